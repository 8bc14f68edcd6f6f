//! A public endpoint for the simulator of whole clusters, a session, and what tests of other crates
//! need of a worker without servers.
//!
//! The endpoint does for its machine what `runtime` does, without a socket, a thread or a clock: the
//! caller passes it bytes, frames and the time.

mod coordinator_rounds;
mod operations;
mod push_buffers;
mod session_endpoint;
mod shared_memory;
mod stepwise_reader;

pub use crate::testing::outcomes::{recorded_digests, restored_checkpoint, saved_checkpoint};
pub use crate::testing::plans::{gradients_for, params_for};
pub use crate::testing::seeded_random::SeededRandom;
pub use operations::{EndpointEvent, WorkerAnswer, WorkerOperation};
pub use session_endpoint::SessionEndpoint;
