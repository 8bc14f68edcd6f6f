//! Tests of the session without sockets or a clock: each test scripts the world around it.

mod breaches;
mod connecting;
mod effects;
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
