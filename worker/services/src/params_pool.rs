//! [`ParamsPool`]: memory of pulled values, reused by later calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_worker::Params;

/// The most value sets in the pool.
const FREE_MAX: usize = 4;

/// The value sets of calls that have ended. Later calls pull into their memory.
#[derive(Debug, Default)]
pub(crate) struct ParamsPool(Mutex<Vec<Params>>);

impl ParamsPool {
    pub(crate) fn take(&self) -> Option<Params> {
        self.free().pop()
    }

    /// Returns values to the pool, or drops them if the pool is full.
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
