//! What goes into a session and what comes out of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::codec::{Encoding, Encodings};
use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, Incarnation, Sequence, ShardId, TaskId, VariableId};
use pushpull_common::protocol::message::{
    NonFinitePolicy, Operation, Role, SharedPushBuffer, SharedValues,
};
use pushpull_common::protocol::{Envelope, Grant, Header, Message, Outcome};
use smallvec::SmallVec;

use crate::config::Checksums;
use crate::error::{Error, UnresponsiveShards};
use crate::params::Buffer;
use crate::parts::{Body, Part, Scattered};
use crate::push_buffers::PushBufferId;
use crate::row_requests::RowRequests;
use crate::sharding_plan::ShardingPlan;
use crate::shared::MappedShard;
use crate::staging::StagedParts;

/// Names an operation of the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OpId(pub(crate) u64);

/// What a caller wants done.
#[derive(Debug)]
pub(crate) enum Command {
    /// Connect to these shards.
    Open { shards: Vec<ShardId> },
    /// Send a request that may be sent again, and return its answer.
    Request { shard: ShardId, message: Message, body: Bytes },
    /// The variables are these from now on. Waits until their shards live in one restore epoch;
    /// refused if one has no values.
    Joined { plan: Arc<ShardingPlan> },
    /// Take a token.
    Token,
    /// Fill a buffer with all values: for the step of a token, or whatever there is.
    Pull { plan: Arc<ShardingPlan>, buffer: Buffer, token: Option<GlobalStep> },
    /// Fill a buffer with the values of one variable that is not sparse, likewise.
    PullVariable {
        plan: Arc<ShardingPlan>,
        variable: VariableId,
        buffer: Buffer,
        token: Option<GlobalStep>,
    },
    /// Fill a buffer with rows of sparse variables, likewise.
    PullRows {
        plan: Arc<ShardingPlan>,
        buffer: Buffer,
        wanted: Arc<RowRequests>,
        token: Option<GlobalStep>,
    },
    /// Push, and wait for the outcome.
    Push { order: PushOrder },
    /// Begin a push whose parts come later.
    Begin { order: PushOrder },
    /// Add parts to a push.
    More {
        sequence: Sequence,
        /// Rows that have been cut, before the parts.
        own: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<Part>)>,
    },
    /// That was all of a push; wait for the outcome.
    End { sequence: Sequence },
    /// Wait for the outcome of a push that is under way.
    Await { sequence: Sequence },
    /// What is known of a push, without waiting.
    Outcome { sequence: Sequence },
}

/// Of which values something is: what a pull has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    /// The global step.
    pub(crate) step: GlobalStep,
    /// How many gradients each shard had applied.
    pub(crate) gradients: Counts,
}

/// A count for each of some shards. Of few shards it takes no memory of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts(SmallVec<[(ShardId, u64); FEW]>);

/// As many shards as most clusters have.
const FEW: usize = 4;

impl Counts {
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

    /// Takes in another count of a shard: the lower counts.
    pub(crate) fn lower(&mut self, shard: ShardId, count: u64) {
        match self.0.iter_mut().find(|(other, _)| *other == shard) {
            Some((_, least)) => *least = count.min(*least),
            None => self.0.push((shard, count)),
        }
    }
}

impl<I: IntoIterator<Item = (ShardId, u64)>> From<I> for Counts {
    fn from(counts: I) -> Counts {
        Counts(counts.into_iter().collect())
    }
}

/// A push, before it has a number.
#[derive(Debug)]
pub(crate) struct PushOrder {
    pub(crate) operation: Operation,
    pub(crate) grant: Option<Grant>,
    /// The values that it was computed from.
    pub(crate) read: Read,
    /// What travels by a scatter, behind the parts.
    pub(crate) scattered: Option<Scattered>,
    /// What is made for it alone, before the parts.
    pub(crate) own: Option<Arc<StagedParts>>,
    pub(crate) parts: Vec<(ShardId, Vec<Part>)>,
}

impl PushOrder {
    /// A push of these parts.
    pub(crate) fn of_parts(
        operation: Operation,
        grant: Option<Grant>,
        read: Read,
        parts: Vec<(ShardId, Vec<Part>)>,
    ) -> PushOrder {
        PushOrder { operation, grant, read, scattered: None, own: None, parts }
    }
}

