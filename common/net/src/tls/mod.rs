//! TLS 1.3 of TCP connections: the session of a stream, the settings of both sides, and the names in
//! certificates. Unix sockets have none: the system tells who is at the other end.

mod identity;
mod session;
mod settings;

pub(crate) use session::{HandshakeStep, TlsSession};
pub use settings::TlsFileError;
pub(crate) use settings::{ClientTls, HandshakeError, ServerTls, TlsMaterial};
