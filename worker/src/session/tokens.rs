//! Tokens: one request at a time, and the tokens that arrive with push answers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RequestId, TokenId};
use pushpull_common::protocol::message::{
    EndReason, PushAnswer, ReturnToken, SkipBatch, TokenRequest,
};
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal};

use super::OpId;
use super::links::{LinkFault, OutgoingFrame, PendingRequest, SessionLinks};

/// The received tokens that no caller has taken, with their times of arrival.
///
/// Shared with the session's callers, who take tokens without asking the session. A token is in
/// exactly one place: in this queue, with one caller, or on its way back. The session treats a
/// token taken here like one handed out in answer to a command.
#[derive(Debug, Default)]
pub(crate) struct UnclaimedTokens {
    queue: Mutex<VecDeque<(Grant, Instant)>>,
    /// Why no more tokens will be granted.
    ended: OnceLock<EndReason>,
    /// Whether the session has failed, so that every operation fails.
    has_failed: AtomicBool,
}

impl UnclaimedTokens {
    /// Takes the oldest token.
    pub(crate) fn claim(&self) -> Option<Grant> {
        self.tokens().pop_front().map(|(grant, _)| grant)
    }

    fn add(&self, grant: Grant, now: Instant) {
        self.tokens().push_back((grant, now));
    }

    /// Returns when the oldest token is due to be returned.
    fn due(&self) -> Option<Instant> {
        self.tokens().front().map(|(_, since)| *since + UNCLAIMED_MAX)
    }

    /// Takes the oldest token if it is due to be returned.
    fn take_due(&self, now: Instant) -> Option<Grant> {
        let mut tokens = self.tokens();
        tokens.front().filter(|(_, since)| now >= *since + UNCLAIMED_MAX)?;
        tokens.pop_front().map(|(grant, _)| grant)
    }

    fn clear(&self) {
        self.tokens().clear();
    }

    fn tokens(&self) -> MutexGuard<'_, VecDeque<(Grant, Instant)>> {
        // Each change is one call, so the queue is valid even if another thread panicked.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns why no more tokens will be granted, once the step owner has said so.
    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        self.ended.get().copied()
    }

    /// Returns whether the session has failed: every operation returns its error from now on.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    fn end(&self, reason: EndReason) {
        // The first reason counts.
        let _ = self.ended.set(reason);
    }
}

/// The session's token state.
///
/// Invariants: at most one token request is unanswered. A token that is to be returned is kept
/// until the step owner has answered its return, because the owner counts on it until then.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    unclaimed: Arc<UnclaimedTokens>,
    /// The newest token ever received.
    newest: TokenId,
    /// The operation that sent the unanswered request. It may have timed out since.
    requested: Option<OpId>,
    /// How long that request waits in milliseconds, if less than the operation's remaining time.
    partial_wait_ms: Option<u32>,
    /// What the last such request has waited for.
    awaited: Option<String>,
    returning: Vec<ReturningToken>,
    /// Requests lost with their connections; each may have been granted a token. The owner grants
    /// the oldest such token to the next request, which names the newest token received. A token
    /// prefetched in the meantime would be newer and hide the lost ones.
    lost_requests: usize,
    /// Whether any token has ever been requested.
    ever_requested: bool,
}

/// A token to return.
#[derive(Debug)]
struct ReturningToken {
    grant: Grant,
    /// Whether its batch is to be spent without a gradient.
    skipped: bool,
    /// Whether the return was sent over the current connection.
    sent: bool,
}

/// The answer to a token request.
#[derive(Debug)]
pub(super) enum TokenAnswer {
    /// A token of this step has arrived.
    Granted { step: GlobalStep },
    /// No more tokens will be granted.
    Ended,
    /// The owner has refused the request of this operation.
    Refused(Option<OpId>, Refusal),
}

impl Tokens {
    /// Returns the tokens that no caller has taken.
    pub(super) fn unclaimed(&self) -> &Arc<UnclaimedTokens> {
        &self.unclaimed
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.unclaimed.due()
    }

    fn has_ended(&self) -> bool {
        self.unclaimed.end_reason().is_some()
    }

    /// Takes a token, or `Some(None)` if there will be none.
    pub(super) fn take(&self) -> Option<Option<Grant>> {
        self.unclaimed.claim().map(Some).or(self.has_ended().then_some(None))
    }

    /// Takes an unclaimed token that is due to be returned.
    pub(super) fn take_due(&self, now: Instant) -> Option<Grant> {
        self.unclaimed.take_due(now)
    }

