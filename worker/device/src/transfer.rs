//! [`Pinned`] and [`Transfer`]: copies between the processor's memory and that of a device, while the
//! program does something else.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

#[cfg(feature = "cuda")]
use crate::cuda::pinned_memory::PinnedMemory;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{DeviceElement, View, ViewMut};

/// Memory of the processor that a device copies from and to by itself, from [`Device::pinned`]. For
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

/// A copy under way, from [`Device::start_read`] or [`Device::start_write`]. It returns the pinned
/// memory once the device has finished with it. Any executor can poll it.
///
/// Dropping it loses the pinned memory, which is freed when the device has finished with it. The copy
/// is not undone.
#[must_use = "the copy is done when this completes"]
pub struct Transfer<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    done: Option<Result<Pinned<T>, ComputeError>>,
    waker: Option<Waker>,
}

impl<T: DeviceElement> Transfer<T> {
    fn done(result: Result<Pinned<T>, ComputeError>) -> Transfer<T> {
        let state = Mutex::new(State { done: Some(result), waker: None });
        Transfer { shared: Arc::new(Shared { state }) }
    }

    /// Blocks the thread until the copy is done.
    ///
    /// # Errors
    /// As the future.
    pub fn wait(mut self) -> Result<Pinned<T>, ComputeError> {
        struct Unpark(std::thread::Thread);
        impl std::task::Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
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
impl<T: DeviceElement> Transfer<T> {
    /// Returns a transfer, and what completes it: the waiter calls it with the result of the work
    /// that was queued, and it holds the pinned memory until then.
    fn pending(
        pinned: Pinned<T>,
    ) -> (Transfer<T>, impl FnOnce(Result<(), ComputeError>) + Send + 'static) {
        let state = Mutex::new(State { done: None, waker: None });
        let shared = Arc::new(Shared { state });
        let transfer = Transfer { shared: shared.clone() };
        let complete = move |result: Result<(), ComputeError>| {
            let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.done = Some(result.map(|()| pinned));
            let waker = state.waker.take();
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        };
        (transfer, complete)
    }
}

impl<T: DeviceElement> Future for Transfer<T> {
    type Output = Result<Pinned<T>, ComputeError>;

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

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Transfer").field("is_done", &state.done.is_some()).finish()
    }
}

impl Device {
    /// Allocates pinned memory for `length` elements, all zero.
    ///
    /// # Errors
    /// Those of the device; none on the processor.
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
    ) -> Result<Transfer<T>, ComputeError> {
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
                Ok(finish(cuda, queued, to))
            }
        }
    }

    /// Starts to copy the beginning of pinned memory to the device, after the work that was queued
    /// before. Work that is queued later sees the copied elements. On the processor the copy is done
    /// when this returns.
    ///
    /// # Errors
    /// As [`Device::start_read`].
    pub fn start_write<'a, T: DeviceElement>(
        &self,
        from: Pinned<T>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<Transfer<T>, ComputeError> {
        const NAME: &str = "start_write";
        let to = to.into();
        check_length(NAME, "pinned memory", from.len().min(to.len()), to.len())?;
        match self.backend() {
            Backend::Cpu(_) => {
                let to = to.host(NAME, "the target")?;
                to.copy_from_slice(&from[..to.len()]);
                Ok(Transfer::done(Ok(from)))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let to = to.cuda(cuda, NAME, "the target")?;
                let PinnedPlace::Cuda(memory) = &from.place else {
                    return Err(ComputeError::OtherMemory { kernel: NAME, argument: "the source" });
                };
                // SAFETY: As above.
                let queued = unsafe { memory.queue_write(cuda, to) };
                Ok(finish(cuda, queued, from))
            }
        }
    }
}

/// Hands the pinned memory of a copy to the waiter of the device.
#[cfg(feature = "cuda")]
fn finish<T: DeviceElement>(
    cuda: &Arc<crate::cuda::cuda_device::CudaDevice>,
    queued: Result<(), ComputeError>,
    pinned: Pinned<T>,
) -> Transfer<T> {
    let (transfer, complete) = Transfer::pending(pinned);
    match queued {
        // The copy may have begun nevertheless, so the memory is not returned before.
        Err(error) => cuda.when_done(move |_| complete(Err(error))),
        Ok(()) => cuda.when_done(complete),
    }
    transfer
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
}
