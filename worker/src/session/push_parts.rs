//! Sends the parts of a push to one shard, or references to parts in its push buffer.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, Sequence};
use pushpull_common::protocol::limits::{PUSH_SHARED_RANGES_FEW, PUSH_SHARED_RANGES_MAX};
use pushpull_common::protocol::message::{self, Operation, PushEncoded, PushPart, PushShared};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Message};

use super::Session;
use super::link::PendingRequest;
use super::pushes::{PendingPush, PushShare, SharePhase};
use crate::gradients::parts::{EncodedRange, FrameBody, OutgoingPart};
use crate::gradients::scatter::PushBufferParts;

/// The most small frames that reference the parts of one push.
const SMALL_FRAMES_MAX: usize = 8;

impl Session {
    /// Sends the available parts of a push, or references to them.
    pub(super) fn send_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        push: &mut PendingPush,
        index: usize,
    ) {
        let (operation, grant, synchronous) = (push.operation, push.grant, push.synchronous);
        // If the owner's outcome must come first, the available parts are sent ahead and an empty
        // last part follows.
        let may_end = self.may_complete_on(push, push.shares[index].link);
        let complete = push.complete && may_end;
        let deadline_ms = if synchronous { self.remaining_ms(now, sequence) } else { 0 };
        let step = grant.map_or(GlobalStep(0), |grant| grant.step).max(push.read.step);
        let share = &mut push.shares[index];
        let read = push.read.gradients.of(self.links[share.link].shard);
        let total = share.bytes();
        // A push completed after all its parts were sent ends with an empty part.
        while share.sent < share.parts.len() || (complete && share.phase == SharePhase::Sending) {
            let in_buffer = share.next_in_push_buffer();
            let end = in_buffer.as_ref().map_or(share.sent + 1, |in_buffer| in_buffer.parts.end);
            let last = complete && end >= share.parts.len();
            let part = share.parts.get(share.sent);
            let message = PushPart {
                operation,
                token: grant.map_or_else(Default::default, |grant| grant.token),
                generation: grant.map_or(0, |grant| grant.generation),
                push_slot: share.push_slot,
                offset: part.map_or(0, |part| part.offset),
                whole: last.then_some(total),
                // A synchronous step cannot grant tokens before every shard has applied it.
                next: last
                    && operation == Operation::Gradient {}
                    && !synchronous
                    && self.tokens.may_prefetch(),
                read,
            };
            let (body, encoded) = part.map_or((FrameBody::Empty, None), OutgoingPart::body);
            let deadline_ms = if last { deadline_ms } else { 0 };
            let envelope = Envelope { sequence, step, deadline_ms, ..Envelope::default() };
            share.sent = end;
            if message.next {
                self.tokens.record_request();
            }
            if last {
                (share.phase, share.whole, share.completed_at) =
                    (SharePhase::Sent, true, Some(now));
            }
            match (in_buffer, encoded) {
                (Some(in_buffer), _) => {
                    self.send_shared_parts(now, share, envelope, message, &in_buffer)
                }
                (None, None) => self.send_of_push(now, share, envelope, message, body),
                (None, Some(EncodedRange { encoding, elements, factor, .. })) => {
                    let encoding = encoding.code();
                    let encoded = PushEncoded { part: message, encoding, elements, factor };
                    self.send_of_push(now, share, envelope, encoded, body);
                }
            }
        }
    }

    /// References the parts of a push that are in a slot of the push buffer.
    fn send_shared_parts(
        &mut self,
        now: Instant,
        share: &mut PushShare,
        envelope: Envelope,
        part: PushPart,
        in_buffer: &PushBufferParts,
    ) {
        let PushPart { operation, token, generation, push_slot, read, .. } = part;
        let mut left = in_buffer.ranges.len();
        // A few more small frames are cheaper than a heap allocation for one; very many are not.
        let few = in_buffer.ranges.len() <= SMALL_FRAMES_MAX * PUSH_SHARED_RANGES_FEW;
        let at_once = if few { PUSH_SHARED_RANGES_FEW } else { PUSH_SHARED_RANGES_MAX };
        for some in in_buffer.ranges.chunks(at_once) {
            left -= some.len();
            let stretch =
                |range: &Range<u64>| message::SharedRange { start: range.start, end: range.end };
            let ranges = List::of(some.iter().map(stretch));
            let ranges = ranges.expect("a chunk is within the limit of one message");
            let (whole, next) = (part.whole.filter(|_| left == 0), part.next && left == 0);
            let deadline_ms = if left == 0 { envelope.deadline_ms } else { 0 };
            let envelope = Envelope { deadline_ms, ..envelope };
            let shared =
                PushShared { operation, token, generation, push_slot, whole, next, read, ranges };
            self.send_of_push(now, share, envelope, shared, FrameBody::Empty);
        }
    }

    /// Sends a frame of a push. All frames of a share belong to one request.
    fn send_of_push(
        &mut self,
        now: Instant,
        share: &mut PushShare,
        envelope: Envelope,
        message: impl Into<Message>,
        body: FrameBody,
    ) {
        if let Some(request) = share.request {
            let envelope = Envelope { request, ..envelope };
            return self.send_on(now, share.link, envelope, message, body);
        }
        let pending = PendingRequest::Push(envelope.sequence);
        share.request = Some(self.send(now, share.link, pending, envelope, message, body));
    }
}

impl PushShare {
    /// Returns the range to reference next, instead of sending its parts.
    fn next_in_push_buffer(&self) -> Option<PushBufferParts> {
        self.in_push_buffer
            .clone()
            .filter(|in_buffer| self.uses_push_buffer && in_buffer.parts.start == self.sent)
    }
}
