//! [`Pinned`], [`HostMemory`] and [`Transfer`]: asynchronous copies between the processor's memory
//! and a device's.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

#[cfg(feature = "cuda")]
use crate::cuda::pinned_memory::PinnedMemory;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{DeviceElement, View, ViewMut};

/// Memory of the processor that a device copies from and to directly, from [`Device::pinned`]. For
/// CUDA devices its pages are locked.
#[derive(Debug)]
pub struct Pinned<T> {
    place: PinnedPlace<T>,
}

#[derive(Debug)]
enum PinnedPlace<T> {
    Host(Vec<T>),
    #[cfg(feature = "cuda")]
    Cuda(PinnedMemory<T>),
}

impl<T: DeviceElement> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.place {
            PinnedPlace::Host(values) => values,
            #[cfg(feature = "cuda")]
            PinnedPlace::Cuda(memory) => memory.as_slice(),
        }
    }
}

impl<T: DeviceElement> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.place {
            PinnedPlace::Host(values) => values,
            #[cfg(feature = "cuda")]
            PinnedPlace::Cuda(memory) => memory.as_mut_slice(),
        }
    }
}

impl<T: DeviceElement> Pinned<T> {
    /// Allocates pinned memory for `length` elements of the same device, all zero.
    ///
    /// # Errors
    /// The errors of the device; none on the processor.
    pub fn another(&self, length: usize) -> Result<Pinned<T>, ComputeError> {
        let place = match &self.place {
            PinnedPlace::Host(_) => PinnedPlace::Host(vec![T::default(); length]),
            #[cfg(feature = "cuda")]
            PinnedPlace::Cuda(memory) => {
                PinnedPlace::Cuda(PinnedMemory::new(memory.device(), length)?)
            }
        };
        Ok(Pinned { place })
    }
}

/// Memory of the processor that is addressed by ranges of bytes, for [`Device::start_read_ranges`].
///
/// A device copies to it directly if its pages are locked. Otherwise the copy is slower, and may be
/// done before the call returns.
pub trait HostMemory: Send + 'static {
    /// Returns the bytes of each of these ranges, which do not overlap.
    fn slices_mut(&mut self, ranges: &[Range<usize>]) -> Vec<&mut [u8]>;
}

/// A lock of pages of the processor's memory, so that devices copy from and to them directly. From
/// [`Device::lock_pages`]. Dropping it unlocks the pages.
#[derive(Debug)]
pub struct PageLock {
    #[cfg(feature = "cuda")]
    _pages: Option<crate::cuda::pinned_memory::LockedPages>,
}

/// A copy under way, as a future of the processor's side, from [`Device::start_read`] and the like.
/// Any executor can poll it.
///
/// Dropping it loses the processor's side, which is dropped when the device has finished with it.
/// The copy is not undone.
#[must_use = "the copy is done when this completes"]
pub struct Transfer<O> {
    shared: Arc<SharedTransfer<O>>,
}

struct SharedTransfer<O> {
    state: Mutex<TransferState<O>>,
}

struct TransferState<O> {
    done: Option<Result<O, ComputeError>>,
    waker: Option<Waker>,
}

impl<O> Transfer<O> {
    fn done(result: Result<O, ComputeError>) -> Transfer<O> {
        let state = Mutex::new(TransferState { done: Some(result), waker: None });
        Transfer { shared: Arc::new(SharedTransfer { state }) }
    }

    /// Blocks the thread until the copy is done.
    ///
    /// # Errors
    /// The errors of the future.
    pub fn wait(mut self) -> Result<O, ComputeError> {
        struct TransferWaker(std::thread::Thread);
        impl std::task::Wake for TransferWaker {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(TransferWaker(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut self).poll(&mut context) {
                Poll::Ready(result) => return result,
                Poll::Pending => std::thread::park(),
            }
        }
    }
}

#[cfg(feature = "cuda")]
impl<O: Send + 'static> Transfer<O> {
    /// Hands the processor's side of a copy to the waiter of the device, which holds it until the
    /// queued work is done.
    fn pending(
        cuda: &Arc<crate::cuda::cuda_device::CudaDevice>,
        queued: Result<(), ComputeError>,
        owner: O,
    ) -> Transfer<O> {
        let state = Mutex::new(TransferState { done: None, waker: None });
        let shared = Arc::new(SharedTransfer { state });
        let transfer = Transfer { shared: shared.clone() };
        let complete = move |result: Result<(), ComputeError>| {
            let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.done = Some(result.map(|()| owner));
            let waker = state.waker.take();
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        };
        match queued {
            // The copy may have begun nevertheless, so the memory is not returned before.
            Err(error) => cuda.when_done(move |_| complete(Err(error))),
            Ok(()) => cuda.when_done(complete),
        }
        transfer
    }
}

impl<O> Future for Transfer<O> {
    type Output = Result<O, ComputeError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.done.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<O> fmt::Debug for Transfer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Transfer").field("is_done", &state.done.is_some()).finish()
    }
}

