//! [`GradientOutcome`]: the fate of a step's gradient.

use pushpull_worker::{Error, Push};

/// The fate of a step's gradient. Each is a value, so that a loop goes on with the next step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GradientOutcome {
    /// The servers have settled the push.
    Pushed(Push),
    /// The push was refused and changes nothing, for example because the gradient has a NaN.
    /// Samples of a declared data set go back and are granted again; a batch that can never be used
    /// is to be spent by [`Step::skip`](super::Step::skip) instead of a push.
    Skipped(Error),
    /// The servers were lost, and the session joins again at the next step; or the interrupt was
    /// raised before they settled the push. The gradient counts at most once. It does not count if
    /// a checkpoint was restored.
    Lost(Error),
    /// A hook ended the training before the push.
    Withheld,
}

impl GradientOutcome {
    /// Whether the gradient was applied, or is part of a step for good.
    pub fn counts(&self) -> bool {
        matches!(self, GradientOutcome::Pushed(Push::Applied { .. } | Push::Accepted { .. }))
    }

    /// Returns how many global steps the servers had made afterwards; `None` if they have not
    /// answered. In synchronous mode this counts the step that the gradient is part of.
    pub fn global_step(&self) -> Option<u64> {
        match *self {
            GradientOutcome::Pushed(Push::Applied { step, .. } | Push::Accepted { step }) => {
                Some(step)
            }
            GradientOutcome::Pushed(Push::Stale { current }) => Some(current),
            _ => None,
        }
    }
}
