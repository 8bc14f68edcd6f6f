//! Per-server state of functions, keyed by type.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A value that the functions of a server share between calls.
#[derive(Debug, Default)]
pub struct State<T>(Mutex<T>);

impl<T> State<T> {
    /// Locks the value. Calls that run at the same time wait for each other here.
    ///
    /// A function that panics with the lock leaves the value as it is then.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The states of a server, one for each type.
#[derive(Default)]
pub(crate) struct States {
    all: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl States {
    /// Returns the state of a type, created from the default on first use.
    pub(crate) fn get<T: Default + Send + 'static>(&self) -> Arc<State<T>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let state = all.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(State::<T>::default()));
        state.clone().downcast().expect("a state is stored under its own type")
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("States").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_has_one_state() {
        let states = States::default();
        *states.get::<u64>().lock() += 2;
        *states.get::<u64>().lock() += 3;
        states.get::<Vec<u8>>().lock().push(1);
        assert_eq!((*states.get::<u64>().lock(), states.get::<Vec<u8>>().lock().len()), (5, 1));
    }
}
