//! [`Advice`]: what a training loop does about an error.

use pushpull_common::protocol::Refusal;

/// What a training loop does about an error: see [`crate::Error::advice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// Call again with the same worker, after a pause. A push that timed out continues in the
    /// background: call [`crate::Worker::resume`].
    Retry,
    /// Drop the worker, connect and join again. Its tokens and unanswered pushes are void.
    Rejoin,
    /// Continue with the next token. The gradient of this one does not count.
    SkipBatch,
    /// End the training: the program, its configuration or a server must be corrected. No other
    /// attempt can help.
    Stop,
}

impl Advice {
    /// Returns the advice for a refusal by a server. The table in the tests has every refusal.
    #[doc(hidden)]
    pub fn of_refusal(refusal: &Refusal) -> Advice {
        match refusal {
            // The limit, the lost replica, the lost server or the disk may be better at the next
            // attempt.
            Refusal::Stopping {}
            | Refusal::Busy { .. }
            | Refusal::Deadline { .. }
            | Refusal::Storage { .. }
            | Refusal::Unavailable { .. }
            | Refusal::PushSlotTaken { .. }
            | Refusal::Memory { .. }
            | Refusal::Unreturned { .. } => Advice::Retry,
            // The shard was restarted or restored since this worker joined: the next join declares
            // variables and data again, and begins with new sequence numbers.
            Refusal::NotInitialized {}
            | Refusal::RestoreEpoch { .. }
            | Refusal::UnknownEpoch { .. }
            | Refusal::Catalogue { .. }
            | Refusal::DataSet { .. }
            | Refusal::Window { .. } => Advice::Rejoin,
            // The gradient is at fault, or its token was granted to another worker meanwhile.
            // Or the coordinator of its effect was closed or replaced meanwhile.
            Refusal::NonFinite { .. }
            | Refusal::Overflow { .. }
            | Refusal::Token { .. }
            | Refusal::UnknownCoordinator { .. }
            | Refusal::CoordinatorEpoch { .. } => Advice::SkipBatch,
            // The others are faults of the program or the configuration of either side.
            _ => Advice::Stop,
        }
    }
}
