//! [`ParkedRequest`]: a request that waits, and the event that it waits for.

use std::ops::Range;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Codec;
use pushpull_common::ids::PartitionId;

use super::PeerRequest;

/// The event that a parked request waits for.
#[derive(Debug)]
pub(crate) enum WaitReason {
    /// All variables have values.
    Ready,
    /// A token.
    Token,
    /// A push slot.
    PushSlot,
    /// The end of the training on all workers.
    End,
    /// The values of a step, or newer ones.
    Pull {
        /// The step.
        at_least: u64,
        /// The ranges to send, in bytes of the shard's layout.
        ranges: Vec<Range<u64>>,
        /// The encoding of the answer.
        form: Option<ValueEncoding>,
    },
    /// Rows of a step, or newer ones.
    Rows {
        /// The step.
        at_least: u64,
        /// The sparse partition of the rows.
        partition: PartitionId,
        /// The row numbers, as received.
        numbers: Vec<u8>,
        /// The encoding of the answer.
        codec: Option<Codec>,
        /// The bytes of the rows.
        answer_bytes: u64,
    },
}

impl WaitReason {
    /// Returns whether this is a pull whose step is served, given the newest step that is.
    pub(crate) fn is_served(&self, newest: u64) -> bool {
        match self {
            WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. } => {
                newest >= *at_least
            }
            _ => false,
        }
    }
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct ParkedRequest {
    pub(crate) request: PeerRequest,
    pub(crate) wait: WaitReason,
}

impl ParkedRequest {
    /// The request's share of its connection's limit. A request has weight 1. A pull adds 1 for
    /// each 64 ranges, which is about 1 KiB. A pull of rows adds 1 for each eighth of the largest
    /// answer, because all answers are built at once when the step is applied.
    pub(in crate::shard) fn weight(&self) -> usize {
        match &self.wait {
            WaitReason::Pull { ranges, .. } => 1 + ranges.len() / 64,
            WaitReason::Rows { answer_bytes, .. } => 1 + (answer_bytes / (128 << 10)) as usize,
            _ => 1,
        }
    }
}
