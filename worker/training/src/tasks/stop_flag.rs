//! The stop flag of a group of tasks.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::error::StopCause;
use super::shared_ledger::SharedLedger;

/// The stop flag of a group of tasks. Clones are the same flag.
#[derive(Clone)]
pub struct StopFlag {
    flag: Arc<dyn StopSource>,
}

impl StopFlag {
    pub(super) fn new<E: Send + Sync + 'static>(shared: Arc<SharedLedger<E>>) -> StopFlag {
        StopFlag { flag: shared }
    }

    /// Whether the task is to stop.
    pub fn is_requested(&self) -> bool {
        self.flag.is_requested()
    }

    /// Returns why the task is to stop.
    pub fn cause(&self) -> Option<StopCause> {
        self.flag.cause()
    }

    /// Waits until a stop is requested, at most for a time. Returns whether it is requested. Use it
    /// instead of a sleep.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.flag.wait(timeout)
    }

    /// Asks all tasks to stop; see [`super::Tasks::request_stop`].
    pub fn request(&self, reason: impl Into<String>) {
        self.flag.request(reason.into());
    }
}

impl fmt::Debug for StopFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopFlag").field("cause", &self.cause()).finish()
    }
}

/// The part of [`SharedLedger`] that does not depend on the type of errors.
pub(super) trait StopSource: Send + Sync {
    fn is_requested(&self) -> bool;
    fn cause(&self) -> Option<StopCause>;
    fn wait(&self, timeout: Duration) -> bool;
    fn request(&self, reason: String);
}
