//! What the shards and the step owner tell each other of a synchronous step: who holds what, what is
//! committed, who has applied it.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Message, message};
use smallvec::SmallVec;

use super::Shard;
use super::output::Output;
use crate::aggregate::clipping::Exact;
use crate::aggregate::step_coordinator::{Committed, PerPush};

impl Shard {
    /// The shards that take part in a step, in the order in which the step owner counts them: those
    /// with variables, and its own.
    pub(super) fn taking_part(&self) -> SmallVec<[ShardId; 16]> {
        let mut shards: SmallVec<[ShardId; 16]> =
            self.store().into_iter().flat_map(|store| store.catalogue().shards()).collect();
        if self.owner.is_some() && !shards.contains(&self.id) {
            shards.push(self.id);
        }
        shards.sort_unstable();
        shards
    }

    /// The place of a shard among those that take part.
    pub(super) fn index_of(&self, shard: ShardId) -> Option<usize> {
        self.taking_part().iter().position(|&other| other == shard)
    }

    /// The variables have their places: from now on it is known which shards take part.
    pub(super) fn shards_are_known(&mut self) {
        let shards = self.taking_part().len();
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.set_shards(shards);
        }
    }

    /// The place of a shard among those that take part, and how it is reached from now on.
    pub(super) fn takes_part(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
    ) -> Option<usize> {
        let index = self.index_of(shard).filter(|_| shard != self.id)?;
        let speaks_for = self.parts.iter().find(|(_, other)| **other == connection);
        if speaks_for.is_some_and(|(other, _)| *other != shard) {
            return None;
        }
        self.parts_heard.insert(shard, now);
        if self.parts.insert(shard, connection) != Some(connection) {
            self.say_chief(connection);
        }
        Some(index)
    }

    fn say_chief(&mut self, connection: u64) {
        self.send(connection, Envelope::default(), message::ChiefIs { client: self.chief }.into());
    }

    /// Tells the other shards that another chief has come.
    pub(super) fn tell_chief(&mut self) {
        let connections: SmallVec<[u64; 8]> = self.parts.values().copied().collect();
        connections.into_iter().for_each(|connection| self.say_chief(connection));
    }

    /// A connection over which a shard took part is gone.
    pub(super) fn forget_part(&mut self, connection: u64) {
        self.parts.retain(|_, other| *other != connection);
    }

    /// The step owner forgets what it was told when it is started anew, and may not have been of the
    /// same restore epoch: it is told again when there is a connection, and from time to time.
    pub(super) fn owner_link(&mut self, now: Instant, up: bool) {
        self.owner_lost = (!up).then_some(now);
        self.counters.owner_connections_lost.add(u64::from(self.owner_is_up && !up));
        self.counters.shards_without_owner.set(u64::from(!up));
        self.owner_is_up = up;
        self.told_owner = None;
        self.chief_told = None;
    }

    pub(super) fn tell_owner_again(&mut self, now: Instant) {
        let due = self.told_owner.is_none_or(|last| now >= last + self.config.lease / 5);
        if !due || !self.owner_is_up || !self.is_ready() {
            return;
        }
        self.told_owner = Some(now);
        self.report_applied();
        if self.follower.is_none() {
            return;
        }
        let tokens: Vec<TokenId> =
            self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        for token in tokens {
            self.report_held(token);
        }
    }

    /// Tells the step owner that a push is held here, if what must be told of it is known.
    pub(super) fn report_held(&mut self, token: TokenId) {
        let inbox = self.inbox.as_ref();
        let push_slot = inbox.and_then(|inbox| inbox.whole_push_slot_of(token.0));
        let Some(squares) = push_slot.and_then(|push_slot| self.squares_of(push_slot)) else {
            return;
        };
        let holder = inbox.zip(push_slot).and_then(|(inbox, push_slot)| inbox.holder(push_slot));
        // What an older self has left is no client's, and spends no token.
        let epoch = |client| self.replicas.client(client).epoch;
        let client = holder.map_or(ClientEpoch(0), epoch);
        self.tell_owner(message::Held { token, client, shard: self.id, squares }.into());
    }

    /// Tells the step owner how many steps are applied here.
    pub(super) fn report_applied(&mut self) {
        self.tell_owner(message::StepApplied { shard: self.id }.into());
    }

    pub(super) fn tell_owner(&mut self, message: Message) {
        if self.owner.is_none() && self.owner_is_up {
            let (step, restore_epoch) = (self.step(), self.epoch);
            let envelope = Envelope { step, restore_epoch, ..Envelope::default() };
            self.outputs.push_back(Output::ToOwner { envelope, message });
        }
    }

    /// The step owner says something.
    pub(super) fn on_owner_message(&mut self, now: Instant, header: &Header, message: Message) {
        if let Message::ChiefIs(chief) = message {
            // Valid in any restore epoch: the chief begins the next one.
            self.chief_told = Some(chief.client);
            return;
        }
        if header.restore_epoch != self.epoch || self.poisoned().is_some() {
            return;
        }
        match message {
            Message::Commit(commit) => {
                let pushes = commit.pushes.items().iter();
                let (tokens, factors): (PerPush<u64>, PerPush<Exact>) =
                    pushes.map(|&(token, factor)| (token.0, Exact::from(factor))).unzip();
                if !factors.iter().all(|factor| factor.get() > 0.0 && factor.get() <= 1.0) {
                    // No owner says that; a shard that took it would differ from the others.
                    return;
                }
                let all_here = tokens.iter().all(|&token| self.is_whole(TokenId(token)));
                self.counters.steps_missed.add(u64::from(!all_here));
                if let Some(follower) = self.follower.as_mut().filter(|_| all_here) {
                    follower.learn(&Committed { step: header.step.0, tokens, factors });
                }
                self.begin_step();
            }
            Message::KeepCut(_) => self.keep_cut(now, header.step),
            Message::Recall(recall) => self.recall(now, recall.token, recall.client),
            Message::Over(over) => {
                let push_slot =
                    self.inbox.as_ref().and_then(|i| i.whole_push_slot_of(over.token.0));
                if let Some(push_slot) = push_slot {
                    self.answer_scanning(now, push_slot);
                    self.release(now, push_slot);
                }
            }
            _ => {}
        }
    }

    /// On the step owner: a shard holds a push whole.
    pub(super) fn shard_holds(&mut self, now: Instant, connection: u64, held: &message::Held) {
        let message::Held { token, client, shard, squares } = *held;
        if squares < 0.0 {
            return;
        }
        let Some(index) = self.takes_part(now, connection, shard) else { return };
        let holder = self.owner.as_ref().and_then(|owner| owner.holder_of(token));
        if holder.is_some_and(|holder| self.replicas.client(holder).epoch != client) {
            // Somebody has pushed there under a token that is another's.
            return;
        }
        let Some(coordinator) = self.coordinator_mut() else {
            return;
        };
        if !coordinator.held(index, token.0, squares.into()) {
            self.resend_over(connection, token);
        }
        self.decide(now);
    }

    /// On the step owner: a shard has applied so many steps.
    pub(super) fn shard_has_applied(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
        steps: u64,
    ) {
        let Some(index) = self.takes_part(now, connection, shard) else { return };
        let Some(coordinator) = self.coordinator_mut() else {
            return;
        };
        // No shard can have made a step that is not committed.
        if steps > coordinator.step() {
            return;
        }
        coordinator.applied(index, steps);
        // It may have been away when the others were told.
        if let Some(committed) = coordinator.committed()
            && steps <= committed.step
        {
            self.say_committed(connection, &committed);
        }
        self.decide(now);
    }

    /// Tells the other shards which step is committed.
    pub(super) fn tell_committed(&mut self, committed: &Committed) {
        if self.told != Some(committed.step) {
            self.told = Some(committed.step);
            let connections: SmallVec<[u64; 8]> = self.parts.values().copied().collect();
            for connection in connections {
                self.say_committed(connection, committed);
            }
        }
    }

    /// Tells the other shards that the push of a token is over.
    pub(super) fn tell_over(&mut self, token: u64) {
        let connections: SmallVec<[u64; 8]> = self.parts.values().copied().collect();
        for connection in connections {
            self.resend_over(connection, TokenId(token));
        }
    }

    fn say_committed(&mut self, connection: u64, committed: &Committed) {
        let pushes = committed.tokens.iter().zip(&committed.factors);
        let pushes = pushes.map(|(&token, factor)| (TokenId(token), factor.get()));
        let Some(pushes) = List::of(pushes) else { return };
        let (step, restore_epoch) = (GlobalStep(committed.step), self.epoch);
        let envelope = Envelope { step, restore_epoch, ..Envelope::default() };
        let message = message::Commit { pushes }.into();
        self.send(connection, envelope, message);
    }

    fn resend_over(&mut self, connection: u64, token: TokenId) {
        let envelope = Envelope { restore_epoch: self.epoch, ..Envelope::default() };
        let message = message::Over { token }.into();
        self.send(connection, envelope, message);
    }
}
