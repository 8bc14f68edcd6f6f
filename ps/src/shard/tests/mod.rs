//! The pure shard, told in stories, and played at random.

mod accounts;
mod actors;
mod arenas;
mod corruption;
mod handshakes;

mod join;
mod liars;
mod members;
mod model;
mod numbers;
mod peers;
mod power;
mod pulls;
mod pushes;
mod random;
mod refusals;
mod resends;
mod rooms;
mod spending;
mod talk;
mod tokens;
mod world;
