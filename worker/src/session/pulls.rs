//! Pulls: one or more requests to each shard, whose answers fill one buffer.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{Pulled, Selection};
use pushpull_common::protocol::{Envelope, Message, Refusal, message};

use super::encoded_values::EncodedValuesPart;
use super::link::{LinkStatus, PendingRequest};
use super::requests::deadline_ms;
use super::{GradientCounts, OpId, OpKind, ReadPoint, Reply, Session};
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::parts::FrameBody;
use crate::gradients::row_requests;
use crate::gradients::selection::PartitionSelection;
use crate::gradients::sharding_plan::{LayoutSpan, ShardingPlan};

/// The most unanswered row requests per shard: enough to keep the shard busy and fewer than it
/// refuses. A request of the largest size counts for nine of the shard's 128.
const ROW_REQUESTS_MAX: usize = 8;

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullProgress {
    Unsent,
    /// Sent. The values up to this offset in the shard's layout have arrived, of this step.
    Sent(u64, GlobalStep),
    /// Answered completely, in this restore epoch, with values of this step.
    Done(RestoreEpoch, GlobalStep),
}

/// One request of a pull.
#[derive(Debug)]
pub(super) struct PullRequest {
    pub(super) link: usize,
    scope: PullScope,
    pub(super) progress: PullProgress,
    /// How many gradients the shard had applied to the values it sent.
    gradients: u64,
    /// The step of the first answer and the newest step of other shards, if this request is
    /// repeated because its values were older (synchronous mode).
    pub(super) older: Option<(GlobalStep, GlobalStep)>,
}

/// The values that a request asks for.
#[derive(Debug)]
pub(super) enum PullScope {
    /// All values that are not sparse.
    Values,
    /// The values of one variable.
    Selected(PartitionSelection),
    /// The rows of one of these row requests, by its index.
    Rows(Arc<row_requests::RowRequests>, usize),
}

impl PullRequest {
    pub(super) fn new(link: usize, scope: PullScope) -> PullRequest {
        PullRequest { link, scope, progress: PullProgress::Unsent, gradients: 0, older: None }
    }

    pub(super) fn values(link: usize) -> PullRequest {
        PullRequest::new(link, PullScope::Values)
    }
}

/// A pull in progress.
#[derive(Debug)]
pub(super) struct PendingPull {
    pub(super) plan: Arc<ShardingPlan>,
    pub(super) buffer: AlignedBuffer,
    /// The offset of the buffer in a buffer of all variables.
    pub(super) base: usize,
    /// The step of the token that the values are for.
    pub(super) token: Option<GlobalStep>,
    /// A lower bound of the values' global step (asynchronous mode).
    pub(super) step: GlobalStep,
    pub(super) requests: Vec<PullRequest>,
}

impl PendingPull {
    pub(super) fn new(
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        token: Option<GlobalStep>,
        known: GlobalStep,
        requests: Vec<PullRequest>,
    ) -> PendingPull {
        let step = known.max(token.unwrap_or_default());
        PendingPull { plan, buffer, base: 0, token, step, requests }
    }

