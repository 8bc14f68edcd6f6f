//! One pull: the requests to each shard, whose answers fill one buffer.

use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::{Partition, ValueEncoding};
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId, VariableId};
use pushpull_common::protocol::message::{
    self, PullEncoded, PullRows, PullRowsEncoded, Pulled, PulledEncoded, Selection,
};
use pushpull_common::protocol::{Envelope, Message};

use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::parts::FrameBody;
use crate::gradients::row_requests::RowRequests;
use crate::gradients::selection::PartitionSelection;
use crate::gradients::sharding_plan::{LayoutSpan, ShardingPlan};
use crate::session::encoded_values::EncodedValuesPart;
use crate::session::links::{OutgoingFrame, ShardLink};

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
    pub(super) scope: PullScope,
    pub(super) progress: PullProgress,
    /// How many gradients the shard had applied to the values it sent.
    pub(super) gradients: u64,
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
    Rows(Arc<RowRequests>, usize),
}

impl PullRequest {
    fn new(link: usize, scope: PullScope) -> PullRequest {
        PullRequest { link, scope, progress: PullProgress::Unsent, gradients: 0, older: None }
    }
}

/// A pull in progress.
#[derive(Debug)]
pub(in crate::session) struct PendingPull {
    plan: Arc<ShardingPlan>,
    pub(in crate::session) buffer: AlignedBuffer,
    /// The offset of the buffer in a buffer of all variables.
    base: usize,
    /// The step of the token that the values are for.
    pub(super) token: Option<GlobalStep>,
    /// A lower bound of the values' global step (asynchronous mode).
    pub(super) step: GlobalStep,
    pub(super) requests: Vec<PullRequest>,
}

impl PendingPull {
    fn new(
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        requests: Vec<PullRequest>,
    ) -> PendingPull {
        PendingPull { plan, buffer, base: 0, token: None, step: GlobalStep(0), requests }
    }

    /// A pull of all dense values into a buffer of the plan.
    pub(in crate::session) fn of_values(
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        mut link_to: impl FnMut(ShardId) -> usize,
    ) -> PendingPull {
        let mut requests = Vec::new();
        let links = plan.shards().iter().map(|&shard| link_to(shard));
        requests.extend(links.map(|link| PullRequest::new(link, PullScope::Values)));
        PendingPull::new(plan, buffer, requests)
    }

    /// A pull of one dense variable into a buffer of its length.
    pub(in crate::session) fn of_variable(
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        variable: VariableId,
        mut link_to: impl FnMut(ShardId) -> usize,
    ) -> PendingPull {
        let mut requests = Vec::new();
        let selected = PartitionSelection::of(&plan, variable).into_iter();
        requests.extend(
            selected.map(|of| PullRequest::new(link_to(of.shard), PullScope::Selected(of))),
        );
        let base = plan.range(variable).start;
        PendingPull { base, ..PendingPull::new(plan, buffer, requests) }
    }

    /// A pull of rows into a buffer of their length.
    pub(in crate::session) fn of_rows(
        plan: Arc<ShardingPlan>,
        buffer: AlignedBuffer,
        rows: &Arc<RowRequests>,
        mut link_to: impl FnMut(ShardId) -> usize,
    ) -> PendingPull {
        let mut requests = Vec::new();
        for (index, request) in rows.requests().iter().enumerate() {
            let scope = PullScope::Rows(rows.clone(), index);
            requests.push(PullRequest::new(link_to(request.shard), scope));
        }
        PendingPull::new(plan, buffer, requests)
    }

    /// Sets the step of the token that the values are for, if there is one, and the known step.
    pub(in crate::session) fn for_step(
        self,
        token: Option<GlobalStep>,
        known: GlobalStep,
    ) -> PendingPull {
        PendingPull { token, step: known.max(token.unwrap_or_default()), ..self }
    }

