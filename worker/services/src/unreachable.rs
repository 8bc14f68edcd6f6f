//! [`Unreachable`]: the report of a client about a server that it cannot reach.

use std::fmt;

/// A server that a client could not connect to. The client tries again after a pause, which grows
/// to two seconds, as long as a call waits for the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unreachable {
    /// The address of the server.
    pub address: String,
    /// The reason: the name that has no address, or the result for each address of the name.
    pub reason: String,
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be reached: {}", self.address, self.reason)
    }
}
