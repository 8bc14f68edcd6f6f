//! [`RecoveryWindow`]: the time and the pauses of a training's attempts to recover.

use std::time::Duration;

use super::backoff::Backoff;

/// The time in which a training may fail again and again before it gives up.
///
/// The window opens with the first failure and closes with the next progress: a settled push, or
/// the end of the tokens. A join alone is no progress, since a server may crash at every step.
#[derive(Debug)]
pub(super) struct RecoveryWindow {
    length: Duration,
    /// The time at which the window opened; `None` without a failure.
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

    /// Records progress, which closes the window.
    pub(super) fn progressed(&mut self) {
        if self.since.take().is_some() {
            self.backoff.reset();
        }
    }

    /// Whether a failure has not been followed by progress yet.
    pub(super) fn is_open(&self) -> bool {
        self.since.is_some()
    }

    /// Returns how long attempts may still take.
    pub(super) fn remaining(&self, now: Duration) -> Duration {
        let since = self.since.unwrap_or(now);
        self.length.saturating_sub(now.saturating_sub(since))
    }

    /// Returns until when an operation that begins now may last; `None` while all is well. The last
    /// attempt, which begins at the end of the window, has [`LAST_ATTEMPT`].
    pub(super) fn deadline(&self, now: Duration) -> Option<Duration> {
        let end = self.since?.saturating_add(self.length);
        Some(end.max(now.saturating_add(LAST_ATTEMPT)))
    }

    /// Returns the number of attempts since the window opened, and how long ago that was.
    pub(super) fn spent(&self, now: Duration) -> (u32, Duration) {
        let since = self.since.unwrap_or(now);
        (self.backoff.attempts(), now.saturating_sub(since))
    }
}

/// The longest time of the attempt at the end of the window: enough for a server that answers.
pub(super) const LAST_ATTEMPT: Duration = Duration::from_secs(1);

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

    /// An operation with a longer timeout of its own must not outlast the window.
    #[test]
    fn operations_end_with_the_window() {
        let mut window = RecoveryWindow::new(8000 * MS, 3);
        assert_eq!(window.deadline(5000 * MS), None, "all is well");
        window.failed(5000 * MS);
        assert_eq!(window.deadline(6000 * MS), Some(13_000 * MS));
        assert_eq!(window.deadline(12_900 * MS), Some(13_900 * MS), "the last attempt");
        window.progressed();
        assert_eq!(window.deadline(13_000 * MS), None);
    }

    #[test]
    fn an_empty_window_allows_no_attempt() {
        assert_eq!(RecoveryWindow::new(Duration::ZERO, 3).failed(MS), None);
    }
}
