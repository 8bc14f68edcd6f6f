//! The parts of a push on their way to one shard: sent, or named if they lie in memory that it has lent.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, Sequence};
use pushpull_common::protocol::limits::{PUSH_SHARED_RANGES_FEW, PUSH_SHARED_RANGES_MAX};
use pushpull_common::protocol::message::{self, Operation, PushEncoded, PushPart, PushShared};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Message};

use super::Session;
use super::link::Pending;
use super::pushes::{Phase, Push, Share};
use crate::parts::{Body, InPushBuffer, Part, Stretch};

/// How many messages name parts few at a time.
const SHARED_FRAMES_MAX: usize = 8;

impl Session {
    /// Sends of a push what there is, or says where it lies.
    pub(super) fn send_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        push: &mut Push,
        index: usize,
    ) {
        let (operation, grant, synchronous) = (push.operation, push.grant, push.synchronous);
        // Where another has to say first that it is taken, it is not whole before: what there is goes
        // ahead, and an empty last part follows.
        let may_end = self.may_end_on(push, push.shares[index].link);
        let complete = push.complete && may_end;
        let deadline_ms = if synchronous { self.remaining_ms(now, sequence) } else { 0 };
        let step = grant.map_or(GlobalStep(0), |grant| grant.step).max(push.read.step);
        let share = &mut push.shares[index];
        let read = push.read.gradients.of(self.links[share.link].shard);
        let total = share.bytes();
        // A push that was completed after its last part was sent ends with an empty one.
        while share.sent < share.parts.len() || (complete && share.phase == Phase::Sending) {
            let there = share.named_next();
            let behind = there.as_ref().map_or(share.sent + 1, |there| there.parts.end);
            let last = complete && behind >= share.parts.len();
            let part = share.parts.get(share.sent);
            let message = PushPart {
                operation,
                token: grant.map_or_else(Default::default, |grant| grant.token),
                generation: grant.map_or(0, |grant| grant.generation),
                push_slot: share.push_slot,
                offset: part.map_or(0, |part| part.offset),
                whole: last.then_some(total),
                // A synchronous step has none to give before it is applied everywhere.
                next: last
                    && operation == Operation::Gradient {}
                    && !synchronous
                    && self.tokens.may_come_with_an_answer(),
                read,
            };
            let (body, encoded) = part.map_or((Body::Empty, None), Part::body);
            let deadline_ms = if last { deadline_ms } else { 0 };
            let envelope = Envelope { sequence, step, deadline_ms, ..Envelope::default() };
            share.sent = behind;
            if message.next {
                self.tokens.asks();
            }
            if last {
                (share.phase, share.whole, share.asked) = (Phase::Sent, true, Some(now));
            }
            match (there, encoded) {
                (Some(there), _) => self.name_parts(now, share, envelope, message, &there),
                (None, None) => self.send_of_push(now, share, envelope, message, body),
                (None, Some(Stretch { encoding, elements, factor, .. })) => {
                    let encoding = encoding.code();
                    let encoded = PushEncoded { part: message, encoding, elements, factor };
                    self.send_of_push(now, share, envelope, encoded, body);
                }
            }
        }
    }

    /// Says which parts of a push lie in its room.
    fn name_parts(
        &mut self,
        now: Instant,
        share: &mut Share,
        envelope: Envelope,
        part: PushPart,
        there: &InPushBuffer,
    ) {
        let PushPart { operation, token, generation, push_slot, read, .. } = part;
        let mut left = there.ranges.len();
        // A few frames more cost less than memory for one, very many more do not.
        let few = there.ranges.len() <= SHARED_FRAMES_MAX * PUSH_SHARED_RANGES_FEW;
        let at_once = if few { PUSH_SHARED_RANGES_FEW } else { PUSH_SHARED_RANGES_MAX };
        for some in there.ranges.chunks(at_once) {
            left -= some.len();
            let stretch =
                |range: &Range<u64>| message::Stretch { start: range.start, end: range.end };
            let ranges = List::of(some.iter().map(stretch));
            let ranges = ranges.expect("no more are named at once than may be");
            let (whole, next) = (part.whole.filter(|_| left == 0), part.next && left == 0);
            let deadline_ms = if left == 0 { envelope.deadline_ms } else { 0 };
            let envelope = Envelope { deadline_ms, ..envelope };
            let shared =
                PushShared { operation, token, generation, push_slot, whole, next, read, ranges };
            self.send_of_push(now, share, envelope, shared, Body::Empty);
        }
    }

    /// Sends a frame of a push: all are of one request.
    fn send_of_push(
        &mut self,
        now: Instant,
        share: &mut Share,
        envelope: Envelope,
        message: impl Into<Message>,
        body: Body,
    ) {
        if let Some(request) = share.request {
            let envelope = Envelope { request, ..envelope };
            return self.send_on(now, share.link, envelope, message, body);
        }
        let pending = Pending::Push(envelope.sequence);
        share.request = Some(self.send(now, share.link, pending, envelope, message, body));
    }
}

impl Share {
    /// What is named next, in place of its parts.
    fn named_next(&self) -> Option<InPushBuffer> {
        self.in_push_buffer.clone().filter(|there| self.names && there.parts.start == self.sent)
    }
}