    /// Returns the links with unanswered requests, once for each request.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self
            .requests
            .iter()
            .filter(|request| !matches!(request.progress, PullProgress::Done(..)));
        open.map(|request| request.link)
    }

    /// Returns the newest step of a complete answer or of the token.
    fn newest(&self) -> GlobalStep {
        self.sent_whole().chain(self.token).max().unwrap_or_default()
    }

    /// Returns the oldest step of a complete answer. All answers have this step, unless they are
    /// rows without a token.
    fn oldest(&self) -> GlobalStep {
        self.sent_whole().min().or(self.token).unwrap_or_default()
    }

    /// Returns the steps of the complete answers.
    fn sent_whole(&self) -> impl Iterator<Item = GlobalStep> + '_ {
        self.requests.iter().filter_map(|request| match request.progress {
            PullProgress::Done(_, step) => Some(step),
            _ => None,
        })
    }

    /// Returns the step of the values that a shard sent and the newer step of the others, if the
    /// shard was asked again for that reason.
    pub(super) fn disagreement(&self, link: usize) -> Option<(GlobalStep, GlobalStep)> {
        self.requests
            .iter()
            .filter(|request| request.link == link)
            .find_map(|request| request.older)
    }

    /// Lists the targets of the next part of a shard's answer. Parts must arrive in order and
    /// without gaps: the buffer still holds older values, which must not be mistaken for new ones.
    pub(super) fn part(
        &mut self,
        request: usize,
        shard: ShardId,
        pulled: &Pulled,
        bytes: u64,
        spans: &mut Vec<(LayoutSpan, usize)>,
    ) -> Result<(), &'static str> {
        let Some(PullRequest {
            progress: PullProgress::Sent(received, _), scope, gradients, ..
        }) = self.requests.get_mut(request)
        else {
            return Err("unrequested values");
        };
        let next_value = |from| match &*scope {
            PullScope::Values => self.plan.next_value(shard, from),
            PullScope::Selected(selected) => selected.next_value(from),
            PullScope::Rows(..) => None,
        };
        let end = pulled.offset.checked_add(bytes);
        let in_scope = |end: &u64| {
            let range = pulled.offset..*end;
            let asked = match &*scope {
                PullScope::Values => true,
                PullScope::Selected(selected) => selected.contains(&range),
                PullScope::Rows(..) => false,
            };
            asked && self.plan.spans(shard, range, spans).is_some()
        };
        let Some(end) = end.filter(in_scope) else {
            return Err("values beyond the shard's variables");
        };
        let next = next_value(*received).unwrap_or(*received);
        let whole = next_value(end).is_none();
        if pulled.offset != next || (pulled.last && !whole) {
            return Err("values with a gap");
        }
        (*received, *gradients) = (end, pulled.gradients);
        spans.iter_mut().for_each(|(span, _)| *span = span.behind(self.base));
        Ok(())
    }

    /// Returns the partition of a row request.
    pub(super) fn partition_of(&self, request: usize) -> Option<&Partition> {
        let PullScope::Rows(rows, index) = &self.requests.get(request)?.scope else { return None };
        let partition = rows.requests()[*index].partition;
        self.plan.catalogue().partitions().get(partition.0 as usize)
    }

    /// Returns the target of the rows in an answer, and their encoding if they are encoded.
    pub(super) fn rows(
        &mut self,
        request: usize,
        rows: &message::Rows,
        encoding: Option<Encoding>,
        bytes: u64,
    ) -> Result<(Range<usize>, Option<EncodedValuesPart>), &'static str> {
        let format =
            self.partition_of(request).map(|partition| (partition.dtype, partition.own_encoding));
        let Some(PullRequest {
            progress: PullProgress::Sent(..),
            scope: PullScope::Rows(requests, index),
            gradients,
            ..
        }) = self.requests.get_mut(request)
        else {
            return Err("unrequested rows");
        };
        let to = requests.requests()[*index].to.clone();
        let short = match encoding.zip(format) {
            None => (to.len() as u64 == bytes).then_some(None),
            Some((_, (_, Some(own)))) => {
                EncodedValuesPart::halves(own, to.clone(), bytes).map(Some)
            }
            Some((encoding, (dtype, None))) => {
                EncodedValuesPart::rows(encoding, dtype, to.clone(), bytes).map(Some)
            }
        };
        let short = short.ok_or("rows of another length")?;
        *gradients = rows.gradients;
        Ok((to, short))
    }
}