    /// Returns whether a push may request the next token.
    pub(super) fn may_prefetch(&self) -> bool {
        !self.has_ended() && self.lost_requests == 0
    }

    /// Records that a token is requested with a push.
    pub(super) fn record_request(&mut self) {
        self.ever_requested = true;
    }

    pub(super) fn was_ever_requested(&self) -> bool {
        self.ever_requested
    }

    /// Requests a token for an operation that can wait `deadline_ms`, if no request is under way.
    /// The owner refuses after `wait_ms`, which may be less.
    pub(super) fn request(
        &mut self,
        now: Instant,
        id: OpId,
        (wait_ms, deadline_ms): (u32, u32),
        links: &mut SessionLinks,
    ) {
        let Some(owner) = links.connected_owner() else { return };
        if self.requested.is_some() {
            return;
        }
        self.requested = Some(id);
        self.record_request();
        self.partial_wait_ms = (wait_ms < deadline_ms).then_some(wait_ms);
        let envelope = Envelope { deadline_ms: wait_ms, ..Envelope::default() };
        let frame = OutgoingFrame::new(envelope, TokenRequest { newest: self.newest });
        links.send(now, owner, PendingRequest::Token, frame);
    }

    /// Handles the answer to a token request.
    pub(super) fn answered(
        &mut self,
        now: Instant,
        link: usize,
        request: RequestId,
        message: Message,
        links: &mut SessionLinks,
    ) -> Result<TokenAnswer, LinkFault> {
        let asked = self.requested.take();
        match message {
            Message::Granted(granted) => {
                self.awaited = None;
                if granted.grant.push_slot != 0 {
                    links[link].push_slot = granted.grant.push_slot;
                }
                self.lost_requests = self.lost_requests.saturating_sub(1);
                self.granted(now, request, granted.grant, links);
                Ok(TokenAnswer::Granted { step: granted.grant.step })
            }
            Message::Ended(ended) => {
                self.unclaimed.end(ended.reason);
                Ok(TokenAnswer::Ended)
            }
            Message::Refused(refused) => Ok(TokenAnswer::Refused(asked, refused.refusal)),
            message => Err(LinkFault::unexpected(&message)),
        }
    }

    /// Records the next token, which comes with the answer to a push.
    pub(super) fn push_answered(
        &mut self,
        now: Instant,
        request: RequestId,
        answer: &PushAnswer,
        links: &mut SessionLinks,
    ) {
        if let Some(grant) = answer.next {
            self.granted(now, request, grant, links);
        }
        if let Some(reason) = answer.ended {
            self.unclaimed.end(reason);
        }
    }

    /// Records a token granted in answer to this request of the step owner. A repetition is
    /// ignored.
    fn granted(
        &mut self,
        now: Instant,
        request: RequestId,
        grant: Grant,
        links: &mut SessionLinks,
    ) {
        if grant.token > self.newest {
            self.newest = grant.token;
            self.unclaimed.add(grant, now);
        }
        links.granted(request, grant.token);
    }

    /// Records what the owner waited for, if it refused a request that asked for only a part of the
    /// caller's time, and returns it. `None` if the refusal is final, as one is that comes before that
    /// part has passed.
    pub(super) fn record_partial_wait(&mut self, refusal: &Refusal) -> Option<&str> {
        let (Refusal::Deadline { waited_ms, awaited }, Some(asked_ms)) =
            (refusal, self.partial_wait_ms)
        else {
            return None;
        };
        if *waited_ms < u64::from(asked_ms) {
            return None;
        }
        Some(self.awaited.insert(awaited.to_string()))
    }

    /// Returns what a token waits for, as last reported by the step owner.
    pub(super) fn awaited(&self) -> Option<&str> {
        self.awaited.as_deref()
    }

    /// Handles the loss of a token request with its connection.
    pub(super) fn request_lost(&mut self) {
        self.requested = None;
        self.prefetch_lost();
    }

    /// Handles the loss of a push that requested a token.
    pub(super) fn prefetch_lost(&mut self) {
        self.lost_requests += 1;
    }

    /// Adds a token to return. If it is `skipped`, its batch is spent without a gradient.
    pub(super) fn give_back(&mut self, grant: Grant, skipped: bool) {
        self.returning.push(ReturningToken { grant, skipped, sent: false });
    }

