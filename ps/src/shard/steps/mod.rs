//! [`Steps`]: tokens, steps and coordinators, as this shard takes part in them.

mod coordinators_heard;
pub(super) mod peer_shards;
mod recalls;
mod stragglers;
pub(super) mod to_owner;
mod training_watch;

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{CoordinatorId, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{EffectRef, Envelope, Message, Outcome, Refusal, message};
use pushpull_store::planted::Bug;
use smallvec::SmallVec;

use super::output::{ShardOutput, ShardOutputs};
use super::request::unsupported;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::current_step::CommittedStep;
use crate::aggregate::data_position::DataPosition;
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::aggregate::token_ledger::Issued;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::coordinators::{Coordinators, EffectVerdict};
use crate::inbox::PushArrival;
use crate::metrics::Counters;
use coordinators_heard::CoordinatorsHeard;
use peer_shards::PeerShards;
use recalls::RecallQuestions;
use stragglers::Stragglers;
use to_owner::{AppliedGradients, ToOwner};
use training_watch::TrainingWatch;

/// A shard's part in the steps.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) id: ShardId,
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    /// The shards that take part in a step: those with variables, and the step owner's, in
    /// ascending order. The step owner numbers them in this order.
    pub(super) participants: SmallVec<[ShardId; 16]>,
    /// The coordinators, with the effects that have settled here.
    pub(super) coordinators: Coordinators,
    pub(super) coordinators_heard: CoordinatorsHeard,
    /// `Some` on the step owner.
    pub(super) owner: Option<TokenIssuer>,
    /// `Some` in synchronous mode.
    pub(super) follower: Option<StepFollower>,
    /// On the step owner: the other shards.
    pub(super) shards: PeerShards,
    /// On another shard: the connection to the step owner.
    pub(super) to_owner: ToOwner,
    pub(super) stragglers: Stragglers,
    pub(super) recall_questions: RecallQuestions,
    /// On the step owner: whether tokens are out or are being recalled, or pushes audited.
    pub(super) has_tokens: bool,
    /// On the step owner: what it has reported about the training.
    pub(super) watch: TrainingWatch,
}

