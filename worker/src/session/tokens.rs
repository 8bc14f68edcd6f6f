//! Tokens: asked for one at a time, and those that came with the answer to a push.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::{RequestId, TokenId};
use pushpull_common::protocol::message::{ReturnToken, TokenRequest};
use pushpull_common::protocol::{Envelope, Grant, Message};

use super::link::{Link, Pending, Status};
use super::requests::deadline_ms;
use super::{OpId, Reply, Session};
use crate::parts::Body;

/// How long a token that came with an answer is kept for a caller who may not ask for it.
const UNCLAIMED: Duration = Duration::from_millis(500);

/// The tokens that have come and that nobody has taken, with when they came.
///
/// They are shared with the session's callers, who take them out by themselves: the session need not be
/// asked. Whoever takes a token out has it, so that each is here, with one caller or on its way back,
/// and never in two of these places. One that a caller has taken is to the session what one is that it
/// has handed over in answer to a command.
#[derive(Debug, Default)]
pub(crate) struct Unclaimed(Mutex<VecDeque<(Grant, Instant)>>);

impl Unclaimed {
    /// Takes the oldest token out.
    pub(crate) fn claim(&self) -> Option<Grant> {
        self.tokens().pop_front().map(|(grant, _)| grant)
    }

    fn add(&self, grant: Grant, now: Instant) {
        self.tokens().push_back((grant, now));
    }

    /// When the oldest is to go back.
    fn due(&self) -> Option<Instant> {
        self.tokens().front().map(|(_, since)| *since + UNCLAIMED)
    }

    /// Takes the oldest out if it is to go back by now.
    fn take_due(&self, now: Instant) -> Option<Grant> {
        let mut tokens = self.tokens();
        tokens.front().filter(|(_, since)| now >= *since + UNCLAIMED)?;
        tokens.pop_front().map(|(grant, _)| grant)
    }

    fn clear(&self) {
        self.tokens().clear();
    }

    fn tokens(&self) -> MutexGuard<'_, VecDeque<(Grant, Instant)>> {
        // Each change is one call: the list is whole whatever a panic elsewhere interrupted.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What this session knows of its tokens.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    unclaimed: Arc<Unclaimed>,
    /// The newest token ever given to us.
    newest: TokenId,
    /// The operation whose request is unanswered; it may have given up since.
    requested: Option<OpId>,
    /// How long that request waits, in milliseconds, if it is for a part of the operation's time only.
    asked_in_part: Option<u32>,
    /// For whom the last such request has waited.
    awaited: Option<String>,
    /// Tokens on their way back, and whether that has been sent over the present connection. The
    /// owner counts on a token as long as it is not back, so this is said until it is answered.
    returning: Vec<(Grant, bool)>,
    /// Requests that were lost with their connection, each of which may have been given a token.
    /// The owner gives the oldest of those to the next request that names the newest token we know;
    /// one that came with an answer meanwhile would be newer, and hide them.
    doubts: usize,
    /// There will be no more.
    ended: bool,
    /// Whether any has ever been asked for.
    asked: bool,
}

impl Tokens {
    /// A request for a token, by itself or with a push, was lost.
    pub(super) fn lost(&mut self) {
        self.doubts += 1;
    }

    pub(super) fn asked_in_part(&self) -> Option<u32> {
        self.asked_in_part
    }

    pub(super) fn wait_for(&mut self, awaited: String) {
        self.awaited = Some(awaited);
    }

    /// For whom a token waits, as the step owner has said last.
    pub(super) fn awaited(&self) -> Option<&str> {
        self.awaited.as_deref()
    }

    /// The request for a token alone was lost.
    pub(super) fn request_lost(&mut self) {
        self.requested = None;
        self.lost();
    }

    pub(super) fn return_lost(&mut self, token: TokenId) {
        let lost = self.returning.iter_mut().filter(|(grant, _)| grant.token == token);
        lost.for_each(|(_, sent)| *sent = false);
    }

    pub(super) fn is_back(&mut self, token: TokenId) {
        self.returning.retain(|(grant, _)| grant.token != token);
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.unclaimed.due()
    }

