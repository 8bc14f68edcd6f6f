//! [`Context`]: a context of a device, and which one a thread uses.

use std::cell::{Cell, RefCell};

use super::code::Code;

/// A context of a device.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// How many times the primary context is retained. Another context counts as retained once.
    pub(crate) retains: u32,
    pub(crate) is_primary: bool,
    /// The error that every call returns after a fault.
    pub(crate) sticky: Option<Code>,
    /// The stream with handle 0.
    pub(crate) null_stream: u64,
}

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The handle of the context that the calling thread uses, or 0.
pub(crate) fn current_handle() -> u64 {
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Sets the context of the calling thread. 0 stands for none.
pub(crate) fn set_current(handle: u64) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
}

pub(crate) fn push_current(handle: u64) {
    STACK.with_borrow_mut(|stack| stack.push(handle));
}

pub(crate) fn pop_current() -> Option<u64> {
    STACK.with_borrow_mut(Vec::pop)
}

/// Whether the calling thread runs a host function, which may not call the driver.
pub(crate) fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// Runs a host function.
pub(crate) fn in_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}