impl Steps {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>, counters: Arc<Counters>) -> Steps {
        let PsConfig { last_step, planted, .. } = *config;
        let rule = config.rule();
        let owns_step = id.shard == 0 && config.owns_step();
        let owner = owns_step.then(|| match rule {
            Some(rule) => {
                TokenIssuer::Synchronous(Box::new(StepCoordinator::new(rule, 1, planted)))
            }
            None => {
                let mode = config.mode.asynchronous().copied().unwrap_or_default();
                let wait_ahead = mode.wait_ahead;
                let reject_older = mode.reject_older;
                let tokens = AsynchronousTokens::new(last_step, wait_ahead, reject_older, planted);
                TokenIssuer::Asynchronous(Box::new(tokens))
            }
        });
        let follower = rule.map(|_| StepFollower::new(0, planted));
        Steps {
            id,
            config,
            counters,
            participants: owner.iter().map(|_| id).collect(),
            coordinators: Coordinators::new(planted),
            coordinators_heard: CoordinatorsHeard::default(),
            owner,
            follower,
            shards: PeerShards::default(),
            to_owner: ToOwner::default(),
            stragglers: Stragglers::default(),
            recall_questions: RecallQuestions::default(),
            has_tokens: false,
            watch: TrainingWatch::default(),
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

    /// Returns the step at which a push is applied, by which rows expire. A client may name any
    /// step, and the greatest stays. So a shard that does not own the step takes the client's up to
    /// the newest that can be made by now.
    pub(super) fn made_step(&self, applied: AppliedGradients, named: GlobalStep) -> GlobalStep {
        match (&self.owner, &self.follower) {
            (Some(owner), _) => owner.step(),
            (None, Some(follower)) => named.min(GlobalStep(follower.step())),
            (None, None) => named.min(self.to_owner.newest_step(applied)),
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
        self.owner.iter().flat_map(move |owner| owner.ledger().of(client))
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
        self.shards.forget_steps();
        if let (Some(own), Some(coordinator)) = (self.index_of(self.id), self.coordinator_mut()) {
            coordinator.applied(own, step.0);
        }
    }

    /// Counts a stale gradient and returns its outcome. In asynchronous mode this uses up its
    /// token.
    pub(super) fn stale_outcome(&mut self, token: TokenId) -> Outcome {
        self.counters.gradients_stale.add(1);
        if let Some(tokens) = self.asynchronous_tokens_mut() {
            tokens.take_back_stale(token);
        }
        Outcome::Stale { current: GlobalStep(self.committed_steps()) }
    }

    /// Returns the token of a gradient whose client is absent, so that others may have it.
    pub(super) fn return_token_of(&mut self, push: &PushArrival) {
        let Some(owner) = &mut self.owner else { return };
        if let Some(holder) = owner.ledger().holder_of(push.token)
            && owner.give_back(holder, push.token, push.generation)
        {
            self.counters.tokens_taken_back.add(1);
        }
    }

    /// A replica has joined: the step owner counts on its gradients. `rank` is the index of its
    /// task.
    pub(super) fn replica_joins(&mut self, now: Instant, client: ClientKey, rank: u32) {
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.join(client, rank);
            self.stragglers.replica_joins(now);
        }
    }

    /// Records a step that has just been committed. Returns whether it has become too small, or
    /// changed and is still too small.
    pub(super) fn has_shrunk(&mut self, committed: &CommittedStep, aggregate: u32) -> bool {
        let gradients = committed.tokens.len();
        // The last steps of a training take what is left.
        let is_last = self.coordinator().is_some_and(|coordinator| coordinator.grants_no_more());
        let is_short = gradients < aggregate as usize && !is_last;
        self.watch.has_shrunk(gradients, is_short)
    }

    pub(super) fn report_to_owner(&self, out: &mut ShardOutputs, message: Message) {
        if self.owner.is_none() && self.to_owner.is_up() {
            let envelope = out.stamped(Envelope::default());
            out.push(ShardOutput::ToOwner { envelope, message });
        }
    }

    /// Reports to the step owner how many steps are applied here.
    pub(super) fn report_applied(&self, out: &mut ShardOutputs) {
        self.report_to_owner(out, message::StepApplied { shard: self.id }.into());
    }

    /// Notes whether the step owner has tokens that could expire, so that a tick need not look.
    pub(super) fn note_tokens(&mut self) {
        let Some(owner) = &self.owner else { return };
        let asks = |tokens: &AsynchronousTokens| {
            tokens.recalls.tokens().next().is_some() || !tokens.audits.is_empty()
        };
        let asks = owner.asynchronous_tokens().is_some_and(asks);
        self.has_tokens = asks || owner.ledger().len() > 0;
    }

    /// Sets the gauges of the data position.
    pub(super) fn count_batches(&self) {
        let data: Option<&DataPosition> =
            self.owner.as_ref().and_then(|owner| owner.ledger().data.as_ref());
        self.counters.batches_begun.set(data.map_or(0, |data| data.next().0));
        self.counters.batches_unspent.set(data.map_or(0, |data| data.unspent() as u64));
    }

    /// Records that something was heard of a coordinator.
    pub(super) fn heard_of_coordinator(&mut self, now: Instant, coordinator: CoordinatorId) {
        if let Some(place) = self.coordinators.place_of(coordinator) {
            self.coordinators_heard.heard(now, place);
        }
    }

    /// Returns the verdict on a gradient of this effect.
    pub(super) fn check_effect(
        &self,
        kind: u16,
        operation: Operation,
        effect: &EffectRef,
    ) -> Result<EffectVerdict, Refusal> {
        match operation {
            _ if self.is_synchronous() => Err(unsupported(kind, NOT_SYNCHRONOUS)),
            Operation::Gradient {} => self.coordinators.check(effect),
            _ => Err(unsupported(kind, "only gradients have effects that count once")),
        }
    }

    /// Returns the outcome of a gradient whose effect has counted before. On the step owner, the
    /// token that would have paid for it is returned.
    pub(super) fn repeated_outcome(
        &mut self,
        holder: Option<ClientKey>,
        token: TokenId,
        generation: u32,
    ) -> Outcome {
        self.counters.gradients_repeated.add(1);
        if let Some((owner, holder)) = self.owner.as_mut().zip(holder) {
            owner.give_back(holder, token, generation);
        }
        Outcome::Repeated {}
    }

    /// Returns the other shards that may have applied the push of a token, in asynchronous mode.
    pub(super) fn shards_to_ask(&self) -> SmallVec<[ShardId; 16]> {
        if self.owner.is_none()
            || self.is_synchronous()
            || self.config.planted.has(Bug::TakeBackUnasked)
        {
            return SmallVec::new();
        }
        let mut shards = self.participants.clone();
        shards.retain(|shard| *shard != self.id);
        shards
    }

    /// Names the shards that have not answered for all recalled tokens, with the time since each
    /// was last heard from. `None` if all have.
    pub(super) fn awaited_recalls(&self, now: Instant) -> Option<String> {
        let recalls = &self.asynchronous_tokens()?.recalls;
        let shards = self.shards_to_ask();
        let awaits =
            |shard: &&ShardId| recalls.tokens().any(|token| recalls.awaits(token, **shard));
        let silent: Vec<String> =
            shards.iter().filter(awaits).map(|&shard| self.shards.describe(now, shard)).collect();
        (!silent.is_empty())
            .then(|| format!("the answers of {} about recalled tokens", silent.join(", ")))
    }

    /// Stops expecting replicas that have not joined within the join timeout. Returns whether it
    /// has expected any.
    pub(super) fn stop_expecting(&mut self, now: Instant) -> bool {
        let Some(mode) = self.config.mode.synchronous() else { return false };
        let is_over = self.stragglers.waited(now) >= mode.join_timeout;
        let coordinator = self.coordinator_mut().filter(|it| is_over && it.expects() > 0);
        let Some(coordinator) = coordinator else { return false };
        coordinator.expect_nobody();
        true
    }

    /// Describes that this shard cannot reach the step owner, so that it makes no steps. Empty if
    /// it can.
    pub(super) fn owner_outage(&self, now: Instant) -> String {
        let depends = self.is_synchronous() && self.owner.is_none();
        let outage = self.to_owner.outage(now).filter(|_| depends);
        outage.map_or_else(String::new, |outage| format!("; {} {outage}", self.id))
    }
}

/// Reason for which coordinators are not opened on a server of synchronous trainings.
pub(super) const NOT_SYNCHRONOUS: &str = "effects count once in asynchronous mode";
