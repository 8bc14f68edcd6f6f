//! The pulls under way, and the answers that fill their buffers.

mod pull;

use std::collections::BTreeSet;
use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::{Envelope, Header, Message, Refusal};

use super::encoded_values::EncodedValuesPart;
use super::links::{self, BodyTarget, LinkFault, PendingRequest, SessionLinks};
use super::membership::Membership;
use super::{GradientCounts, OpId, ReadPoint, Reply};
pub(super) use pull::PendingPull;
use pull::{PullProgress, PullScope};

/// The most unanswered row requests per shard: enough to keep the shard busy and fewer than it
/// refuses. A request of the largest size counts for nine of the shard's 128.
const ROW_REQUESTS_MAX: usize = 8;

/// The pulls under way, by their operations.
///
/// Invariants:
///
/// - A request is `Sent` exactly while its link's current connection has it.
/// - The complete answers of a pull are of one restore epoch, and in synchronous mode of one step.
/// - A pull gives its buffer back once all its requests are `Done`, or its token's step has passed.
#[derive(Debug, Default)]
pub(super) struct PendingPulls(Vec<(OpId, PendingPull)>);

/// What the answer to a pull changes.
#[derive(Debug)]
pub(super) enum PullEvent {
    /// Nothing yet: the body or more parts follow, or the caller has stopped waiting.
    Received,
    /// Requests can be sent, or the pull is complete.
    Advanced,
    /// The step of the pull's token has passed on the shard: the values are useless.
    Stale,
    /// The shard has refused a request.
    Refused(Refusal),
}

impl PendingPulls {
    pub(super) fn add(&mut self, id: OpId, pull: PendingPull) {
        self.0.push((id, pull));
    }

    pub(super) fn remove(&mut self, id: OpId) -> Option<PendingPull> {
        let index = self.0.iter().position(|(other, _)| *other == id)?;
        Some(self.0.swap_remove(index).1)
    }

    fn get(&self, id: OpId) -> Option<&PendingPull> {
        self.0.iter().find(|(other, _)| *other == id).map(|(_, pull)| pull)
    }

    fn get_mut(&mut self, id: OpId) -> Option<&mut PendingPull> {
        self.0.iter_mut().find(|(other, _)| *other == id).map(|(_, pull)| pull)
    }

    /// Forgets all answers, which are requested again.
    pub(super) fn forget_answers(&mut self) {
        for request in self.0.iter_mut().flat_map(|(_, pull)| &mut pull.requests) {
            if matches!(request.progress, PullProgress::Done(..)) {
                request.progress = PullProgress::Unsent;
                request.older = None;
            }
        }
    }

    /// Returns the links with unanswered requests of a pull.
    pub(super) fn awaited(&self, id: OpId) -> BTreeSet<usize> {
        self.get(id).into_iter().flat_map(PendingPull::unanswered).collect()
    }

    /// Returns the step of the values that a shard sent and the newer step of the others, if the
    /// shard was asked again for that reason.
    pub(super) fn disagreement(&self, id: OpId, link: usize) -> Option<(GlobalStep, GlobalStep)> {
        self.get(id)?.disagreement(link)
    }

