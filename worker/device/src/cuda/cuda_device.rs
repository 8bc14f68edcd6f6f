//! [`CudaDevice`]: one CUDA device, as a device of the process.

use std::num::NonZeroU32;
use std::sync::Arc;
#[cfg(feature = "kernels")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUdevice_attribute_enum::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
};
use cudarc::driver::{result, sys};

use super::context::{CudaContext, CudaStream};
#[cfg(feature = "kernels")]
use super::cublas::Cublas;
use super::driver::{self, failed};
use super::modules::Modules;
use super::waiter::DeviceWaiter;
use crate::device_info::DeviceInfo;
use crate::error::ComputeError;

/// One CUDA device, whose work is queued on one stream.
#[derive(Debug)]
pub(crate) struct CudaDevice {
    index: u32,
    pub(super) waiter: DeviceWaiter,
    /// The cuBLAS library, loaded on first use; `None` inside if the machine has none.
    #[cfg(feature = "kernels")]
    pub(super) cublas: OnceLock<Option<Cublas>>,
    pub(super) modules: Modules,
    pub(super) stream: CudaStream,
    context: Arc<CudaContext>,
    /// Whether memory can be allocated and freed on the stream.
    pub(super) has_pools: bool,
    /// The bytes that are allocated. `limit` is the most that may be.
    used: AtomicU64,
    limit: u64,
    /// The most blocks of a grid in each dimension.
    pub(super) blocks_max: NonZeroU32,
}

impl CudaDevice {
    /// Opens a device. Its memory is limited to `limit` bytes, and each dimension of its grids to
    /// `blocks_max` blocks.
    pub(crate) fn open(
        index: u32,
        limit: u64,
        blocks_max: NonZeroU32,
    ) -> Result<CudaDevice, ComputeError> {
        let devices = driver::device_count()?;
        if index >= devices {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            return Err(ComputeError::NoDevice { index, devices, visible });
        }
        let context = Arc::new(CudaContext::retain(index)?);
        let capability = capability(context.device())?;
        if capability < CAPABILITY_MIN {
            return Err(ComputeError::Capability { index, capability });
        }
        let has_pools =
            attribute(context.device(), CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? > 0;
        let stream = CudaStream::new(&context)?;
        let modules = Modules::load(&context)?;
        Ok(CudaDevice {
            index,
            waiter: DeviceWaiter::default(),
            #[cfg(feature = "kernels")]
            cublas: OnceLock::new(),
            modules,
            stream,
            context,
            has_pools,
            used: AtomicU64::new(0),
            limit,
            blocks_max,
        })
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Binds the device's context to the calling thread.
    pub(super) fn bind(&self) -> Result<(), ComputeError> {
        self.context.bind()
    }

    /// Waits until all queued work is done. Returns the error of work that failed.
    ///
    /// A call that fails may not have waited, so that copies would go on in memory that is freed
    /// next. So it then waits once more. A device that fails again copies nothing more.
    pub(crate) fn synchronize(&self) -> Result<(), ComputeError> {
        let result = self.stream.synchronize();
        if result.is_err() {
            let _ = self.stream.synchronize();
        }
        result
    }

    /// Adds bytes to the account before they are allocated.
    pub(super) fn reserve(&self, bytes: u64) -> Result<(), ComputeError> {
        let add = |used: u64| used.checked_add(bytes).filter(|&used| used <= self.limit);
        let reserved = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        reserved.map(|_| ()).map_err(|used| {
            let index = self.index;
            let limit = self.limit;
            ComputeError::MemoryLimit { index, bytes, used, limit }
        })
    }

    /// Subtracts bytes from the account.
    pub(super) fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Kernels may still run that use the modules.
        let _ = self.synchronize();
    }
}

/// The lowest compute capability for which the kernels are made.
const CAPABILITY_MIN: (u32, u32) = (7, 0);

fn capability(device: sys::CUdevice) -> Result<(u32, u32), ComputeError> {
    let [major, minor] = [
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    ]
    .map(|name| attribute(device, name));
    Ok((major?, minor?))
}

fn attribute(
    device: sys::CUdevice,
    name: sys::CUdevice_attribute_enum,
) -> Result<u32, ComputeError> {
    // SAFETY: The device is one that the driver has returned.
    let value = unsafe { result::device::get_attribute(device, name) };
    Ok(value.map_err(failed("cuDeviceGetAttribute"))?.max(0) as u32)
}

/// Describes all devices that the process may use, without a context.
pub(crate) fn infos() -> Result<Vec<DeviceInfo>, ComputeError> {
    (0..driver::device_count()?).map(info).collect()
}

fn info(index: u32) -> Result<DeviceInfo, ComputeError> {
    let device = result::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
    // SAFETY: The device is one that the driver has returned.
    let memory = unsafe { result::device::total_mem(device) };
    Ok(DeviceInfo {
        name: format!("cuda:{index}"),
        model: result::device::get_name(device).map_err(failed("cuDeviceGetName"))?,
        cores: attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        memory_bytes: Some(memory.map_err(failed("cuDeviceTotalMem"))? as u64),
        compute_capability: Some(capability(device)?),
    })
}
