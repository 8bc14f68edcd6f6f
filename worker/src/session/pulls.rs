//! Pulls: requests to each shard, whose answers fill one buffer.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{Pulled, Selection};
use pushpull_common::protocol::{Envelope, Message, Refusal, message};

use super::encoded_values::EncodedValuesPart;
use super::link::{Pending, Status};
use super::requests::deadline_ms;
use super::{Counts, OpId, OpKind, Read, Reply, Session};
use crate::error::Error;
use crate::params::Buffer;
use crate::parts::Body;
use crate::row_requests;
use crate::selection::Selected;
use crate::sharding_plan::{ShardingPlan, Span};

/// Requests for rows that a shard may have unanswered: enough that it is never idle, and few enough
/// that it never says it has too many: one of the largest size counts for nine of its 128.
const ROWS_AT_ONCE: usize = 8;

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Unsent,
    /// It is sent, and so many bytes of the values of this step have come.
    Sent(u64, GlobalStep),
    /// All have come, in this restore epoch, of this step.
    Done(RestoreEpoch, GlobalStep),
}

/// One request of a pull.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) link: usize,
    wanted: Requested,
    pub(super) progress: Progress,
    /// How many gradients the shard had applied to what it has sent.
    gradients: u64,
    /// What was found where values were of an older step than elsewhere (synchronous mode): asked for
    /// again, of the newest step.
    pub(super) older: Option<(GlobalStep, GlobalStep)>,
}

/// What a shard is asked for.
#[derive(Debug)]
pub(super) enum Requested {
    /// All values that are not sparse.
    Values,
    /// Those of one variable.
    Selected(Selected),
    /// One request of those for rows.
    Rows(Arc<row_requests::RowRequests>, usize),
}

impl Ask {
    pub(super) fn new(link: usize, wanted: Requested) -> Ask {
        Ask { link, wanted, progress: Progress::Unsent, gradients: 0, older: None }
    }

    pub(super) fn values(link: usize) -> Ask {
        Ask::new(link, Requested::Values)
    }
}

/// A pull under way.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) plan: Arc<ShardingPlan>,
    pub(super) buffer: Buffer,
    /// Where the buffer begins in one of all variables.
    pub(super) base: usize,
    /// The step of the token that the values are for.
    pub(super) token: Option<GlobalStep>,
    /// The global step that the values are at least of (asynchronous mode).
    pub(super) step: GlobalStep,
    pub(super) asks: Vec<Ask>,
}

impl Pull {
    pub(super) fn new(
        plan: Arc<ShardingPlan>,
        buffer: Buffer,
        token: Option<GlobalStep>,
        known: GlobalStep,
        asks: Vec<Ask>,
    ) -> Pull {
        let step = known.max(token.unwrap_or_default());
        Pull { plan, buffer, base: 0, token, step, asks }
    }