    /// Sends the returns that the owner has not been sent over its current connection.
    pub(super) fn send_returns(&mut self, now: Instant, links: &mut SessionLinks) {
        let Some(owner) = links.connected_owner() else { return };
        for returning in self.returning.iter_mut().filter(|returning| !returning.sent) {
            returning.sent = true;
            let Grant { token, generation, .. } = returning.grant;
            let frame = match returning.skipped {
                true => OutgoingFrame::of(SkipBatch { token, generation }),
                false => OutgoingFrame::of(ReturnToken { token, generation }),
            };
            links.send(now, owner, PendingRequest::Return(token), frame);
        }
    }

    /// Handles the answer to the return of a token. A refused token is gone as well.
    pub(super) fn return_answered(
        &mut self,
        token: TokenId,
        message: &Message,
    ) -> Result<(), LinkFault> {
        if !matches!(message, Message::Returned(_) | Message::Refused(_)) {
            self.return_lost(token);
            return Err(LinkFault::unexpected(message));
        }
        self.returning.retain(|returning| returning.grant.token != token);
        Ok(())
    }

    /// Handles the loss of a return with its connection.
    pub(super) fn return_lost(&mut self, token: TokenId) {
        let lost = self.returning.iter_mut().filter(|returning| returning.grant.token == token);
        lost.for_each(|returning| returning.sent = false);
    }

    /// Discards all tokens: the session has failed.
    pub(super) fn forget(&mut self) {
        self.unclaimed.clear();
        self.unclaimed.has_failed.store(true, Ordering::Relaxed);
        *self = Tokens { unclaimed: self.unclaimed.clone(), ..Tokens::default() };
    }
}

/// How long a prefetched token waits for a caller before it is returned.
const UNCLAIMED_MAX: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use pushpull_common::ids::ShardId;
    use pushpull_common::protocol::message::{Granted, Returned};

    use super::*;

    fn grant(token: u64) -> Grant {
        Grant {
            token: TokenId(token),
            generation: 1,
            step: GlobalStep(token),
            push_slot: 0,
            samples: None,
            ahead: None,
        }
    }

    /// Links with a connected step owner.
    fn connected() -> (SessionLinks, usize) {
        let owner = ShardId { task: 0, shard: 0 };
        let mut links = SessionLinks::new(owner, 1);
        let link = links.to(Instant::now(), owner);
        links.welcomed(link, false);
        (links, link)
    }

    #[test]
    fn one_request_at_a_time_and_no_prefetch_after_a_lost_one() {
        let now = Instant::now();
        let mut tokens = Tokens::default();
        let (mut links, owner) = connected();
        tokens.request(now, OpId(1), (50, 50), &mut links);
        tokens.request(now, OpId(2), (50, 50), &mut links);
        assert_eq!(links.outputs.len(), 1);
        tokens.request_lost();
        assert!(!tokens.may_prefetch(), "it would hide the token of the lost request");
        tokens.request(now, OpId(2), (50, 50), &mut links);
        assert_eq!(links.outputs.len(), 2);
        let granted = Granted { grant: grant(3) }.into();
        tokens.answered(now, owner, RequestId(2), granted, &mut links).unwrap();
        assert!(tokens.may_prefetch());
        assert_eq!((tokens.take(), tokens.take()), (Some(Some(grant(3))), None));
    }

    #[test]
    fn a_repeated_grant_is_ignored() {
        let now = Instant::now();
        let mut tokens = Tokens::default();
        let (mut links, owner) = connected();
        for token in [3, 3, 2] {
            let granted = Granted { grant: grant(token) }.into();
            tokens.answered(now, owner, RequestId(1), granted, &mut links).unwrap();
        }
        assert_eq!((tokens.take(), tokens.take()), (Some(Some(grant(3))), None));
    }

    #[test]
    fn a_return_is_repeated_until_it_is_answered() {
        let now = Instant::now();
        let mut tokens = Tokens::default();
        let (mut links, _) = connected();
        tokens.give_back(grant(3), false);
        (0..2).for_each(|_| tokens.send_returns(now, &mut links));
        assert_eq!(links.outputs.len(), 1);
        tokens.return_lost(TokenId(3));
        tokens.send_returns(now, &mut links);
        assert_eq!(links.outputs.len(), 2);
        tokens.return_answered(TokenId(3), &Returned {}.into()).unwrap();
        tokens.return_lost(TokenId(3));
        tokens.send_returns(now, &mut links);
        assert_eq!(links.outputs.len(), 2);
    }
}
