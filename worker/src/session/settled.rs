//! The outcomes of pushes, merged from the answers of their shards.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Outcome, Refusal};

use super::pushes::{PendingPush, SharePhase};
use super::{Op, OpId, OpKind, Reply, Session};
use crate::error::Error;

/// How many settled pushes the session remembers.
const SETTLED_MAX: usize = WINDOW as usize;

impl Session {
    /// Settles a push if every shard has settled it, or the step owner has for all of them. Answers
    /// the operations that wait for it.
    pub(super) fn settle_if_done(&mut self, now: Instant, sequence: Sequence) {
        let Some(push) = self.pushes.get(&sequence) else {
            return;
        };
        let done = match push.synchronous {
            true => self.is_decided(push),
            false => {
                let settled = push.complete && push.unsettled().next().is_none();
                let not_taken = push.is_rejected_by(self.owner_link());
                settled || (not_taken && !push.is_whole_somewhere())
            }
        };
        if !done {
            return;
        }
        let Some(mut push) = self.pushes.remove(&sequence) else {
            return;
        };
        self.withdraw_shares(now, sequence, &push);
        let result = self.result_of(now, &push);
        if let Ok(Outcome::Accepted { step }) = result {
            let in_push_buffers =
                push.shares.iter_mut().filter_map(|share| share.in_push_buffer.take());
            self.applying.extend(in_push_buffers.map(|in_buffer| (step, in_buffer.buffer)));
        }
        drop(push);
        if self.settled.len() == SETTLED_MAX {
            self.settled.pop_front();
        }
        self.settled.push_back((sequence, result.clone()));
        let reply = || result.clone().map(|outcome| Reply::Pushed { outcome });
        let first = |session: &Session| session.waiting_for(sequence).next();
        while let Some(id) = first(self) {
            self.finish(id, reply());
        }
    }

    /// Returns the operations that wait for a push.
    pub(super) fn waiting_for(&self, sequence: Sequence) -> impl Iterator<Item = OpId> + '_ {
        let waits =
            move |op: &Op| matches!(op.kind, OpKind::Push { sequence: s, .. } if s == sequence);
        self.ops.iter().filter(move |(_, op)| waits(op)).map(|(&id, _)| id)
    }

    /// Merges the answers of all shards: the first refusal, or the owner's outcome, which has the
    /// step. Without a share of the owner, the first outcome.
    fn result_of(&mut self, now: Instant, push: &PendingPush) -> Result<Outcome, Error> {
        let owner = self.owner_link();
        let mut result = None;
        for share in &push.shares {
            match &share.phase {
                SharePhase::Settled(Err(refusal)) => {
                    let token_is_gone = matches!(refusal, Refusal::Token { .. });
                    let owner_spent_it = push.shares.iter().any(|share| {
                        Some(share.link) == owner
                            && matches!(share.phase, SharePhase::Settled(Ok(_)))
                    });
                    if let Some(grant) = push.grant.filter(|_| !token_is_gone && !owner_spent_it) {
                        self.return_token(now, grant);
                    }
                    return Err(self.refused("push", share.link, refusal.clone()));
                }
                SharePhase::Settled(Ok(outcome))
                    if result.is_none() || Some(share.link) == owner =>
                {
                    result = Some(*outcome);
                }
                _ => {}
            }
        }
        result.ok_or(Error::EmptyPush)
    }

    pub(super) fn settled_result(&self, sequence: Sequence) -> Option<Result<Outcome, Error>> {
        let settled = self.settled.iter().find(|(settled, _)| *settled == sequence);
        match settled {
            Some((_, result)) => Some(result.clone()),
            None if self.pushes.contains_key(&sequence) => None,
            None => Some(Err(Error::UnknownPush { sequence })),
        }
    }

    /// Answers with the known outcome of a push. The session remembers the last [`SETTLED_MAX`].
    pub(super) fn outcome(&mut self, op: OpId, sequence: Sequence) {
        let reply = match self.settled_result(sequence) {
            None => Ok(Reply::Outcome(None)),
            Some(Ok(outcome)) => Ok(Reply::Outcome(Some(outcome))),
            Some(Err(error)) => Err(error),
        };
        self.reply(op, reply);
    }
}