    /// Returns the links with unanswered requests, once for each request.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self
            .requests
            .iter()
            .filter(|request| !matches!(request.progress, PullProgress::Done(..)));
        open.map(|request| request.link)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.unanswered().next().is_none()
    }

    /// Returns the newest step of a complete answer or of the token.
    pub(super) fn newest(&self) -> GlobalStep {
        self.sent_whole().chain(self.token).max().unwrap_or_default()
    }

    /// Returns the oldest step of a complete answer. All answers have this step, unless they are
    /// rows without a token.
    pub(super) fn oldest(&self) -> GlobalStep {
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

    /// Marks a shard's unanswered requests as unsent.
    pub(super) fn lost(&mut self, link: usize) {
        for request in self.requests.iter_mut().filter(|request| request.link == link) {
            if !matches!(request.progress, PullProgress::Done(..)) {
                request.progress = PullProgress::Unsent;
            }
        }
    }

    /// Builds the frame of a request, with an encoding if one applies.
    pub(super) fn frame_of(
        &self,
        request: usize,
        link: &ShardLink,
        envelope: Envelope,
    ) -> OutgoingFrame {
        let values = |selection| {
            let pull = message::Pull { selection };
            match self.form_of_values(link) {
                None => Message::from(pull),
                Some(form) => PullEncoded { pull, encoding: form.code() }.into(),
            }
        };
        let (message, body) = match &self.requests[request].scope {
            PullScope::Values => (values(Selection::Dense {}), FrameBody::Empty),
            PullScope::Selected(selected) => (values(selected.selection()), FrameBody::Empty),
            PullScope::Rows(rows, index) => {
                let pull = PullRows { partition: rows.requests()[*index].partition };
                let message = match self.encoding_of_rows(request, link) {
                    None => Message::from(pull),
                    Some(encoding) => PullRowsEncoded { pull, encoding: encoding.code() }.into(),
                };
                (message, rows.body_of(*index))
            }
        };
        OutgoingFrame { envelope, message, body }
    }

    /// Returns the encoding of a shard's values, if any: the chosen one if the shard supports it,
    /// or [`ValueEncoding::Own`] if the shard has half-precision variables.
    fn form_of_values(&self, link: &ShardLink) -> Option<ValueEncoding> {
        let own = || self.plan.has_halves(link.shard).then_some(ValueEncoding::Own);
        link.values.and_then(ValueEncoding::of).or_else(own)
    }

    /// Returns the encoding of a request's rows, if any. Rows of half-precision variables always
    /// come in their own type; other rows in the chosen encoding if they are trainable.
    fn encoding_of_rows(&self, request: usize, link: &ShardLink) -> Option<Encoding> {
        let partition = self.partition_of(request)?;
        partition.own_encoding.or_else(|| link.values.filter(|_| partition.trainable))
    }

    /// Returns the partition of a row request.
    fn partition_of(&self, request: usize) -> Option<&Partition> {
        let PullScope::Rows(rows, index) = &self.requests.get(request)?.scope else { return None };
        let partition = rows.requests()[*index].partition;
        self.plan.catalogue().partitions().get(partition.0 as usize)
    }

    /// Lists the targets of an answer with a body of `bytes` bytes in the spans of its link.
    /// Returns how the body is encoded, if it is.
    pub(super) fn locate(
        &mut self,
        request: usize,
        message: &Message,
        bytes: u64,
        link: &mut ShardLink,
    ) -> Result<Option<EncodedValuesPart>, &'static str> {
        let shard = link.shard;
        match message {
            Message::Rows(rows) => {
                let encoding = self.encoding_of_rows(request, link);
                let (to, encoded) = self.rows(request, rows, encoding, bytes)?;
                link.spans.clear();
                link.spans.push((LayoutSpan::Buffer(to.start), to.len()));
                Ok(encoded)
            }
            // An older server may not support the chosen encoding and sends plain values.
            // Half-precision variables are always encoded.
            Message::Pulled(pulled) if !self.plan.has_halves(shard) => {
                self.part(request, shard, pulled, bytes, &mut link.spans)?;
                Ok(None)
            }
            Message::PulledEncoded(PulledEncoded { part, bytes: covered }) => {
                self.part(request, shard, part, *covered, &mut link.spans)?;
                let form = self.form_of_values(link).ok_or("values in an unrequested encoding")?;
                let end = part.offset.checked_add(*covered);
                let range = part.offset..end.ok_or("values beyond the shard's variables")?;
                let encoded = EncodedValuesPart::new(form, &self.plan, shard, range, bytes);
                encoded.map(Some).ok_or("values of another length")
            }
            _ => Err("values in an unrequested encoding"),
        }
    }

    /// Lists the targets of the next part of a shard's answer. Parts must arrive in order and
    /// without gaps: the buffer still holds older values, which must not be mistaken for new ones.
    fn part(
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
        *received = end;
        *gradients = pulled.gradients;
        spans.iter_mut().for_each(|(span, _)| *span = span.behind(self.base));
        Ok(())
    }

    /// Returns the target of the rows in an answer, and their encoding if they are encoded.
    fn rows(
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
        let encoded = match encoding.zip(format) {
            None => (to.len() as u64 == bytes).then_some(None),
            Some((_, (_, Some(own)))) => {
                EncodedValuesPart::halves(own, to.clone(), bytes).map(Some)
            }
            Some((encoding, (dtype, None))) => {
                EncodedValuesPart::rows(encoding, dtype, to.clone(), bytes).map(Some)
            }
        };
        let encoded = encoded.ok_or("rows of another length")?;
        *gradients = rows.gradients;
        Ok((to, encoded))
    }

    /// Calls `receive` with the targets that the spans of the link name.
    pub(super) fn with_targets<R>(
        &mut self,
        spans: &[(LayoutSpan, usize)],
        scratch: &mut Vec<u8>,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        scatter(self.buffer.bytes_mut(), spans, scratch, receive)
    }

    /// Decodes a received body into the buffer. `None` if it is malformed.
    pub(super) fn decode(&mut self, part: &EncodedValuesPart, link: &mut ShardLink) -> Option<()> {
        let to = (self.base, self.buffer.bytes_mut());
        part.decode(&self.plan, link.shard, &link.encoded_body, &mut link.spans, to)
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
        let mut order = [0; INLINE_TARGETS];
        let mut targets = [(); INLINE_TARGETS].map(|()| &mut [][..]);
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
    let mut rest = buffer;
    let mut at = 0;
    for &index in &*order {
        let Some(start) = start_of(index) else { continue };
        let (_, tail) = rest.split_at_mut_checked(start.checked_sub(at)?)?;
        let (target, tail) = tail.split_at_mut_checked(spans[index].1)?;
        targets[index] = target;
        rest = tail;
        at = start + spans[index].1;
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
