//! Validates the answers to a pull and receives their bodies.

use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::PulledEncoded;
use pushpull_common::protocol::{Header, Message};

use super::encoded_values::EncodedValuesPart;
use super::link::BodyTarget;
use super::pulls::{PullProgress, PullRequest};
use super::{OpId, OpKind, Session};
use crate::gradients::sharding_plan::LayoutSpan;

impl Session {
    pub(super) fn pull_answered(
        &mut self,
        now: Instant,
        (id, request): (OpId, usize),
        link: usize,
        header: &Header,
        message: Message,
    ) {
        if let Message::Refused(refused) = message {
            return self.pull_refused(now, id, link, refused.refusal);
        }
        let shard = self.links[link].shard;
        if !matches!(message, Message::Pulled(_) | Message::Rows(_) | Message::PulledEncoded(_)) {
            self.pull_lost(id, link);
            return self.unexpected(now, link, &message);
        }
        // The caller may have stopped waiting. The body is then read and discarded.
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        let plan = pull.plan.clone();
        let form = self.form_of_values(link, &plan);
        let encoding = self.encoding_of_rows(pull, request);
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        let (bytes, mut short) = (header.body_bytes, None);
        let spans = &mut self.links[link].spans;
        let placed = match &message {
            Message::Rows(rows) => pull.rows(request, rows, encoding, bytes).map(|(to, part)| {
                short = part;
                spans.clear();
                spans.push((LayoutSpan::Buffer(to.start), to.len()));
            }),
            // An older server may not support the chosen encoding and sends plain values.
            // Half-precision variables are always encoded.
            Message::Pulled(pulled) if !plan.has_halves(shard) => {
                pull.part(request, shard, pulled, bytes, spans)
            }
            Message::PulledEncoded(PulledEncoded { part, bytes: covered }) => {
                pull.part(request, shard, part, *covered, spans).and_then(|()| {
                    let form = form.ok_or("values in an unrequested encoding")?;
                    let end = part.offset.checked_add(*covered);
                    let range = part.offset..end.ok_or("values beyond the shard's variables")?;
                    short = EncodedValuesPart::new(form, &plan, shard, range, bytes);
                    short.is_some().then_some(()).ok_or("values of another length")
                })
            }
            _ => Err("values in an unrequested encoding"),
        };
        let last = !has_more_parts(&message);
        if let Err(error) = placed {
            self.pull_lost(id, link);
            return self.reset_link(now, link, error.to_owned());
        }
        // Row answers do not raise the step: they may be of several steps, of which the oldest
        // counts. That is the step known when the pull began.
        if shard == self.config.owner
            && matches!(message, Message::Pulled(_) | Message::PulledEncoded(_))
        {
            pull.step = pull.step.max(header.step);
        }
        if self.synchronous {
            if let Some(PullRequest { progress: PullProgress::Sent(_, step), .. }) =
                pull.requests.get_mut(request)
            {
                *step = header.step.max(*step);
            }
            if pull.token.is_some_and(|step| header.step > step) {
                return self.pull_is_stale(now, id);
            }
            if pull.token.is_some_and(|step| header.step < step) {
                self.pull_lost(id, link);
                return self.reset_link(
                    now,
                    link,
                    "values of a step before the token's".to_owned(),
                );
            }
        }
        if header.body_bytes == 0 {
            return self.values_received(now, (id, request), link, last);
        }
        self.links[link].receiving = Some(match short {
            None => BodyTarget::Values { op: id, request, last },
            Some(part) => {
                self.links[link].encoded_body.resize(bytes as usize, 0);
                BodyTarget::EncodedValues { op: id, request, part, last }
            }
        });
    }

    pub(super) fn values_received(
        &mut self,
        now: Instant,
        (id, request): (OpId, usize),
        link: usize,
        last: bool,
    ) {
        let epoch = self.links[link].restore_epoch;
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        if let Some(request) = pull.requests.get_mut(request).filter(|_| last) {
            let step = match request.progress {
                PullProgress::Sent(_, step) => step,
                _ => GlobalStep(0),
            };
            (request.progress, request.older) = (PullProgress::Done(epoch, step), None);
            let waits =
                pull.requests.iter().any(|request| request.progress == PullProgress::Unsent);
            if self.synchronous || waits || pull.unanswered().next().is_none() {
                self.drive(now);
            }
        }
    }

