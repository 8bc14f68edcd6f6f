//! [`Timer`]: ticks a state machine at the times that it asks for.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

/// The time of the next tick.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    at: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Timer {
    /// Sets the next time at which the machine wants a tick; `None` for no time.
    pub(crate) fn set(&self, wake: Option<Instant>) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        // A later time is read when the earlier one has come.
        let earlier = match (wake, *at) {
            (Some(wake), Some(at)) => wake < at,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if earlier {
            *at = wake;
            self.changed.notify_one();
        }
    }

    /// Calls `tick` at each due time; it returns the next one.
    pub(crate) async fn run(&self, mut tick: impl FnMut() -> Option<Instant>) {
        loop {
            let wake = tick();
            *self.at.lock().unwrap_or_else(PoisonError::into_inner) = wake;
            let sleep = async {
                match wake {
                    Some(wake) => tokio::time::sleep_until(wake.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                () = self.changed.notified() => {}
            }
        }
    }
}
