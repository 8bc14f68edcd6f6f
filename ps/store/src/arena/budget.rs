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

    /// Returns a reservation of no bytes, which can grow.
    pub(crate) fn reserve_none(&self) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
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
    /// Takes more bytes off the budget.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), StorageError> {
        let mut more = self.budget.reserve(bytes)?;
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
        let mut reservation = budget.reserve(30).unwrap();
        assert!(reservation.grow(71).is_err());
        reservation.grow(70).unwrap();
        assert_eq!((reservation.bytes(), budget.left()), (100, 0));
        reservation.shrink(40);
        assert_eq!((reservation.bytes(), budget.left()), (60, 40));
        drop(reservation);
        budget.reserve(100).unwrap();
    }
}
