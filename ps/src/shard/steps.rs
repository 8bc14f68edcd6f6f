//! The steps of training, as this shard takes part in them: tokens, held pushes, commits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::Outcome;
use pushpull_common::protocol::message::Operation;
use smallvec::SmallVec;

use super::peers::Peers;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::outstanding_tokens::Issued;
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::inbox::PushArrival;
use crate::metrics::Counters;

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
    pub(super) owner: Option<TokenIssuer>,
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
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>, counters: Arc<Counters>) -> Steps {
        let PsConfig { token_timeout, last_step, wait_ahead, reject_older, planted, .. } = *config;
        let (rule, owns_step) = (config.rule(), id.shard == 0 && config.owns_step());
        let owner = owns_step.then(|| match rule {
            Some(rule) => {
                TokenIssuer::synchronous(token_timeout, StepCoordinator::new(rule, 1, planted))
            }
            None => {
                let tokens = AsynchronousTokens::new(last_step, wait_ahead, reject_older);
                TokenIssuer::asynchronous(token_timeout, tokens)
            }
        });
        let follower = rule.map(|_| StepFollower::new(0, planted));
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

    /// Returns the global step as this shard knows it. In synchronous mode this is the number of
    /// steps it has applied.
    pub(super) fn step(&self) -> GlobalStep {
        match &self.follower {
            Some(follower) => GlobalStep(follower.step()),
            None => self.owner.as_ref().map_or_else(Default::default, TokenIssuer::step),
        }
    }

    /// Returns whether steps are synchronous.
    pub(super) fn is_synchronous(&self) -> bool {
        self.follower.is_some()
    }

    /// Returns whether a push is a gradient that waits for its synchronous step.
    pub(super) fn waits_for_step(&self, push: &PushArrival) -> bool {
        self.is_synchronous() && push.operation == (Operation::Gradient {})
    }

    /// Returns the step coordinator: on the step owner, in synchronous mode.
    pub(super) fn coordinator(&self) -> Option<&StepCoordinator> {
        self.owner.as_ref().and_then(TokenIssuer::coordinator)
    }

    pub(super) fn coordinator_mut(&mut self) -> Option<&mut StepCoordinator> {
        self.owner.as_mut().and_then(TokenIssuer::coordinator_mut)
    }

    /// Returns the tokens of asynchronous mode: on the step owner.
    pub(super) fn asynchronous_tokens(&self) -> Option<&AsynchronousTokens> {
        self.owner.as_ref().and_then(TokenIssuer::asynchronous_tokens)
    }

    pub(super) fn asynchronous_tokens_mut(&mut self) -> Option<&mut AsynchronousTokens> {
        self.owner.as_mut().and_then(TokenIssuer::asynchronous_tokens_mut)
    }

    /// Returns the number of steps applied here, and the pushes of the committed step that is not
    /// applied.
    #[cfg(feature = "simulation")]
    pub(super) fn steps_and_due(&self) -> (u64, Option<&[u64]>) {
        self.follower
            .as_ref()
            .map_or((0, None), |follower| (follower.step(), follower.tokens_to_apply()))
    }

    /// Returns the number of committed steps, as far as this shard knows.
    pub(super) fn committed_steps(&self) -> u64 {
        let coordinator = self.coordinator();
        coordinator.map_or_else(|| self.step().0, |coordinator| coordinator.step())
    }

    /// Returns the newest step that pulls may request now.
    pub(super) fn served_step(&self) -> u64 {
        match (&self.follower, &self.owner) {
            (Some(follower), _) => follower.step(),
            (None, Some(owner)) => owner.step().0,
            // Only the step owner knows the step. Other shards have versions of their own.
            (None, None) => u64::MAX,
        }
    }

    /// Whether this shard knows the step of its values. In asynchronous mode only the step owner
    /// does.
    pub(super) fn counts_steps(&self) -> bool {
        self.is_synchronous() || self.owner.is_some()
    }

    pub(super) fn tokens_of(&self, client: ClientKey) -> impl Iterator<Item = Issued> {
        self.owner.iter().flat_map(move |owner| owner.tokens().of(client))
    }

    /// Returns the index of a shard among those that take part.
    pub(super) fn index_of(&self, shard: ShardId) -> Option<usize> {
        self.participants.iter().position(|&other| other == shard)
    }

    /// Sets the shards with variables.
    pub(super) fn set_participants(&mut self, shards: impl Iterator<Item = ShardId>) {
        self.participants = shards.collect();
        if self.owner.is_some() && !self.participants.contains(&self.id) {
            self.participants.push(self.id);
        }
        self.participants.sort_unstable();
    }

    /// The variables are laid out: sets the number of shards that take part.
    pub(super) fn count_participants(&mut self, shards: impl Iterator<Item = ShardId>) {
        self.set_participants(shards);
        let count = self.participants.len();
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.set_shards(count);
        }
    }

    /// Restarts the step follower after this many steps, without a commit for the next.
    pub(super) fn begin_follower(&mut self, step: GlobalStep) {
        if let Some(follower) = &mut self.follower {
            *follower = StepFollower::new(step.0, self.config.planted);
        }
        self.shards.announced_step = None;
        if let (Some(own), Some(coordinator)) = (self.index_of(self.id), self.coordinator_mut()) {
            coordinator.applied(own, step.0);
        }
    }

    /// Counts a stale gradient and returns its outcome. In asynchronous mode this uses up its
    /// token.
    pub(super) fn stale_outcome(&mut self, token: TokenId) -> Outcome {
        self.counters.gradients_stale.add(1);
        if let Some(tokens) = self.asynchronous_tokens_mut() {
            tokens.spend_without_step(token);
        }
        Outcome::Stale { current: GlobalStep(self.committed_steps()) }
    }

    /// Returns the token of a gradient whose client is absent, so that others may have it.
    pub(super) fn return_token_of(&mut self, push: &PushArrival) {
        let Some(owner) = &mut self.owner else { return };
        if let Some(holder) = owner.tokens().holder_of(push.token)
            && owner.give_back(holder, push.token, push.generation)
        {
            self.counters.tokens_taken_back.add(1);
        }
    }

    /// A replica has joined: the step owner counts on its gradients.
    pub(super) fn replica_joins(&mut self, peers: &Peers, now: Instant, client: ClientKey) {
        let rank = peers.task_of(client).index;
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.join(client, rank);
            self.stragglers.first_join.get_or_insert(now);
        }
    }
}
