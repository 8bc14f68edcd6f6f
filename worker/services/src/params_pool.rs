//! The memory of values that calls have pulled, for later calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_worker::Params;

/// The most values that are kept.
const FREE_MAX: usize = 4;

/// Values of calls that have ended. Later calls pull into their memory.
#[derive(Debug, Default)]
pub(crate) struct ParamsPool(Mutex<Vec<Params>>);

impl ParamsPool {
    pub(crate) fn take(&self) -> Option<Params> {
        self.free().pop()
    }

    /// Keeps values, or drops them if there are enough.
    pub(crate) fn keep(&self, params: Params) {
        let mut free = self.free();
        if free.len() < FREE_MAX {
            free.push(params);
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Params>> {
        // A panic leaves the list as it was.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
