//! [`Pacing`]: the times at which an announcement is due.

use std::time::{Duration, Instant};

/// When an announcement is sent again: soon after a change, never more often than `pause`.
///
/// Without the pause, one peer that comes and goes would have a message sent to every member each
/// time.
#[derive(Debug)]
pub(super) struct Pacing {
    pause: Duration,
    /// The interval without changes; `None` sends only changes.
    interval: Option<Duration>,
    sent: Option<Instant>,
    changed: bool,
}

impl Pacing {
    pub(super) fn new(pause: Duration, interval: Option<Duration>) -> Pacing {
        Pacing { pause, interval, sent: None, changed: false }
    }

    /// Notes that the last announcement is no longer true.
    pub(super) fn change(&mut self) {
        self.changed = true;
    }

    /// Returns when the next announcement is due; `None` for never, or before the first.
    pub(super) fn due(&self) -> Option<Instant> {
        let wait = if self.changed { Some(self.pause) } else { self.interval };
        self.sent?.checked_add(wait?)
    }

    /// Returns whether an announcement is due, which is then taken as sent.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let is_due = match self.sent {
            None => self.changed,
            Some(_) => self.due().is_some_and(|at| at <= now),
        };
        if is_due {
            self.sent = Some(now);
            self.changed = false;
        }
        is_due
    }
}
