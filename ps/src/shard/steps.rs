//! The steps of training, as this shard takes part in them: tokens, held pushes, commits.

use crate::config::PsConfig;
use crate::metrics::Counters;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, ShardId};

use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::StepOwner;

/// A shard's part in the steps.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) id: ShardId,
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    /// The shards that take part in a step: those with variables, and the step owner's, in
    /// ascending order. The step owner numbers them in this order.
    pub(super) participants: SmallVec<[ShardId; 16]>,
    /// `Some` on the step owner.
    pub(super) owner: Option<StepOwner>,
    /// `Some` in synchronous mode.
    pub(super) follower: Option<StepFollower>,
    /// On the step owner: the other shards.
    pub(super) shards: PeerShards,
    /// On another shard: the connection to the step owner.
    pub(super) to_owner: ToOwner,
    pub(super) stragglers: Stragglers,
}

/// The other participating shards, as the step owner sees them.
#[derive(Debug, Default)]
pub(super) struct PeerShards {
    pub(super) connections: BTreeMap<ShardId, u64>,
    /// When each last sent a message.
    pub(super) heard_at: BTreeMap<ShardId, Instant>,
    /// The last step that was announced as committed.
    pub(super) announced_step: Option<u64>,
    /// When they were last asked about all recalled tokens.
    pub(super) recalls_asked_at: Option<Instant>,
}

/// The connection to the step owner.
#[derive(Debug, Default)]
pub(super) struct ToOwner {
    pub(super) is_up: bool,
    /// Since when there is none.
    pub(super) lost_at: Option<Instant>,
    /// When this shard last reported over it.
    pub(super) reported_at: Option<Instant>,
    /// The epoch of the last `ChiefIs` on the current connection.
    pub(super) announced_chief: Option<ClientEpoch>,
}

/// How long a synchronous step has waited for replicas.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    /// When the first replica joined this process.
    pub(super) first_join: Option<Instant>,
    /// Since when the step has had too few replicas.
    pub(super) short_since: Option<Instant>,
}

impl Steps {
    pub(super) fn new(
        id: ShardId,
        config: Arc<PsConfig>,
        counters: Arc<Counters>,
        owner: Option<StepOwner>,
        follower: Option<StepFollower>,
    ) -> Steps {
        Steps {
            id,
            config,
            counters,
            participants: owner.iter().map(|_| id).collect(),
            owner,
            follower,
            shards: PeerShards::default(),
            to_owner: ToOwner::default(),
            stragglers: Stragglers::default(),
        }
    }
}
