//! [`ComputeError`]: why a device or a kernel was refused.

/// Why a device could not be opened, or why a kernel did not run.
///
/// A kernel that returns an error has written nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// A text names no device.
    #[error("{name:?} names no device: expected `auto`, `cpu`, `cpu:THREADS` or `cuda:INDEX`")]
    Name {
        /// The text.
        name: String,
    },
    /// A processor was asked for with more threads than are allowed, or with none.
    #[error("a device has 1 to {max} threads, not {threads}", max = crate::Device::THREADS_MAX)]
    Threads {
        /// The number asked for.
        threads: usize,
    },
    /// The operating system started no further thread.
    #[error("cannot start thread {index} of the device: {reason}")]
    Spawn {
        /// The thread, counted from 0.
        index: usize,
        /// What the system said.
        reason: String,
    },
    /// This build has no support for CUDA.
    #[error("cannot open cuda:{index}: this program is built without CUDA")]
    WithoutCuda {
        /// The device's index.
        index: u32,
    },
    /// An argument has the wrong number of elements.
    #[error("{kernel} needs {expected} elements of {argument}, not {found}")]
    Length {
        /// The kernel.
        kernel: &'static str,
        /// The argument.
        argument: &'static str,
        /// The number it has.
        found: usize,
        /// The number it must have.
        expected: usize,
    },
    /// An argument is in the memory of another device.
    #[error("{kernel}: {argument} is not in the memory of the device that computes")]
    OtherMemory {
        /// The kernel.
        kernel: &'static str,
        /// The argument.
        argument: &'static str,
    },
    /// Two matrices do not fit together.
    #[error("cannot multiply a matrix of {columns} columns by one of {rows} rows")]
    Inner {
        /// Columns of the left matrix.
        columns: usize,
        /// Rows of the right matrix.
        rows: usize,
    },
    /// The mean of nothing was asked for.
    #[error("{kernel} has no samples to average over")]
    Empty {
        /// The kernel.
        kernel: &'static str,
    },
    /// A label names no class.
    #[error("label {label} of sample {sample} is not below the {classes} classes")]
    Label {
        /// The sample, counted from 0.
        sample: usize,
        /// Its label.
        label: u32,
        /// The number of classes.
        classes: usize,
    },
    /// An id names no row of an embedding table.
    #[error("id {id} at position {position} is not below the {rows} rows of the table")]
    Id {
        /// The position in the list of ids, counted from 0.
        position: usize,
        /// The id.
        id: u64,
        /// The number of rows.
        rows: usize,
    },
    /// The ends of bags descend, or the last is not the number of ids.
    #[error("bag {bag} ends at id {end}: ends must ascend to the {ids} ids")]
    Bag {
        /// The bag, counted from 0.
        bag: usize,
        /// Where it ends.
        end: usize,
        /// The number of ids.
        ids: usize,
    },
}

/// Checks the number of elements of an argument.
pub(crate) fn check_length(
    kernel: &'static str,
    argument: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), ComputeError> {
    match found == expected {
        true => Ok(()),
        false => Err(ComputeError::Length { kernel, argument, found, expected }),
    }
}
