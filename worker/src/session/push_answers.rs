//! What shards say of pushes, and what becomes of those whose connection is lost.

use std::time::Instant;

use pushpull_common::ids::{RequestId, Sequence};
use pushpull_common::protocol::message::PushAnswer;
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::Session;
use super::pushes::Phase;

impl Session {
    /// The answer to a reservation or to the parts of a push.
    pub(super) fn push_answered(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        request: RequestId,
        message: Message,
    ) {
        if let Message::PushAnswer(answer) = &message {
            self.take_extras(now, link, request, answer);
        }
        let is_owner = self.links[link].shard == self.start.owner;
        let Some(push) = self.pushes.get_mut(&sequence) else {
            if let Message::Reserved(push_slot) = message {
                self.links[link].push_slot = push_slot.push_slot;
            }
            return self.drive(now);
        };
        let synchronous = push.synchronous;
        let Some(share) = push.shares.iter_mut().find(|share| share.link == link) else {
            return;
        };
        match message {
            Message::Reserved(push_slot) if share.phase == Phase::Reserving => {
                share.push_slot = push_slot.push_slot;
                share.phase = Phase::Sending;
            }
            Message::PushAnswer(answer)
                if share.awaits(answer.outcome)
                    && may_be_said(answer.outcome, synchronous, is_owner) =>
            {
                share.phase = Phase::Settled(Ok(answer.outcome));
            }
            Message::Refused(refused) => match refused.refusal {
                // Another push was given the room: ask again, and send all again. A request for room
                // that was answered meanwhile may have told the same room; parts that went into it
                // now would be taken for the rest of those refused, and passed over.
                Refusal::PushSlotTaken { push_slot } => {
                    // One of a tray would be as little free again, at once.
                    share.in_push_buffer = share.in_push_buffer.take().filter(|_| !share.names);
                    share.start_over();
                    if self.links[link].push_slot == push_slot {
                        self.links[link].push_slot = 0;
                    }
                }
                Refusal::Deadline { awaited, .. }
                    if synchronous && is_owner && share.phase == Phase::Sent =>
                {
                    (share.phase, share.request) = (Phase::Undecided, None);
                    let asked = share.asked;
                    self.tell_undecided(now, sequence, link, asked, &awaited);
                }
                refusal => share.phase = Phase::Settled(Err(refusal)),
            },
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// The next token and room, which come with the answer to a push.
    fn take_extras(&mut self, now: Instant, link: usize, request: RequestId, answer: &PushAnswer) {
        if answer.push_slot != 0 {
            self.links[link].push_slot = answer.push_slot;
        }
        if let Some(grant) = answer.next {
            self.granted(now, request, grant);
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
        let is_owner = self.links[link].shard == self.start.owner;
        let Some(push) = self.pushes.get_mut(&sequence) else {
            return;
        };
        let synchronous = push.synchronous;
        let Some(share) = push.shares.iter_mut().find(|share| share.link == link) else {
            return;
        };
        match message {
            Message::OutcomeIs(answer) => match answer.state {
                PushState::Settled { outcome } => match may_be_said(outcome, synchronous, is_owner)
                {
                    true => share.phase = Phase::Settled(Ok(outcome)),
                    false => {
                        share.phase = Phase::InDoubt;
                        return self.unexpected(now, link, &Message::OutcomeIs(answer));
                    }
                },
                PushState::TooOld { oldest } => {
                    let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                    let refusal = Refusal::Window { sequence, oldest, newest };
                    share.phase = Phase::Settled(Err(refusal));
                }
                // Its room is still ours there. What it has whole it needs no bytes of: that this was
                // the last part, once more, asks for the answer.
                PushState::Receiving { bytes } => {
                    let has_all = share.whole && bytes == share.bytes();
                    share.whole = has_all;
                    share.sent = if has_all { share.parts.len() } else { 0 };
                    share.phase = Phase::Sending;
                }
                PushState::Unknown {} => share.start_over(),
            },
            Message::Refused(refused) => {
                share.phase = Phase::Settled(Err(refused.refusal));
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// The connection is lost, and with it what was on its way.
    pub(super) fn push_lost(&mut self, sequence: Sequence, link: usize) {
        let Some(push) = self.pushes.get_mut(&sequence) else {
            return;
        };
        for share in push.shares.iter_mut().filter(|share| share.link == link) {
            (share.request, share.names) = (None, false);
            share.phase = match std::mem::replace(&mut share.phase, Phase::Roomless) {
                Phase::Roomless | Phase::Reserving => Phase::Roomless,
                Phase::Sending if share.sent == 0 => Phase::Roomless,
                Phase::Sending
                | Phase::Sent
                | Phase::Undecided
                | Phase::InDoubt
                | Phase::Asking => Phase::InDoubt,
                settled @ Phase::Settled(_) => settled,
            };
        }
    }
}

/// Whether a shard may say this of a push. In synchronous mode the step owner decides, and the
/// others hold.
fn may_be_said(outcome: Outcome, synchronous: bool, is_owner: bool) -> bool {
    match outcome {
        Outcome::Applied { .. } => !synchronous,
        Outcome::Accepted { .. } => synchronous && is_owner,
        Outcome::Held {} => synchronous && !is_owner,
        Outcome::Stale { .. } | Outcome::Withdrawn {} => true,
    }
}
