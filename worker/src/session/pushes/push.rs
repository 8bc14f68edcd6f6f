//! One push, and its share on each shard.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RequestId, Sequence, ShardId};
use pushpull_common::protocol::limits::{PUSH_SHARED_RANGES_FEW, PUSH_SHARED_RANGES_MAX};
use pushpull_common::protocol::message::{
    self, EffectEncoded, EffectPart, EffectShared, Operation, OutcomeQuery, PushEncoded, PushPart,
    PushShared, Reserve, Withdraw,
};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{EffectRef, Envelope, Grant, Outcome, Refusal};

use crate::gradients::parts::{EncodedRange, FrameBody, OutgoingPart};
use crate::gradients::scatter::{PushBufferParts, ScatteredGradients};
use crate::gradients::staged_parts::StagedParts;
use crate::session::ReadPoint;
use crate::session::links::{OutgoingFrame, PendingRequest, SessionLinks};

/// The state of a push on one shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum SharePhase {
    /// Needs a push slot.
    #[default]
    NoSlot,
    /// Has requested a push slot.
    Reserving,
    /// Has a push slot; parts are sent as they come.
    Sending,
    /// All parts are sent; the outcome is unknown.
    Sent,
    /// The step owner holds the share and did not decide while an operation waited (synchronous
    /// mode). The next command asks again.
    Undecided,
    /// The connection was lost after parts had been sent. The shard must be asked what it received.
    InDoubt,
    /// The shard has been asked.
    Querying,
    /// The shard has settled its share.
    Settled(Result<Outcome, Refusal>),
}

/// One shard's share of a push.
#[derive(Debug, Default)]
pub(super) struct PushShare {
    pub(super) link: usize,
    pub(super) parts: Vec<OutgoingPart>,
    /// The parts that are stored in a push buffer of the shard.
    pub(super) in_push_buffer: Option<PushBufferParts>,
    /// Whether those parts are referenced instead of sent: the push buffer belongs to the current
    /// connection.
    pub(super) uses_push_buffer: bool,
    /// How many parts have been sent over the current connection.
    pub(super) sent: usize,
    pub(super) push_slot: u32,
    /// The request for a push slot, or that of the parts.
    pub(super) request: Option<RequestId>,
    /// When the last part was sent. The deadline in it covers the operations that waited then.
    pub(super) completed_at: Option<Instant>,
    /// The last part has been sent, and the shard has not denied having it.
    pub(super) whole: bool,
    pub(super) phase: SharePhase,
}

