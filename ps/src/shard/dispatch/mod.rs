//! The dispatch of a shard: what each input has its owners do, one after the other, and what follows
//! from it. It names all owners, which name none of each other.

mod administration;
mod awaited;
mod bodies;
mod coordinators;
mod data;
mod declaration;
mod durable_words;
mod hello;
mod messages;
mod owner_link;
mod parts;
mod pulls;
mod push_audits;
mod pushes;
mod recalls;
mod reports;
mod restores;
mod saves;
mod steps;
mod stragglers;
mod tick;
mod tokens;
mod work;
