//! [`ComputeError`]: the refusal of a device or a kernel.

/// The error of a device that was not opened, or of a kernel that did not run.
///
/// A kernel that returns an error has written nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// A text names no device.
    #[error("{name:?} names no device: expected `auto`, `cpu`, `cpu:THREADS` or `cuda:INDEX`")]
    Name {
        /// The text that was given as a name.
        name: String,
    },
    /// A processor was asked for with more threads than are allowed, or with none.
    #[error("a device has 1 to {max} threads, not {threads}", max = crate::Device::THREADS_MAX)]
    Threads {
        /// The number of threads that was asked for.
        threads: usize,
    },
    /// The operating system started no further thread.
    #[error("cannot start thread {index} of the device: {reason}")]
    Spawn {
        /// The thread, counted from 0.
        index: usize,
        /// The error of the operating system, in words.
        reason: String,
    },
    /// This build has no support for CUDA.
    #[error("cannot open cuda:{index}: this program is built without the feature `cuda`")]
    WithoutCuda {
        /// The index of the device among those that the process may use.
        index: u32,
    },
    /// There is no CUDA driver.
    #[error("cannot use CUDA: no driver is installed; tried {}", tried.join(" and "))]
    NoDriver {
        /// The names of the library that were tried.
        tried: &'static [&'static str],
    },
    /// The CUDA driver is too old for the kernels.
    #[error(
        "cannot use CUDA: the driver is of version {}, and {} is needed",
        version(*found),
        version(*needed)
    )]
    DriverTooOld {
        /// The version of CUDA that the driver supports, times 1000; minor versions times 10.
        found: i32,
        /// The lowest version that is needed.
        needed: i32,
    },
    /// The CUDA driver lacks a function.
    #[error("cannot use CUDA: the driver has no function {function}")]
    DriverLacks {
        /// The name of the missing function.
        function: &'static str,
    },
    /// There is no CUDA device of this index.
    #[error(
        "cannot open cuda:{index}: the driver has {devices} devices{}",
        visible.as_ref().map_or(String::new(), |list| format!(" (CUDA_VISIBLE_DEVICES={list:?})"))
    )]
    NoDevice {
        /// The index of the device among those that the process may use.
        index: u32,
        /// The number of devices that the process may use.
        devices: u32,
        /// The list of devices that the environment allows, if it has one.
        visible: Option<String>,
    },
    /// A CUDA device is older than the kernels support.
    #[error(
        "cannot open cuda:{index}: its compute capability is {}.{}, and 7.0 is needed",
        capability.0, capability.1
    )]
    Capability {
        /// The index of the device among those that the process may use.
        index: u32,
        /// The compute capability of the device, its major and minor version.
        capability: (u32, u32),
    },
    /// A device has not enough memory.
    #[error("cuda:{index} has no memory for {bytes} bytes more")]
    OutOfMemory {
        /// The index of the device among those that the process may use.
        index: u32,
        /// The size of the allocation in bytes.
        bytes: u64,
    },
    /// The limit of a device's memory would be passed.
    #[error("cuda:{index} may use {limit} bytes: {used} are used, and {bytes} more were asked for")]
    MemoryLimit {
        /// The index of the device among those that the process may use.
        index: u32,
        /// The size of the allocation in bytes.
        bytes: u64,
        /// The bytes that are allocated on the device.
        used: u64,
        /// The limit in bytes, from [`Device::cuda_within`](crate::Device::cuda_within).
        limit: u64,
    },
    /// A call of the CUDA driver failed. Work that was queued before may be what failed.
    #[error("{call} failed with CUDA error {code} ({})", cuda_error(*code))]
    Cuda {
        /// The call that reported it.
        call: &'static str,
        /// The error code of the driver, a `CUresult`.
        code: u32,
    },
    /// An argument has the wrong number of elements.
    #[error("{kernel} needs {expected} elements of {argument}, not {found}")]
    Length {
        /// The name of the kernel or the network.
        kernel: &'static str,
        /// The name of the argument.
        argument: &'static str,
        /// The number of elements that the argument has.
        found: usize,
        /// The number of elements that the argument must have.
        expected: usize,
    },
    /// An argument is in the memory of another device.
    #[error("{kernel}: {argument} is not in the memory of the device that computes")]
    OtherMemory {
        /// The name of the kernel or the network.
        kernel: &'static str,
        /// The name of the argument.
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
    /// A codec cannot encode a gradient.
    #[error("{reason}")]
    Codec {
        /// The name of the codec and the reason.
        reason: String,
    },
    /// The device has encoded more elements than the codec sends, which no correct device does.
    #[error("the device has encoded {pairs} pairs of {elements} elements with {codec}")]
    Pairs {
        /// The pairs of index and value.
        pairs: usize,
        /// The elements that were to be encoded.
        elements: usize,
        /// The name of the codec.
        codec: String,
    },
    /// The batch has no samples, so there is no mean.
    #[error("{kernel} has no samples to average over")]
    Empty {
        /// The name of the kernel or the network.
        kernel: &'static str,
    },
    /// A label names no class.
    #[error("label {label} of sample {sample} is not below the {classes} classes")]
    Label {
        /// The sample, counted from 0.
        sample: usize,
        /// The label of the sample.
        label: u32,
        /// The number of classes, which labels are below.
        classes: usize,
    },
    /// An id names no row of an embedding table.
    #[error("id {id} at position {position} is not below the {rows} rows of the table")]
    Id {
        /// The position in the list of ids, counted from 0.
        position: usize,
        /// The id in the list.
        id: u64,
        /// The number of rows of the table, which ids are below.
        rows: usize,
    },
    /// The ends of bags descend, or the last is not the number of ids.
    #[error("bag {bag} ends at id {end}: ends must ascend to the {ids} ids")]
    Bag {
        /// The bag, counted from 0.
        bag: usize,
        /// The end of the bag, an index into the ids.
        end: usize,
        /// The number of ids of all bags.
        ids: usize,
    },
}

