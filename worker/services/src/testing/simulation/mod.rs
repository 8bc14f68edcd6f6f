//! Public endpoints for the simulator of whole clusters: a function server, a coordinator.
//!
//! An endpoint drives its machine like `runtime`, without a socket, a thread or a clock. The caller
//! passes it bytes, frames and the time.

mod coordinator_endpoint;
mod frames;
mod function_server_endpoint;

pub use coordinator_endpoint::{CoordinatorEndpoint, CoordinatorEvent, ScheduledNumber};
pub use function_server_endpoint::{
    FunctionFailure, FunctionServerEndpoint, FunctionServerEvent, FunctionServerSettings,
    SimulatedExecution, scheduled_push_end,
};
