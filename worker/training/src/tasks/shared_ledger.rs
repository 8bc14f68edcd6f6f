//! The ledger of a group of tasks, as its threads share it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::StopCause;
use super::stop_flag::StopSource;
use super::task_ledger::TaskLedger;

/// The ledger of a group, and the threads that wait for its changes.
#[derive(Debug)]
pub(super) struct SharedLedger<E> {
    ledger: Mutex<TaskLedger<E>>,
    changed: Condvar,
    start: Instant,
}

impl<E> SharedLedger<E> {
    pub(super) fn new() -> SharedLedger<E> {
        SharedLedger {
            ledger: Mutex::new(TaskLedger::new()),
            changed: Condvar::new(),
            start: Instant::now(),
        }
    }

    pub(super) fn read<R>(&self, read: impl FnOnce(&TaskLedger<E>) -> R) -> R {
        read(&self.lock())
    }

    /// Changes the ledger and wakes all waiting threads. What `change` returns is dropped by the
    /// caller, outside of the lock.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut TaskLedger<E>) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `poll` returns a result. It is called after each change, and at the time that it
    /// has returned last. Times are durations since the group was made.
    pub(super) fn wait<R>(
        &self,
        mut poll: impl FnMut(&TaskLedger<E>, Duration) -> Result<R, Option<Duration>>,
    ) -> R {
        let mut ledger = self.lock();
        loop {
            let now = self.start.elapsed();
            ledger = match poll(&ledger, now) {
                Ok(result) => return result,
                Err(None) => self.changed.wait(ledger).unwrap_or_else(PoisonError::into_inner),
                Err(Some(deadline)) => {
                    let timeout = deadline.saturating_sub(now);
                    let waited = self.changed.wait_timeout(ledger, timeout);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, TaskLedger<E>> {
        // Each change of the ledger is complete before anything can panic.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: Send + Sync> StopSource for SharedLedger<E> {
    fn is_requested(&self) -> bool {
        self.read(|ledger| ledger.stop_cause().is_some())
    }

    fn cause(&self) -> Option<StopCause> {
        self.read(|ledger| ledger.stop_cause().cloned())
    }

    fn wait(&self, timeout: Duration) -> bool {
        let deadline = self.start.elapsed().saturating_add(timeout);
        SharedLedger::wait(self, |ledger, now| match ledger.stop_cause() {
            Some(_) => Ok(true),
            None if now >= deadline => Ok(false),
            None => Err(Some(deadline)),
        })
    }

    fn request(&self, reason: String) {
        self.change(|ledger| ledger.request_stop(reason));
    }
}
