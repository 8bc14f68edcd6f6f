//! What the step owner has reported about the training, so that each change is one event.

use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RestoreEpoch, TaskId};
use pushpull_common::status::{TrainingPhase, Waiting};

use crate::event::Event;

/// What the step owner has reported about the training.
#[derive(Debug, Default)]
pub(in crate::shard) struct TrainingWatch {
    /// The last phase; `None` before the first tick of this process.
    phase: Option<TrainingPhase>,
    /// The wait that was reported and has not ended.
    pub(in crate::shard) wait: Option<ReportedWait>,
    /// The number of gradients of the last step that had too few; `None` after a full one.
    short_step: Option<usize>,
}

/// A wait that was reported.
#[derive(Debug)]
pub(in crate::shard) struct ReportedWait {
    since: Instant,
    workers: Vec<TaskId>,
    /// How far the training was.
    progress: (RestoreEpoch, GlobalStep),
}

impl TrainingWatch {
    /// Records the phase. Returns whether the training has just ended.
    pub(in crate::shard) fn has_ended_now(&mut self, phase: TrainingPhase) -> bool {
        let before = self.phase.replace(phase);
        phase.has_ended() && before.is_some_and(|before| !before.has_ended())
    }

    /// Records the longest wait of all, and returns the event of its begin or end.
    ///
    /// A wait ends once the request that has waited is answered and the training has advanced. A
    /// worker whose request has expired, and which asks again, continues its wait.
    pub(in crate::shard) fn wait_event(
        &mut self,
        now: Instant,
        delay: Duration,
        progress: (RestoreEpoch, GlobalStep),
        current: Option<Waiting>,
    ) -> Option<Event> {
        let step = progress.1.0;
        let since = current.as_ref().and_then(|wait| now.checked_sub(wait.waited));
        match (&self.wait, current) {
            (Some(reported), _) => {
                let goes_on = since.is_some_and(|since| since <= reported.since);
                if goes_on || progress == reported.progress {
                    return None;
                }
                let ReportedWait { since, workers, .. } = self.wait.take()?;
                let waited = now.saturating_duration_since(since);
                Some(Event::WaitEnded { step, workers, waited })
            }
            (None, Some(wait)) if wait.waited >= delay => {
                let workers = wait.workers.clone();
                self.wait = Some(ReportedWait { since: since?, workers, progress });
                Some(Event::WaitBegan { step, wait })
            }
            (None, _) => None,
        }
    }

    /// Records the number of gradients of a step. Returns whether it has become too small, or
    /// changed and is still too small.
    pub(super) fn has_shrunk(&mut self, gradients: usize, is_short: bool) -> bool {
        let now = is_short.then_some(gradients);
        let before = std::mem::replace(&mut self.short_step, now);
        is_short && before != now
    }
}
