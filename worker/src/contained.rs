//! [`contained`]: the panic of a callback as an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pushpull_common::panic_message::message_of;

use crate::error::Error;

/// Calls a function of the program. The callers of this function give up what a panic may have
/// left unfinished.
///
/// # Errors
/// [`Error::Panicked`] with the name of the callback.
pub fn contained<T>(callback: &'static str, call: impl FnOnce() -> T) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let message = message_of(&*panic);
        Error::Panicked { callback, message }
    })
}
