//! The memory budget that the shards of a task share.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::StorageError;

/// The bytes of memory that all shards of a task may use together. Clones share one budget.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Mutex<BudgetBytes>>);

#[derive(Debug)]
struct BudgetBytes {
    left: u64,
    /// The bytes that were promised to memory that grows, without those that it has taken. They may
    /// be more than are left.
    promised: u128,
}

impl Budget {
    /// Creates a budget of `bytes_max` bytes.
    pub fn new(bytes_max: u64) -> Self {
        Budget(Arc::new(Mutex::new(BudgetBytes { left: bytes_max, promised: 0 })))
    }

    fn bytes(&self) -> MutexGuard<'_, BudgetBytes> {
        self.0.lock().expect("no panic holds the lock")
    }

    /// Returns the bytes that are left.
    pub fn left(&self) -> u64 {
        self.bytes().left
    }

    /// Returns the bytes that are left and not promised, for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub fn left_unpromised(&self) -> u64 {
        let bytes = self.bytes();
        bytes.left.saturating_sub(bytes.promised.try_into().unwrap_or(u64::MAX))
    }

    /// Returns a reservation of no bytes, which can grow.
    pub(crate) fn reserve_none(&self) -> Reservation {
        self.reservation(0)
    }

    fn reservation(&self, bytes: u64) -> Reservation {
        Reservation { budget: self.clone(), bytes, promised: None }
    }

    /// Takes `bytes` off the budget, promised or not. They are returned when the [`Reservation`] is
    /// dropped.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, StorageError> {
        self.bytes().take(bytes, 0)?;
        Ok(self.reservation(bytes))
    }

    /// Takes `bytes` off the budget as [`Budget::reserve`] does, unless they were promised to memory
    /// that grows.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub fn reserve_unpromised(&self, bytes: u64) -> Result<Reservation, StorageError> {
        let mut of_all = self.bytes();
        let promised = of_all.promised;
        of_all.take(bytes, promised)?;
        Ok(self.reservation(bytes))
    }

    /// Keeps `bytes` for memory that grows into them, until the [`Promise`] and all reservations of it
    /// are dropped.
    pub fn promise(&self, bytes: u64) -> Promise {
        self.bytes().promised += u128::from(bytes);
        Promise(Arc::new(PromisedBytes { budget: self.clone(), left: Mutex::new(bytes) }))
    }
}

impl BudgetBytes {
    /// Takes bytes if `rest` are left afterwards.
    fn take(&mut self, bytes: u64, rest: u128) -> Result<(), StorageError> {
        let after = self.left.checked_sub(bytes).filter(|&after| u128::from(after) >= rest);
        let rest = u64::try_from(rest).unwrap_or(u64::MAX);
        let limit = self.left.saturating_sub(rest);
        self.left = after.ok_or(StorageError::DoesNotFit { need: bytes, limit })?;
        Ok(())
    }
}

/// Bytes taken off a [`Budget`], returned to it on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: u64,
    /// The promise that some of the bytes are of, and the number of those.
    promised: Option<(Promise, u64)>,
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
        drop(self.budget.reservation(returned));
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut bytes = self.budget.bytes();
        bytes.left += self.bytes;
        if let Some((promise, promised)) = &self.promised {
            bytes.promised += u128::from(*promised);
            *promise.left() += promised;
        }
    }
}

/// Bytes of a [`Budget`] that are kept for memory that grows. Clones share one promise.
#[derive(Clone, Debug)]
pub struct Promise(Arc<PromisedBytes>);

#[derive(Debug)]
struct PromisedBytes {
    budget: Budget,
    /// The bytes that are not taken. Locked after the bytes of the budget.
    left: Mutex<u64>,
}

impl Promise {
    fn left(&self) -> MutexGuard<'_, u64> {
        self.0.left.lock().expect("no panic holds the lock")
    }

    /// Takes `bytes` off the budget, first those of this promise. What exceeds them is not taken
    /// from other promises.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reservation, StorageError> {
        self.take(bytes, true)
    }

    /// Takes `bytes` off the budget for memory that an earlier process left, first those of this
    /// promise. That process may have exceeded it.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if fewer bytes are left.
    pub(crate) fn reserve_recovered(&self, bytes: u64) -> Result<Reservation, StorageError> {
        self.take(bytes, false)
    }

    fn take(&self, bytes: u64, spares_others: bool) -> Result<Reservation, StorageError> {
        let budget = &self.0.budget;
        let mut of_all = budget.bytes();
        let mut left = self.left();
        let promised = bytes.min(*left);
        let others = of_all.promised - u128::from(promised);
        of_all.take(bytes, if spares_others && bytes > promised { others } else { 0 })?;
        of_all.promised = others;
        *left -= promised;
        let promised = Some((self.clone(), promised));
        Ok(Reservation { budget: budget.clone(), bytes, promised })
    }
}

impl Drop for PromisedBytes {
    fn drop(&mut self) {
        let left = *self.left.get_mut().expect("no panic holds the lock");
        self.budget.bytes().promised -= u128::from(left);
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
        let grown = promise.reserve(20).unwrap();
        assert_eq!((budget.left(), budget.left_unpromised()), (10, 0));
        drop(unpromised);
        assert_eq!((budget.left(), budget.left_unpromised()), (80, 70), "each byte counts once");
        drop(promise);
        assert_eq!(budget.left_unpromised(), 70, "what has grown may grow again");
        drop(grown);
        assert_eq!((budget.left(), budget.left_unpromised()), (100, 100));
    }

    #[test]
    fn memory_that_exceeds_its_promise_leaves_others_theirs() {
        let budget = Budget::new(100);
        let [a, b] = [30, 50].map(|bytes| budget.promise(bytes));
        let error = a.reserve(51).unwrap_err();
        assert!(matches!(error, StorageError::DoesNotFit { need: 51, limit: 50 }), "{error:?}");
        let grown = a.reserve(40).unwrap();
        assert_eq!((budget.left(), budget.left_unpromised()), (60, 10));
        drop((b.reserve(50).unwrap(), budget.reserve_unpromised(10).unwrap()));
        drop(grown);
        assert_eq!((budget.left(), budget.left_unpromised()), (100, 20));
        // More is promised than there is.
        let more = budget.promise(u64::MAX);
        assert_eq!((budget.left_unpromised(), a.reserve(30).unwrap().bytes()), (0, 30));
        assert!(a.reserve(31).is_err() && budget.reserve_unpromised(1).is_err());
        assert_eq!(a.reserve_recovered(100).unwrap().bytes(), 100);
        assert!(a.reserve_recovered(101).is_err());
        drop(more);
        assert_eq!(budget.left_unpromised(), 20);
    }
}