impl PushShare {
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.phase, SharePhase::Settled(_))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(OutgoingPart::bytes).sum()
    }

    /// Returns whether the share has a push slot that it has not filled, or has requested one.
    fn takes_push_slot(&self) -> bool {
        let has_slot = matches!(self.phase, SharePhase::Reserving | SharePhase::Sending);
        !self.is_settled() && !self.whole && (has_slot || self.sent > 0)
    }

    /// Returns whether this outcome can come now. Only a stale outcome can precede the last part.
    pub(super) fn awaits(&self, outcome: Outcome) -> bool {
        match self.phase {
            SharePhase::Sent => true,
            SharePhase::Sending => self.sent > 0 && matches!(outcome, Outcome::Stale { .. }),
            _ => false,
        }
    }

    /// Restarts a share that the shard does not have: a new push slot, and all parts again.
    pub(super) fn start_over(&mut self) {
        self.sent = 0;
        self.request = None;
        self.whole = false;
        self.phase = SharePhase::NoSlot;
        self.uses_push_buffer = false;
    }

    /// Records that the step owner has not decided in time. Returns when the push was complete.
    pub(super) fn undecided(&mut self) -> Option<Instant> {
        self.phase = SharePhase::Undecided;
        self.request = None;
        self.completed_at
    }

    /// Updates the share after the loss of its connection: frames in flight are lost.
    pub(super) fn lost(&mut self) {
        self.request = None;
        self.uses_push_buffer = false;
        self.phase = match std::mem::replace(&mut self.phase, SharePhase::NoSlot) {
            SharePhase::NoSlot | SharePhase::Reserving => SharePhase::NoSlot,
            SharePhase::Sending if self.sent == 0 => SharePhase::NoSlot,
            SharePhase::Sending
            | SharePhase::Sent
            | SharePhase::Undecided
            | SharePhase::InDoubt
            | SharePhase::Querying => SharePhase::InDoubt,
            settled @ SharePhase::Settled(_) => settled,
        };
    }

    /// Chooses the push slot: the one of the push buffer that contains the parts, or the one that
    /// is reserved on the link. Returns false if there is none.
    fn take_push_slot(&mut self, links: &mut SessionLinks) -> bool {
        let link = &mut links[self.link];
        let in_buffer = self.in_push_buffer.as_ref();
        let in_buffer = in_buffer.filter(|of| Some(of.push_buffer) == link.push_buffer);
        self.uses_push_buffer = in_buffer.is_some();
        self.push_slot = match in_buffer {
            Some(in_buffer) => in_buffer.push_slot,
            None => std::mem::take(&mut link.push_slot),
        };
        self.push_slot != 0
    }

    /// Returns the range to reference next, instead of sending its parts.
    fn next_in_push_buffer(&self) -> Option<PushBufferParts> {
        self.in_push_buffer
            .clone()
            .filter(|in_buffer| self.uses_push_buffer && in_buffer.parts.start == self.sent)
    }

    /// References the parts of a push that are in a slot of the push buffer.
    fn send_shared_parts(
        &mut self,
        now: Instant,
        envelope: Envelope,
        (part, effect): (PushPart, Option<EffectRef>),
        in_buffer: &PushBufferParts,
        links: &mut SessionLinks,
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
            let whole = part.whole.filter(|_| left == 0);
            let next = part.next && left == 0;
            let deadline_ms = if left == 0 { envelope.deadline_ms } else { 0 };
            let envelope = Envelope { deadline_ms, ..envelope };
            let shared =
                PushShared { operation, token, generation, push_slot, whole, next, read, ranges };
            let frame = match effect {
                None => OutgoingFrame::new(envelope, shared),
                Some(effect) => {
                    OutgoingFrame::new(envelope, EffectShared { shared: Box::new(shared), effect })
                }
            };
            self.send_frame(now, frame, links);
        }
    }

    /// Sends a frame of a push. All frames of a share belong to one request.
    fn send_frame(&mut self, now: Instant, frame: OutgoingFrame, links: &mut SessionLinks) {
        if let Some(request) = self.request {
            return links.send_more(now, self.link, request, frame);
        }
        let pending = PendingRequest::Push(frame.envelope.sequence);
        self.request = Some(links.send(now, self.link, pending, frame));
    }
}

/// A pending push.
///
/// Invariants: the push keeps its number and its bytes until it is settled. It has at most one
/// share on each shard. No part is sent without a push slot for the whole share.
#[derive(Debug)]
pub(super) struct PendingPush {
    pub(super) sequence: Sequence,
    pub(super) operation: Operation,
    /// A gradient in synchronous mode: the step owner decides for all shards.
    pub(super) synchronous: bool,
    /// A gradient in asynchronous mode: no shard may apply it unless the step owner does.
    pub(super) follows_owner: bool,
    pub(super) grant: Option<Grant>,
    /// The effect of the gradient. Every part names it.
    pub(super) effect: Option<EffectRef>,
    pub(super) read: ReadPoint,
    pub(super) shares: Vec<PushShare>,
    /// No more parts will come.
    pub(super) complete: bool,
}

impl PendingPush {
    /// Adds parts, those staged for this push first.
    pub(super) fn add_parts(
        &mut self,
        now: Instant,
        staged: Option<&Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
        links: &mut SessionLinks,
    ) {
        for (shard, part) in staged.into_iter().flat_map(StagedParts::parts) {
            self.share(links.to(now, shard)).parts.push(part);
        }
        for (shard, parts) in parts {
            self.share(links.to(now, shard)).parts.extend(parts);
        }
    }

    /// Adds dense gradients.
    pub(super) fn add_scattered(
        &mut self,
        now: Instant,
        scattered: &ScatteredGradients,
        links: &mut SessionLinks,
    ) {
        for (index, shard) in scattered.shards().enumerate() {
            let share = self.share(links.to(now, shard));
            share.in_push_buffer = scattered.in_push_buffer(index, share.parts.len());
            share.parts.extend(scattered.parts(index));
        }
    }

    /// Returns the share on a link, which is created on the first call.
    pub(super) fn share(&mut self, link: usize) -> &mut PushShare {
        let index = self.shares.iter().position(|share| share.link == link);
        let index = index.unwrap_or_else(|| {
            self.shares.push(PushShare { link, ..PushShare::default() });
            self.shares.len() - 1
        });
        &mut self.shares[index]
    }

