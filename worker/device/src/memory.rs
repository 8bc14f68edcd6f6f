//! Memory of a device: a [`Buffer`] owns it, a [`View`] and a [`ViewMut`] borrow it.

use std::fmt;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::cuda::cuda_device::CudaDevice;
#[cfg(feature = "cuda")]
use crate::cuda::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use crate::error::ComputeError;

mod sealed {
    pub trait SealedElement {}
    impl SealedElement for f32 {}
    impl SealedElement for f64 {}
    impl SealedElement for u8 {}
    impl SealedElement for u32 {}
    impl SealedElement for u64 {}
    impl SealedElement for i64 {}
    impl SealedElement for half::f16 {}
    impl SealedElement for half::bf16 {}
}

/// An element of a device's memory, for which every pattern of bits is a value.
pub trait DeviceElement:
    sealed::SealedElement + bytemuck::Pod + Default + fmt::Debug + Send + Sync + 'static
{
}

impl DeviceElement for f32 {}
impl DeviceElement for f64 {}
impl DeviceElement for u8 {}
impl DeviceElement for u32 {}
impl DeviceElement for u64 {}
impl DeviceElement for i64 {}
impl DeviceElement for f16 {}
impl DeviceElement for bf16 {}

/// Elements in the memory of a device, from [`Device::buffer`](crate::Device::buffer).
#[derive(Debug)]
pub struct Buffer<T> {
    pub(crate) place: BufferPlace<T>,
}

#[derive(Debug)]
pub(crate) enum BufferPlace<T> {
    Host(Vec<T>),
    #[cfg(feature = "cuda")]
    Cuda(CudaMemory<T>),
}

impl<T: DeviceElement> Buffer<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Returns whether the buffer has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows all elements, to be read by kernels.
    pub fn view(&self) -> View<'_, T> {
        match &self.place {
            BufferPlace::Host(values) => View::from(values),
            #[cfg(feature = "cuda")]
            BufferPlace::Cuda(memory) => View { place: ViewPlace::Cuda(memory.view()) },
        }
    }

    /// Borrows all elements, to be changed by kernels.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        match &mut self.place {
            BufferPlace::Host(values) => ViewMut::from(values),
            #[cfg(feature = "cuda")]
            BufferPlace::Cuda(memory) => ViewMut { place: ViewPlaceMut::Cuda(memory.view_mut()) },
        }
    }
}

/// Elements that the kernels of a device can read: the caller's own, or a copy. From
/// [`Device::resident`](crate::Device::resident).
#[derive(Debug)]
#[non_exhaustive]
pub enum Resident<'a, T> {
    /// The caller's own elements, in the processor's memory.
    Host(&'a [T]),
    /// A copy in the memory of the device.
    Copy(Buffer<T>),
}

impl<T: DeviceElement> Resident<'_, T> {
    /// Borrows all elements, to be read by kernels.
    pub fn view(&self) -> View<'_, T> {
        match self {
            Resident::Host(values) => View::from(*values),
            Resident::Copy(buffer) => buffer.view(),
        }
    }
}

/// Borrowed elements in the memory of a device. Slices of the processor's memory are views too.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    place: ViewPlace<'a, T>,
}

#[derive(Clone, Copy, Debug)]
enum ViewPlace<'a, T> {
    Host(&'a [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaView<'a, T>),
}

impl<'a, T: DeviceElement> View<'a, T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self.place {
            ViewPlace::Host(values) => values.len(),
            #[cfg(feature = "cuda")]
            ViewPlace::Cuda(view) => view.len(),
        }
    }

    /// Returns whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a part of the view.
    ///
    /// # Panics
    /// If the range is not within it, as for slices.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        match self.place {
            ViewPlace::Host(values) => View::from(&values[range]),
            #[cfg(feature = "cuda")]
            ViewPlace::Cuda(view) => View { place: ViewPlace::Cuda(view.slice(range)) },
        }
    }

    /// Returns the same memory as elements of another type.
    ///
    /// # Panics
    /// If the start is not aligned for them, or the length not a multiple of theirs.
    pub fn cast<U: DeviceElement>(self) -> View<'a, U> {
        match self.place {
            ViewPlace::Host(values) => View::from(bytemuck::cast_slice::<T, U>(values)),
            #[cfg(feature = "cuda")]
            ViewPlace::Cuda(view) => View { place: ViewPlace::Cuda(view.cast()) },
        }
    }

    /// Returns the elements if they are in the processor's memory.
    pub fn as_host(self) -> Option<&'a [T]> {
        match self.place {
            ViewPlace::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            ViewPlace::Cuda(_) => None,
        }
    }

    /// Returns the elements for a kernel of the processor.
    pub(crate) fn host(
        self,
        kernel: &'static str,
        argument: &'static str,
    ) -> Result<&'a [T], ComputeError> {
        self.as_host().ok_or(ComputeError::OtherMemory { kernel, argument })
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: DeviceElement> View<'a, T> {
    /// Returns the elements for a kernel of this CUDA device.
    pub(crate) fn cuda(
        self,
        device: &Arc<CudaDevice>,
        kernel: &'static str,
        argument: &'static str,
    ) -> Result<CudaView<'a, T>, ComputeError> {
        match self.place {
            ViewPlace::Cuda(view) if view.is_of(device) => Ok(view),
            _ => Err(ComputeError::OtherMemory { kernel, argument }),
        }
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: DeviceElement> ViewMut<'a, T> {
    /// Returns the elements for a kernel of this CUDA device.
    pub(crate) fn cuda(
        self,
        device: &Arc<CudaDevice>,
        kernel: &'static str,
        argument: &'static str,
    ) -> Result<CudaViewMut<'a, T>, ComputeError> {
        match self.place {
            ViewPlaceMut::Cuda(view) if view.view().is_of(device) => Ok(view),
            _ => Err(ComputeError::OtherMemory { kernel, argument }),
        }
    }
}

