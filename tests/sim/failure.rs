//! Runs that fail.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};

/// How a run has failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failure {
    pub(crate) words: String,
    /// The file and the line. Failures of one place are taken for the same.
    pub(crate) place: String,
}

thread_local! {
    static LAST: RefCell<Failure> = RefCell::default();
}

/// From now on failures are caught, and print nothing.
pub(crate) fn listen() {
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|at| format!("{}:{}", at.file(), at.line()));
        let payload = panic.payload();
        let fixed = payload.downcast_ref::<&str>().map(|&words| words.to_owned());
        let words = payload.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default();
        LAST.set(Failure { words, place: place.unwrap_or_default() });
    }));
}

/// Runs something that may fail.
pub(crate) fn catch<R>(run: impl FnOnce() -> R) -> Result<R, Failure> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| LAST.take())
}