/// What a caller gets.
#[derive(Debug)]
pub(crate) enum Reply {
    Opened(Welcomed),
    Answer {
        message: Message,
        body: Vec<u8>,
    },
    Done,
    Token(Option<Grant>),
    Pulled {
        buffer: Buffer,
        read: Read,
    },
    /// The token's step has passed; the buffer, of whatever content.
    Stale {
        buffer: Buffer,
    },
    Begun {
        sequence: Sequence,
    },
    Pushed {
        outcome: Outcome,
    },
    Outcome(Option<Outcome>),
}

/// What the servers said in their welcomes.
#[derive(Clone, Debug)]
pub(crate) struct Welcomed {
    pub(crate) shards_per_task: u16,
    pub(crate) non_finite: NonFinitePolicy,
    /// Whether steps are synchronous, as the step owner has said.
    pub(crate) synchronous: bool,
    /// The encodings that each shard knows, by its last welcome.
    pub(crate) encodings: BTreeMap<ShardId, Encodings>,
}

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Input {
    /// A caller wants something done by the deadline.
    Command { op: OpId, command: Command, deadline: Instant },
    /// A caller no longer waits.
    Cancelled { op: OpId },
    /// A push that was begun was dropped.
    Abandoned { sequence: Sequence },
    /// A token was dropped.
    TokenDropped { grant: Grant },
    /// A transport is connected; `same_host` if it passes descriptors.
    Connected { link: usize, same_host: bool },
    /// A transport could not be connected, or is gone.
    Disconnected { link: usize, error: String },
    /// Bytes have come.
    Heard { link: usize },
    /// Bytes have been taken by the transport: the peer reads.
    Written { link: usize },
    /// A message has come. If it has a body, that comes next.
    Message { link: usize, header: Header, message: Message },
    /// The body of the last message has come whole into [`Session::with_targets`].
    Body { link: usize },
    /// Time has passed.
    Tick,
}

/// Something to do.
#[derive(Debug)]
pub(crate) enum Output {
    /// Connect the transport to a shard.
    Connect { link: usize, shard: ShardId },
    /// Close the transport; what waits to be sent on it is forgotten.
    Disconnect { link: usize },
    /// Send a frame.
    Send { link: usize, envelope: Envelope, message: Message, body: Body, crc: bool },
    /// Callers may read the values of a shard by themselves, in the memory whose descriptors have come
    /// over this link, for as long as its transport is connected.
    SharedValues { link: usize, mapped_shard: MappedShard, shared: SharedValues },
    /// Callers may write gradients for a shard into the memory whose descriptor has come over this link,
    /// likewise.
    SharedPushBuffer {
        link: usize,
        shard: ShardId,
        push_buffer: PushBufferId,
        shared: SharedPushBuffer,
    },
    /// Tell a caller.
    Reply { op: OpId, reply: Result<Reply, Error> },
    /// Tell for whom an operation waits.
    Progress { silent: UnresponsiveShards },
}

/// What a session is told when it begins.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) task: TaskId,
    pub(crate) role: Role,
    pub(crate) owner: ShardId,
    pub(crate) incarnation: Incarnation,
    pub(crate) checksums: Checksums,
    /// Whether shards of this host are asked for memory.
    pub(crate) shared_memory: bool,
    /// In which form values are pulled, where a shard knows it.
    pub(crate) values: Option<Encoding>,
    pub(crate) identity: Identity,
    pub(crate) addresses: BTreeMap<u32, String>,
    pub(crate) progress_interval: Option<Duration>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_any_number_of_shards_are_kept_and_the_lower_counts() {
        let shard = |index: u64| ShardId { task: index as u32, shard: 0 };
        for shards in [0, 1, FEW as u64, 3 * FEW as u64] {
            let mut counts = Counts::from((0..shards).map(|index| (shard(index), 10 + index)));
            (0..shards).for_each(|index| counts.lower(shard(index), 12));
            let expected = |index: u64| (shard(index), (10 + index).min(12));
            assert!(counts.iter().eq((0..shards).map(expected)));
            assert_eq!(counts.of(shard(shards)), None);
            assert!((0..shards).all(|index| counts.of(shard(index)) == Some(expected(index).1)));
        }
    }
}