    pub(super) fn share_on(&mut self, link: usize) -> Option<&mut PushShare> {
        self.shares.iter_mut().find(|share| share.link == link)
    }

    pub(super) fn unsettled(&self) -> impl Iterator<Item = usize> + '_ {
        self.shares.iter().filter(|share| !share.is_settled()).map(|share| share.link)
    }

    /// Returns whether the push counts on the step owner; `None` without its outcome. A push that
    /// repeats an effect does: the owner has counted another execution, which may have ended before
    /// it reached the other shards.
    fn counts_on(&self, owner: Option<usize>) -> Option<bool> {
        self.shares.iter().find_map(|share| match &share.phase {
            SharePhase::Settled(result) if Some(share.link) == owner => {
                Some(matches!(result, Ok(Outcome::Applied { .. } | Outcome::Repeated {})))
            }
            _ => None,
        })
    }

    /// Returns whether the step owner has rejected the push, so that no shard may apply it.
    fn is_rejected_by(&self, owner: Option<usize>) -> bool {
        self.follows_owner && self.counts_on(owner) == Some(false)
    }

    /// Returns whether a shard may hold its whole share, so that it is too late to withdraw.
    pub(super) fn may_be_whole(&self) -> bool {
        self.shares.iter().any(|share| match share.phase {
            SharePhase::Settled(Err(_)) => false,
            SharePhase::Settled(Ok(_)) => true,
            _ => share.whole,
        })
    }

    /// Returns whether a shard may have counted the push, so that the others must count it too.
    pub(super) fn must_complete(&self) -> bool {
        !self.synchronous && self.may_be_whole()
    }

    /// Returns whether the fate of the push is known.
    ///
    /// In asynchronous mode every shard must settle its share, or the step owner reject the push
    /// before another shard may hold its share whole. In synchronous mode:
    ///
    /// - The step owner's outcome decides it. If accepted, every shard holds it; if stale, no shard
    ///   needs the rest.
    /// - A refusal by any shard decides it too. That shard will never hold the push, so the step
    ///   owner would never answer. The token is returned, which discards what the other shards
    ///   hold.
    pub(super) fn is_decided(&self, owner: Option<usize>) -> bool {
        if self.synchronous {
            return self.shares.iter().any(|share| match share.phase {
                SharePhase::Settled(Ok(_)) => Some(share.link) == owner,
                SharePhase::Settled(Err(_)) => true,
                _ => false,
            });
        }
        let is_whole_somewhere =
            || self.shares.iter().any(|share| share.whole && !share.is_settled());
        (self.complete && self.unsettled().next().is_none())
            || (self.is_rejected_by(owner) && !is_whole_somewhere())
    }

    /// Returns whether a shard may receive the last part of the push, after which it may apply it.
    ///
    /// A gradient goes to all shards at once if its token was granted after the shard's welcome.
    /// Before the owner takes such a token back, it makes the shard close the connection. Over a
    /// connection newer than the token, the owner's outcome comes first. It always comes first if
    /// the owner may reject gradients as stale, and for a gradient of an effect, which the owner
    /// rejects under an old epoch.
    pub(super) fn may_complete_on(&self, link: usize, links: &SessionLinks) -> bool {
        let owner = links.owner();
        if !self.follows_owner || Some(link) == owner {
            return true;
        }
        // The shard may have applied its whole share. Repeating the last part asks for the outcome.
        if self.shares.iter().any(|share| share.link == link && share.whole) {
            return true;
        }
        self.counts_on(owner).unwrap_or_else(|| {
            let granted = self.grant.zip(links[link].granted_since);
            let at_once = !links.owner_first && self.effect.is_none();
            at_once && granted.is_some_and(|(grant, since)| grant.token >= since)
        })
    }

    /// Sends what can be sent of one share now. Returns whether that requests a token.
    pub(super) fn send_share(
        &mut self,
        now: Instant,
        index: usize,
        links: &mut SessionLinks,
        may_prefetch: bool,
        remaining_ms: impl Fn(Sequence) -> u32,
    ) -> bool {
        let share = &self.shares[index];
        let link = share.link;
        if !links[link].is_up() {
            return false;
        }
        let begins =
            matches!(share.phase, SharePhase::NoSlot | SharePhase::Sending) && !share.whole;
        if begins && self.is_rejected_by(links.owner()) {
            return false;
        }
        let envelope = Envelope { sequence: self.sequence, ..Envelope::default() };
        let share = &mut self.shares[index];
        match share.phase {
            SharePhase::InDoubt => {
                share.phase = SharePhase::Querying;
                let pending = PendingRequest::PushState(self.sequence);
                let frame = OutgoingFrame::new(envelope, OutcomeQuery {});
                links.send(now, link, pending, frame);
            }
            SharePhase::NoSlot if self.complete || !share.parts.is_empty() => {
                if share.take_push_slot(links) {
                    share.phase = SharePhase::Sending;
                    return self.send_parts(now, index, links, may_prefetch, remaining_ms);
                } else {
                    share.phase = SharePhase::Reserving;
                    let pending = PendingRequest::Reserve(self.sequence);
                    let frame = OutgoingFrame::new(envelope, Reserve {});
                    share.request = Some(links.send(now, link, pending, frame));
                }
            }
            SharePhase::Sending => {
                return self.send_parts(now, index, links, may_prefetch, remaining_ms);
            }
            _ => {}
        }
        false
    }

    /// Sends the available parts of a share, or references to them. Returns whether they request a
    /// token.
    fn send_parts(
        &mut self,
        now: Instant,
        index: usize,
        links: &mut SessionLinks,
        may_prefetch: bool,
        remaining_ms: impl Fn(Sequence) -> u32,
    ) -> bool {
        let operation = self.operation;
        let grant = self.grant;
        let synchronous = self.synchronous;
        // If the owner's outcome must come first, the available parts are sent ahead and an empty
        // last part follows.
        let complete = self.complete && self.may_complete_on(self.shares[index].link, links);
        let deadline_ms = if synchronous { remaining_ms(self.sequence) } else { 0 };
        let step = grant.map_or(GlobalStep(0), |grant| grant.step).max(self.read.step);
        let sequence = self.sequence;
        let effect = self.effect;
        let share = &mut self.shares[index];
        let read = self.read.gradients.of(links[share.link].shard);
        let total = share.bytes();
        let mut prefetches = false;
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
                next: last && operation == Operation::Gradient {} && !synchronous && may_prefetch,
                read,
            };
            let (body, encoded) = part.map_or((FrameBody::Empty, None), OutgoingPart::body);
            let deadline_ms = if last { deadline_ms } else { 0 };
            let envelope = Envelope { sequence, step, deadline_ms, ..Envelope::default() };
            share.sent = end;
            prefetches |= message.next;
            if last {
                share.phase = SharePhase::Sent;
                share.whole = true;
                share.completed_at = Some(now);
            }
            if let Some(in_buffer) = in_buffer {
                let message = (message, effect);
                share.send_shared_parts(now, envelope, message, &in_buffer, links);
                continue;
            }
            let encoded = encoded.map(|EncodedRange { encoding, elements, factor, .. }| {
                let encoding = encoding.code();
                PushEncoded { part: message.clone(), encoding, elements, factor }
            });
            let message = match (encoded, effect) {
                (None, None) => message.into(),
                (None, Some(effect)) => EffectPart { part: message, effect }.into(),
                (Some(encoded), None) => encoded.into(),
                (Some(encoded), Some(effect)) => EffectEncoded { encoded, effect }.into(),
            };
            share.send_frame(now, OutgoingFrame { envelope, message, body }, links);
        }
        prefetches
    }

    /// Withdraws the incomplete shares of a push that has ended, so that other clients get their
    /// push slots.
    pub(super) fn withdraw_shares(&self, now: Instant, links: &mut SessionLinks) {
        for share in self.shares.iter().filter(|share| share.takes_push_slot()) {
            if links[share.link].is_up() {
                if share.phase == SharePhase::Sending && share.sent == 0 {
                    links[share.link].push_slot = share.push_slot;
                }
                let envelope = Envelope { sequence: self.sequence, ..Envelope::default() };
                let pending = PendingRequest::Withdraw(share.request);
                let frame = OutgoingFrame::new(envelope, Withdraw {});
                links.send(now, share.link, pending, frame);
            }
        }
    }
}

/// The most small frames that reference the parts of one push.
const SMALL_FRAMES_MAX: usize = 8;
