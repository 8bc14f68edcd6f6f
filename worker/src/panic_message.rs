//! The message of a panic in a function of the caller.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Error;

/// Returns the text of a panic, or words that say that it has none.
pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a text".to_owned())
}

/// Calls a function of the program. The callers of this function give up what a panic may have
/// left unfinished.
///
/// # Errors
/// [`Error::Panicked`] with the name of the callback.
pub(crate) fn contained<T>(callback: &'static str, call: impl FnOnce() -> T) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let message = message_of(&*panic);
        Error::Panicked { callback, message }
    })
}
