//! [`CudaContext`] and [`CudaStream`]: the driver's state for a process that uses a device.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::failed;
use crate::error::ComputeError;

/// The primary context of a device, which all users of the device in this process share. It is
/// released in the end, also if it cannot be used.
#[derive(Debug)]
pub(super) struct CudaContext {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: The handles are of the driver, which any thread may use.
unsafe impl Send for CudaContext {}
// SAFETY: As above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    /// Retains the context of a device, and makes it that of the calling thread.
    pub(super) fn retain(index: u32) -> Result<CudaContext, ComputeError> {
        let device = result::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
        // SAFETY: The device is one that the driver has returned.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let context = CudaContext { device, context };
        context.bind()?;
        Ok(context)
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Binds the context to the calling thread.
    pub(super) fn bind(&self) -> Result<(), ComputeError> {
        // SAFETY: The context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // Nobody hears of an error here.
        // SAFETY: The context was retained once for this value.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A queue of device work, which runs in its order.
#[derive(Debug)]
pub(super) struct CudaStream {
    stream: sys::CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: As for the context.
unsafe impl Send for CudaStream {}
// SAFETY: As above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Creates a stream that waits for no other. The context is bound.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<CudaStream, ComputeError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = stream.map_err(failed("cuStreamCreate"))?;
        Ok(CudaStream { stream, context: context.clone() })
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits until all queued work is done.
    pub(super) fn synchronize(&self) -> Result<(), ComputeError> {
        self.context.bind()?;
        // SAFETY: The stream is one of the bound context.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // Nobody hears of an error here.
            // SAFETY: The stream is one of the bound context, and is not used any more.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}
