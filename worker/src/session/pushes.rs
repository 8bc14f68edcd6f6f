//! Pushes: parts to every shard they touch under one sequence number, until each has settled it.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RequestId, Sequence, ShardId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{
    Operation, OutcomeQuery, PushAnswer, PushPart, Reserve, Withdraw,
};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, PushState, Refusal};

use super::link::{Pending, Status};
use super::{OpId, OpKind, PushOrder, Reply, Session};
use crate::error::Error;
use crate::fanout::Part;

/// How far a push is on one shard.
#[derive(Clone, Debug, PartialEq)]
enum Phase {
    /// It needs room there.
    Roomless,
    /// It has asked for room.
    Reserving,
    /// It has room, and sends what there is.
    Sending,
    /// All has been sent; what became of it is open.
    Sent,
    /// The connection was lost after something had been sent: what does the shard know of it?
    InDoubt,
    /// That has been asked.
    Asking,
    /// The shard has settled it.
    Settled(Result<Outcome, Refusal>),
}

/// One shard's share of a push.
#[derive(Debug)]
struct Share {
    link: usize,
    parts: Vec<Part>,
    /// How many of the parts have been sent over the present connection.
    sent: usize,
    room: u32,
    request: Option<RequestId>,
    phase: Phase,
}

/// A push under way.
#[derive(Debug)]
pub(super) struct Push {
    operation: Operation,
    grant: Option<Grant>,
    read: GlobalStep,
    shares: Vec<Share>,
    /// No more parts will come.
    complete: bool,
}

impl Push {
    pub(super) fn unsettled(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self.shares.iter().filter(|share| !matches!(share.phase, Phase::Settled(_)));
        open.map(|share| share.link)
    }

    /// Whether some shard may hold all of its share: then it can no longer be withdrawn.
    fn may_be_whole(&self) -> bool {
        self.shares.iter().any(|share| {
            matches!(share.phase, Phase::Sent | Phase::InDoubt | Phase::Asking | Phase::Settled(_))
        })
    }
}

/// How many ended pushes a session can be asked about.
const SETTLED_MAX: usize = WINDOW as usize;

impl Session {
    /// Gives a push its number and keeps it until it is settled.
    pub(super) fn begin_push(
        &mut self,
        now: Instant,
        order: PushOrder,
        complete: bool,
    ) -> Result<Sequence, Error> {
        let oldest = self.pushes.first_key_value().map_or(self.next_sequence, |(first, _)| first.0);
        if self.next_sequence - oldest >= WINDOW {
            if let Some(grant) = order.grant {
                self.return_token(now, grant);
            }
            return Err(Error::Window { limit: WINDOW });
        }
        let sequence = Sequence(self.next_sequence);
        self.next_sequence += 1;
        let PushOrder { operation, grant, read, parts } = order;
        let mut push = Push { operation, grant, read, shares: Vec::new(), complete };
        for (shard, parts) in parts {
            self.share(now, &mut push, shard).parts.extend(parts);
        }
        if operation == (Operation::Gradient {}) {
            // The owner counts the step when it has applied its share, empty or not.
            self.share(now, &mut push, self.start.owner);
        }
        self.pushes.insert(sequence, push);
        Ok(sequence)
    }

