//! Tells a function that nobody waits for it any more.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

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

    /// Returns a future of [`CancelFlag::raised`] that owns the flag.
    pub(crate) fn wait(self: Arc<Self>) -> Cancelled {
        Cancelled(Box::pin(async move { self.raised().await }))
    }
}

/// A future that ends once a call is cancelled.
pub(crate) struct Cancelled(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Future for Cancelled {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cancelled")
    }
}
