//! The memory budget that the shards of a task share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::StorageError;

/// The bytes of memory that all shards of a task may use together. Clones share one budget.
#[derive(Clone, Debug)]
pub struct Budget(Arc<AtomicU64>);

impl Budget {
    /// Creates a budget of `bytes_max` bytes.
    pub fn new(bytes_max: u64) -> Self {
        Budget(Arc::new(AtomicU64::new(bytes_max)))
    }

    /// Returns the bytes that are left.
    pub fn left(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes `bytes` off the budget. They are returned when the [`Reservation`] is dropped.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, StorageError> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => Ok(Reservation { budget: self.clone(), bytes }),
            Err(limit) => Err(StorageError::DoesNotFit { need: bytes, limit }),
        }
    }
}

/// Bytes taken off a [`Budget`], returned to it on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: u64,
}

impl Reservation {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_reservation_returns_its_bytes() {
        let budget = Budget::new(100);
        let reservation = budget.reserve(60).unwrap();
        let error = budget.reserve(60).unwrap_err();
        assert!(matches!(error, StorageError::DoesNotFit { need: 60, limit: 40 }));
        drop(reservation);
        budget.reserve(100).unwrap();
    }
}