    fn share<'a>(&mut self, now: Instant, push: &'a mut Push, shard: ShardId) -> &'a mut Share {
        let link = self.link_to(now, shard);
        if let Some(index) = push.shares.iter().position(|share| share.link == link) {
            return &mut push.shares[index];
        }
        let phase = Phase::Roomless;
        push.shares.push(Share { link, parts: Vec::new(), sent: 0, room: 0, request: None, phase });
        let last = push.shares.len() - 1;
        &mut push.shares[last]
    }

    pub(super) fn more_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        parts: Vec<(ShardId, Vec<Part>)>,
    ) {
        let Some(mut push) = self.pushes.remove(&sequence) else { return };
        for (shard, parts) in parts {
            self.share(now, &mut push, shard).parts.extend(parts);
        }
        self.pushes.insert(sequence, push);
        self.drive_push(now, sequence);
    }

    pub(super) fn end_push(&mut self, sequence: Sequence) {
        if let Some(push) = self.pushes.get_mut(&sequence) {
            push.complete = true;
        }
    }

    /// Sends of a push what can be sent now.
    pub(super) fn drive_push(&mut self, now: Instant, sequence: Sequence) {
        let Some(mut push) = self.pushes.remove(&sequence) else { return };
        for index in 0..push.shares.len() {
            self.drive_share(now, sequence, &mut push, index);
        }
        self.pushes.insert(sequence, push);
        self.settle_if_done(now, sequence);
    }

    fn drive_share(&mut self, now: Instant, sequence: Sequence, push: &mut Push, index: usize) {
        let share = &mut push.shares[index];
        let link = share.link;
        if self.links[link].status != Status::Up {
            return;
        }
        let envelope = Envelope { sequence, ..Envelope::default() };
        match share.phase {
            Phase::InDoubt => {
                share.phase = Phase::Asking;
                let pending = Pending::PushState(sequence);
                self.send(now, link, pending, envelope, OutcomeQuery {}, vec![]);
            }
            Phase::Roomless if push.complete || !share.parts.is_empty() => {
                share.room = std::mem::take(&mut self.links[link].room);
                if share.room != 0 {
                    share.phase = Phase::Sending;
                    self.send_parts(now, sequence, push, index);
                } else {
                    share.phase = Phase::Reserving;
                    self.send(now, link, Pending::Reserve(sequence), envelope, Reserve {}, vec![]);
                }
            }
            Phase::Sending => self.send_parts(now, sequence, push, index),
            _ => {}
        }
    }

    fn send_parts(&mut self, now: Instant, sequence: Sequence, push: &mut Push, index: usize) {
        let (operation, complete, grant) = (push.operation, push.complete, push.grant);
        let step = grant.map_or(GlobalStep(0), |grant| grant.step).max(push.read);
        let share = &mut push.shares[index];
        let total: u64 = share.parts.iter().map(Part::bytes).sum();
        // A push that was completed after its last part was sent ends with an empty one.
        while share.sent < share.parts.len() || (complete && share.phase == Phase::Sending) {
            let last = complete && share.sent + 1 >= share.parts.len();
            let part = share.parts.get(share.sent);
            let message = PushPart {
                operation,
                token: grant.map_or_else(Default::default, |grant| grant.token),
                generation: grant.map_or(0, |grant| grant.generation),
                room: share.room,
                offset: part.map_or(0, |part| part.offset),
                whole: last.then_some(total),
                next: last && operation == Operation::Gradient {} && !self.tokens.has_ended(),
            };
            let bodies = part.map_or_else(Vec::new, |part| part.bodies.clone());
            let request = share.request.unwrap_or_default();
            let envelope = Envelope { sequence, step, request, ..Envelope::default() };
            share.sent += 1;
            if last {
                share.phase = Phase::Sent;
            }
            if share.request.is_some() {
                self.send_on(now, share.link, envelope, message, bodies);
            } else {
                let pending = Pending::Push(sequence);
                let request = self.send(now, share.link, pending, envelope, message, bodies);
                share.request = Some(request);
            }
        }
    }

    /// The answer to a reservation or to the parts of a push.
    pub(super) fn push_answered(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        message: Message,
    ) {
        if let Message::PushAnswer(answer) = &message {
            self.take_extras(now, link, answer);
        }
        let Some(push) = self.pushes.get_mut(&sequence) else {
            if let Message::Room(room) = message {
                self.links[link].room = room.room;
            }
            return self.drive(now);
        };
        let Some(share) = push.shares.iter_mut().find(|share| share.link == link) else { return };
        match message {
            Message::Room(room) if share.phase == Phase::Reserving => {
                share.room = room.room;
                share.phase = Phase::Sending;
            }
            Message::PushAnswer(answer) => share.phase = Phase::Settled(Ok(answer.outcome)),
            Message::Refused(refused) => match refused.refusal {
                // Another push was given the room: ask again, and send all again.
                Refusal::NoRoom { .. } => share.start_over(Phase::Roomless),
                refusal if Session::is_fatal(&refusal) => {
                    let error = self.refused("push", link, refusal);
                    return self.fail(error);
                }
                refusal => share.phase = Phase::Settled(Err(refusal)),
            },
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// The next token and room, which come with the answer to a push.
    fn take_extras(&mut self, now: Instant, link: usize, answer: &PushAnswer) {
        if answer.room != 0 {
            self.links[link].room = answer.room;
        }
        if let Some(grant) = answer.next {
            self.tokens.add(grant, now);
        }
        if answer.ended.is_some() {
            self.tokens.end();
        }
    }

    pub(super) fn push_state_answered(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        message: Message,
    ) {
        let Some(push) = self.pushes.get_mut(&sequence) else { return };
        let Some(share) = push.shares.iter_mut().find(|share| share.link == link) else { return };
        match message {
            Message::OutcomeIs(answer) => match answer.state {
                PushState::Settled { outcome } => share.phase = Phase::Settled(Ok(outcome)),
                PushState::TooOld { oldest } => {
                    let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                    let refusal = Refusal::Window { sequence, oldest, newest };
                    share.phase = Phase::Settled(Err(refusal));
                }
                // Its room is still ours there.
                PushState::Receiving { .. } => share.start_over(Phase::Sending),
                PushState::Unknown {} => share.start_over(Phase::Roomless),
            },
            Message::Refused(refused) => {
                if Session::is_fatal(&refused.refusal) {
                    let error = self.refused("push", link, refused.refusal);
                    return self.fail(error);
                }
                share.phase = Phase::Settled(Err(refused.refusal));
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// The connection is lost, and with it what was on its way.
    pub(super) fn push_lost(&mut self, sequence: Sequence, link: usize) {
        let Some(push) = self.pushes.get_mut(&sequence) else { return };
        for share in push.shares.iter_mut().filter(|share| share.link == link) {
            share.request = None;
            share.phase = match std::mem::replace(&mut share.phase, Phase::Roomless) {
                Phase::Roomless | Phase::Reserving => Phase::Roomless,
                Phase::Sending if share.sent == 0 => Phase::Sending,
                Phase::Sending | Phase::Sent | Phase::InDoubt | Phase::Asking => Phase::InDoubt,
                settled @ Phase::Settled(_) => settled,
            };
        }
    }

    /// Ends a push that every shard has settled, and tells who waits for it.
    fn settle_if_done(&mut self, now: Instant, sequence: Sequence) {
        let Some(push) = self.pushes.get(&sequence) else { return };
        if !push.complete || push.unsettled().next().is_some() {
            return;
        }
        let Some(push) = self.pushes.remove(&sequence) else { return };
        let result = self.result_of(now, &push);
        if self.settled.len() == SETTLED_MAX {
            self.settled.pop_front();
        }
        self.settled.push_back((sequence, result.clone()));
        let waiting: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| matches!(op.kind, OpKind::Push { sequence: s, .. } if s == sequence))
            .map(|(&id, _)| id)
            .collect();
        for id in waiting {
            self.finish(id, result.clone().map(|outcome| Reply::Pushed { outcome }));
        }
    }

    /// What became of a push as a whole: the first refusal, or the owner's outcome, which knows
    /// the step; the first outcome where the owner has no share.
    fn result_of(&mut self, now: Instant, push: &Push) -> Result<Outcome, Error> {
        let owner = self.owner_link();
        let mut result = None;
        for share in &push.shares {
            match &share.phase {
                Phase::Settled(Err(refusal)) => {
                    let token_is_gone = matches!(refusal, Refusal::Token { .. });
                    let owner_spent_it = push.shares.iter().any(|share| {
                        Some(share.link) == owner && matches!(share.phase, Phase::Settled(Ok(_)))
                    });
                    if let Some(grant) = push.grant.filter(|_| !token_is_gone && !owner_spent_it) {
                        self.return_token(now, grant);
                    }
                    return Err(self.refused("push", share.link, refusal.clone()));
                }
                Phase::Settled(Ok(outcome)) if result.is_none() || Some(share.link) == owner => {
                    result = Some(*outcome);
                }
                _ => {}
            }
        }
        result.ok_or(Error::EmptyPush)
    }

    pub(super) fn settled_result(&self, sequence: Sequence) -> Option<Result<Outcome, Error>> {
        let settled = self.settled.iter().find(|(settled, _)| *settled == sequence);
        match settled {
            Some((_, result)) => Some(result.clone()),
            None if self.pushes.contains_key(&sequence) => None,
            None => Some(Err(Error::UnknownPush { sequence })),
        }
    }

    /// What is known here of a push; a push that is long settled is not asked about again.
    pub(super) fn outcome(&mut self, op: OpId, sequence: Sequence) {
        let reply = match self.settled_result(sequence) {
            None => Ok(Reply::Outcome(None)),
            Some(Ok(outcome)) => Ok(Reply::Outcome(Some(outcome))),
            Some(Err(error)) => Err(error),
        };
        self.reply(op, reply);
    }

    /// The caller has given a push up. If no shard can hold it whole it is withdrawn; if one may,
    /// it goes on, because what one shard has counted the others must count.
    pub(super) fn withdraw(&mut self, now: Instant, sequence: Sequence) {
        let Some(push) = self.pushes.get(&sequence) else { return };
        if push.may_be_whole() {
            return;
        }
        let Some(push) = self.pushes.remove(&sequence) else { return };
        for share in push.shares.iter().filter(|share| share.sent > 0) {
            if self.links[share.link].status == Status::Up {
                let envelope = Envelope { sequence, ..Envelope::default() };
                let pending = Pending::Withdraw(share.request);
                self.send(now, share.link, pending, envelope, Withdraw {}, vec![]);
            }
        }
        if let Some(grant) = push.grant {
            self.return_token(now, grant);
        }
    }
}

impl Share {
    fn start_over(&mut self, phase: Phase) {
        (self.sent, self.request, self.phase) = (0, None, phase);
    }
}
