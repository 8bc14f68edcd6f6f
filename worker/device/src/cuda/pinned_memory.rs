//! [`PinnedMemory`] and [`LockedPages`]: pages of the processor's memory that a CUDA device copies
//! from and to.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaView, CudaViewMut};
use super::driver::failed;
use crate::error::ComputeError;
use crate::memory::DeviceElement;

/// Page-locked memory, cached by the processor. Reads of write-combined memory were about 68 times
/// slower.
#[derive(Debug)]
pub(crate) struct PinnedMemory<T> {
    device: Arc<CudaDevice>,
    /// The start of the memory; dangling if there is no element.
    pointer: *mut T,
    length: usize,
    elements: PhantomData<T>,
}

// SAFETY: It owns its memory.
unsafe impl<T: Send> Send for PinnedMemory<T> {}
// SAFETY: As above.
unsafe impl<T: Sync> Sync for PinnedMemory<T> {}

impl<T: DeviceElement> PinnedMemory<T> {
    /// Allocates memory for `length` elements, all zero.
    pub(crate) fn new(device: &Arc<CudaDevice>, length: usize) -> Result<Self, ComputeError> {
        let device = device.clone();
        let bytes = length.saturating_mul(size_of::<T>());
        let mut pointer = std::ptr::NonNull::<T>::dangling().as_ptr();
        if bytes > 0 {
            device.bind()?;
            // SAFETY: The context is bound. All contexts may use the memory.
            let allocated = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
            pointer = allocated.map_err(failed("cuMemHostAlloc"))?.cast();
            // SAFETY: The memory has this many bytes, and its elements are any bits.
            unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        }
        Ok(PinnedMemory { device, pointer, length, elements: PhantomData })
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: The memory has `length` initialized elements. The device does not write it while
        // it can be borrowed: a copy under way holds it.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: As above, and it is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.length) }
    }

    /// Queues a copy from the device to the beginning.
    ///
    /// # Safety
    ///
    /// The memory is neither used nor freed before the copy is done.
    pub(crate) unsafe fn queue_read(
        &mut self,
        device: &CudaDevice,
        from: CudaView<'_, T>,
    ) -> Result<(), ComputeError> {
        let to = &mut self.as_mut_slice()[..from.len()];
        // SAFETY: The caller guarantees it.
        unsafe { queue_read(device, from, to) }
    }

    /// Queues a copy from the beginning to the device.
    ///
    /// # Safety
    ///
    /// The memory is neither changed nor freed before the copy is done.
    pub(crate) unsafe fn queue_write(
        &self,
        device: &CudaDevice,
        to: CudaViewMut<'_, T>,
    ) -> Result<(), ComputeError> {
        let to = to.view();
        if to.len() == 0 {
            return Ok(());
        }
        device.bind()?;
        let from = &self.as_slice()[..to.len()];
        let stream = device.stream.handle();
        // SAFETY: Both have the same number of elements; the caller guarantees the rest.
        unsafe { result::memcpy_htod_async(to.pointer(), from, stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))
    }
}

/// Queues a copy from the device to the processor's memory.
///
/// # Safety
///
/// The memory is neither used nor freed before the copy is done.
pub(crate) unsafe fn queue_read<T: DeviceElement>(
    device: &CudaDevice,
    from: CudaView<'_, T>,
    to: &mut [T],
) -> Result<(), ComputeError> {
    assert_eq!(from.len(), to.len(), "a copy to memory of another length");
    if to.is_empty() {
        return Ok(());
    }
    device.bind()?;
    // SAFETY: Both have the same number of elements; the caller guarantees the rest.
    unsafe { result::memcpy_dtoh_async(to, from.pointer(), device.stream.handle()) }
        .map_err(failed("cuMemcpyDtoHAsync"))
}

impl<T> Drop for PinnedMemory<T> {
    fn drop(&mut self) {
        if self.length * size_of::<T>() > 0 && self.device.bind().is_ok() {
            // Nobody hears of an error here.
            // SAFETY: The memory was allocated by the driver, and no copy uses it.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}

/// Pages that the driver has locked where they are, for all devices.
#[derive(Debug)]
pub(crate) struct LockedPages {
    device: Arc<CudaDevice>,
    start: *mut u8,
}

// SAFETY: The pointer is only passed to the driver, which any thread may call.
unsafe impl Send for LockedPages {}
// SAFETY: As above.
unsafe impl Sync for LockedPages {}

impl LockedPages {
    /// Locks these pages for all devices.
    ///
    /// # Safety
    ///
    /// The memory is mapped, and stays so until the value is dropped.
    pub(crate) unsafe fn new(
        device: &Arc<CudaDevice>,
        start: *mut u8,
        bytes: usize,
    ) -> Result<LockedPages, ComputeError> {
        device.bind()?;
        // SAFETY: The context is bound; the caller guarantees the rest.
        let locked = unsafe {
            sys::cuMemHostRegister_v2(start.cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        };
        locked.result().map_err(failed("cuMemHostRegister"))?;
        Ok(LockedPages { device: device.clone(), start })
    }
}

impl Drop for LockedPages {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // Nobody hears of an error here.
            // SAFETY: The pages were locked by the driver, and no copy uses them: it would hold the
            // owner of this.
            let _ = unsafe { sys::cuMemHostUnregister(self.start.cast()) };
        }
    }
}
