//! Named functions: servers that compute, and clients that call them.
//!
//! A server registers [`Functions`] under names. A [`Client`] calls them on tasks and devices, with
//! values, variables of the parameter servers, and what earlier calls have left. No code travels.
//!
//! The decisions are in pure state machines: `service` for a server, `call_session` for a client.
//! `runtime` drives them with threads, sockets and a clock.

mod block_on;
pub mod blocking;
mod call;
pub(crate) mod call_session;
mod cancel;
mod client;
#[cfg(test)]
mod conversation_tests;
pub(crate) mod coordinator;
pub(crate) mod description;
pub(crate) mod device_name;
pub(crate) mod dispatch;
mod elementwise;
mod error;
pub(crate) mod function_table;
mod functions;
mod gradient_value;
mod inputs;
mod invocation;
mod kept;
mod outputs;
mod params_pool;
mod per_worker;
mod remote_value;
mod runtime;
mod server;
mod server_devices;
pub(crate) mod service;
mod signature;
mod states;
mod towers;
pub(crate) mod trainer;
mod value;
pub(crate) mod value_body;
mod value_error;
mod variables;

pub use pushpull_net::ServicePeers;

pub use call::Call;
pub use client::{Client, ClientConfig, Running};
pub use coordinator::{Coordinator, CoordinatorConfig};
pub use description::Description;
pub use error::ServiceError;
pub use functions::{FunctionError, Functions};
pub use invocation::Invocation;
pub use kept::{Keeping, Kept};
pub use outputs::Outputs;
pub use per_worker::PerWorker;
pub use remote_value::RemoteValue;
pub use server::{Server, ServerConfig, ServerError, ServerHandle, ServerListener};
pub use signature::Signature;
pub use states::State;
pub use towers::{TowerStep, Towers};
pub use value::{Elements, Value, ValueType};
pub use value_error::ValueError;
