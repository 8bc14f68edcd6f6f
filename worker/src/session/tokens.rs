//! Tokens: asked for one at a time, and those that came with the answer to a push.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::{ReturnToken, TokenRequest};
use pushpull_common::protocol::{Envelope, Grant, Message};

use super::link::{Pending, Status};
use super::requests::deadline_ms;
use super::{OpId, OpKind, Reply, Session};

/// How long a token that came with an answer is kept for a caller who may not ask for it.
const UNCLAIMED: Duration = Duration::from_millis(500);

/// The tokens that this session has and nobody has taken.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    unclaimed: VecDeque<(Grant, Instant)>,
    /// The newest token ever given to us.
    newest: TokenId,
    /// A request is unanswered.
    requested: bool,
    /// There will be no more.
    ended: bool,
}

impl Tokens {
    pub(super) fn lost(&mut self) {
        self.requested = false;
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.unclaimed.front().map(|(_, since)| *since + UNCLAIMED)
    }

    /// A token has come; false if it has come before.
    pub(super) fn add(&mut self, grant: Grant, now: Instant) -> bool {
        let new = grant.token > self.newest;
        if new {
            self.newest = grant.token;
            self.unclaimed.push_back((grant, now));
        }
        new
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }
}

impl Session {
    pub(super) fn drive_token(&mut self, now: Instant, id: OpId) {
        if let Some((grant, _)) = self.tokens.unclaimed.pop_front() {
            self.finish(id, Ok(Reply::Token(Some(grant))));
            return;
        }
        if self.tokens.ended {
            self.finish(id, Ok(Reply::Token(None)));
            return;
        }
        let Some(link) = self.owner_link() else { return };
        if self.tokens.requested || self.links[link].status != Status::Up {
            return;
        }
        let Some(op) = self.ops.get(&id) else { return };
        self.tokens.requested = true;
        let envelope =
            Envelope { deadline_ms: deadline_ms(now, op.deadline), ..Envelope::default() };
        let request = TokenRequest { newest: self.tokens.newest };
        self.send(now, link, Pending::Token, envelope, request, vec![]);
    }

    pub(super) fn token_answered(&mut self, now: Instant, link: usize, message: Message) {
        self.tokens.requested = false;
        match message {
            Message::Granted(granted) => {
                if granted.grant.room != 0 {
                    self.links[link].room = granted.grant.room;
                }
                self.tokens.add(granted.grant, now);
            }
            Message::Ended(_) => self.tokens.end(),
            Message::Refused(refused) if Session::is_fatal(&refused.refusal) => {
                let error = self.refused("take a token", link, refused.refusal);
                return self.fail(error);
            }
            Message::Refused(refused) => {
                // The oldest who waits was the one whose deadline the request carried.
                let oldest = self.ops.iter().find(|(_, op)| matches!(op.kind, OpKind::Token));
                if let Some((&id, _)) = oldest {
                    let error = self.refused("take a token", link, refused.refusal);
                    self.finish(id, Err(error));
                }
            }
            message => return self.unexpected(now, link, &message),
        }
        self.drive(now);
    }

    /// Gives a token back, if the owner can be told; if not, its lease does so.
    pub(super) fn return_token(&mut self, now: Instant, grant: Grant) {
        let Some(link) = self.owner_link() else { return };
        if self.links[link].status == Status::Up {
            let (token, generation) = (grant.token, grant.generation);
            let returned = ReturnToken { token, generation };
            self.send(now, link, Pending::Nobody, Envelope::default(), returned, vec![]);
        } else {
            self.tokens.unclaimed.push_back((grant, now));
        }
    }

    pub(super) fn return_unclaimed_tokens(&mut self, now: Instant) {
        while let Some(&(grant, since)) = self.tokens.unclaimed.front()
            && now >= since + UNCLAIMED
        {
            self.tokens.unclaimed.pop_front();
            let up = self.owner_link().is_some_and(|l| self.links[l].status == Status::Up);
            self.return_token(now, grant);
            if !up {
                return;
            }
        }
    }
}
