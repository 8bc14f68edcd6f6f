//! [`Readiness`]: watches a descriptor that others read and write.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a descriptor for one interest, on the runtime of the thread that creates it. Any executor
/// may await it while that runtime runs.
#[derive(Debug)]
pub struct Readiness {
    descriptor: AsyncFd<OwnedFd>,
    interest: Interest,
}

impl Readiness {
    /// Registers a descriptor, usually a duplicate, with the current runtime.
    ///
    /// # Errors
    /// If the system cannot watch the descriptor.
    ///
    /// # Panics
    /// Outside of a tokio runtime that drives sockets.
    pub fn new(descriptor: OwnedFd, interest: Interest) -> io::Result<Readiness> {
        // SAFETY: an owned descriptor is open until it is dropped, and has one number.
        let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, interest) }?;
        Ok(Readiness { descriptor, interest })
    }

    /// Waits until the descriptor may be ready, and forgets that: the next wait ends with the next
    /// change. So a caller tries the descriptor after each wait, and waits only after a try that
    /// would have blocked. Cancel-safe.
    ///
    /// # Errors
    /// If the runtime has ended.
    pub async fn changed(&self) -> io::Result<()> {
        self.descriptor.ready(self.interest).await?.clear_ready();
        Ok(())
    }
}
