//! [`Ending`]: what a session does at the end of a training, and in which order.

use super::next_action::NextAction;

/// What has been done at the end of a training that has not failed.
///
/// First the chief finishes the training for all, if it does. If the training has ended for all, the
/// others are waited for, so that the values are final. Then the values are pulled.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ending {
    /// Whether the servers grant no more tokens to any worker.
    pub(super) is_for_all: bool,
    /// Whether all workers have ended.
    pub(super) is_final: bool,
    has_finished: bool,
    has_awaited: bool,
    has_refreshed: bool,
}

impl Ending {
    /// Returns the next action before the final checkpoint; `None` if there is no more. `finishes`
    /// says whether this worker ends the training for all. Values are pulled once those of the step
    /// `at_least` are there.
    pub(super) fn next_action(
        &self,
        finishes: bool,
        is_interrupted: bool,
        at_least: u64,
    ) -> Option<NextAction> {
        match self {
            Ending { has_finished: false, .. } if finishes => Some(NextAction::Finish),
            // An interrupted training waits for nobody.
            _ if is_interrupted => None,
            Ending { is_for_all: true, has_awaited: false, .. } => Some(NextAction::AwaitEnd),
            Ending { has_refreshed: false, .. } => Some(NextAction::Refresh { at_least }),
            _ => None,
        }
    }

    /// Records whether the training is finished for all.
    pub(super) fn finished(&mut self, is_for_all: bool) {
        self.has_finished = true;
        self.is_for_all |= is_for_all;
    }

    /// Records whether all workers have ended.
    pub(super) fn awaited(&mut self, is_final: bool) {
        (self.has_awaited, self.is_final) = (true, is_final);
    }

    /// Records whether the newest values were pulled.
    pub(super) fn refreshed(&mut self, has_values: bool) {
        self.has_refreshed = true;
        self.is_final &= has_values;
    }
}
