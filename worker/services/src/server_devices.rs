//! The devices of a server, opened when a function first uses them.

use std::sync::OnceLock;

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::TaskId;
use pushpull_device::{ComputeError, Device, cuda_devices};

use super::device_name::TaskDevice;

/// The devices of a server.
#[derive(Debug)]
pub(crate) struct ServerDevices {
    all: Vec<(TaskDevice, OnceLock<Result<Device, ComputeError>>)>,
    threads: Option<usize>,
}

impl ServerDevices {
    /// Lists the devices of a task: the processor, and with `cuda` the CUDA devices. The processor
    /// has this many threads, or one for each core. Without CUDA devices, `GPU:0` has the reason.
    pub(crate) fn of_task(task: &TaskId, threads: Option<usize>, cuda: bool) -> ServerDevices {
        let mut all = vec![TaskDevice::new(task, "CPU", 0)];
        // Listing the devices opens the driver.
        match cuda.then(cuda_devices) {
            None => {}
            Some(Ok(found)) => {
                let gpu = |index| TaskDevice::new(task, "GPU", index as u32);
                all.extend((0..found.len()).map(gpu));
            }
            Some(Err(error)) => {
                let unusable = Some(error.to_string());
                all.push(TaskDevice { unusable, ..TaskDevice::new(task, "GPU", 0) });
            }
        }
        let all = all.into_iter().map(|device| (device, OnceLock::new())).collect();
        ServerDevices { all, threads }
    }

    pub(crate) fn names(&self) -> Vec<TaskDevice> {
        self.all.iter().map(|(device, _)| device.clone()).collect()
    }

    pub(crate) fn name(&self, device: usize) -> &DeviceSpec {
        &self.all[device].0.name
    }

    /// Opens a device, or returns the result of its first opening.
    pub(crate) fn open(&self, device: usize) -> Result<Device, ComputeError> {
        let (at, opened) = &self.all[device];
        let open = || match (at.name.device_type(), self.threads) {
            (Some("GPU"), _) => Device::cuda(at.name.device_index().unwrap_or(0)),
            (_, Some(threads)) => Device::cpu_threads(threads),
            (_, None) => Device::cpu(),
        };
        opened.get_or_init(open).clone()
    }
}
