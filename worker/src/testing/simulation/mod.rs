//! Public endpoints for the simulator of whole clusters: a session, a server of functions, a
//! coordinator.
//!
//! An endpoint does for its machine what `runtime` does, without a socket, a thread or a clock: the
//! caller passes it bytes, frames and the time.

mod calls_rounds;
mod coordinator_endpoint;
mod frames;
mod function_server_endpoint;
mod operations;
mod push_buffers;
mod session_endpoint;
mod shared_memory;
mod stepwise_reader;

pub use crate::testing::plans::{gradients_for, params_for, restored_checkpoint, saved_checkpoint};
pub use crate::testing::planted::{PlantedWorkerBugs, WorkerBug};
pub use coordinator_endpoint::{CoordinatorEndpoint, CoordinatorEvent, ScheduledNumber};
pub use function_server_endpoint::{
    FunctionFailure, FunctionServerEndpoint, FunctionServerEvent, FunctionServerSettings,
    SimulatedExecution, scheduled_push_end,
};
pub use operations::{EndpointEvent, WorkerAnswer, WorkerOperation};
pub use session_endpoint::SessionEndpoint;
