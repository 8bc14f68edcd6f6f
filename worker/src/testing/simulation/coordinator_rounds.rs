//! The rounds of requests about coordinators that are pending.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;

use super::operations::WorkerAnswer;
use crate::coordinators::CoordinatorRound;
use crate::error::Error;
use crate::session::{OpId, Reply, SessionCommand};

/// The rounds of requests about coordinators, one shard after the other.
///
/// Each request is an operation of the session. Invariant: a round is here exactly while one of its
/// requests is unanswered.
#[derive(Debug, Default)]
pub(super) struct CoordinatorRounds(BTreeMap<OpId, PendingRound>);

/// A round and the operation of the caller.
#[derive(Debug)]
pub(super) struct PendingRound {
    op: OpId,
    round: CoordinatorRound,
    deadline: Instant,
}

/// What follows in a round.
#[derive(Debug)]
pub(super) enum RoundStep {
    /// Pass this command to the session.
    Command { op: OpId, command: SessionCommand, deadline: Instant },
    /// Answer the operation of the caller.
    Reply { op: OpId, reply: Result<WorkerAnswer, Error> },
}

impl CoordinatorRounds {
    /// Takes the round that a request is of.
    pub(super) fn take(&mut self, request: OpId) -> Option<PendingRound> {
        self.0.remove(&request)
    }

    /// Begins the round of an operation. `request` numbers its first request.
    pub(super) fn begin(
        &mut self,
        op: OpId,
        round: CoordinatorRound,
        deadline: Instant,
        request: OpId,
    ) -> RoundStep {
        self.next_step(PendingRound { op, round, deadline }, request)
    }

    /// Takes the answer to the request of a round. `next` numbers the one that may follow.
    pub(super) fn answered(
        &mut self,
        mut pending: PendingRound,
        reply: Result<Reply, Error>,
        next: OpId,
    ) -> RoundStep {
        let round = &mut pending.round;
        let answered = reply.and_then(|reply| match reply {
            Reply::Answer { message, .. } => round.answered(&message),
            _ => Err(Error::Ended { doing: round.doing() }),
        });
        match answered {
            Ok(()) => self.next_step(pending, next),
            Err(error) => RoundStep::Reply { op: pending.op, reply: Err(error) },
        }
    }

    fn next_step(&mut self, pending: PendingRound, request: OpId) -> RoundStep {
        let PendingRound { op, ref round, deadline } = pending;
        match round.next() {
            Some((shard, message)) => {
                self.0.insert(request, pending);
                let body = Bytes::new();
                let wait_ms = None;
                let command = SessionCommand::Request { shard, message, body, wait_ms };
                RoundStep::Command { op: request, command, deadline }
            }
            None => {
                let answer = round.found().map_or(WorkerAnswer::Done, WorkerAnswer::Calls);
                RoundStep::Reply { op, reply: Ok(answer) }
            }
        }
    }
}
