//! The session, driven without sockets or clock by a world that each test scripts.

mod breaches;
mod connecting;
mod encoded_values;
mod epochs;
mod keeping_alive;
mod model;
mod owner_first;
mod pulls;
mod push_buffers;
mod pushes;
mod random;
mod resends;
mod samples;
mod shared_values;
mod streaming;
mod synchronous;
mod tokens;
mod world;
