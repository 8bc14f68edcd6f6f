//! How pushes ended: what their shards said, put together, and kept for those who ask later.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Outcome, Refusal};

use super::pushes::{Phase, Push};
use super::{Op, OpId, OpKind, Reply, Session};
use crate::error::Error;

/// How many ended pushes a session can be asked about.
const SETTLED_MAX: usize = WINDOW as usize;

impl Session {
    /// Ends a push that every shard has settled, or the step owner for all of them, and tells who
    /// waits for it.
    pub(super) fn settle_if_done(&mut self, now: Instant, sequence: Sequence) {
        let Some(push) = self.pushes.get(&sequence) else {
            return;
        };
        let done = match push.synchronous {
            true => self.is_decided(push),
            false => {
                let settled = push.complete && push.unsettled().next().is_none();
                let not_taken = push.is_not_taken_by(self.owner_link());
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
            self.applying.extend(in_push_buffers.map(|there| (step, there.buffer)));
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

    /// The operations that wait for a push.
    pub(super) fn waiting_for(&self, sequence: Sequence) -> impl Iterator<Item = OpId> + '_ {
        let waits =
            move |op: &Op| matches!(op.kind, OpKind::Push { sequence: s, .. } if s == sequence);
        self.ops.iter().filter(move |(_, op)| waits(op)).map(|(&id, _)| id)
    }

    /// What became of a push as a whole: the first refusal, or the owner's outcome, which knows
    /// the step; the first outcome where the owner has no share.
    fn result_of(&mut self, now: Instant, push: &Push) -> Result<Outcome, Error> {
        let owner = self.owner_link();
        let mut result = None;
        for share in &push.shares {
            match &share.phase {
                Phase::Settled(Err(refusal)) => {
                    let token_is_gone = matches!(refusal, Refusal::Token { .. });
                    let owner_spent_it = push.shares.iter().any(|share| {
                        Some(share.link) == owner && matches!(share.phase, Phase::Settled(Ok(_)))
                    });
                    if let Some(grant) = push.grant.filter(|_| !token_is_gone && !owner_spent_it) {
                        self.return_token(now, grant);
                    }
                    return Err(self.refused("push", share.link, refusal.clone()));
                }
                Phase::Settled(Ok(outcome)) if result.is_none() || Some(share.link) == owner => {
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

    /// What is known here of a push; a push that is long settled is not asked about again.
    pub(super) fn outcome(&mut self, op: OpId, sequence: Sequence) {
        let reply = match self.settled_result(sequence) {
            None => Ok(Reply::Outcome(None)),
            Some(Ok(outcome)) => Ok(Reply::Outcome(Some(outcome))),
            Some(Err(error)) => Err(error),
        };
        self.reply(op, reply);
    }
}