    /// The links that have not answered all, each once for every request.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self.asks.iter().filter(|ask| !matches!(ask.progress, Progress::Done(..)));
        open.map(|ask| ask.link)
    }

    /// The newest step that a shard has sent all values of, or that of the token.
    fn newest(&self) -> GlobalStep {
        self.sent_whole().chain(self.token).max().unwrap_or_default()
    }

    /// The oldest step that a shard has sent all values of: that of all, unless they are rows without
    /// a token.
    fn oldest(&self) -> GlobalStep {
        self.sent_whole().min().or(self.token).unwrap_or_default()
    }

    /// The steps of which all values have come that were asked for in one request.
    fn sent_whole(&self) -> impl Iterator<Item = GlobalStep> + '_ {
        self.asks.iter().filter_map(|ask| match ask.progress {
            Progress::Done(_, step) => Some(step),
            _ => None,
        })
    }

    /// The step of the values that a shard has sent, and the newer one of others, if that is why it
    /// is asked again.
    pub(super) fn disagreement(&self, link: usize) -> Option<(GlobalStep, GlobalStep)> {
        self.asks.iter().filter(|ask| ask.link == link).find_map(|ask| ask.older)
    }

    /// Lists where the next part of a shard's answer goes. Parts come in order and leave nothing out:
    /// the buffer holds older values, which must not be taken for these.
    pub(super) fn part(
        &mut self,
        ask: usize,
        shard: ShardId,
        pulled: &Pulled,
        bytes: u64,
        spans: &mut Vec<(Span, usize)>,
    ) -> Result<(), &'static str> {
        let Some(Ask { progress: Progress::Sent(received, _), wanted, gradients, .. }) =
            self.asks.get_mut(ask)
        else {
            return Err("values nobody asked for");
        };
        let next_value = |from| match &*wanted {
            Requested::Values => self.plan.next_value(shard, from),
            Requested::Selected(selected) => selected.next_value(from),
            Requested::Rows(..) => None,
        };
        let end = pulled.offset.checked_add(bytes);
        let lies = |end: &u64| {
            let range = pulled.offset..*end;
            let asked = match &*wanted {
                Requested::Values => true,
                Requested::Selected(selected) => selected.contains(&range),
                Requested::Rows(..) => false,
            };
            asked && self.plan.spans(shard, range, spans).is_some()
        };
        let Some(end) = end.filter(lies) else {
            return Err("values beyond the shard's variables");
        };
        let next = next_value(*received).unwrap_or(*received);
        let whole = next_value(end).is_none();
        if pulled.offset != next || (pulled.last && !whole) {
            return Err("values that leave some out");
        }
        (*received, *gradients) = (end, pulled.gradients);
        spans.iter_mut().for_each(|(span, _)| *span = span.behind(self.base));
        Ok(())
    }

    /// The partition that a request asks for rows of.
    pub(super) fn partition_of(&self, ask: usize) -> Option<&Partition> {
        let Requested::Rows(wanted, which) = &self.asks.get(ask)?.wanted else { return None };
        let partition = wanted.asks()[*which].partition;
        self.plan.catalogue().partitions().get(partition.0 as usize)
    }

    /// Where the rows of an answer go, which come so, if not as they are.
    pub(super) fn rows(
        &mut self,
        ask: usize,
        rows: &message::Rows,
        encoding: Option<Encoding>,
        bytes: u64,
    ) -> Result<(Range<usize>, Option<EncodedValuesPart>), &'static str> {
        let kept = self.partition_of(ask).map(|partition| (partition.dtype, partition.own));
        let Some(Ask {
            progress: Progress::Sent(..),
            wanted: Requested::Rows(wanted, which),
            gradients,
            ..
        }) = self.asks.get_mut(ask)
        else {
            return Err("rows nobody asked for");
        };
        let to = wanted.asks()[*which].to.clone();
        let short = match encoding.zip(kept) {
            None => (to.len() as u64 == bytes).then_some(None),
            Some((_, (_, Some(own)))) => {
                EncodedValuesPart::halves(own, to.clone(), bytes).map(Some)
            }
            Some((encoding, (dtype, None))) => {
                EncodedValuesPart::rows(encoding, dtype, to.clone(), bytes).map(Some)
            }
        };
        let short = short.ok_or("other rows than were asked for")?;
        *gradients = rows.gradients;
        Ok((to, short))
    }
}

