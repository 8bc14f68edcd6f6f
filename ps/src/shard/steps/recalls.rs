//! [`RecallQuestions`]: when the step owner asks the other shards about recalled tokens.

use std::time::{Duration, Instant};

/// The questions of the step owner to the other shards about recalled tokens.
#[derive(Debug, Default)]
pub(in crate::shard) struct RecallQuestions {
    /// When they were last asked about all recalled tokens.
    asked_at: Option<Instant>,
}

impl RecallQuestions {
    /// Returns whether all questions are to be asked again now, and notes it.
    pub(in crate::shard) fn are_due(&mut self, now: Instant, interval: Duration) -> bool {
        let due = self.asked_at.is_none_or(|at| now >= at + interval);
        if due {
            self.asked_at = Some(now);
        }
        due
    }
}
