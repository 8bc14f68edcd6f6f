//! [`RecoveryWindow`]: how long a training tries to recover, and how often.

use std::time::Duration;

use super::backoff::Backoff;

/// The time in which a training may fail again and again before it gives up.
///
/// The window opens with the first failure and closes with the next progress: a settled push, or
/// the end of the tokens. A join alone is no progress, since a server may crash at every step.
#[derive(Debug)]
pub(super) struct RecoveryWindow {
    length: Duration,
    /// When the window opened; `None` while all is well.
    since: Option<Duration>,
    backoff: Backoff,
}

impl RecoveryWindow {
    pub(super) fn new(length: Duration, seed: u64) -> RecoveryWindow {
        RecoveryWindow { length, since: None, backoff: Backoff::new(seed) }
    }

    /// Records a failure. Returns the pause before the next attempt, or `None` if the window has
    /// closed.
    pub(super) fn failed(&mut self, now: Duration) -> Option<Duration> {
        self.since.get_or_insert(now);
        let remaining = self.remaining(now);
        // The last attempt is made at the end of the window.
        (!remaining.is_zero()).then(|| self.backoff.pause().min(remaining))
    }

    /// Records progress.
    pub(super) fn progressed(&mut self) {
        if self.since.take().is_some() {
            self.backoff.reset();
        }
    }

    /// Returns how long attempts may still take.
    pub(super) fn remaining(&self, now: Duration) -> Duration {
        let since = self.since.unwrap_or(now);
        self.length.saturating_sub(now.saturating_sub(since))
    }

    /// Returns the number of attempts since the window opened, and how long ago that was.
    pub(super) fn spent(&self, now: Duration) -> (u32, Duration) {
        let since = self.since.unwrap_or(now);
        (self.backoff.attempts(), now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_window_closes_after_its_length_or_with_progress() {
        let mut window = RecoveryWindow::new(1000 * MS, 3);
        let begin = 5000 * MS;
        assert!(window.failed(begin).unwrap() <= 100 * MS);
        assert!(window.failed(begin + 500 * MS).unwrap() <= 200 * MS);
        assert_eq!(window.remaining(begin + 600 * MS), 400 * MS);
        let last = window.failed(begin + 999 * MS).unwrap();
        assert_eq!(last, MS, "the last attempt is made at the end");
        assert_eq!(window.failed(begin + 1000 * MS), None);
        assert_eq!(window.spent(begin + 1000 * MS), (3, 1000 * MS));
        window.progressed();
        assert!(
            window.failed(begin + 9000 * MS).unwrap() <= 100 * MS,
            "the back-off is short again"
        );
    }

    #[test]
    fn an_empty_window_allows_no_attempt() {
        assert_eq!(RecoveryWindow::new(Duration::ZERO, 3).failed(MS), None);
    }
}
