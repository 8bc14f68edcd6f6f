//! The inputs and outputs of a session.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::codec::{Encoding, Encodings};
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    GlobalStep, Incarnation, RestoreEpoch, Sequence, ShardId, TaskId, VariableId,
};
use pushpull_common::protocol::message::{
    NonFinitePolicy, Operation, Role, SharedPushBuffer, SharedValues,
};
use pushpull_common::protocol::{
    EffectRef, Envelope, Features, FrameEvent, Grant, Header, Message, Outcome,
};
use smallvec::SmallVec;

use super::expectations::Expectations;
use crate::config::Checksums;
use crate::error::{Error, UnresponsiveShards};
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::parts::{FrameBody, OutgoingPart};
use crate::gradients::row_requests::RowRequests;
use crate::gradients::scatter::ScatteredGradients;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::gradients::staged_parts::StagedParts;
use crate::mapped_values::MappedShard;

/// The number of an operation, chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OpId(pub(crate) u64);

/// An operation that a caller requests.
#[derive(Debug)]
pub(crate) enum SessionCommand {
    /// Connect to these shards.
    Open { shards: Vec<ShardId> },
    /// Send a request that may be repeated, and return its answer. The shard may wait for
    /// `wait_ms` if given, or else for as long as the caller does.
    Request { shard: ShardId, message: Message, body: Bytes, wait_ms: Option<u32> },
    /// Join with these variables. Waits until their shards are in one restore epoch; refused if a
    /// shard has no values.
    Join { plan: Arc<ShardingPlan> },
    /// Take a token.
    Token,
    /// Fill a buffer with all values: for the step of a token, or without one of any step.
    Pull { plan: Arc<ShardingPlan>, buffer: AlignedBuffer, token: Option<GlobalStep> },
    /// Fill a buffer with the values of one variable that is not sparse. `token` as for `Pull`.
    PullVariable {
        plan: Arc<ShardingPlan>,
        variable: VariableId,
        buffer: AlignedBuffer,
        token: Option<GlobalStep>,
    },
    /// Fill a buffer with rows of sparse variables. `token` as for `Pull`.
    PullRows {
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        rows: Arc<RowRequests>,
        token: Option<GlobalStep>,
    },
    /// Push, and wait for the outcome.
    Push { order: PushOrder },
    /// Begin a push whose parts follow.
    Begin { order: PushOrder },
    /// Add parts to a push.
    AddParts {
        sequence: Sequence,
        /// Staged rows, sent before the parts.
        staged: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
    },
    /// Complete a push, and wait for the outcome.
    End { sequence: Sequence },
    /// Wait for the outcome of a pending push.
    Await { sequence: Sequence },
    /// Return the known outcome of a push, without waiting.
    Outcome { sequence: Sequence },
}

/// The point in training at which values were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadPoint {
    /// The global step.
    pub(crate) step: GlobalStep,
    /// How many gradients each shard had applied.
    pub(crate) gradients: GradientCounts,
}

/// One count for each of some shards. No heap memory for up to [`INLINE_SHARDS`] shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GradientCounts(SmallVec<[(ShardId, u64); INLINE_SHARDS]>);

/// The inline capacity of [`GradientCounts`]; most clusters have no more shards.
const INLINE_SHARDS: usize = 4;

impl GradientCounts {
    pub(crate) fn of(&self, shard: ShardId) -> Option<u64> {
        self.iter().find(|(other, _)| *other == shard).map(|(_, count)| count)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ShardId, u64)> + '_ {
        self.0.iter().copied()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records a count of a shard. The lower one of two counts is kept.
    pub(crate) fn lower(&mut self, shard: ShardId, count: u64) {
        match self.0.iter_mut().find(|(other, _)| *other == shard) {
            Some((_, least)) => *least = count.min(*least),
            None => self.0.push((shard, count)),
        }
    }
}

impl<I: IntoIterator<Item = (ShardId, u64)>> From<I> for GradientCounts {
    fn from(counts: I) -> GradientCounts {
        GradientCounts(counts.into_iter().collect())
    }
}

/// A push that has no sequence number yet.
#[derive(Debug)]
pub(crate) struct PushOrder {
    pub(crate) operation: Operation,
    pub(crate) grant: Option<Grant>,
    /// The effect of the gradient, if it counts once for one.
    pub(crate) effect: Option<EffectRef>,
    /// The point at which the values for this gradient were read.
    pub(crate) read: ReadPoint,
    /// Gradients sent by a scatter, after the parts.
    pub(crate) scattered: Option<ScatteredGradients>,
    /// Parts staged for this push alone, sent before the others.
    pub(crate) staged: Option<Arc<StagedParts>>,
    pub(crate) parts: Vec<(ShardId, Vec<OutgoingPart>)>,
}

impl PushOrder {
    /// Creates a push of these parts alone.
    pub(crate) fn of_parts(
        operation: Operation,
        grant: Option<Grant>,
        read: ReadPoint,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
    ) -> PushOrder {
        PushOrder { operation, grant, effect: None, read, scattered: None, staged: None, parts }
    }
}

/// The restore epoch that a member has joined, and the state of the step owner in which it began.
///
/// Epochs of states that were lost may have one number. Both together never repeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct JoinedEpoch {
    pub(crate) epoch: RestoreEpoch,
    pub(crate) arena: u64,
}