    /// Those that nobody has taken.
    pub(super) fn unclaimed(&self) -> &Arc<Unclaimed> {
        &self.unclaimed
    }

    /// The session has failed: no token is of use any more.
    pub(super) fn forget(&mut self) {
        self.unclaimed.clear();
        *self = Tokens { unclaimed: self.unclaimed.clone(), ..Tokens::default() };
    }

    /// A token has come; false if it has come before.
    pub(super) fn add(&mut self, grant: Grant, now: Instant) -> bool {
        let new = grant.token > self.newest;
        if new {
            self.newest = grant.token;
            self.unclaimed.add(grant, now);
        }
        new
    }

    /// One is asked for, by itself or with a push.
    pub(super) fn asks(&mut self) {
        self.asked = true;
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    /// Whether a push may ask for the next.
    pub(super) fn may_come_with_an_answer(&self) -> bool {
        !self.ended && self.doubts == 0
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
        if self.tokens.requested.is_some() || self.links[link].status != Status::Up {
            return;
        }
        let Some(op) = self.ops.get(&id) else { return };
        self.tokens.requested = Some(id);
        self.tokens.asks();
        let wait_ms = self.token_wait_ms(now, op.deadline);
        let is_part = wait_ms < deadline_ms(now, op.deadline);
        self.tokens.asked_in_part = is_part.then_some(wait_ms);
        let envelope = Envelope { deadline_ms: wait_ms, ..Envelope::default() };
        let request = TokenRequest { newest: self.tokens.newest };
        self.send(now, link, Pending::Token, envelope, request, Body::Empty);
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
                self.tokens.doubts = self.tokens.doubts.saturating_sub(1);
                self.granted(now, request, granted.grant);
                // A synchronous step begins when every shard has applied those before.
                let under_way = granted.grant.step;
                self.applying.retain(|(step, _)| *step >= under_way);
            }
            Message::Ended(_) => self.tokens.end(),
            Message::Refused(refused) => {
                // The request carried the deadline of whoever made it: others ask anew.
                if let Some(id) = asked.filter(|_| !self.token_goes_on(now, link, &refused.refusal))
                {
                    let refusal = self.of_the_whole_wait(now, id, refused.refusal);
                    let error = self.refused("take a token", link, refusal);
                    self.finish(id, Err(error));
                }
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// A token has come, which answers this request of the step owner.
    pub(super) fn granted(&mut self, now: Instant, request: RequestId, grant: Grant) {
        self.tokens.add(grant, now);
        let unknown = |link: &&mut Link| link.granted_since.is_none() && link.status == Status::Up;
        for link in self.links.iter_mut().filter(unknown) {
            // Tokens are numbered in the order in which they are granted.
            link.granted_since = (request >= link.welcomed_before).then_some(grant.token);
        }
    }

    /// A shard has welcomed this session: tokens that are asked for from now on are granted after it.
    pub(super) fn welcomed_at(&mut self, index: usize) {
        let next = self.owner_link().map(|owner| self.links[owner].next_request());
        let link = &mut self.links[index];
        link.welcomed_before = next.unwrap_or_default();
        link.granted_since = (!self.tokens.asked).then_some(TokenId(0));
    }

    /// Takes every token for one that was granted while all connections stood: a bug that the simulator
    /// plants.
    #[cfg(feature = "simulation")]
    pub(crate) fn trust_connections(&mut self) {
        self.links.iter_mut().for_each(|link| link.granted_since = Some(TokenId(0)));
    }

    /// Gives a token back, once the owner can be told.
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
                Pending::Return(token),
                Envelope::default(),
                returned,
                Body::Empty,
            );
        }
    }

    /// Gives back the tokens that nobody has asked for in time; while the owner is away, somebody
    /// still may.
    pub(super) fn return_unclaimed_tokens(&mut self, now: Instant) {
        while self.owner_is_up()
            && let Some(grant) = self.tokens.unclaimed.take_due(now)
        {
            self.return_token(now, grant);
        }
    }
}
