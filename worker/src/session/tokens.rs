//! Tokens: one request at a time, and the tokens that arrive with push answers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::{RequestId, TokenId};
use pushpull_common::protocol::message::{ReturnToken, TokenRequest};
use pushpull_common::protocol::{Envelope, Grant, Message};

use super::link::{LinkStatus, PendingRequest, ShardLink};
use super::requests::deadline_ms;
use super::{OpId, Reply, Session};
use crate::gradients::parts::FrameBody;

/// How long a prefetched token waits for a caller before it is returned.
const UNCLAIMED_MAX: Duration = Duration::from_millis(500);

/// The received tokens that no caller has taken, with their times of arrival.
///
/// Shared with the session's callers, who take tokens without asking the session. A token is in
/// exactly one place: in this queue, with one caller, or on its way back. The session treats a
/// token taken here like one handed out in answer to a command.
#[derive(Debug, Default)]
pub(crate) struct UnclaimedTokens(Mutex<VecDeque<(Grant, Instant)>>);

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The session's token state.
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
    /// Tokens to return, and whether the return was sent over the current connection. The owner
    /// counts on a token until it is returned, so the return is repeated until it is answered.
    returning: Vec<(Grant, bool)>,
    /// Requests lost with their connections; each may have been granted a token. The owner grants
    /// the oldest such token to the next request, which names the newest token received. A token
    /// prefetched in the meantime would be newer and hide the lost ones.
    lost_requests: usize,
    /// No more tokens will be granted.
    ended: bool,
    /// Whether any token has ever been requested.
    ever_requested: bool,
}

impl Tokens {
    /// Records the loss of a token request, whether alone or with a push.
    pub(super) fn record_lost_request(&mut self) {
        self.lost_requests += 1;
    }

    pub(super) fn partial_wait_ms(&self) -> Option<u32> {
        self.partial_wait_ms
    }

    pub(super) fn set_awaited(&mut self, awaited: String) {
        self.awaited = Some(awaited);
    }

    /// Returns what a token waits for, as last reported by the step owner.
    pub(super) fn awaited(&self) -> Option<&str> {
        self.awaited.as_deref()
    }

    /// Handles the loss of a `TokenRequest`.
    pub(super) fn request_lost(&mut self) {
        self.requested = None;
        self.record_lost_request();
    }

    pub(super) fn return_lost(&mut self, token: TokenId) {
        let lost = self.returning.iter_mut().filter(|(grant, _)| grant.token == token);
        lost.for_each(|(_, sent)| *sent = false);
    }

    pub(super) fn remove_returned(&mut self, token: TokenId) {
        self.returning.retain(|(grant, _)| grant.token != token);
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.unclaimed.due()
    }

    /// Returns the tokens that no caller has taken.
    pub(super) fn unclaimed(&self) -> &Arc<UnclaimedTokens> {
        &self.unclaimed
    }

    /// Discards all tokens: the session has failed.
    pub(super) fn forget(&mut self) {
        self.unclaimed.clear();
        *self = Tokens { unclaimed: self.unclaimed.clone(), ..Tokens::default() };
    }

    /// Adds a received token. Returns false if it is a repetition.
    pub(super) fn add(&mut self, grant: Grant, now: Instant) -> bool {
        let new = grant.token > self.newest;
        if new {
            self.newest = grant.token;
            self.unclaimed.add(grant, now);
        }
        new
    }

    /// Records that a token is requested, alone or with a push.
    pub(super) fn record_request(&mut self) {
        self.ever_requested = true;
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    /// Returns whether a push may request the next token.
    pub(super) fn may_prefetch(&self) -> bool {
        !self.ended && self.lost_requests == 0
    }
}

impl Session {
    pub(super) fn drive_token(&mut self, now: Instant, id: OpId) {
        if let Some(grant) = self.tokens.unclaimed.claim() {
            self.finish(id, Ok(Reply::Token(Some(grant))));
            return;
        }
        if self.tokens.ended {
            self.finish(id, Ok(Reply::Token(None)));
            return;
        }
        let Some(link) = self.owner_link() else {
            return;
        };
        if self.tokens.requested.is_some() || self.links[link].status != LinkStatus::Up {
            return;
        }
        let Some(op) = self.ops.get(&id) else { return };
        self.tokens.requested = Some(id);
        self.tokens.record_request();
        let wait_ms = self.token_wait_ms(now, op.deadline);
        let is_part = wait_ms < deadline_ms(now, op.deadline);
        self.tokens.partial_wait_ms = is_part.then_some(wait_ms);
        let envelope = Envelope { deadline_ms: wait_ms, ..Envelope::default() };
        let request = TokenRequest { newest: self.tokens.newest };
        self.send(now, link, PendingRequest::Token, envelope, request, FrameBody::Empty);
    }

