//! [`DeviceWaiter`]: a thread that waits for a device, so that no other thread has to.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;

use super::cuda_device::CudaDevice;
use crate::error::ComputeError;

/// The completion of a copy: called with the result of the queued work once that is done.
type Completion = Box<dyn FnOnce(Result<(), ComputeError>) + Send>;

/// A thread that waits for a device. The first wait starts it, and it ends with the device.
///
/// A callback of the driver would need no thread, but none is called after the device has failed.
#[derive(Debug, Default)]
pub(super) struct DeviceWaiter {
    completions: Mutex<Option<Sender<Completion>>>,
}

impl CudaDevice {
    /// Calls `complete` on another thread once all work is done that has been queued.
    pub(crate) fn when_done(
        self: &Arc<CudaDevice>,
        complete: impl FnOnce(Result<(), ComputeError>) + Send + 'static,
    ) {
        let mut completions =
            self.waiter.completions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut complete: Completion = Box::new(complete);
        if let Some(sender) = &*completions {
            match sender.send(complete) {
                Ok(()) => return,
                Err(unsent) => complete = unsent.0,
            }
        }
        let (sender, receiver) = channel::<Completion>();
        let device: Weak<CudaDevice> = Arc::downgrade(self);
        let wait = move || {
            for complete in receiver {
                // A device that has ended has waited for its work.
                let result = device.upgrade().map_or(Ok(()), |device| device.synchronize());
                complete(result);
            }
        };
        let started =
            thread::Builder::new().name(format!("pushpull-cuda-{}", self.index())).spawn(wait);
        match started {
            Ok(_) => {
                // The receiver is there: the thread has just begun.
                let _ = sender.send(complete);
                *completions = Some(sender);
            }
            // Without a thread this one waits.
            Err(_) => complete(self.synchronize()),
        }
    }
}
