//! [`DeviceInfo`]: the devices of this machine.

use std::path::Path;
use std::thread;

use crate::cpu::host;

/// A device of this machine, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name by which [`Device::pick`](crate::Device::pick) opens it.
    pub name: String,
    /// The model; empty if the system does not tell.
    pub model: String,
    /// The cores that this process may use, by its affinity and by the quota of its control group.
    /// A fraction of a core counts as none, but there is always one.
    pub cores: usize,
    /// The bytes of memory that this process may use, by the limits of its control groups; `None`
    /// if the system does not tell.
    pub memory_bytes: Option<u64>,
}

/// Returns the devices of this machine. The first is the processor.
pub fn devices() -> Vec<DeviceInfo> {
    let root = Path::new("/");
    vec![DeviceInfo {
        name: "cpu".to_owned(),
        model: host::model(root),
        cores: cores(),
        memory_bytes: host::memory_bytes(root),
    }]
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
            assert_eq!((device.threads(), info.memory_bytes > Some(1 << 20)), (info.cores, true));
        }
    }
}