    /// Sends the requests of a pull that can be sent now. Returns whether the pull is complete.
    ///
    /// Synchronous values must all be of one step: answers of older steps are requested again.
    pub(super) fn send(
        &mut self,
        now: Instant,
        id: OpId,
        envelope: Envelope,
        membership: &Membership,
        links: &mut SessionLinks,
    ) -> bool {
        let Some(pull) = self.get_mut(id) else { return false };
        let mut envelope = Envelope { step: pull.token.unwrap_or_default(), ..envelope };
        // Never mix values of two restore epochs. A shard in an older epoch is asked once it is
        // restored, and its earlier answers are requested again. The owner counts too: it gives the
        // step.
        let all = pull.requests.iter().map(|request| request.link).chain(links.owner());
        let outdated: Vec<usize> = links.outdated(all).collect();
        let mut restored = false;
        for request in &mut pull.requests {
            let epoch = links[request.link].restore_epoch;
            let outdated = outdated.contains(&request.link);
            if matches!(request.progress, PullProgress::Done(of, _) if of != epoch || outdated) {
                request.progress = PullProgress::Unsent;
                restored = true;
            }
        }
        if restored {
            pull.requests.iter_mut().for_each(|request| request.older = None);
        }
        if membership.synchronous {
            // A shard that has applied fewer steps answers once it has caught up.
            envelope.step = pull.newest();
        }
        for request in &mut pull.requests {
            // Rows without a token share a step within one request only. Otherwise a pull of many
            // requests would never end while steps are made.
            if let PullProgress::Done(_, step) = request.progress
                && membership.synchronous
                && step < envelope.step
                && !matches!(request.scope, PullScope::Rows(..))
            {
                request.older = Some((step, envelope.step));
                request.progress = PullProgress::Unsent;
            }
        }
        // The step may have been higher in an older epoch.
        pull.step = pull.step.min(membership.step.max(pull.token.unwrap_or_default()));
        let done = outdated.is_empty() && pull.is_complete();
        // Unanswered requests per link.
        let mut under_way = vec![0; links.len()];
        for request in &pull.requests {
            if matches!(request.progress, PullProgress::Sent(..)) {
                under_way[request.link] += 1;
            }
        }
        for index in 0..pull.requests.len() {
            let link = pull.requests[index].link;
            let progress = pull.requests[index].progress;
            let up = links[link].is_up() && !outdated.contains(&link);
            if progress == PullProgress::Unsent && up && under_way[link] < ROW_REQUESTS_MAX {
                under_way[link] += 1;
                pull.requests[index].progress = PullProgress::Sent(0, GlobalStep(0));
                let frame = pull.frame_of(index, &links[link], envelope);
                links.send(now, link, PendingRequest::Pull(id, index), frame);
            }
        }
        done
    }

    /// Ends a complete pull and returns its values.
    pub(super) fn finish(
        &mut self,
        id: OpId,
        synchronous: bool,
        links: &SessionLinks,
    ) -> Option<Reply> {
        let pull = self.remove(id)?;
        let step = if synchronous { pull.oldest() } else { pull.step };
        // Of several answers of a shard the oldest counts.
        let mut gradients = GradientCounts::default();
        for request in &pull.requests {
            gradients.lower(links[request.link].shard, request.gradients);
        }
        Some(Reply::Pulled { buffer: pull.buffer, read: ReadPoint { step, gradients } })
    }

    /// Checks an answer and prepares its link for the body.
    pub(super) fn answered(
        &mut self,
        (id, request): (OpId, usize),
        index: usize,
        header: &Header,
        message: Message,
        synchronous: bool,
        links: &mut SessionLinks,
    ) -> Result<PullEvent, LinkFault> {
        if let Message::Refused(refused) = message {
            return Ok(PullEvent::Refused(refused.refusal));
        }
        let event = self.receive((id, request), index, header, &message, synchronous, links);
        if event.is_err() {
            self.lost(id, index);
        }
        event
    }

    fn receive(
        &mut self,
        (id, request): (OpId, usize),
        index: usize,
        header: &Header,
        message: &Message,
        synchronous: bool,
        links: &mut SessionLinks,
    ) -> Result<PullEvent, LinkFault> {
        if !matches!(message, Message::Pulled(_) | Message::Rows(_) | Message::PulledEncoded(_)) {
            return Err(LinkFault::unexpected(message));
        }
        // The caller may have stopped waiting. The body is then read and discarded.
        let Some(pull) = self.get_mut(id) else { return Ok(PullEvent::Received) };
        let is_owner = links.is_owner(index);
        let bytes = header.body_bytes;
        let link = &mut links[index];
        let encoded = pull
            .locate(request, message, bytes, link)
            .map_err(|error| LinkFault::Reset(error.to_owned()))?;
        // Row answers do not raise the step: they may be of several steps, of which the oldest
        // counts. That is the step known when the pull began.
        if is_owner && !matches!(message, Message::Rows(_)) {
            pull.step = pull.step.max(header.step);
        }
        if synchronous {
            let of = pull.requests.get_mut(request).map(|request| &mut request.progress);
            if let Some(PullProgress::Sent(_, step)) = of {
                *step = header.step.max(*step);
            }
            if pull.token.is_some_and(|step| header.step > step) {
                return Ok(PullEvent::Stale);
            }
            if pull.token.is_some_and(|step| header.step < step) {
                let error = "values of a step before the token's";
                return Err(LinkFault::Reset(error.to_owned()));
            }
        }
        let last = !links::has_more_parts(message);
        if bytes == 0 {
            return Ok(self.received((id, request), index, last, synchronous, links));
        }
        link.receiving = Some(match encoded {
            None => BodyTarget::Values { op: id, request, last },
            Some(part) => {
                link.encoded_body.resize(bytes as usize, 0);
                BodyTarget::EncodedValues { op: id, request, part, last }
            }
        });
        Ok(PullEvent::Received)
    }

