//! Pulls: one request to each shard, whose answers fill one buffer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{Pulled, Selection};
use pushpull_common::protocol::{Envelope, Header, Message, Refusal};

use super::link::{Pending, Receiving, Status};
use super::requests::deadline_ms;
use super::short_values::ShortPart;
use super::{OpId, OpKind, Read, Reply, Session};
use crate::error::Error;
use crate::fanout::{Plan, Span};
use crate::params::Buffer;

/// How far a pull is on one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Unsent,
    /// It is asked, and has sent so many bytes of the values of this step.
    Sent(u64, GlobalStep),
    /// It has sent all, in this restore epoch, of this step.
    Done(RestoreEpoch, GlobalStep),
}

/// A pull under way.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) plan: Arc<Plan>,
    pub(super) buffer: Buffer,
    /// The step of the token that the values are for.
    token: Option<GlobalStep>,
    /// The global step that the values are at least of (asynchronous mode).
    step: GlobalStep,
    /// How many gradients each shard had applied to what it has sent.
    gradients: BTreeMap<ShardId, u64>,
    links: BTreeMap<usize, Progress>,
    /// What was found where values were of an older step than elsewhere (synchronous mode): asked for
    /// again, of the newest step.
    older: BTreeMap<usize, (GlobalStep, GlobalStep)>,
}

impl Pull {
    pub(super) fn new(
        plan: Arc<Plan>,
        buffer: Buffer,
        token: Option<GlobalStep>,
        known: GlobalStep,
        links: Vec<usize>,
    ) -> Pull {
        let links = links.into_iter().map(|link| (link, Progress::Unsent)).collect();
        let step = known.max(token.unwrap_or_default());
        let (gradients, older) = (BTreeMap::new(), BTreeMap::new());
        Pull { plan, buffer, token, step, gradients, links, older }
    }

    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let open =
            self.links.iter().filter(|(_, progress)| !matches!(progress, Progress::Done(..)));
        open.map(|(&link, _)| link)
    }

    /// The newest step that a shard has sent all values of, or that of the token.
    fn newest(&self) -> GlobalStep {
        let done = self.links.values().filter_map(|progress| match *progress {
            Progress::Done(_, step) => Some(step),
            _ => None,
        });
        done.chain(self.token).max().unwrap_or_default()
    }

    /// The step of the values that a shard has sent, and the newer one of others, if that is why it
    /// is asked again.
    pub(super) fn disagreement(&self, link: usize) -> Option<(GlobalStep, GlobalStep)> {
        self.older.get(&link).copied()
    }

    /// Where the next part of a shard's answer goes. Parts come in order and leave nothing out:
    /// the buffer holds older values, which must not be taken for these.
    fn part(
        &mut self,
        link: usize,
        shard: ShardId,
        pulled: &Pulled,
        bytes: u64,
    ) -> Result<Vec<(Span, usize)>, &'static str> {
        let Some(Progress::Sent(received, _)) = self.links.get_mut(&link) else {
            return Err("values nobody asked for");
        };
        let end = pulled.offset.checked_add(bytes);
        let spans = end.and_then(|end| self.plan.spans(shard, pulled.offset..end));
        let (Some(end), Some(spans)) = (end, spans) else {
            return Err("values beyond the shard's variables");
        };
        let whole = end == self.plan.catalogue().layout(shard).bytes();
        if pulled.offset != *received || (pulled.last && !whole) {
            return Err("values that leave some out");
        }
        *received = end;
        self.gradients.insert(shard, pulled.gradients);
        Ok(spans)
    }
}

impl Session {
    pub(super) fn drive_pull(&mut self, now: Instant, id: OpId) {
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        // Values of two restore epochs do not belong together. A shard that is behind is asked once
        // it has been restored; what it said before is asked again. The owner says of which step.
        let links = pull.links.keys().copied().chain(self.owner_link());
        let behind: Vec<usize> = self.behind(links).collect();
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let OpKind::Pull(pull) = &mut op.kind else {
            return;
        };
        let mut envelope = Envelope {
            step: pull.token.unwrap_or_default(),
            deadline_ms: deadline_ms(now, op.deadline),
            ..Envelope::default()
        };
        for (&link, progress) in &mut pull.links {
            let epoch = self.links[link].restore_epoch;
            let behind = behind.contains(&link);
            if matches!(*progress, Progress::Done(done, _) if done != epoch || behind) {
                *progress = Progress::Unsent;
                pull.older.clear();
            }
        }
        if self.synchronous {
            // A shard that has not applied as many steps answers once it has.
            envelope.step = pull.newest();
        }
        let mut due = Vec::new();
        for (&link, progress) in &mut pull.links {
            let behind = behind.contains(&link);
            if let Progress::Done(_, step) = *progress
                && self.synchronous
                && step < envelope.step
            {
                pull.older.insert(link, (step, envelope.step));
                *progress = Progress::Unsent;
            }
            let up = self.links[link].status == Status::Up;
            if *progress == Progress::Unsent && up && !behind {
                *progress = Progress::Sent(0, GlobalStep(0));
                due.push(link);
            }
        }
        // Steps of an older epoch may have been higher.
        pull.step = pull.step.min(self.step.max(pull.token.unwrap_or_default()));
        let done = behind.is_empty() && pull.unanswered().next().is_none();
        for link in due {
            let request = self.request_for_values(link, Selection::All {});
            self.send(now, link, Pending::Pull(id), envelope, request, vec![]);
        }
        if done {
            self.finish_pull(id);
        }
    }

