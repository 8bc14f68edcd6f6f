//! [`OutOfDescriptors`]: the report of a server whose process has no file descriptor left.

use std::fmt;

/// The process or the system has no file descriptor left: a server refuses newcomers, and
/// connections that need another descriptor end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfDescriptors {
    /// The limit of open files of this process; `None` if it has none.
    pub limit: Option<u64>,
    /// The error of the operating system.
    pub cause: String,
}

impl fmt::Display for OutOfDescriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no connection can be accepted: {}; ", self.cause)?;
        match self.limit {
            Some(limit) => write!(f, "this process may have {limit} files open (ulimit -n)"),
            None => f.write_str("this process has no limit of open files"),
        }
    }
}
