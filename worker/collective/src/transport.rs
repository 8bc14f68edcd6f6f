//! [`Transport`]: the kind of a connection between neighbours.

use std::fmt;

/// The kind of a connection between neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// TCP.
    Tcp,
    /// A Unix socket, within a host.
    Unix,
    /// Memory that two processes of one host share. A Unix socket wakes a side that sleeps.
    SharedMemory,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Tcp => "TCP",
            Transport::Unix => "a Unix socket",
            Transport::SharedMemory => "shared memory",
        })
    }
}
