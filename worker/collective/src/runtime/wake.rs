//! [`WakeFlag`]: wakes a thread that polls sockets.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// A flag that is also a descriptor: it becomes readable when the flag is raised.
#[derive(Debug)]
pub(crate) struct WakeFlag {
    event: OwnedFd,
    is_raised: AtomicBool,
}

impl WakeFlag {
    /// Creates a flag that is not raised.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub(crate) fn new() -> io::Result<WakeFlag> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(WakeFlag { event, is_raised: AtomicBool::new(false) })
    }

    /// Raises the flag.
    pub(crate) fn raise(&self) {
        self.is_raised.store(true, Ordering::Release);
        // The counter cannot overflow: it is set back whenever the flag is lowered.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Lowers the flag.
    pub(crate) fn lower(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.is_raised.store(false, Ordering::Release);
    }

    /// Returns whether the flag is raised.
    pub(crate) fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }
}

impl AsFd for WakeFlag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
