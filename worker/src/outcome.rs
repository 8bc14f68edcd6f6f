//! What verbs come to: of a pull, and of a push.

use pushpull_common::protocol::Outcome;

/// What a pull found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pulled {
    /// The values, of at least this global step.
    Pulled {
        /// The step.
        step: u64,
    },
    /// The token's step has passed (synchronous mode): drop the token and take another.
    Stale,
}

impl Pulled {
    /// Whether the token's step has passed.
    pub fn is_stale(self) -> bool {
        self == Pulled::Stale
    }
}

/// What became of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Push {
    /// Applied to the variables.
    Applied {
        /// The global step after it.
        step: u64,
        /// How many steps others had made since the values were pulled.
        staleness: u64,
    },
    /// Admitted to a step for good (synchronous mode).
    Accepted {
        /// The step.
        step: u64,
    },
    /// Dropped, because its step has passed (synchronous mode).
    Stale {
        /// The step that is current now.
        current: u64,
    },
    /// Dropped at the worker's own wish, before it was whole.
    Withdrawn,
}

impl From<Outcome> for Push {
    fn from(outcome: Outcome) -> Push {
        match outcome {
            Outcome::Applied { step, staleness, .. } => Push::Applied { step: step.0, staleness },
            Outcome::Accepted { step } => Push::Accepted { step: step.0 },
            Outcome::Stale { current } => Push::Stale { current: current.0 },
            Outcome::Withdrawn {} => Push::Withdrawn,
        }
    }
}
