//! [`Cadence`]: the interval of something that a training repeats.

use std::time::Duration;

/// The interval of something that a training repeats, in time or in global steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cadence {
    /// After this time since the last one.
    Time(Duration),
    /// After this many global steps since the last one.
    Steps(u64),
}

impl Cadence {
    /// Whether the next one is due, this time and this many global steps after the last one.
    pub(crate) fn is_due(self, time: Duration, steps: u64) -> bool {
        match self {
            Cadence::Time(every) => time >= every,
            Cadence::Steps(every) => steps >= every,
        }
    }
}