    fn finish_pull(&mut self, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            // All are of one step in synchronous mode.
            let step = if self.synchronous { pull.newest() } else { pull.step };
            let read = Read { step, gradients: pull.gradients };
            self.reply(id, Ok(Reply::Pulled { buffer: pull.buffer, read }));
        }
    }

    pub(super) fn pull_lost(&mut self, id: OpId, link: usize) {
        if let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind)
            && let Some(progress) = pull.links.get_mut(&link)
            && !matches!(progress, Progress::Done(..))
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
        let encoding = self.encoding_of_values(link);
        let (pulled, bytes, encoding) = match (message, encoding) {
            (Message::Pulled(pulled), _) => (pulled, header.body_bytes, None),
            (Message::PulledEncoded(pulled), Some(encoding)) => {
                (pulled.part, pulled.bytes, Some(encoding))
            }
            (Message::Refused(refused), _) => {
                return self.pull_refused(now, id, link, refused.refusal);
            }
            (message, _) => {
                self.pull_lost(id, link);
                return self.unexpected(now, link, &message);
            }
        };
        let shard = self.links[link].shard;
        // The caller may have gone; the body is read and forgotten then.
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        let range = pulled.offset..pulled.offset.saturating_add(bytes);
        let plan = pull.plan.clone();
        let found = pull.part(link, shard, &pulled, bytes).and_then(|spans| {
            let Some(encoding) = encoding else { return Ok((spans, None)) };
            let part = ShortPart::new(encoding, &plan, shard, range, header.body_bytes);
            Ok((spans, Some(part.ok_or("values of another length")?)))
        });
        let (spans, short) = match found {
            Ok(found) => found,
            Err(error) => {
                self.pull_lost(id, link);
                return self.break_off(now, link, error.to_owned());
            }
        };
        if shard == self.start.owner {
            pull.step = pull.step.max(header.step);
        }
        if self.synchronous {
            if let Some(Progress::Sent(_, step)) = pull.links.get_mut(&link) {
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
            return self.values_received(now, id, link, pulled.last);
        }
        let last = pulled.last;
        self.links[link].receiving = Some(match short {
            None => Receiving::Values { op: id, spans, last },
            Some(part) => Receiving::ShortValues { op: id, part, last },
        });
    }

    pub(super) fn values_received(&mut self, now: Instant, id: OpId, link: usize, last: bool) {
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        if last {
            let epoch = self.links[link].restore_epoch;
            let step = match pull.links.get(&link) {
                Some(Progress::Sent(_, step)) => *step,
                _ => GlobalStep(0),
            };
            pull.links.insert(link, Progress::Done(epoch, step));
            pull.older.remove(&link);
            if self.synchronous || pull.unanswered().next().is_none() {
                self.drive(now);
            }
        }
    }

    fn pull_refused(&mut self, now: Instant, id: OpId, link: usize, refusal: Refusal) {
        let Some(op) = self.ops.get(&id) else { return };
        let disagrees = match &op.kind {
            OpKind::Pull(pull) => pull.disagreement(link).is_some(),
            _ => false,
        };
        let error = match refusal {
            Refusal::Deadline { .. } if disagrees => Error::Timeout {
                doing: op.doing,
                waited: now.saturating_duration_since(op.since),
                awaited: self.awaited(now, op),
                sequence: None,
            },
            refusal => self.refused("pull", link, refusal),
        };
        self.finish(id, Err(error));
    }

    /// A shard is a step further than the token: what it sends is of no use, and no other's is.
    fn pull_is_stale(&mut self, now: Instant, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            self.reply(id, Ok(Reply::Stale { buffer: pull.buffer }));
        }
        self.drive(now);
    }

    /// The memory that the body of the link's last message is received into, in order; `None` if
    /// the body is to be read and forgotten.
    pub(crate) fn body_targets(&mut self, link: usize) -> Option<Vec<&mut [u8]>> {
        let link = &mut self.links[link];
        match link.receiving.as_mut()? {
            Receiving::Answer { body, .. } => Some(vec![body]),
            Receiving::ShortValues { part, .. } => Some(vec![&mut part.body]),
            Receiving::Values { op, spans, .. } => {
                let OpKind::Pull(pull) = &mut self.ops.get_mut(op)?.kind else {
                    return None;
                };
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
            Some(Receiving::ShortValues { op, part, last }) => {
                self.short_values_received(now, op, index, &part, last);
            }
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
