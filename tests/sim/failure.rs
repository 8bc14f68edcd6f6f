//! Catches the panic of a run that fails.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};

/// The panic that ended a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimFailure {
    pub(crate) words: String,
    /// The file and the line. Two failures at one place count as the same failure.
    pub(crate) place: String,
}

thread_local! {
    static LAST: RefCell<SimFailure> = RefCell::default();
}

/// Installs a panic hook that records failures and prints nothing.
pub(crate) fn install_hook() {
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|at| format!("{}:{}", at.file(), at.line()));
        let payload = panic.payload();
        let fixed = payload.downcast_ref::<&str>().map(|&words| words.to_owned());
        let words = payload.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default();
        LAST.set(SimFailure { words, place: place.unwrap_or_default() });
    }));
}

/// Runs a closure and returns its panic as a [`SimFailure`].
pub(crate) fn catch<R>(run: impl FnOnce() -> R) -> Result<R, SimFailure> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| LAST.take())
}