impl Session {
    pub(super) fn drive_pull(&mut self, now: Instant, id: OpId) {
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        // Values of two restore epochs do not belong together. A shard that is behind is asked once
        // it has been restored; what it said before is asked again. The owner says of which step.
        let links = pull.asks.iter().map(|ask| ask.link).chain(self.owner_link());
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
        let mut restored = false;
        for ask in &mut pull.asks {
            let epoch = self.links[ask.link].restore_epoch;
            let behind = behind.contains(&ask.link);
            if matches!(ask.progress, Progress::Done(done, _) if done != epoch || behind) {
                (ask.progress, restored) = (Progress::Unsent, true);
            }
        }
        if restored {
            pull.asks.iter_mut().for_each(|ask| ask.older = None);
        }
        if self.synchronous {
            // A shard that has not applied as many steps answers once it has.
            envelope.step = pull.newest();
        }
        for ask in &mut pull.asks {
            // Rows without a token are of one step in each request alone: a pull of many would never
            // end while steps are made.
            if let Progress::Done(_, step) = ask.progress
                && self.synchronous
                && step < envelope.step
                && !matches!(ask.wanted, Requested::Rows(..))
            {
                ask.older = Some((step, envelope.step));
                ask.progress = Progress::Unsent;
            }
        }
        // Steps of an older epoch may have been higher.
        pull.step = pull.step.min(self.step.max(pull.token.unwrap_or_default()));
        let done = behind.is_empty() && pull.unanswered().next().is_none();
        self.send_asks(now, id, envelope, &behind);
        if done {
            self.finish_pull(id);
        }
    }

    /// Sends what a pull asks for and has not asked yet, as far as its shards take it.
    fn send_asks(&mut self, now: Instant, id: OpId, envelope: Envelope, behind: &[usize]) {
        let Some(mut op) = self.ops.remove(&id) else { return };
        if let OpKind::Pull(pull) = &mut op.kind {
            // How many requests each shard has not answered.
            let mut under_way = vec![0; self.links.len()];
            let sent = pull.asks.iter().filter(|ask| matches!(ask.progress, Progress::Sent(..)));
            sent.for_each(|ask| under_way[ask.link] += 1);
            for index in 0..pull.asks.len() {
                let (link, progress) = (pull.asks[index].link, pull.asks[index].progress);
                let up = self.links[link].status == Status::Up && !behind.contains(&link);
                if progress == Progress::Unsent && up && under_way[link] < ROWS_AT_ONCE {
                    under_way[link] += 1;
                    pull.asks[index].progress = Progress::Sent(0, GlobalStep(0));
                    let (request, body) = self.request_of(pull, index);
                    self.send(now, link, Pending::Pull(id, index), envelope, request, body);
                }
            }
        }
        self.ops.insert(id, op);
    }

    /// What a pull asks of a shard: the message, and its body.
    fn request_of(&self, pull: &Pull, ask: usize) -> (Message, Body) {
        let Ask { link, wanted, .. } = &pull.asks[ask];
        let values = |selection| self.request_for_values(*link, &pull.plan, selection);
        match wanted {
            Requested::Values => (values(Selection::Dense {}), Body::Empty),
            Requested::Selected(selected) => (values(selected.selection()), Body::Empty),
            Requested::Rows(wanted, which) => {
                let partition = wanted.asks()[*which].partition;
                (self.request_for_rows(pull, ask, partition), wanted.body_of(*which))
            }
        }
    }

    fn finish_pull(&mut self, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            let step = if self.synchronous { pull.oldest() } else { pull.step };
            // Where a shard has answered more than once, what is oldest counts.
            let mut gradients = Counts::default();
            for ask in &pull.asks {
                gradients.lower(self.links[ask.link].shard, ask.gradients);
            }
            let read = Read { step, gradients };
            self.reply(id, Ok(Reply::Pulled { buffer: pull.buffer, read }));
        }
    }

    /// What a shard was asked for is not to be expected any more.
    pub(super) fn pull_lost(&mut self, id: OpId, link: usize) {
        if let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) {
            for ask in pull.asks.iter_mut().filter(|ask| ask.link == link) {
                if !matches!(ask.progress, Progress::Done(..)) {
                    ask.progress = Progress::Unsent;
                }
            }
        }
    }

    pub(super) fn pull_refused(&mut self, now: Instant, id: OpId, link: usize, refusal: Refusal) {
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
            refusal => self.refused(op.doing, link, refusal),
        };
        self.finish(id, Err(error));
    }

    /// A shard is a step further than the token: what it sends is of no use, and no other's is.
    pub(super) fn pull_is_stale(&mut self, now: Instant, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            self.reply(id, Ok(Reply::Stale { buffer: pull.buffer }));
        }
        self.drive(now);
    }
}