/// Writes a version of CUDA in its usual form, such as 12.0.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Names the frequent errors of the driver.
fn cuda_error(code: u32) -> &'static str {
    match code {
        1 => "invalid value",
        2 => "out of memory",
        3 => "not initialized",
        4 => "the process is ending",
        100 => "no device",
        101 => "invalid device",
        200 => "invalid image of a kernel",
        201 => "invalid context",
        209 => "no kernel for this device",
        218 => "invalid PTX",
        222 => "a toolchain newer than the driver",
        400 => "invalid handle",
        500 => "not found",
        700 => "illegal address",
        701 => "out of resources for a launch",
        702 => "launch timed out",
        709 => "the context is destroyed",
        716 => "misaligned address",
        719 => "launch failed",
        801 => "not supported",
        999 => "unknown",
        _ => "see CUresult",
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_drivers_name_what_was_found_and_what_is_needed() {
        let tried = &["libcuda.so.1", "libcuda.so"];
        let no_device = |visible| ComputeError::NoDevice { index: 3, devices: 2, visible };
        let cases = [
            (
                ComputeError::NoDriver { tried },
                "cannot use CUDA: no driver is installed; tried libcuda.so.1 and libcuda.so",
            ),
            (
                ComputeError::DriverTooOld { found: 11_080, needed: 12_000 },
                "cannot use CUDA: the driver is of version 11.8, and 12.0 is needed",
            ),
            (no_device(None), "cannot open cuda:3: the driver has 2 devices"),
            (
                no_device(Some("0,1".to_owned())),
                "cannot open cuda:3: the driver has 2 devices (CUDA_VISIBLE_DEVICES=\"0,1\")",
            ),
            (
                ComputeError::Capability { index: 0, capability: (6, 1) },
                "cannot open cuda:0: its compute capability is 6.1, and 7.0 is needed",
            ),
            (
                ComputeError::Cuda { call: "cuInit", code: 999 },
                "cuInit failed with CUDA error 999 (unknown)",
            ),
            (
                ComputeError::Cuda { call: "cuInit", code: 12_345 },
                "cuInit failed with CUDA error 12345 (see CUresult)",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
        }
    }
}