impl Device {
    /// Allocates pinned memory for `length` elements, all zero.
    ///
    /// # Errors
    /// The errors of the device; none on the processor.
    pub fn pinned<T: DeviceElement>(&self, length: usize) -> Result<Pinned<T>, ComputeError> {
        let place = match self.backend() {
            Backend::Cpu(_) => PinnedPlace::Host(vec![T::default(); length]),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => PinnedPlace::Cuda(PinnedMemory::new(cuda, length)?),
        };
        Ok(Pinned { place })
    }

    /// Starts to copy elements of the device to the beginning of pinned memory, after the work that
    /// was queued before. On the processor the copy is done when this returns.
    ///
    /// The view may be changed or freed meanwhile: that happens after the copy.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if the pinned memory is shorter; [`ComputeError::OtherMemory`]. The
    /// transfer fails with the error of the device, also of work before it.
    pub fn start_read<'a, T: DeviceElement>(
        &self,
        from: impl Into<View<'a, T>>,
        mut to: Pinned<T>,
    ) -> Result<Transfer<Pinned<T>>, ComputeError> {
        const NAME: &str = "start_read";
        let from = from.into();
        check_length(NAME, "pinned memory", to.len().min(from.len()), from.len())?;
        match self.backend() {
            Backend::Cpu(_) => {
                to[..from.len()].copy_from_slice(from.host(NAME, "the source")?);
                Ok(Transfer::done(Ok(to)))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let from = from.cuda(cuda, NAME, "the source")?;
                let PinnedPlace::Cuda(memory) = &mut to.place else {
                    return Err(ComputeError::OtherMemory { kernel: NAME, argument: "the target" });
                };
                // SAFETY: The waiter holds the pinned memory until the copy is done.
                let queued = unsafe { memory.queue_read(cuda, from) };
                Ok(Transfer::pending(cuda, queued, to))
            }
        }
    }

    /// Starts to copy ranges of bytes of the device to the same ranges of the processor's memory,
    /// which do not overlap, after the work that was queued before. On the processor the copies are
    /// done when this returns.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if a range is not inside the view, or if the memory has another
    /// length there; [`ComputeError::OtherMemory`]. The transfer fails with the error of the
    /// device, also of work before it.
    ///
    /// # Panics
    /// The panics of the memory.
    pub fn start_read_ranges<'a, O: HostMemory>(
        &self,
        from: impl Into<View<'a, u8>>,
        ranges: &[Range<usize>],
        mut to: Box<O>,
    ) -> Result<Transfer<Box<O>>, ComputeError> {
        const NAME: &str = "start_read_ranges";
        let from = from.into();
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        check_length(NAME, "the source", from.len().min(end), end)?;
        match self.backend() {
            Backend::Cpu(_) => {
                let from = from.host(NAME, "the source")?;
                for (range, to) in ranges.iter().zip(to.slices_mut(ranges)) {
                    check_length(NAME, "the target", to.len(), range.len())?;
                    to.copy_from_slice(&from[range.clone()]);
                }
                Ok(Transfer::done(Ok(to)))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                from.cuda(cuda, NAME, "the source")?;
                let mut copies = ranges.iter().zip(to.slices_mut(ranges)).map(|(range, to)| {
                    check_length(NAME, "the target", to.len(), range.len())?;
                    let from = from.slice(range.clone()).cuda(cuda, NAME, "the source")?;
                    // SAFETY: All slices were borrowed at once, so they are still there. The waiter
                    // holds the memory in its box until the copies are done, and nothing accesses
                    // it there.
                    unsafe { crate::cuda::pinned_memory::queue_read(cuda, from, to) }
                });
                let queued = copies.try_for_each(|queued| queued);
                Ok(Transfer::pending(cuda, queued, to))
            }
        }
    }

    /// Starts to copy the beginning of pinned memory to the device, after the work that was queued
    /// before. Work that is queued later sees the copied elements. On the processor the copy ends
    /// before this returns.
    ///
    /// # Errors
    /// The errors of [`Device::start_read`].
    pub fn start_write<'a, T: DeviceElement>(
        &self,
        from: Pinned<T>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<Transfer<Pinned<T>>, ComputeError> {
        self.start_write_from(from, |from| from, to.into())
    }

    /// Starts a write like [`Device::start_write`], from shared pinned memory, which can be read
    /// meanwhile.
    ///
    /// # Errors
    /// The errors of [`Device::start_read`].
    pub fn start_write_shared<'a, T: DeviceElement>(
        &self,
        from: Arc<Pinned<T>>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<Transfer<Arc<Pinned<T>>>, ComputeError> {
        self.start_write_from(from, |from| from, to.into())
    }

    fn start_write_from<T: DeviceElement, O: Send + 'static>(
        &self,
        owner: O,
        pinned: impl Fn(&O) -> &Pinned<T>,
        to: ViewMut<'_, T>,
    ) -> Result<Transfer<O>, ComputeError> {
        const NAME: &str = "start_write";
        let from = pinned(&owner);
        check_length(NAME, "pinned memory", from.len().min(to.len()), to.len())?;
        match self.backend() {
            Backend::Cpu(_) => {
                let to = to.host(NAME, "the target")?;
                to.copy_from_slice(&from[..to.len()]);
                Ok(Transfer::done(Ok(owner)))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let to = to.cuda(cuda, NAME, "the target")?;
                let PinnedPlace::Cuda(memory) = &from.place else {
                    return Err(ComputeError::OtherMemory { kernel: NAME, argument: "the source" });
                };
                // SAFETY: The waiter holds the pinned memory until the copy is done, and others
                // that share it only read.
                let queued = unsafe { memory.queue_write(cuda, to) };
                Ok(Transfer::pending(cuda, queued, owner))
            }
        }
    }

    /// Locks pages of the processor's memory, so that devices copy from and to them directly. On
    /// the processor this does nothing.
    ///
    /// # Errors
    /// The errors of the device, also if the system cannot lock pages of this kind.
    ///
    /// # Safety
    ///
    /// The memory is mapped, and stays so until the lock is dropped.
    pub unsafe fn lock_pages(
        &self,
        start: *mut u8,
        bytes: usize,
    ) -> Result<PageLock, ComputeError> {
        match self.backend() {
            Backend::Cpu(_) => {
                let _ = (start, bytes);
                Ok(PageLock {
                    #[cfg(feature = "cuda")]
                    _pages: None,
                })
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                // SAFETY: The caller guarantees it.
                let pages =
                    unsafe { crate::cuda::pinned_memory::LockedPages::new(cuda, start, bytes) };
                Ok(PageLock { _pages: Some(pages?) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_the_processor_are_done_at_once() {
        let device = Device::cpu_threads(1).unwrap();
        let mut pinned = device.pinned::<f32>(3).unwrap();
        assert_eq!(*pinned, [0.0; 3]);
        pinned.copy_from_slice(&[1.0, 2.0, 3.0]);
        let mut buffer = device.buffer::<f32>(2).unwrap();
        let pinned = device.start_write(pinned, &mut buffer).unwrap().wait().unwrap();
        device.scale(2.0, &mut buffer).unwrap();
        let pinned = device.start_read(&buffer, pinned).unwrap().wait().unwrap();
        assert_eq!(*pinned, [2.0, 4.0, 3.0]);
        let short = device.pinned::<f32>(1).unwrap();
        let error = device.start_read(&buffer, short).unwrap_err();
        assert_eq!(error.to_string(), "start_read needs 2 elements of pinned memory, not 1");
    }

    struct HostBytes(Vec<u8>);

    impl HostMemory for HostBytes {
        fn slices_mut(&mut self, ranges: &[Range<usize>]) -> Vec<&mut [u8]> {
            let mut slices = Vec::new();
            let mut rest = &mut self.0[..];
            let mut at = 0;
            for range in ranges {
                let (slice, behind) = rest[range.start - at..].split_at_mut(range.len());
                slices.push(slice);
                rest = behind;
                at = range.end;
            }
            slices
        }
    }

    #[test]
    fn ranges_are_read_to_where_they_were() {
        let device = Device::cpu_threads(1).unwrap();
        let mut buffer = device.buffer::<u8>(10).unwrap();
        device.write(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &mut buffer).unwrap();
        let read = |ranges: &[Range<usize>]| {
            device.start_read_ranges(&buffer, ranges, Box::new(HostBytes(vec![99; 10])))
        };
        for (ranges, expected) in [
            (vec![], [99; 10]),
            (vec![2..4, 4..5, 7..7, 9..10], [99, 99, 2, 3, 4, 99, 99, 99, 99, 9]),
        ] {
            assert_eq!(read(&ranges).unwrap().wait().unwrap().0, expected);
        }
        let error = read(&[0..1, 8..11]).unwrap_err();
        assert_eq!(error.to_string(), "start_read_ranges needs 11 elements of the source, not 10");
    }

    #[test]
    fn pinned_memory_is_read_while_it_is_written_from() {
        let device = Device::cpu_threads(1).unwrap();
        let mut pinned = device.pinned::<u64>(2).unwrap();
        pinned.copy_from_slice(&[5, 6]);
        let shared = Arc::new(pinned.another(3).unwrap());
        assert_eq!(**shared, [0; 3]);
        let shared = Arc::new(pinned);
        let mut buffer = device.buffer::<u64>(2).unwrap();
        let transfer = device.start_write_shared(shared.clone(), &mut buffer).unwrap();
        assert_eq!(**shared, [5, 6]);
        assert!(Arc::ptr_eq(&transfer.wait().unwrap(), &shared));
        let mut found = [0; 2];
        device.read(&buffer, &mut found).unwrap();
        assert_eq!(found, [5, 6]);
    }
}