impl Session {
    pub(super) fn drive_pull(&mut self, now: Instant, id: OpId) {
        let Some(OpKind::Pull(pull)) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        // Never mix values of two restore epochs. A shard in an older epoch is asked once it is
        // restored, and its earlier answers are requested again. The owner counts too: it gives the
        // step.
        let links = pull.requests.iter().map(|request| request.link).chain(self.owner_link());
        let outdated: Vec<usize> = self.outdated(links).collect();
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
        for request in &mut pull.requests {
            let epoch = self.links[request.link].restore_epoch;
            let outdated = outdated.contains(&request.link);
            if matches!(request.progress, PullProgress::Done(done, _) if done != epoch || outdated)
            {
                (request.progress, restored) = (PullProgress::Unsent, true);
            }
        }
        if restored {
            pull.requests.iter_mut().for_each(|request| request.older = None);
        }
        if self.synchronous {
            // A shard that has applied fewer steps answers once it has caught up.
            envelope.step = pull.newest();
        }
        for request in &mut pull.requests {
            // Rows without a token share a step within one request only. Otherwise a pull of many
            // requests would never end while steps are made.
            if let PullProgress::Done(_, step) = request.progress
                && self.synchronous
                && step < envelope.step
                && !matches!(request.scope, PullScope::Rows(..))
            {
                request.older = Some((step, envelope.step));
                request.progress = PullProgress::Unsent;
            }
        }
        // The step may have been higher in an older epoch.
        pull.step = pull.step.min(self.step.max(pull.token.unwrap_or_default()));
        let done = outdated.is_empty() && pull.unanswered().next().is_none();
        self.send_requests(now, id, envelope, &outdated);
        if done {
            self.finish_pull(id);
        }
    }

    /// Sends the unsent requests of a pull, as many as each shard accepts at once.
    fn send_requests(&mut self, now: Instant, id: OpId, envelope: Envelope, outdated: &[usize]) {
        let Some(mut op) = self.ops.remove(&id) else { return };
        if let OpKind::Pull(pull) = &mut op.kind {
            // Unanswered requests per link.
            let mut under_way = vec![0; self.links.len()];
            let sent = pull
                .requests
                .iter()
                .filter(|request| matches!(request.progress, PullProgress::Sent(..)));
            sent.for_each(|request| under_way[request.link] += 1);
            for index in 0..pull.requests.len() {
                let (link, progress) = (pull.requests[index].link, pull.requests[index].progress);
                let up = self.links[link].status == LinkStatus::Up && !outdated.contains(&link);
                if progress == PullProgress::Unsent && up && under_way[link] < ROW_REQUESTS_MAX {
                    under_way[link] += 1;
                    pull.requests[index].progress = PullProgress::Sent(0, GlobalStep(0));
                    let (request, body) = self.request_of(pull, index);
                    self.send(now, link, PendingRequest::Pull(id, index), envelope, request, body);
                }
            }
        }
        self.ops.insert(id, op);
    }

    /// Builds the message and the body of a request.
    fn request_of(&self, pull: &PendingPull, request: usize) -> (Message, FrameBody) {
        let PullRequest { link, scope, .. } = &pull.requests[request];
        let values = |selection| self.request_for_values(*link, &pull.plan, selection);
        match scope {
            PullScope::Values => (values(Selection::Dense {}), FrameBody::Empty),
            PullScope::Selected(selected) => (values(selected.selection()), FrameBody::Empty),
            PullScope::Rows(rows, index) => {
                let partition = rows.requests()[*index].partition;
                (self.request_for_rows(pull, request, partition), rows.body_of(*index))
            }
        }
    }

    fn finish_pull(&mut self, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            let step = if self.synchronous { pull.oldest() } else { pull.step };
            // Of several answers of a shard the oldest counts.
            let mut gradients = GradientCounts::default();
            for request in &pull.requests {
                gradients.lower(self.links[request.link].shard, request.gradients);
            }
            let read = ReadPoint { step, gradients };
            self.reply(id, Ok(Reply::Pulled { buffer: pull.buffer, read }));
        }
    }

    /// Marks a shard's unanswered requests as unsent.
    pub(super) fn pull_lost(&mut self, id: OpId, link: usize) {
        if let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) {
            for request in pull.requests.iter_mut().filter(|request| request.link == link) {
                if !matches!(request.progress, PullProgress::Done(..)) {
                    request.progress = PullProgress::Unsent;
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

    /// Ends a pull whose token's step has passed on some shard. The values are useless.
    pub(super) fn pull_is_stale(&mut self, now: Instant, id: OpId) {
        if let Some(op) = self.ops.remove(&id)
            && let OpKind::Pull(pull) = op.kind
        {
            self.reply(id, Ok(Reply::Stale { buffer: pull.buffer }));
        }
        self.drive(now);
    }
}
