//! The messages between shards and the step owner about synchronous steps: held pushes, commits,
//! and applied steps.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Message, message};
use smallvec::SmallVec;

use super::Shard;
use super::intake::Intake;
use super::output::{Outputs, ShardOutput};
use super::peers::Peers;
use super::steps::Steps;
use super::variables::Variables;
use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::step_coordinator::{CommittedStep, PerPush};

impl Shard {
    /// Handles a change of the connection to the step owner. A restarted step owner has lost the
    /// reports, and an owner of another restore epoch has refused them. So reports are repeated
    /// once there is a connection, and at intervals.
    pub(super) fn owner_link(&mut self, now: Instant, up: bool) {
        self.steps.to_owner.lost_at = (!up).then_some(now);
        self.counters.owner_connections_lost.add(u64::from(self.steps.to_owner.is_up && !up));
        self.counters.shards_without_owner.set(u64::from(!up));
        self.steps.to_owner.is_up = up;
        self.steps.to_owner.reported_at = None;
        self.peers.chief.announced = None;
    }

    /// Handles a message of the step owner.
    pub(super) fn on_owner_message(&mut self, now: Instant, header: &Header, message: Message) {
        if let Message::ChiefIs(chief) = message {
            // Valid in any restore epoch, because the chief begins the next one.
            self.peers.chief.announced = Some(chief.client);
            return;
        }
        if header.restore_epoch != self.variables.epoch || self.poisoned().is_some() {
            return;
        }
        match message {
            Message::Commit(commit) => {
                let pushes = commit.pushes.items().iter();
                let (tokens, factors): (PerPush<u64>, PerPush<BitwiseF64>) =
                    pushes.map(|&(token, factor)| (token.0, BitwiseF64::from(factor))).unzip();
                if !factors.iter().all(|factor| factor.get() > 0.0 && factor.get() <= 1.0) {
                    // No step owner sends that. A shard that accepted it would differ from the
                    // others.
                    return;
                }
                let all_here = tokens.iter().all(|&token| self.intake.is_whole(TokenId(token)));
                self.counters.steps_missed.add(u64::from(!all_here));
                if let Some(follower) = self.steps.follower.as_mut().filter(|_| all_here) {
                    follower.receive_commit(&CommittedStep {
                        step: header.step.0,
                        tokens,
                        factors,
                    });
                }
                self.applier.begin_step(&self.intake, &self.steps);
            }
            Message::KeepCut(_) => self.checkpoints.keep_cut(
                &mut self.variables,
                &self.peers,
                &self.steps,
                now,
                header.step,
            ),
            Message::Recall(recall) => self.recall(recall.token, recall.client),
            Message::TokenOver(over) => {
                let push_slot =
                    self.intake.inbox.as_ref().and_then(|i| i.whole_push_slot_of(over.token.0));
                if let Some(push_slot) = push_slot {
                    self.steps.answer_scanning(
                        &mut self.intake,
                        &mut self.peers,
                        &mut self.out,
                        now,
                        push_slot,
                    );
                    self.intake.release(push_slot);
                }
            }
            _ => {}
        }
    }
}

impl Steps {
    /// Forgets a connection of a shard that takes part.
    pub(super) fn forget_peer_connection(&mut self, connection: u64) {
        self.shards.connections.retain(|_, other| *other != connection);
    }

    /// Announces the committed step to the other shards.
    pub(super) fn announce_committed(&mut self, out: &mut Outputs, committed: &CommittedStep) {
        if self.shards.announced_step != Some(committed.step) {
            self.shards.announced_step = Some(committed.step);
            let connections: SmallVec<[u64; 8]> =
                self.shards.connections.values().copied().collect();
            for connection in connections {
                send_committed(out, connection, committed);
            }
        }
    }

    /// Announces to the other shards that the push of a token is over.
    pub(super) fn announce_over(&self, out: &mut Outputs, token: u64) {
        let connections: SmallVec<[u64; 8]> = self.shards.connections.values().copied().collect();
        for connection in connections {
            send_over(out, connection, TokenId(token));
        }
    }

    pub(super) fn report_to_owner(&self, out: &mut Outputs, message: Message) {
        if self.owner.is_none() && self.to_owner.is_up {
            let envelope = out.stamped(Envelope::default());
            out.push(ShardOutput::ToOwner { envelope, message });
        }
    }

    /// Reports to the step owner how many steps are applied here.
    pub(super) fn report_applied(&self, out: &mut Outputs) {
        self.report_to_owner(out, message::StepApplied { shard: self.id }.into());
    }

    /// Records the connection of another shard that takes part. Returns its index, or `None` if it
    /// takes no part or the connection is another shard's.
    pub(super) fn register_peer(
        &mut self,
        peers: &Peers,
        out: &mut Outputs,
        now: Instant,
        connection: u64,
        shard: ShardId,
    ) -> Option<usize> {
        let index = self.index_of(shard).filter(|_| shard != self.id)?;
        let speaks_for = self.shards.connections.iter().find(|(_, other)| **other == connection);
        if speaks_for.is_some_and(|(other, _)| *other != shard) {
            return None;
        }
        self.shards.heard_at.insert(shard, now);
        if self.shards.connections.insert(shard, connection) != Some(connection) {
            peers.send_chief(out, connection);
        }
        Some(index)
    }

    /// Announces a new chief to the other shards.
    pub(super) fn announce_chief(&self, peers: &Peers, out: &mut Outputs) {
        let connections: SmallVec<[u64; 8]> = self.shards.connections.values().copied().collect();
        connections.into_iter().for_each(|connection| peers.send_chief(out, connection));
    }

    /// On the step owner: a shard holds a complete push.
    pub(super) fn shard_holds(
        &mut self,
        peers: &Peers,
        out: &mut Outputs,
        now: Instant,
        connection: u64,
        held: &message::Held,
    ) {
        let message::Held { token, client, shard, squares } = *held;
        if squares < 0.0 {
            return;
        }
        let Some(index) = self.register_peer(peers, out, now, connection, shard) else { return };
        let holder = self.owner.as_ref().and_then(|owner| owner.tokens().holder_of(token));
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
        out: &mut Outputs,
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
        out: &mut Outputs,
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

    pub(super) fn repeat_reports(
        &mut self,
        intake: &Intake,
        peers: &Peers,
        variables: &Variables,
        out: &mut Outputs,
        now: Instant,
    ) {
        let due = self.to_owner.reported_at.is_none_or(|last| now >= last + self.config.lease / 5);
        if !due || !self.to_owner.is_up || !variables.is_ready() {
            return;
        }
        self.to_owner.reported_at = Some(now);
        self.report_applied(out);
        if self.follower.is_none() {
            return;
        }
        let tokens: Vec<TokenId> =
            intake.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        for token in tokens {
            self.report_held(intake, peers, out, token);
        }
    }
}

fn send_committed(out: &mut Outputs, connection: u64, committed: &CommittedStep) {
    let pushes = committed.tokens.iter().zip(&committed.factors);
    let pushes = pushes.map(|(&token, factor)| (TokenId(token), factor.get()));
    let Some(pushes) = List::of(pushes) else { return };
    let step = GlobalStep(committed.step);
    let envelope = Envelope { step, ..out.epoch_only() };
    let message = message::Commit { pushes }.into();
    out.send(connection, envelope, message);
}

fn send_over(out: &mut Outputs, connection: u64, token: TokenId) {
    let envelope = out.epoch_only();
    let message = message::TokenOver { token }.into();
    out.send(connection, envelope, message);
}
