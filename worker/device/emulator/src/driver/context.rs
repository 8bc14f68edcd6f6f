//! [`EmulatedContext`]: the primary context of a device, and which one a thread uses.

use std::cell::Cell;

use super::code::DriverErrorCode;

/// The primary context of a device. There are no others.
#[derive(Clone, Debug)]
pub(crate) struct EmulatedContext {
    pub(crate) device: usize,
    /// The number of retains that no release has undone.
    pub(crate) retains: u32,
    /// The error that every call returns after a fault.
    pub(crate) sticky: Option<DriverErrorCode>,
    /// The stream with handle 0.
    pub(crate) null_stream: u64,
}

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The handle of the context that the calling thread uses, or 0.
pub(crate) fn current_handle() -> u64 {
    CURRENT.get()
}

/// Sets the context of the calling thread. 0 stands for none.
pub(crate) fn set_current(handle: u64) {
    CURRENT.set(handle);
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