    pub(super) fn token_answered(
        &mut self,
        now: Instant,
        link: usize,
        request: RequestId,
        message: Message,
    ) {
        let asked = self.tokens.requested.take();
        match message {
            Message::Granted(granted) => {
                self.tokens.awaited = None;
                if granted.grant.push_slot != 0 {
                    self.links[link].push_slot = granted.grant.push_slot;
                }
                self.tokens.lost_requests = self.tokens.lost_requests.saturating_sub(1);
                self.granted(now, request, granted.grant);
                // A synchronous step begins only after every shard has applied the previous ones.
                let under_way = granted.grant.step;
                self.applying.retain(|(step, _)| *step >= under_way);
            }
            Message::Ended(_) => self.tokens.end(),
            Message::Refused(refused) => {
                // The request carried the deadline of this operation. Other operations send their
                // own.
                if let Some(id) =
                    asked.filter(|_| !self.continue_token_wait(now, link, &refused.refusal))
                {
                    let refusal = self.with_total_wait(now, id, refused.refusal);
                    let error = self.refused("take a token", link, refusal);
                    self.finish(id, Err(error));
                }
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// Records a token granted in answer to this request of the step owner.
    pub(super) fn granted(&mut self, now: Instant, request: RequestId, grant: Grant) {
        self.tokens.add(grant, now);
        let unknown =
            |link: &&mut ShardLink| link.granted_since.is_none() && link.status == LinkStatus::Up;
        for link in self.links.iter_mut().filter(unknown) {
            // Tokens are numbered in the order of their grants.
            link.granted_since = (request >= link.welcomed_before).then_some(grant.token);
        }
    }

    /// Marks a shard as welcomed: tokens requested from now on are granted after its welcome.
    pub(super) fn welcomed_at(&mut self, index: usize) {
        let next = self.owner_link().map(|owner| self.links[owner].next_request());
        let link = &mut self.links[index];
        link.welcomed_before = next.unwrap_or_default();
        link.granted_since = (!self.tokens.ever_requested).then_some(TokenId(0));
    }

    /// Treats every token as granted while all connections were up. Planted bug of the simulator.
    #[cfg(feature = "simulation")]
    pub(crate) fn trust_connections(&mut self) {
        self.links.iter_mut().for_each(|link| link.granted_since = Some(TokenId(0)));
    }

    /// Returns a token, now or as soon as the owner is connected.
    pub(super) fn return_token(&mut self, now: Instant, grant: Grant) {
        if self.failed.is_none() {
            self.tokens.returning.push((grant, false));
            self.drive_returns(now);
        }
    }

    pub(super) fn drive_returns(&mut self, now: Instant) {
        let Some(link) = self.owner_link().filter(|_| self.owner_is_up()) else {
            return;
        };
        let unsent = self.tokens.returning.iter_mut().filter(|(_, sent)| !sent);
        let due: Vec<Grant> = unsent.map(|(grant, sent)| (*sent = true, *grant).1).collect();
        for Grant { token, generation, .. } in due {
            let returned = ReturnToken { token, generation };
            self.send(
                now,
                link,
                PendingRequest::Return(token),
                Envelope::default(),
                returned,
                FrameBody::Empty,
            );
        }
    }

    /// Returns the unclaimed tokens that are due. While the owner is disconnected, callers may
    /// still claim them.
    pub(super) fn return_unclaimed_tokens(&mut self, now: Instant) {
        while self.owner_is_up()
            && let Some(grant) = self.tokens.unclaimed.take_due(now)
        {
            self.return_token(now, grant);
        }
    }
}