    /// Handles values that have been received completely.
    pub(super) fn received(
        &mut self,
        (id, request): (OpId, usize),
        index: usize,
        last: bool,
        synchronous: bool,
        links: &SessionLinks,
    ) -> PullEvent {
        let epoch = links[index].restore_epoch;
        let Some(pull) = self.get_mut(id) else { return PullEvent::Received };
        let Some(request) = pull.requests.get_mut(request).filter(|_| last) else {
            return PullEvent::Received;
        };
        let step = match request.progress {
            PullProgress::Sent(_, step) => step,
            _ => GlobalStep(0),
        };
        request.progress = PullProgress::Done(epoch, step);
        request.older = None;
        let waits = pull.requests.iter().any(|of| of.progress == PullProgress::Unsent);
        match synchronous || waits || pull.is_complete() {
            true => PullEvent::Advanced,
            false => PullEvent::Received,
        }
    }

    /// Decodes encoded values that have been received completely.
    pub(super) fn received_encoded(
        &mut self,
        (id, request): (OpId, usize),
        index: usize,
        (part, last): (&EncodedValuesPart, bool),
        synchronous: bool,
        links: &mut SessionLinks,
    ) -> Result<PullEvent, LinkFault> {
        let Some(pull) = self.get_mut(id) else { return Ok(PullEvent::Received) };
        if pull.decode(part, &mut links[index]).is_none() {
            pull.lost(index);
            return Err(LinkFault::Reset("malformed encoded values".to_owned()));
        }
        Ok(self.received((id, request), index, last, synchronous, links))
    }

    /// Calls `receive` with the memory for the body that a link is receiving, in order, or with
    /// `None` if the body is to be discarded.
    pub(super) fn with_targets<R>(
        &mut self,
        index: usize,
        links: &mut SessionLinks,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        let link = &mut links[index];
        match &mut link.receiving {
            None => receive(None),
            Some(BodyTarget::Answer { body, .. }) => receive(Some(&mut [body])),
            Some(BodyTarget::EncodedValues { .. }) => receive(Some(&mut [&mut link.encoded_body])),
            Some(BodyTarget::Values { op, .. }) => match self.get_mut(*op) {
                Some(pull) => pull.with_targets(&link.spans, &mut link.scratch, receive),
                None => receive(None),
            },
        }
    }

    /// Marks the unanswered requests of a pull to a shard as unsent.
    pub(super) fn lost(&mut self, id: OpId, link: usize) {
        if let Some(pull) = self.get_mut(id) {
            pull.lost(link);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self, links: &SessionLinks) {
        for (id, pull) in &self.0 {
            for (index, request) in pull.requests.iter().enumerate() {
                let link = &links[request.link];
                let is_pending = link.awaits(PendingRequest::Pull(*id, index))
                    || link.receiving.as_ref().is_some_and(|body| body.is_for(*id, index));
                let is_sent = matches!(request.progress, PullProgress::Sent(..));
                assert_eq!(is_sent, is_pending, "request {index} of {id:?}: {request:?}");
            }
        }
    }
}
