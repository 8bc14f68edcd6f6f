//! [`DeviceInfo`]: the devices of this machine.

use std::path::Path;
use std::thread;

use crate::cpu::host;
use crate::error::ComputeError;

/// A device of this machine, with the share that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name by which [`Device::pick`](crate::Device::pick) opens it.
    pub name: String,
    /// The model; empty if the system does not tell.
    pub model: String,
    /// The cores that this process may use, by its affinity and by the quota of its control group.
    /// A fraction of a core counts as none, but there is always one. For a CUDA device, its
    /// multiprocessors.
    pub cores: usize,
    /// The bytes of memory that this process may use, by the limits of its control groups; `None`
    /// if the system does not tell. For a CUDA device, its memory.
    pub memory_bytes: Option<u64>,
    /// The major and minor version of what a CUDA device can compute.
    pub compute_capability: Option<(u32, u32)>,
}

/// Returns the devices of this machine. The first is the processor.
pub fn devices() -> Vec<DeviceInfo> {
    let root = Path::new("/");
    let mut devices = vec![DeviceInfo {
        name: "cpu".to_owned(),
        model: host::model(root),
        cores: cores(),
        memory_bytes: host::memory_bytes(root),
        compute_capability: None,
    }];
    devices.extend(cuda_devices().unwrap_or_default());
    devices
}

/// Returns the CUDA devices that this process may use.
///
/// # Errors
/// [`ComputeError::WithoutCuda`] if this build has no support for CUDA, and the error of a driver
/// that cannot be opened.
pub fn cuda_devices() -> Result<Vec<DeviceInfo>, ComputeError> {
    #[cfg(feature = "cuda")]
    return crate::cuda::cuda_device::infos();
    #[cfg(not(feature = "cuda"))]
    Err(ComputeError::WithoutCuda { index: 0 })
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn every_device_opens_by_its_name() {
        for info in devices() {
            let device = Device::pick(&info.name).unwrap();
            assert!(info.memory_bytes > Some(1 << 20), "{info:?}");
            match info.compute_capability {
                None => assert_eq!(device.threads(), info.cores),
                Some(_) => assert!(!device.uses_host_memory()),
            }
        }
    }
}