    /// Calls `receive` with the memory for the body of the link's last message, in order, or with
    /// `None` if the body is to be discarded.
    pub(crate) fn with_targets<R>(
        &mut self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        let link = &mut self.links[link];
        match &mut link.receiving {
            None => receive(None),
            Some(BodyTarget::Answer { body, .. }) => receive(Some(&mut [body])),
            Some(BodyTarget::EncodedValues { .. }) => receive(Some(&mut [&mut link.encoded_body])),
            Some(BodyTarget::Values { op, .. }) => {
                match self.ops.get_mut(op).map(|op| &mut op.kind) {
                    Some(OpKind::Pull(pull)) => {
                        scatter(pull.buffer.bytes_mut(), &link.spans, &mut link.scratch, receive)
                    }
                    _ => receive(None),
                }
            }
        }
    }

    /// Handles a completely received body.
    pub(super) fn body(&mut self, now: Instant, index: usize) {
        let link = &mut self.links[index];
        link.last_received = now;
        match link.receiving.take() {
            None => {}
            Some(BodyTarget::Answer { op, message, body }) => {
                self.finish_request(now, op, index, message, body);
            }
            Some(BodyTarget::Values { op, request, last, .. }) => {
                self.values_received(now, (op, request), index, last);
            }
            Some(BodyTarget::EncodedValues { op, request, part, last }) => {
                self.encoded_values_received(now, (op, request), index, &part, last);
            }
        }
    }
}

/// Returns whether more parts of the same answer follow this one.
pub(super) fn has_more_parts(message: &Message) -> bool {
    match message {
        Message::Pulled(part) | Message::PulledEncoded(PulledEncoded { part, .. }) => !part.last,
        _ => false,
    }
}

/// How many targets fit on the stack.
const INLINE_TARGETS: usize = 64;

/// Calls `receive` with the ranges of the buffer in the order of the spans. Padding goes to
/// `scratch`.
fn scatter<R>(
    buffer: &mut [u8],
    spans: &[(LayoutSpan, usize)],
    scratch: &mut Vec<u8>,
    receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
) -> R {
    if let [(LayoutSpan::Buffer(start), bytes)] = *spans {
        return receive(Some(&mut [&mut buffer[start..start + bytes]]));
    }
    let padding = spans.iter().filter(|(span, _)| *span == LayoutSpan::Padding);
    scratch.resize(padding.map(|(_, bytes)| bytes).sum(), 0);
    let count = spans.len();
    if count <= INLINE_TARGETS {
        let (mut order, mut targets) =
            ([0; INLINE_TARGETS], [(); INLINE_TARGETS].map(|()| &mut [][..]));
        let targets = &mut targets[..count];
        let split = split_targets(buffer, scratch, spans, &mut order[..count], targets);
        return receive(split.map(|()| targets));
    }
    let mut targets: Vec<&mut [u8]> = spans.iter().map(|_| &mut [][..]).collect();
    let split = split_targets(buffer, scratch, spans, &mut vec![0; count], &mut targets);
    receive(split.map(|()| &mut targets[..]))
}

/// Splits the buffer into targets; `order` is scratch space for sorting. `None` if two ranges
/// overlap, which cannot happen with spans of a plan.
fn split_targets<'a>(
    buffer: &'a mut [u8],
    scratch: &'a mut [u8],
    spans: &[(LayoutSpan, usize)],
    order: &mut [usize],
    targets: &mut [&'a mut [u8]],
) -> Option<()> {
    // Half-precision values are never received in place.
    let start_of = |index: usize| match spans[index].0 {
        LayoutSpan::Buffer(start) => Some(start),
        LayoutSpan::Halves(_) | LayoutSpan::Padding => None,
    };
    order.iter_mut().enumerate().for_each(|(index, place)| *place = index);
    order.sort_unstable_by_key(|&index| start_of(index));
    let (mut rest, mut at) = (buffer, 0);
    for &index in &*order {
        let Some(start) = start_of(index) else { continue };
        let (_, tail) = rest.split_at_mut_checked(start.checked_sub(at)?)?;
        let (target, tail) = tail.split_at_mut_checked(spans[index].1)?;
        targets[index] = target;
        (rest, at) = (tail, start + spans[index].1);
    }
    let mut rest = scratch;
    for (target, &(span, bytes)) in targets.iter_mut().zip(spans) {
        if span == LayoutSpan::Padding {
            let (padding, tail) = std::mem::take(&mut rest).split_at_mut(bytes);
            *target = padding;
            rest = tail;
        }
    }
    Some(())
}
