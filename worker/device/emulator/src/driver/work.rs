//! [`StreamWork`]: what a stream has to do.

use std::sync::Arc;

use crate::ptx::Program;

/// One piece of work in the queue of a stream.
#[derive(Clone, Debug)]
pub(crate) enum StreamWork {
    HostToDevice {
        to: u64,
        from: CopySource,
    },
    DeviceToHost {
        to: usize,
        from: u64,
        size: usize,
    },
    DeviceToDevice {
        to: u64,
        from: u64,
        size: usize,
    },
    Fill {
        to: u64,
        value: Vec<u8>,
        count: usize,
    },
    Free {
        address: u64,
    },
    Launch(Box<PendingLaunch>),
    /// Notes when an event was reached.
    Record {
        event: u64,
    },
    /// Waits until another stream has done its work up to a number.
    WaitFor {
        stream: u64,
        number: u64,
    },
    HostFunction {
        function: HostFunction,
        argument: usize,
    },
    /// Work that was taken back after a fault.
    Nothing,
}

/// A function of the host that a stream calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut std::ffi::c_void);

/// The source of the bytes of a copy from the host.
#[derive(Clone, Debug)]
pub(crate) enum CopySource {
    /// Bytes that were copied when the work was queued, as the driver does with pageable memory.
    Staged(Box<[u8]>),
    /// Page-locked memory that is read when the stream gets there.
    Pinned { at: usize, size: usize },
}

/// A launch that waits in a stream.
#[derive(Clone, Debug)]
pub(crate) struct PendingLaunch {
    pub(crate) module: u64,
    pub(crate) program: Arc<Program>,
    pub(crate) kernel: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: usize,
    pub(crate) parameters: Vec<u8>,
}

impl StreamWork {
    /// The host memory that the work reads or writes later.
    pub(crate) fn host_range(&self) -> Option<(usize, usize)> {
        match self {
            StreamWork::HostToDevice { from: CopySource::Pinned { at, size }, .. } => {
                Some((*at, *size))
            }
            StreamWork::DeviceToHost { to, size, .. } => Some((*to, *size)),
            _ => None,
        }
    }

    /// The device memory that the work uses, but for launches: address, size, whether it is
    /// written, and what the work is.
    pub(crate) fn memory_used(&self) -> Vec<(u64, usize, bool, String)> {
        let name = |name: &str| name.to_owned();
        match self {
            StreamWork::HostToDevice { to, from } => {
                let size = match from {
                    CopySource::Staged(bytes) => bytes.len(),
                    CopySource::Pinned { size, .. } => *size,
                };
                vec![(*to, size, true, name("copy from the host"))]
            }
            StreamWork::DeviceToHost { from, size, .. } => {
                vec![(*from, *size, false, name("copy to the host"))]
            }
            StreamWork::DeviceToDevice { to, from, size } => {
                vec![(*from, *size, false, name("copy")), (*to, *size, true, name("copy"))]
            }
            StreamWork::Fill { to, value, count } => {
                vec![(*to, value.len() * count, true, name("fill"))]
            }
            _ => Vec::new(),
        }
    }

    /// Whether the work uses host memory in a range.
    pub(crate) fn uses_host(&self, at: usize, size: usize) -> bool {
        self.host_range().is_some_and(|(start, length)| start < at + size && at < start + length)
    }
}
