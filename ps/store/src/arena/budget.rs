//! The memory budget that the shards of a task share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::StorageError;

/// The bytes of memory that all shards of a task may use together. Clones share one budget.
#[derive(Clone, Debug)]
pub struct Budget(Arc<BudgetBytes>);

#[derive(Debug)]
struct BudgetBytes {
    left: AtomicU64,
    /// The bytes that only [`Budget::reserve`] takes, because memory that grows will need them.
    promised: AtomicU64,
}

impl Budget {
    /// Creates a budget of `bytes_max` bytes.
    pub fn new(bytes_max: u64) -> Self {
        let left = AtomicU64::new(bytes_max);
        let promised = AtomicU64::new(0);
        Budget(Arc::new(BudgetBytes { left, promised }))
    }

    /// Returns the bytes that are left.
    pub fn left(&self) -> u64 {
        self.0.left.load(Ordering::Relaxed)
    }

    /// Returns a reservation of no bytes, which can grow.
    pub(crate) fn reserve_none(&self) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
    }

    /// Takes `bytes` off the budget. They are returned when the [`Reservation`] is dropped.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, StorageError> {
        self.reserve_leaving(bytes, 0)
    }

    /// Takes `bytes` off the budget as [`Budget::reserve`] does, unless they were promised to memory
    /// that grows.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub fn reserve_unpromised(&self, bytes: u64) -> Result<Reservation, StorageError> {
        self.reserve_leaving(bytes, self.0.promised.load(Ordering::Relaxed))
    }

    fn reserve_leaving(&self, bytes: u64, rest: u64) -> Result<Reservation, StorageError> {
        let take = |left: u64| left.checked_sub(bytes).filter(|&after| after >= rest);
        match self.0.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(Reservation { budget: self.clone(), bytes }),
            Err(left) => {
                Err(StorageError::DoesNotFit { need: bytes, limit: left.saturating_sub(rest) })
            }
        }
    }

    /// Keeps `bytes` from [`Budget::reserve_unpromised`] until the [`Promise`] is dropped.
    pub fn promise(&self, bytes: u64) -> Promise {
        self.0.promised.fetch_add(bytes, Ordering::Relaxed);
        Promise { budget: self.clone(), bytes }
    }
}

/// Bytes taken off a [`Budget`], returned to it on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: u64,
}

impl Reservation {
    /// Takes more bytes off the budget, as [`Budget::reserve_unpromised`] does.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), StorageError> {
        let mut more = self.budget.reserve_unpromised(bytes)?;
        self.bytes += std::mem::take(&mut more.bytes);
        Ok(())
    }

    /// Returns some of the bytes to the budget.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        let returned = bytes.min(self.bytes);
        self.bytes -= returned;
        drop(Reservation { budget: self.budget.clone(), bytes: returned });
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.0.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes of a [`Budget`] that are left to memory that grows.
#[derive(Debug)]
pub struct Promise {
    budget: Budget,
    bytes: u64,
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.budget.0.promised.fetch_sub(self.bytes, Ordering::Relaxed);
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
        let mut reservation = budget.reserve(30).unwrap();
        assert!(reservation.grow(71).is_err());
        reservation.grow(70).unwrap();
        assert_eq!((reservation.bytes(), budget.left()), (100, 0));
        reservation.shrink(40);
        assert_eq!((reservation.bytes(), budget.left()), (60, 40));
        drop(reservation);
        budget.reserve(100).unwrap();
    }

    #[test]
    fn promised_bytes_are_kept_for_memory_that_grows() {
        let budget = Budget::new(100);
        let promise = budget.promise(30);
        assert!(matches!(
            budget.reserve_unpromised(71),
            Err(StorageError::DoesNotFit { need: 71, limit: 70 })
        ));
        let unpromised = budget.reserve_unpromised(70).unwrap();
        assert!(budget.reserve_unpromised(1).is_err());
        drop(budget.reserve(30).unwrap());
        drop(promise);
        drop(budget.reserve_unpromised(30).unwrap());
        drop(unpromised);
        assert_eq!(budget.left(), 100);
    }
}
