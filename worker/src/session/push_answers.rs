//! Answers of shards to pushes, and pushes whose connection is lost.

use std::time::Instant;

use pushpull_common::ids::{RequestId, Sequence};
use pushpull_common::protocol::message::PushAnswer;
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::Session;
use super::pushes::SharePhase;

impl Session {
    /// Handles the answer to a reservation or to the parts of a push.
    pub(super) fn push_answered(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        request: RequestId,
        message: Message,
    ) {
        if let Message::PushAnswer(answer) = &message {
            self.record_extras(now, link, request, answer);
        }
        let is_owner = self.links[link].shard == self.config.owner;
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
            Message::Reserved(push_slot) if share.phase == SharePhase::Reserving => {
                share.push_slot = push_slot.push_slot;
                share.phase = SharePhase::Sending;
            }
            Message::PushAnswer(answer)
                if share.awaits(answer.outcome)
                    && is_allowed_outcome(answer.outcome, synchronous, is_owner) =>
            {
                share.phase = SharePhase::Settled(Ok(answer.outcome));
            }
            Message::Refused(refused) => match refused.refusal {
                // The slot belongs to another push: reserve another one and send all parts again. A
                // reservation answered in the meantime may have returned the same slot. Parts sent
                // into that one would be taken for the rest of the refused parts, and be skipped.
                Refusal::PushSlotTaken { push_slot } => {
                    // A slot of a push buffer would be refused again at once: send the parts
                    // instead.
                    share.in_push_buffer =
                        share.in_push_buffer.take().filter(|_| !share.uses_push_buffer);
                    share.start_over();
                    if self.links[link].push_slot == push_slot {
                        self.links[link].push_slot = 0;
                    }
                }
                Refusal::Deadline { awaited, .. }
                    if synchronous && is_owner && share.phase == SharePhase::Sent =>
                {
                    (share.phase, share.request) = (SharePhase::Undecided, None);
                    let completed_at = share.completed_at;
                    self.report_undecided(now, sequence, link, completed_at, &awaited);
                }
                refusal => share.phase = SharePhase::Settled(Err(refusal)),
            },
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// Records the next token and push slot, which come with the answer to a push.
    fn record_extras(
        &mut self,
        now: Instant,
        link: usize,
        request: RequestId,
        answer: &PushAnswer,
    ) {
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
        let is_owner = self.links[link].shard == self.config.owner;
        let Some(push) = self.pushes.get_mut(&sequence) else {
            return;
        };
        let synchronous = push.synchronous;
        let Some(share) = push.shares.iter_mut().find(|share| share.link == link) else {
            return;
        };
        match message {
            Message::OutcomeIs(answer) => match answer.state {
                PushState::Settled { outcome } => {
                    match is_allowed_outcome(outcome, synchronous, is_owner) {
                        true => share.phase = SharePhase::Settled(Ok(outcome)),
                        false => {
                            share.phase = SharePhase::InDoubt;
                            return self.unexpected(now, link, &Message::OutcomeIs(answer));
                        }
                    }
                }
                PushState::TooOld { oldest } => {
                    let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                    let refusal = Refusal::Window { sequence, oldest, newest };
                    share.phase = SharePhase::Settled(Err(refusal));
                }
                // The push slot is still reserved there. A whole share needs no bytes again:
                // repeating the last part asks for the outcome.
                PushState::Receiving { bytes } => {
                    let has_all = share.whole && bytes == share.bytes();
                    share.whole = has_all;
                    share.sent = if has_all { share.parts.len() } else { 0 };
                    share.phase = SharePhase::Sending;
                }
                PushState::Unknown {} => share.start_over(),
            },
            Message::Refused(refused) => {
                share.phase = SharePhase::Settled(Err(refused.refusal));
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// Updates a push after the loss of a connection: frames in flight are lost.
    pub(super) fn push_lost(&mut self, sequence: Sequence, link: usize) {
        let Some(push) = self.pushes.get_mut(&sequence) else {
            return;
        };
        for share in push.shares.iter_mut().filter(|share| share.link == link) {
            (share.request, share.uses_push_buffer) = (None, false);
            share.phase = match std::mem::replace(&mut share.phase, SharePhase::NoSlot) {
                SharePhase::NoSlot | SharePhase::Reserving => SharePhase::NoSlot,
                SharePhase::Sending if share.sent == 0 => SharePhase::NoSlot,
                SharePhase::Sending
                | SharePhase::Sent
                | SharePhase::Undecided
                | SharePhase::InDoubt
                | SharePhase::Querying => SharePhase::InDoubt,
                settled @ SharePhase::Settled(_) => settled,
            };
        }
    }
}

/// Returns whether a shard may send this outcome. In synchronous mode the step owner decides and
/// the other shards hold.
fn is_allowed_outcome(outcome: Outcome, synchronous: bool, is_owner: bool) -> bool {
    match outcome {
        Outcome::Applied { .. } => !synchronous,
        Outcome::Accepted { .. } => synchronous && is_owner,
        Outcome::Held {} => synchronous && !is_owner,
        Outcome::Stale { .. } | Outcome::Withdrawn {} => true,
    }
}
