//! The answers to a pull: what they must be, and the memory that their bodies are received into.

use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::PulledEncoded;
use pushpull_common::protocol::{Header, Message};

use super::encoded_values::EncodedValuesPart;
use super::link::Receiving;
use super::pulls::{Ask, Progress};
use super::{OpId, OpKind, Session};
use crate::sharding_plan::Span;

impl Session {
    pub(super) fn pull_answered(
        &mut self,
        now: Instant,
        (id, ask): (OpId, usize),
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
        // The caller may have gone; the body is read and forgotten then.
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        let plan = pull.plan.clone();
        let form = self.form_of_values(link, &plan);
        let encoding = self.encoding_of_rows(pull, ask);
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        let (bytes, mut short) = (header.body_bytes, None);
        let spans = &mut self.links[link].spans;
        let placed = match &message {
            Message::Rows(rows) => pull.rows(ask, rows, encoding, bytes).map(|(to, part)| {
                short = part;
                spans.clear();
                spans.push((Span::Buffer(to.start), to.len()));
            }),
            // A server of old may not know the form that was chosen; halves come in no other.
            Message::Pulled(pulled) if !plan.has_halves(shard) => {
                pull.part(ask, shard, pulled, bytes, spans)
            }
            Message::PulledEncoded(PulledEncoded { part, bytes: covered }) => {
                pull.part(ask, shard, part, *covered, spans).and_then(|()| {
                    let form = form.ok_or("values in a form nobody asked for")?;
                    let end = part.offset.checked_add(*covered);
                    let range = part.offset..end.ok_or("values beyond the shard's variables")?;
                    short = EncodedValuesPart::new(form, &plan, shard, range, bytes);
                    short.is_some().then_some(()).ok_or("values of another length")
                })
            }
            _ => Err("values in a form nobody asked for"),
        };
        let last = !is_followed(&message);
        if let Err(error) = placed {
            self.pull_lost(id, link);
            return self.break_off(now, link, error.to_owned());
        }
        // Rows come in several answers, of which the oldest counts: what was known before.
        if shard == self.start.owner
            && matches!(message, Message::Pulled(_) | Message::PulledEncoded(_))
        {
            pull.step = pull.step.max(header.step);
        }
        if self.synchronous {
            if let Some(Ask { progress: Progress::Sent(_, step), .. }) = pull.asks.get_mut(ask) {
                *step = header.step.max(*step);
            }
            if pull.token.is_some_and(|step| header.step > step) {
                return self.pull_is_stale(now, id);
            }
            if pull.token.is_some_and(|step| header.step < step) {
                self.pull_lost(id, link);
                return self.break_off(now, link, "values of a step before the token's".to_owned());
            }
        }
        if header.body_bytes == 0 {
            return self.values_received(now, (id, ask), link, last);
        }
        self.links[link].receiving = Some(match short {
            None => Receiving::Values { op: id, ask, last },
            Some(part) => {
                self.links[link].encoded_body.resize(bytes as usize, 0);
                Receiving::EncodedValues { op: id, ask, part, last }
            }
        });
    }

    pub(super) fn values_received(
        &mut self,
        now: Instant,
        (id, ask): (OpId, usize),
        link: usize,
        last: bool,
    ) {
        let epoch = self.links[link].restore_epoch;
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        if let Some(ask) = pull.asks.get_mut(ask).filter(|_| last) {
            let step = match ask.progress {
                Progress::Sent(_, step) => step,
                _ => GlobalStep(0),
            };
            (ask.progress, ask.older) = (Progress::Done(epoch, step), None);
            let waits = pull.asks.iter().any(|ask| ask.progress == Progress::Unsent);
            if self.synchronous || waits || pull.unanswered().next().is_none() {
                self.drive(now);
            }
        }
    }

    /// Lends the memory that the body of the link's last message is received into, in order; `None` if
    /// the body is to be read and forgotten.
    pub(crate) fn with_targets<R>(
        &mut self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        let link = &mut self.links[link];
        match &mut link.receiving {
            None => receive(None),
            Some(Receiving::Answer { body, .. }) => receive(Some(&mut [body])),
            Some(Receiving::EncodedValues { .. }) => receive(Some(&mut [&mut link.encoded_body])),
            Some(Receiving::Values { op, .. }) => match self.ops.get_mut(op).map(|op| &mut op.kind)
            {
                Some(OpKind::Pull(pull)) => {
                    scatter(pull.buffer.bytes_mut(), &link.spans, &mut link.scratch, receive)
                }
                _ => receive(None),
            },
        }
    }

    /// The body of the link's last message has come.
    pub(super) fn body(&mut self, now: Instant, index: usize) {
        let link = &mut self.links[index];
        link.last_heard = now;
        match link.receiving.take() {
            None => {}
            Some(Receiving::Answer { op, message, body }) => {
                self.finish_request(now, op, index, message, body);
            }
            Some(Receiving::Values { op, ask, last, .. }) => {
                self.values_received(now, (op, ask), index, last);
            }
            Some(Receiving::EncodedValues { op, ask, part, last }) => {
                self.encoded_values_received(now, (op, ask), index, &part, last);
            }
        }
    }
}

/// Whether more parts of the same answer come after this one.
pub(super) fn is_followed(message: &Message) -> bool {
    match message {
        Message::Pulled(part) | Message::PulledEncoded(PulledEncoded { part, .. }) => !part.last,
        _ => false,
    }
}

/// How many stretches are lent without a list of them being made.
const FEW: usize = 64;

/// Lends the stretches of the buffer, in the order of the spans; padding goes to `scratch`.
fn scatter<R>(
    buffer: &mut [u8],
    spans: &[(Span, usize)],
    scratch: &mut Vec<u8>,
    receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
) -> R {
    if let [(Span::Buffer(start), bytes)] = *spans {
        return receive(Some(&mut [&mut buffer[start..start + bytes]]));
    }
    let padding = spans.iter().filter(|(span, _)| *span == Span::Padding);
    scratch.resize(padding.map(|(_, bytes)| bytes).sum(), 0);
    let count = spans.len();
    if count <= FEW {
        let (mut order, mut targets) = ([0; FEW], [(); FEW].map(|()| &mut [][..]));
        let targets = &mut targets[..count];
        let shared = share(buffer, scratch, spans, &mut order[..count], targets);
        return receive(shared.map(|()| targets));
    }
    let mut targets: Vec<&mut [u8]> = spans.iter().map(|_| &mut [][..]).collect();
    let shared = share(buffer, scratch, spans, &mut vec![0; count], &mut targets);
    receive(shared.map(|()| &mut targets[..]))
}

/// Takes the stretches apart, with room for their order. `None` if two overlap, which those of a plan
/// never do.
fn share<'a>(
    buffer: &'a mut [u8],
    scratch: &'a mut [u8],
    spans: &[(Span, usize)],
    order: &mut [usize],
    targets: &mut [&'a mut [u8]],
) -> Option<()> {
    // Halves never come as ranges of the buffer.
    let start_of = |index: usize| match spans[index].0 {
        Span::Buffer(start) => Some(start),
        Span::Halves(_) | Span::Padding => None,
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
        if span == Span::Padding {
            let (padding, tail) = std::mem::take(&mut rest).split_at_mut(bytes);
            *target = padding;
            rest = tail;
        }
    }
    Some(())
}
