//! [`NcclError`]: why a communicator was not made, or a collective did not run.

use std::time::Duration;

use crate::error::ComputeError;

/// The error of a communicator that was not made, or of a collective that did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is not installed, or the system cannot load it.
    #[error("cannot use NCCL: no library can be loaded; tried {}", tried.join(" and "))]
    NotLoaded {
        /// The names of the library that were tried.
        tried: &'static [&'static str],
    },
    /// The library lacks a function. Versions before 2.14 do.
    #[error("cannot use NCCL: the library has no function {function}")]
    Lacks {
        /// The name of the missing function.
        function: &'static str,
    },
    /// The device is no CUDA device.
    #[error("cannot use NCCL on {device}: it is no CUDA device")]
    NotCuda {
        /// The name of the device.
        device: String,
    },
    /// A communicator cannot have this many ranks.
    #[error("a communicator has 1 to {max} ranks, not {size}", max = i32::MAX)]
    Size {
        /// The number of ranks that was asked for.
        size: u32,
    },
    /// A rank, or the root of a broadcast, is not in the communicator.
    #[error("rank {rank} is not below {size}, the size of the communicator")]
    Rank {
        /// The rank, counted from 0.
        rank: u32,
        /// The number of ranks, which ranks are below.
        size: u32,
    },
    /// A call of the library failed on this rank or on another. The communicator has ended.
    #[error("cannot {doing}: NCCL error {code} ({text})")]
    Failed {
        /// The operation, as a verb.
        doing: &'static str,
        /// The error code of the library, an `ncclResult_t`.
        code: i32,
        /// The meaning of the code.
        text: &'static str,
    },
    /// The other ranks did not do their part in time. The communicator has ended.
    #[error("cannot {doing}: not all ranks have done their part within {timeout:?}")]
    Timeout {
        /// The operation, as a verb.
        doing: &'static str,
        /// The time that the operation had.
        timeout: Duration,
    },
    /// An operation that failed before has ended the communicator. A new one has a new id.
    #[error("cannot {doing}: the communicator has ended")]
    Ended {
        /// The operation, as a verb.
        doing: &'static str,
    },
    /// The device failed, or refused an argument.
    #[error(transparent)]
    Compute(#[from] ComputeError),
}

impl NcclError {
    /// Makes the error of a result of the library.
    pub(super) fn failed(doing: &'static str, code: i32) -> NcclError {
        NcclError::Failed { doing, code, text: text(code) }
    }
}

/// Returns the meaning of an `ncclResult_t`. The library's own texts are only there if it is.
fn text(code: i32) -> &'static str {
    match code {
        0 => "no error",
        1 => "a call of CUDA failed",
        2 => "a call of the operating system failed",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "another rank has failed or cannot be reached",
        7 => "in progress",
        8 => "timed out",
        _ => "see ncclResult_t",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_operation_and_the_reason() {
        let timeout = Duration::from_millis(1_500);
        let cases = [
            (
                NcclError::NotLoaded { tried: &["libnccl.so.2", "libnccl.so"] },
                "cannot use NCCL: no library can be loaded; tried libnccl.so.2 and libnccl.so",
            ),
            (
                NcclError::NotCuda { device: "cpu:2".to_owned() },
                "cannot use NCCL on cpu:2: it is no CUDA device",
            ),
            (NcclError::Size { size: 0 }, "a communicator has 1 to 2147483647 ranks, not 0"),
            (
                NcclError::Rank { rank: 4, size: 4 },
                "rank 4 is not below 4, the size of the communicator",
            ),
            (
                NcclError::failed("all-reduce", 6),
                "cannot all-reduce: NCCL error 6 (another rank has failed or cannot be reached)",
            ),
            (NcclError::failed("join", 99), "cannot join: NCCL error 99 (see ncclResult_t)"),
            (
                NcclError::Timeout { doing: "join", timeout },
                "cannot join: not all ranks have done their part within 1.5s",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
        }
    }
}
