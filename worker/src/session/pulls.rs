//! Pulls: one request to each shard, whose answers fill one buffer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::Selection;
use pushpull_common::protocol::{Envelope, Header, Message, message};

use super::link::{Pending, Receiving, Status};
use super::requests::deadline_ms;
use super::{OpId, OpKind, Reply, Session};
use crate::fanout::{Plan, Span};
use crate::params::Buffer;

/// How far a pull is on one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Unsent,
    Sent,
    Done,
}

/// A pull under way.
#[derive(Debug)]
pub(super) struct Pull {
    plan: Arc<Plan>,
    buffer: Buffer,
    at_least: GlobalStep,
    links: BTreeMap<usize, Progress>,
}

impl Pull {
    pub(super) fn new(
        plan: Arc<Plan>,
        buffer: Buffer,
        at_least: GlobalStep,
        links: Vec<usize>,
    ) -> Pull {
        let links = links.into_iter().map(|link| (link, Progress::Unsent)).collect();
        Pull { plan, buffer, at_least, links }
    }

    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self.links.iter().filter(|(_, progress)| **progress != Progress::Done);
        open.map(|(&link, _)| link)
    }
}

impl Session {
    pub(super) fn drive_pull(&mut self, now: Instant, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let OpKind::Pull(pull) = &mut op.kind else { return };
        let envelope = Envelope {
            step: pull.at_least,
            deadline_ms: deadline_ms(now, op.deadline),
            ..Envelope::default()
        };
        let mut due = Vec::new();
        for (&link, progress) in &mut pull.links {
            if *progress == Progress::Unsent && self.links[link].status == Status::Up {
                *progress = Progress::Sent;
                due.push(link);
            }
        }
        let done = pull.unanswered().next().is_none();
        for link in due {
            let request = message::Pull { selection: Selection::All {} };
            self.send(now, link, Pending::Pull(id), envelope, request, vec![]);
        }
        if done {
            self.finish_pull(id);
        }
    }

    fn finish_pull(&mut self, id: OpId) {
        let step = self.step;
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            self.reply(id, Ok(Reply::Pulled { buffer: pull.buffer, step }));
        }
    }

    pub(super) fn pull_lost(&mut self, id: OpId, link: usize) {
        if let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind)
            && let Some(progress) = pull.links.get_mut(&link)
            && *progress == Progress::Sent
        {
            *progress = Progress::Unsent;
        }
    }

    pub(super) fn pull_answered(
        &mut self,
        now: Instant,
        id: OpId,
        link: usize,
        header: &Header,
        message: Message,
    ) {
        let pulled = match message {
            Message::Pulled(pulled) => pulled,
            Message::Refused(refused) => {
                let error = self.refused("pull", link, refused.refusal.clone());
                if Session::is_fatal(&refused.refusal) {
                    return self.fail(error);
                }
                self.finish(id, Err(error));
                return;
            }
            message => return self.unexpected(now, link, &message),
        };
        // The caller may have gone; the body is read and forgotten then.
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else { return };
        let shard = self.links[link].shard;
        let range = pulled.offset..pulled.offset.saturating_add(header.body_bytes);
        let Some(spans) = pull.plan.spans(shard, range) else {
            let error = "values beyond the shard's variables".to_owned();
            return self.break_off(now, link, error);
        };
        if header.body_bytes == 0 {
            return self.values_received(now, id, link, pulled.last);
        }
        let last = pulled.last;
        self.links[link].receiving = Some(Receiving::Values { op: id, spans, last });
    }

    fn values_received(&mut self, now: Instant, id: OpId, link: usize, last: bool) {
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else { return };
        if last {
            pull.links.insert(link, Progress::Done);
            if pull.unanswered().next().is_none() {
                self.finish_pull(id);
                self.drive(now);
            }
        }
    }

    /// The memory that the body of the link's last message is received into, in order; `None` if
    /// the body is to be read and forgotten.
    pub(crate) fn body_targets(&mut self, link: usize) -> Option<Vec<&mut [u8]>> {
        let link = &mut self.links[link];
        match link.receiving.as_mut()? {
            Receiving::Answer { body, .. } => Some(vec![body]),
            Receiving::Values { op, spans, .. } => {
                let OpKind::Pull(pull) = &mut self.ops.get_mut(op)?.kind else { return None };
                scatter(pull.buffer.bytes_mut(), spans, &mut link.scratch)
            }
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
            Some(Receiving::Values { op, last, .. }) => self.values_received(now, op, index, last),
        }
    }
}

/// The stretches of the buffer, in the order of the spans; padding goes to `scratch`. `None` if
/// two overlap, which those of a plan never do.
fn scatter<'a>(
    buffer: &'a mut [u8],
    spans: &[(Span, usize)],
    scratch: &'a mut Vec<u8>,
) -> Option<Vec<&'a mut [u8]>> {
    if let [(Span::Buffer(start), bytes)] = *spans {
        return Some(vec![&mut buffer[start..start + bytes]]);
    }
    let padding = spans.iter().filter(|(span, _)| *span == Span::Padding);
    scratch.resize(padding.map(|(_, bytes)| bytes).sum(), 0);
    let mut order: Vec<(usize, usize, usize)> = spans
        .iter()
        .enumerate()
        .filter_map(|(index, &(span, bytes))| match span {
            Span::Buffer(start) => Some((start, bytes, index)),
            Span::Padding => None,
        })
        .collect();
    order.sort_unstable();
    let mut targets: Vec<&mut [u8]> = spans.iter().map(|_| &mut [][..]).collect();
    let (mut rest, mut at) = (buffer, 0);
    for (start, bytes, index) in order {
        let (_, tail) = rest.split_at_mut_checked(start.checked_sub(at)?)?;
        let (target, tail) = tail.split_at_mut_checked(bytes)?;
        targets[index] = target;
        (rest, at) = (tail, start + bytes);
    }
    let mut rest = &mut scratch[..];
    for (target, &(span, bytes)) in targets.iter_mut().zip(spans) {
        if span == Span::Padding {
            let (padding, tail) = std::mem::take(&mut rest).split_at_mut(bytes);
            *target = padding;
            rest = tail;
        }
    }
    Some(targets)
}
