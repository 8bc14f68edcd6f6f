//! Tells a function that nobody waits for it any more.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Whether a call is cancelled.
#[derive(Debug, Default)]
pub(crate) struct CancelFlag {
    raised: AtomicBool,
    changed: Notify,
}

impl CancelFlag {
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Returns once it is raised.
    pub(crate) async fn raised(&self) {
        loop {
            let changed = self.changed.notified();
            if self.is_raised() {
                return;
            }
            changed.await;
        }
    }
}
