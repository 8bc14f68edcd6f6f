//! [`CancelFlag`]: tells a function that no caller waits for it any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::Notify;

use super::nested_calls::NestedCalls;

/// The cancellation of a call. The calls that its function makes end with it.
#[derive(Debug, Default)]
pub(crate) struct CancelFlag {
    raised: AtomicBool,
    changed: Notify,
    nested: OnceLock<Arc<NestedCalls>>,
}

impl CancelFlag {
    pub(crate) fn raise(&self) {
        // Ordered with the check in `nested`: one of the two sees the other.
        self.raised.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
        self.end_nested();
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
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

    /// Returns the calls of the function, which `begin` creates the first time.
    pub(crate) fn nested(&self, begin: impl FnOnce() -> NestedCalls) -> &Arc<NestedCalls> {
        let nested = self.nested.get_or_init(|| Arc::new(begin()));
        if self.is_raised() {
            nested.end();
        }
        nested
    }

    /// Cancels the calls of the function.
    pub(crate) fn end_nested(&self) {
        if let Some(nested) = self.nested.get() {
            nested.end();
        }
    }
}
