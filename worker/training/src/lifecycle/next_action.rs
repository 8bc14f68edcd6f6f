//! [`NextAction`]: the next action of a session.

use std::time::Duration;

/// The next operation of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextAction {
    /// Drop the worker; connect and join within this time. Report by `joined` or `join_failed`.
    Join {
        /// The longest time of the attempt.
        within: Duration,
    },
    /// Wait for this long.
    Wait(Duration),
    /// Average the means that are due after this many steps of this worker, and report by
    /// `averaged`.
    Average {
        /// The number of steps of this worker.
        steps: u64,
    },
    /// Give the servers the chief's local values, and report by `published`.
    Publish,
    /// Ask the servers for a checkpoint, and report by `saved` once they answer.
    Save,
    /// Wait for the answer to the save.
    AwaitSave,
    /// Take a token, and report by `token_taken`.
    Token,
    /// Pull the values for the token, and report by `pulled`.
    Pull,
    /// Wait until the training has ended on all workers, and report by `end_awaited`.
    AwaitEnd,
    /// Pull the newest values once this step is applied, and report by `refreshed`.
    Refresh {
        /// The step that the values must include.
        at_least: u64,
    },
    /// Call [`Lifecycle::end`](super::Lifecycle::end).
    End,
    /// Finish the training for all workers, and report by `finished`.
    Finish,
    /// Leave, and report by `has_left`.
    Leave,
    /// The session is over, and no action is left.
    Over,
}
