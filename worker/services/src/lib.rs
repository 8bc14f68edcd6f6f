//! Named functions: servers that compute, and clients that call them.
//!
//! A server registers [`Functions`] under names. A [`FunctionClient`] calls them on tasks and
//! devices, with values, variables of the parameter servers, and kept outputs of earlier calls. No
//! code travels.
//!
//! The decisions are in pure state machines: `service` for a server, `call_session` for a client.
//! `runtime` drives them with threads, sockets and a clock. A coordinator has the machine
//! `dispatch`, which `coordinator` drives.
//
// | files | what is in them |
// | --- | --- |
// | `functions`, `function_table`, `signature`, `elementwise` | what a server offers |
// | `value`, `value_body`, `value_error`, `outputs` | tensors and bytes; parts to send, memory to receive |
// | `invocation`, `cancel`, `execution_waits`, `nested_calls`, `states`, `server_devices` | what a running function is given |
// | `inputs`, `variables`, `params_pool` | the inputs of an execution, from calls and parameter servers |
// | `function_server_config`, `function_server`, `out_of_descriptors` | a server: its settings, its start and end, what it reports |
// | `description`, `device_name` | what a server says of itself |
// | `function_client`, `function_client_config`, `call`, `kept`, `error` | a client |
// | `blocking`, `block_on` | the blocking twins of all these |
// | `running` | calls under way, as futures |
// | `trainer`, `towers` | functions that train; in-graph replication |
// | `coordinator`, `remote_value`, `per_worker` | scheduled calls |

#![forbid(unsafe_code)]

mod block_on;
pub mod blocking;
mod call;
mod call_session;
mod cancel;
#[cfg(test)]
mod conversation_tests;
mod coordinator;
mod description;
mod device_name;
mod dispatch;
mod elementwise;
mod error;
mod execution_waits;
mod function_client;
mod function_client_config;
mod function_server;
mod function_server_config;
mod function_table;
mod functions;
mod inputs;
mod invocation;
mod kept;
mod nested_calls;
mod out_of_descriptors;
mod outputs;
mod params_pool;
mod per_worker;
#[doc(hidden)]
pub mod planted;
mod remote_value;
mod running;
mod runtime;
mod server_devices;
mod service;
mod signature;
mod states;
mod testing;
mod towers;
mod trainer;
mod unreachable;
mod value;
mod value_body;
mod value_error;
mod variables;

pub use pushpull_net::ServicePeers;

pub use call::Call;
pub use coordinator::{Coordinator, CoordinatorConfig};
pub use description::Description;
pub use error::ServiceError;
pub use function_client::FunctionClient;
pub use function_client_config::FunctionClientConfig;
pub use function_server::{
    FunctionServer, FunctionServerError, FunctionServerHandle, FunctionServerListener,
};
pub use function_server_config::FunctionServerConfig;
pub use functions::{FunctionError, Functions};
pub use invocation::Invocation;
pub use kept::{Keeping, Kept};
pub use out_of_descriptors::OutOfDescriptors;
pub use outputs::Outputs;
pub use per_worker::PerWorker;
pub use remote_value::RemoteValue;
pub use running::Running;
pub use signature::Signature;
pub use states::State;
pub use towers::{TowerStep, Towers};
pub use unreachable::Unreachable;
pub use value::{Elements, Value, ValueType};
pub use value_error::ValueError;

#[cfg(any(test, feature = "simulation"))]
#[doc(hidden)]
pub use testing::adversary;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use testing::simulation;
