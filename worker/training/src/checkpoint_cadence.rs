//! [`CheckpointCadence`]: the times at which the chief asks the servers for a checkpoint.

use std::time::Duration;

use super::cadence::Cadence;

/// Decides the time of each checkpoint, and takes at most one for each step.
///
/// One is due after each join, unless the values come from a checkpoint of that very step. After
/// the first join it holds the initial values; after a later one, a server was lost, and the next
/// loss would cost all steps since the last checkpoint. Further ones are due by the interval. The
/// last is due at the end.
#[derive(Debug)]
pub(super) struct CheckpointCadence {
    /// `None` if this worker saves no checkpoints.
    interval: Option<Cadence>,
    /// The step of the newest checkpoint.
    saved: Option<u64>,
    /// The time and the step from which the interval counts.
    since: (Duration, u64),
    is_due_after_join: bool,
}

impl CheckpointCadence {
    pub(super) fn new(interval: Option<Cadence>) -> CheckpointCadence {
        let since = (Duration::ZERO, 0);
        CheckpointCadence { interval, saved: None, since, is_due_after_join: false }
    }

    /// Records a join at this step, and the step of the checkpoint that it restored.
    pub(super) fn joined(&mut self, now: Duration, step: u64, restored: Option<u64>) {
        // Values that were rolled back to an older step are in no newer checkpoint.
        self.saved = restored.or(self.saved.filter(|&saved| saved <= step));
        self.since = (now, step);
        self.is_due_after_join = self.is_unsaved(step);
    }

    /// Whether a checkpoint is due at this step.
    pub(super) fn is_due(&self, now: Duration, step: u64) -> bool {
        let Some(interval) = self.interval else { return false };
        let (at, before) = self.since;
        let by_interval = interval.is_due(now.saturating_sub(at), step.saturating_sub(before));
        (by_interval || self.is_due_after_join) && self.is_unsaved(step)
    }

    /// Whether a final checkpoint is due at this step.
    pub(super) fn is_due_at_end(&self, step: u64) -> bool {
        self.interval.is_some() && self.is_unsaved(step)
    }

    /// Records that the servers were asked.
    pub(super) fn asked(&mut self, now: Duration, step: u64) {
        self.since = (now, step);
        self.is_due_after_join = false;
    }

    /// Records a checkpoint of this step.
    pub(super) fn saved(&mut self, step: u64) {
        self.saved = self.saved.max(Some(step));
    }

    fn is_unsaved(&self, step: u64) -> bool {
        self.saved.is_none_or(|saved| saved < step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays steps one second apart, and returns the steps of the checkpoints with the final one.
    fn play(interval: Option<Cadence>, first: u64, last: u64) -> Vec<u64> {
        play_from(&mut CheckpointCadence::new(interval), None, first, last)
    }

    fn play_from(
        cadence: &mut CheckpointCadence,
        restored: Option<u64>,
        first: u64,
        last: u64,
    ) -> Vec<u64> {
        let mut saved = Vec::new();
        cadence.joined(Duration::from_secs(first), first, restored);
        for step in first..=last {
            let now = Duration::from_secs(step);
            if cadence.is_due(now, step) {
                cadence.asked(now, step);
                cadence.saved(step);
                saved.push(step);
            }
        }
        if cadence.is_due_at_end(last) {
            cadence.saved(last);
            saved.push(last);
        }
        saved
    }

    #[test]
    fn checkpoints_follow_the_interval() {
        let steps = |every| Some(Cadence::Steps(every));
        let seconds = |every| Some(Cadence::Time(Duration::from_secs(every)));
        for (interval, first, last, saved) in [
            (steps(3), 0, 10, &[0, 3, 6, 9, 10][..]),
            (steps(3), 0, 9, &[0, 3, 6, 9]),
            (steps(2), 0, 1, &[0, 1]),
            (steps(5), 7, 13, &[7, 12, 13]),
            (steps(1), 0, 3, &[0, 1, 2, 3]),
            (steps(100), 0, 0, &[0]),
            (seconds(4), 0, 10, &[0, 4, 8, 10]),
            (seconds(600), 0, 10, &[0, 10]),
            (None, 0, 10, &[]),
        ] {
            assert_eq!(play(interval, first, last), saved, "{interval:?} {first}..={last}");
        }
    }

    #[test]
    fn a_restored_step_is_not_saved_again() {
        let mut cadence = CheckpointCadence::new(Some(Cadence::Steps(3)));
        assert_eq!(play_from(&mut cadence, Some(6), 6, 10), [9, 10]);
        // Restored into an older step: the checkpoints that follow are made again.
        assert_eq!(play_from(&mut cadence, Some(6), 6, 10), [9, 10]);
        // The servers kept their state.
        assert_eq!(play_from(&mut cadence, None, 10, 14), [13, 14]);
        assert_eq!(play_from(&mut cadence, None, 16, 16), [16]);
    }

    /// A save that takes longer than a step holds a later step.
    #[test]
    fn a_checkpoint_of_a_later_step_covers_the_steps_before() {
        let mut cadence = CheckpointCadence::new(Some(Cadence::Steps(3)));
        let now = Duration::ZERO;
        cadence.joined(now, 0, None);
        cadence.asked(now, 0);
        cadence.saved(4);
        assert!(!cadence.is_due(now, 3) && !cadence.is_due_at_end(4));
        assert!(cadence.is_due(now, 5) && cadence.is_due_at_end(5));
    }
}
