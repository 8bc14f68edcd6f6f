//! [`CudaMemory`]: memory of a device, with its views.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::cuda_device::CudaDevice;
use super::driver::failed;
use crate::error::ComputeError;
use crate::memory::DeviceElement;

/// Owned memory of a device. It is freed after the work that was queued before.
#[derive(Debug)]
pub(crate) struct CudaMemory<T> {
    device: Arc<CudaDevice>,
    /// The address on the device; 0 if there is no element.
    pointer: sys::CUdeviceptr,
    length: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceElement> CudaMemory<T> {
    /// Allocates memory for `length` elements, all zero.
    pub(crate) fn new(device: &Arc<CudaDevice>, length: usize) -> Result<Self, ComputeError> {
        let bytes = (length as u64).saturating_mul(size_of::<T>() as u64);
        device.reserve(bytes)?;
        // From here on the drop gives the reservation back.
        let device = device.clone();
        let mut memory = CudaMemory { device, pointer: 0, length, elements: PhantomData };
        if bytes == 0 {
            return Ok(memory);
        }
        memory.device.bind()?;
        let stream = memory.device.stream.handle();
        let asynchronous = memory.device.has_pools;
        // SAFETY: The context is bound, and the stream is one of it.
        let pointer = unsafe {
            match asynchronous {
                true => result::malloc_async(stream, bytes as usize),
                false => result::malloc_sync(bytes as usize),
            }
        };
        memory.pointer = pointer.map_err(|error| match failed("cuMemAlloc")(error) {
            ComputeError::Cuda { code: OUT_OF_MEMORY, .. } => {
                ComputeError::OutOfMemory { index: memory.device.index(), bytes }
            }
            other => other,
        })?;
        // SAFETY: The memory has this many bytes, and nothing else uses it yet.
        unsafe { result::memset_d8_async(memory.pointer, 0, bytes as usize, stream) }
            .map_err(failed("cuMemsetD8Async"))?;
        Ok(memory)
    }

    pub(crate) fn view(&self) -> CudaView<'_, T> {
        let CudaMemory { device, pointer, length, elements } = self;
        CudaView {
            device,
            pointer: *pointer,
            length: *length,
            elements: *elements,
            memory: PhantomData,
        }
    }

    pub(crate) fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        CudaViewMut { view: self.view(), exclusive: PhantomData }
    }
}

impl<T> Drop for CudaMemory<T> {
    fn drop(&mut self) {
        let bytes = self.length as u64 * size_of::<T>() as u64;
        if self.pointer != 0 && self.device.bind().is_ok() {
            let stream = self.device.stream.handle();
            // Nobody hears of an error here. One of the device is returned by the next call.
            // SAFETY: The memory was allocated in this context, and no view of it is left.
            let _ = unsafe {
                match self.device.has_pools {
                    true => result::free_async(self.pointer, stream),
                    // This waits for the work that was queued before.
                    false => result::free_sync(self.pointer),
                }
            };
        }
        self.device.release(bytes);
    }
}

const OUT_OF_MEMORY: u32 = 2;

/// Borrowed memory of a device.
#[derive(Debug)]
pub(crate) struct CudaView<'a, T> {
    device: &'a Arc<CudaDevice>,
    pointer: sys::CUdeviceptr,
    length: usize,
    elements: PhantomData<T>,
    memory: PhantomData<&'a [T]>,
}

impl<T> Clone for CudaView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for CudaView<'_, T> {}

impl<'a, T: DeviceElement> CudaView<'a, T> {
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the memory belongs to this device.
    pub(crate) fn is_of(&self, device: &Arc<CudaDevice>) -> bool {
        Arc::ptr_eq(self.device, device)
    }

    /// Returns the address on the device.
    pub(super) fn pointer(&self) -> sys::CUdeviceptr {
        self.pointer
    }

    pub(super) fn bytes(&self) -> usize {
        self.length * size_of::<T>()
    }

    pub(crate) fn slice(self, range: Range<usize>) -> CudaView<'a, T> {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.length, "{start}..{end} of {}", self.length);
        let pointer = self.pointer + (start * size_of::<T>()) as u64;
        CudaView { pointer, length: end - start, ..self }
    }

    pub(crate) fn cast<U: DeviceElement>(self) -> CudaView<'a, U> {
        let bytes = self.bytes();
        let fits = bytes.is_multiple_of(size_of::<U>())
            && (bytes == 0 || self.pointer.is_multiple_of(align_of::<U>() as u64));
        assert!(fits, "{bytes} bytes at {:#x} are no elements of that type", self.pointer);
        CudaView {
            device: self.device,
            pointer: self.pointer,
            length: bytes / size_of::<U>(),
            elements: PhantomData,
            memory: PhantomData,
        }
    }
}

/// Borrowed memory of a device, to be changed.
#[derive(Debug)]
pub(crate) struct CudaViewMut<'a, T> {
    view: CudaView<'a, T>,
    exclusive: PhantomData<&'a mut [T]>,
}

impl<'a, T: DeviceElement> CudaViewMut<'a, T> {
    pub(crate) fn view(&self) -> CudaView<'_, T> {
        self.view
    }

    pub(crate) fn reborrow(&mut self) -> CudaViewMut<'_, T> {
        CudaViewMut { view: self.view, exclusive: PhantomData }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> CudaViewMut<'a, T> {
        CudaViewMut { view: self.view.slice(range), exclusive: PhantomData }
    }

    pub(crate) fn split_at(self, middle: usize) -> (CudaViewMut<'a, T>, CudaViewMut<'a, T>) {
        let part = |range| CudaViewMut { view: self.view.slice(range), exclusive: PhantomData };
        (part(0..middle), part(middle..self.view.len()))
    }

    pub(crate) fn cast<U: DeviceElement>(self) -> CudaViewMut<'a, U> {
        CudaViewMut { view: self.view.cast(), exclusive: PhantomData }
    }
}

impl CudaDevice {
    /// Copies values to the device, and waits for it.
    pub(crate) fn write<T: DeviceElement>(
        &self,
        values: &[T],
        to: CudaViewMut<'_, T>,
    ) -> Result<(), ComputeError> {
        if values.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: The target is as long as the source. The source is borrowed until the copy is
        // done.
        unsafe { result::memcpy_htod_async(to.view.pointer, values, self.stream.handle()) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        self.synchronize()
    }

    /// Copies elements from the device, after the work that was queued before.
    pub(crate) fn read<T: DeviceElement>(
        &self,
        from: CudaView<'_, T>,
        values: &mut [T],
    ) -> Result<(), ComputeError> {
        if values.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: The target is as long as the source, and is borrowed until the copy is done.
        unsafe { result::memcpy_dtoh_async(values, from.pointer, self.stream.handle()) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    /// Copies elements within the device.
    pub(crate) fn copy<T: DeviceElement>(
        &self,
        from: CudaView<'_, T>,
        to: CudaViewMut<'_, T>,
    ) -> Result<(), ComputeError> {
        let bytes = from.bytes();
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        let stream = self.stream.handle();
        // SAFETY: Both are memory of this device of `bytes`, and the target is exclusive.
        unsafe { result::memcpy_dtod_async(to.view.pointer, from.pointer, bytes, stream) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }
}
