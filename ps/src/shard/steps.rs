//! The steps of training, as this shard takes part in them: tokens, held pushes, commits.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Envelope, Message, Outcome, message};
use smallvec::SmallVec;

use super::applier::Applier;
use super::calls_heard::CallsHeard;
use super::held_push::HeldPush;
use super::intake::Intake;
use super::output::{ShardOutput, ShardOutputs};
use super::peer_shards::{PeerShards, send_committed, send_over};
use super::peers::Peers;
use super::recalls::RecallQuestions;
use super::stragglers::Stragglers;
use super::to_owner::ToOwner;
use super::training_watch::TrainingWatch;
use super::variables::Variables;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::current_step::TokenOutcome;
use crate::aggregate::step_coordinator::{Grant, StepCoordinator};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::aggregate::token_ledger::Issued;
use crate::call_sources::CallSources;
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
    /// The calls that have settled here.
    pub(super) calls: CallSources,
    pub(super) calls_heard: CallsHeard,
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
    /// On the step owner: what it has reported about the training.
    pub(super) watch: TrainingWatch,
}

impl Steps {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>, counters: Arc<Counters>) -> Steps {
        let PsConfig { last_step, planted, .. } = *config;
        let (rule, owns_step) = (config.rule(), id.shard == 0 && config.owns_step());
        let owner = owns_step.then(|| match rule {
            Some(rule) => {
                TokenIssuer::Synchronous(Box::new(StepCoordinator::new(rule, 1, planted)))
            }
            None => {
                let mode = config.mode.asynchronous().copied().unwrap_or_default();
                let (wait_ahead, reject_older) = (mode.wait_ahead, mode.reject_older);
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
            calls: CallSources::new(planted),
            calls_heard: CallsHeard::default(),
            owner,
            follower,
            shards: PeerShards::default(),
            to_owner: ToOwner::default(),
            stragglers: Stragglers::default(),
            recall_questions: RecallQuestions::default(),
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
    pub(super) fn made_step(&self, variables: &Variables, named: GlobalStep) -> GlobalStep {
        match (&self.owner, &self.follower) {
            (Some(owner), _) => owner.step(),
            (None, Some(follower)) => named.min(GlobalStep(follower.step())),
            (None, None) => named.min(self.to_owner.newest_step(variables)),
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

    /// A replica has joined: the step owner counts on its gradients.
    pub(super) fn replica_joins(&mut self, peers: &Peers, now: Instant, client: ClientKey) {
        let rank = peers.registry.client(client).task.index;
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.join(client, rank);
            self.stragglers.replica_joins(now);
        }
    }

    /// Restores the complete pushes that an earlier process left.
    pub(super) fn recover_held(&mut self, applier: &mut Applier, intake: &Intake) {
        let tokens = intake.whole_tokens();
        if self.config.mode.clip_by_global_norm().is_some() {
            let push_slots = intake.inbox.iter().flat_map(|inbox| {
                tokens.iter().filter_map(|token| inbox.whole_push_slot_of(token.0))
            });
            push_slots.for_each(|push_slot| applier.begin_norm(intake, push_slot));
        }
        let measured = self.config.mode.clip_by_global_norm().is_none();
        let own = self.index_of(self.id);
        let step = self.follower.as_ref().map_or(0, StepFollower::step);
        if let (Some(own), Some(coordinator)) = (own, self.coordinator_mut()) {
            coordinator.applied(own, step);
            for token in tokens.into_iter().filter(|_| measured) {
                // A push that is over is not here, because its decision dropped it.
                let _ = coordinator.held(own, token.0, 0.0.into());
            }
        }
    }

    /// Carries out the decisions of the step owner since the last call. Announces and begins a
    /// committed step.
    pub(super) fn decide(
        &mut self,
        applier: &mut Applier,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let Some(coordinator) = self.coordinator_mut() else { return };
        for (grant, verdict) in coordinator.verdicts() {
            self.carry_out(intake, peers, out, now, grant, verdict);
        }
        let committed = self.coordinator().and_then(StepCoordinator::committed);
        let Some(committed) = committed else { return };
        if self.shards.announce_committed(out, &committed) {
            let shrunk = self.shrunk_step(peers, &committed);
            out.queue.extend(shrunk.map(ShardOutput::Event));
        }
        if let Some(follower) = &mut self.follower {
            follower.receive_commit(&committed);
        }
        applier.begin_step(intake, self);
    }

    fn carry_out(
        &mut self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
        grant: Grant,
        verdict: TokenOutcome,
    ) {
        match verdict {
            TokenOutcome::Admitted { step } => {
                self.counters.gradients_admitted.add(1);
                let push_slot =
                    intake.inbox.as_ref().and_then(|inbox| inbox.whole_push_slot_of(grant.token));
                if let Some(push_slot) = push_slot {
                    let outcome = Outcome::Accepted { step: GlobalStep(step) };
                    HeldPush { push_slot }.settle(intake, peers, out, now, outcome);
                }
            }
            TokenOutcome::Over => {
                self.shards.announce_over(out, grant.token);
                // The push may be complete or in transit.
                let push_slots =
                    intake.inbox.as_ref().map(|inbox| inbox.push_slots_of(grant.token));
                for push_slot in push_slots.unwrap_or_default() {
                    self.counters.gradients_stale.add(1);
                    let current = GlobalStep(self.committed_steps());
                    HeldPush { push_slot }.drop_stale(intake, peers, out, now, current);
                }
            }
        }
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

    /// Records the connection of another shard that takes part. Returns its index, or `None` if it
    /// takes no part or the connection is another shard's.
    pub(super) fn register_peer(
        &mut self,
        peers: &Peers,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        shard: ShardId,
    ) -> Option<usize> {
        let index = self.index_of(shard).filter(|_| shard != self.id)?;
        self.shards.register(peers, out, now, connection, shard).then_some(index)
    }

    /// On the step owner: a shard holds a complete push.
    pub(super) fn shard_holds(
        &mut self,
        peers: &Peers,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        held: &message::Held,
    ) {
        let message::Held { token, client, shard, squares } = *held;
        if squares < 0.0 {
            return;
        }
        let Some(index) = self.register_peer(peers, out, now, connection, shard) else { return };
        let holder = self.owner.as_ref().and_then(|owner| owner.ledger().holder_of(token));
        if holder.is_some_and(|holder| peers.registry.client(holder).epoch != client) {
            // A client has pushed there under another client's token.
            return;
        }
        let Some(coordinator) = self.coordinator_mut() else {
            return;
        };
        if !coordinator.held(index, token.0, squares.into()) {
            send_over(out, connection, token);
        }
    }

    /// On the step owner: a shard has applied `steps` steps.
    pub(super) fn shard_has_applied(
        &mut self,
        peers: &Peers,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        shard: ShardId,
        steps: u64,
    ) {
        let Some(index) = self.register_peer(peers, out, now, connection, shard) else { return };
        let Some(coordinator) = self.coordinator_mut() else {
            return;
        };
        // No shard can have applied a step that is not committed.
        if steps > coordinator.step() {
            return;
        }
        coordinator.applied(index, steps);
        // The shard may have been disconnected when the commit was announced.
        if let Some(committed) = coordinator.committed()
            && steps <= committed.step
        {
            send_committed(out, connection, &committed);
        }
    }

    /// Reports to the step owner that a push is held here, once its squared norm is known.
    pub(super) fn report_held(
        &self,
        intake: &Intake,
        peers: &Peers,
        out: &mut ShardOutputs,
        token: TokenId,
    ) {
        let inbox = intake.inbox.as_ref();
        let push_slot = inbox.and_then(|inbox| inbox.whole_push_slot_of(token.0));
        let Some(squares) = push_slot.and_then(|push_slot| intake.squares_of(push_slot)) else {
            return;
        };
        let holder = inbox.zip(push_slot).and_then(|(inbox, push_slot)| inbox.holder(push_slot));
        // The push of an older incarnation has no client, and spends no token.
        let epoch = |client| peers.registry.client(client).epoch;
        let client = holder.map_or(ClientEpoch(0), epoch);
        self.report_to_owner(out, message::Held { token, client, shard: self.id, squares }.into());
    }

    /// Repeats the reports to the step owner, once there is a connection and at intervals.
    pub(super) fn repeat_reports(
        &mut self,
        intake: &Intake,
        peers: &Peers,
        variables: &Variables,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let interval = self.config.lease / 5;
        if !variables.is_ready() || !self.to_owner.reports_are_due(now, interval) {
            return;
        }
        self.report_applied(out);
        if self.follower.is_none() {
            return;
        }
        for token in intake.whole_tokens() {
            self.report_held(intake, peers, out, token);
        }
    }

    /// Describes that this shard cannot reach the step owner, so that it makes no steps. Empty if
    /// it can.
    pub(super) fn owner_outage(&self, now: Instant) -> String {
        let depends = self.is_synchronous() && self.owner.is_none();
        let outage = self.to_owner.outage(now).filter(|_| depends);
        outage.map_or_else(String::new, |outage| format!("; {} {outage}", self.id))
    }

    /// Describes what a request for a push slot waits for.
    pub(super) fn awaited_push_slot(&self, now: Instant) -> String {
        format!("a push slot{}", self.owner_outage(now))
    }
}