impl<'a, T> From<&'a [T]> for View<'a, T> {
    fn from(values: &'a [T]) -> View<'a, T> {
        View { place: ViewPlace::Host(values) }
    }
}

impl<'a, T> From<&'a Vec<T>> for View<'a, T> {
    fn from(values: &'a Vec<T>) -> View<'a, T> {
        View::from(&values[..])
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for View<'a, T> {
    fn from(values: &'a [T; N]) -> View<'a, T> {
        View::from(&values[..])
    }
}

impl<'a, T: DeviceElement> From<&'a Buffer<T>> for View<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> View<'a, T> {
        buffer.view()
    }
}

/// Borrowed elements in the memory of a device, to be changed.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    place: ViewPlaceMut<'a, T>,
}

#[derive(Debug)]
enum ViewPlaceMut<'a, T> {
    Host(&'a mut [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaViewMut<'a, T>),
}

impl<'a, T: DeviceElement> ViewMut<'a, T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Returns whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows the elements to be read.
    pub fn view(&self) -> View<'_, T> {
        match &self.place {
            ViewPlaceMut::Host(values) => View::from(&values[..]),
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(view) => View { place: ViewPlace::Cuda(view.view()) },
        }
    }

    /// Borrows the elements for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        match &mut self.place {
            ViewPlaceMut::Host(values) => ViewMut::from(&mut values[..]),
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(view) => ViewMut { place: ViewPlaceMut::Cuda(view.reborrow()) },
        }
    }

    /// Returns a part of the view.
    ///
    /// # Panics
    /// If the range is not within it, as for slices.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        match self.place {
            ViewPlaceMut::Host(values) => ViewMut::from(&mut values[range]),
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(view) => ViewMut { place: ViewPlaceMut::Cuda(view.slice(range)) },
        }
    }

    /// Cuts the view in two, before this element.
    ///
    /// # Panics
    /// If there are fewer elements.
    pub fn split_at(self, middle: usize) -> (ViewMut<'a, T>, ViewMut<'a, T>) {
        match self.place {
            ViewPlaceMut::Host(values) => {
                let (left, right) = values.split_at_mut(middle);
                (ViewMut::from(left), ViewMut::from(right))
            }
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(view) => {
                let (left, right) = view.split_at(middle);
                let part = |view| ViewMut { place: ViewPlaceMut::Cuda(view) };
                (part(left), part(right))
            }
        }
    }

    /// Returns the same memory as elements of another type, under the conditions of [`View::cast`].
    pub fn cast<U: DeviceElement>(self) -> ViewMut<'a, U> {
        match self.place {
            ViewPlaceMut::Host(values) => ViewMut::from(bytemuck::cast_slice_mut::<T, U>(values)),
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(view) => ViewMut { place: ViewPlaceMut::Cuda(view.cast()) },
        }
    }

    /// Returns the elements if they are in the processor's memory.
    pub fn into_host(self) -> Option<&'a mut [T]> {
        match self.place {
            ViewPlaceMut::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            ViewPlaceMut::Cuda(_) => None,
        }
    }

    /// Returns the elements for a kernel of the processor.
    pub(crate) fn host(
        self,
        kernel: &'static str,
        argument: &'static str,
    ) -> Result<&'a mut [T], ComputeError> {
        self.into_host().ok_or(ComputeError::OtherMemory { kernel, argument })
    }
}

impl<'a, T> From<&'a mut [T]> for ViewMut<'a, T> {
    fn from(values: &'a mut [T]) -> ViewMut<'a, T> {
        ViewMut { place: ViewPlaceMut::Host(values) }
    }
}

impl<'a, T> From<&'a mut Vec<T>> for ViewMut<'a, T> {
    fn from(values: &'a mut Vec<T>) -> ViewMut<'a, T> {
        ViewMut::from(&mut values[..])
    }
}

impl<'a, T, const N: usize> From<&'a mut [T; N]> for ViewMut<'a, T> {
    fn from(values: &'a mut [T; N]) -> ViewMut<'a, T> {
        ViewMut::from(&mut values[..])
    }
}

impl<'a, T: DeviceElement> From<&'a mut Buffer<T>> for ViewMut<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> ViewMut<'a, T> {
        buffer.view_mut()
    }
}
