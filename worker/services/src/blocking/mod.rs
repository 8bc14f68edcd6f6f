//! Blocking forms of clients, function servers and coordinators, for threads without an async
//! runtime.

mod coordinator;
mod function_client;
mod function_server;
mod remote_value;

pub use coordinator::Coordinator;
pub use function_client::FunctionClient;
pub use function_server::FunctionServer;
pub use remote_value::RemoteValue;
