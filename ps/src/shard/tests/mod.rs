//! The pure shard, told in stories, and played at random.

mod join;
mod members;
mod model;
mod numbers;
mod peers;
mod pulls;
mod pushes;
mod refusals;
mod resends;
mod rooms;
mod tokens;
mod world;