/// The answer to an operation.
#[derive(Debug)]
pub(crate) enum Reply {
    Opened(ServerSettings),
    Answer {
        message: Message,
        body: Vec<u8>,
    },
    Done,
    /// The shards in use are all in this restore epoch.
    Joined(JoinedEpoch),
    Token(Option<Grant>),
    Pulled {
        buffer: AlignedBuffer,
        read: ReadPoint,
    },
    /// The token's step has passed. The content of the buffer is undefined.
    Stale {
        buffer: AlignedBuffer,
    },
    Begun {
        sequence: Sequence,
    },
    Pushed {
        outcome: Outcome,
    },
    Outcome(Option<Outcome>),
}

/// The servers' settings, from their welcomes.
#[derive(Clone, Debug)]
pub(crate) struct ServerSettings {
    pub(crate) shards_per_task: u16,
    /// Whether an optimizer of the servers needs whole variables.
    pub(crate) whole_variables: bool,
    pub(crate) non_finite: NonFinitePolicy,
    /// Whether the step owner makes synchronous steps.
    pub(crate) synchronous: bool,
    /// The encodings that each shard supports, from its last welcome.
    pub(crate) encodings: BTreeMap<ShardId, Encodings>,
}

/// An event.
#[derive(Debug)]
pub(crate) enum SessionInput {
    /// A caller requests an operation, to be answered by the deadline.
    Command { op: OpId, command: SessionCommand, deadline: Instant },
    /// A caller has stopped waiting for an operation.
    Cancelled { op: OpId },
    /// A caller has dropped a push that was begun and not completed.
    Abandoned { sequence: Sequence },
    /// A caller has dropped a token.
    TokenDropped { grant: Grant },
    /// A caller has ended a token whose batch is to be spent without a gradient.
    TokenSkipped { grant: Grant },
    /// A transport is connected. `same_host` if it can pass descriptors.
    Connected { link: usize, same_host: bool },
    /// A transport failed to connect, or its connection is lost.
    Disconnected { link: usize, error: String },
    /// The name of a server has no address. A typing error, or the server is not known yet.
    Unresolved { link: usize, error: String },
    /// The server of a link does not prove who it is.
    Unproven { link: usize, reason: String },
    /// A transport has received bytes.
    BytesReceived { link: usize },
    /// A transport has accepted bytes after it was full: the peer reads.
    BytesSent { link: usize },
    /// A message has arrived. If it has a body, [`SessionInput::Body`] follows.
    Message { link: usize, header: Header, message: Message },
    /// The whole body of the last message has been received into the memory of
    /// [`Session::with_targets`](super::Session::with_targets).
    Body { link: usize },
    /// Time has passed.
    Tick,
}

impl SessionInput {
    /// Returns the input for an event of a transport.
    pub(crate) fn of_frame(link: usize, event: FrameEvent<'_>) -> SessionInput {
        match event {
            FrameEvent::Message(&header, message) => {
                SessionInput::Message { link, header, message }
            }
            FrameEvent::Progress => SessionInput::BytesReceived { link },
            FrameEvent::Body => SessionInput::Body { link },
        }
    }
}

/// An action for the caller of the session.
#[derive(Debug)]
pub(crate) enum SessionOutput {
    /// Connect the transport to a shard.
    Connect { link: usize, shard: ShardId },
    /// Close the transport and drop its unsent frames.
    Disconnect { link: usize },
    /// Send a frame.
    Send { link: usize, envelope: Envelope, message: Message, body: FrameBody, crc: bool },
    /// Map the values of a shard, from the descriptors that came over this link. Callers may read
    /// them in place while the transport is connected.
    SharedValues { link: usize, mapped_shard: MappedShard, shared: SharedValues },
    /// Map a push buffer of a shard, from the descriptor that came over this link. Callers may
    /// write gradients into it while the transport is connected.
    SharedPushBuffer {
        link: usize,
        shard: ShardId,
        push_buffer: PushBufferId,
        shared: SharedPushBuffer,
    },
    /// Answer an operation.
    Reply { op: OpId, reply: Result<Reply, Error> },
    /// Report the unresponsive shards that operations wait for.
    Progress { silent: UnresponsiveShards },
}

/// The configuration of a session.
#[derive(Debug)]
pub(crate) struct SessionConfig {
    pub(crate) task: TaskId,
    pub(crate) role: Role,
    pub(crate) owner: ShardId,
    pub(crate) incarnation: Incarnation,
    pub(crate) checksums: Checksums,
    /// Whether to ask shards on the same host for shared memory.
    pub(crate) shared_memory: bool,
    /// The encoding of pulled values, from shards that support it.
    pub(crate) values: Option<Encoding>,
    pub(crate) identity: Identity,
    pub(crate) expectations: Expectations,
    /// The features of the protocol that this side has.
    pub(crate) features: Features,
    pub(crate) addresses: BTreeMap<u32, String>,
    pub(crate) progress_interval: Option<Duration>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_counts_keep_the_lower_count_of_each_shard() {
        let shard = |index: u64| ShardId { task: index as u32, shard: 0 };
        for shards in [0, 1, INLINE_SHARDS as u64, 3 * INLINE_SHARDS as u64] {
            let mut counts =
                GradientCounts::from((0..shards).map(|index| (shard(index), 10 + index)));
            (0..shards).for_each(|index| counts.lower(shard(index), 12));
            let expected = |index: u64| (shard(index), (10 + index).min(12));
            assert!(counts.iter().eq((0..shards).map(expected)));
            assert_eq!(counts.of(shard(shards)), None);
            assert!((0..shards).all(|index| counts.of(shard(index)) == Some(expected(index).1)));
        }
    }
}
