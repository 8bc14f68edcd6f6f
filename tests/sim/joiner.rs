//! How the session of a process joins the variables: from the first connection on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Declared;
use pushpull_worker::Error;
use pushpull_worker::simulation::{SessionEndpoint, WorkerAnswer, WorkerOperation};

/// Joins the variables, one operation at a time. A chief declares and initializes them; others wait
/// until they have values.
#[derive(Clone, Debug)]
pub(crate) struct Joiner {
    chief: bool,
    phase: JoinPhase,
    op: u64,
    timeout: Duration,
}

#[derive(Clone, Debug, PartialEq)]
enum JoinPhase {
    Opening,
    Declaring(Vec<(ShardId, Declared)>),
    Initializing(VecDeque<(ShardId, RestoreEpoch)>),
    Awaiting(VecDeque<ShardId>),
    Joining,
}

impl Joiner {
    pub(crate) fn new(chief: bool, timeout: Duration) -> Joiner {
        Joiner { chief, phase: JoinPhase::Opening, op: 0, timeout }
    }

    /// Starts, or starts over.
    pub(crate) fn begin(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        self.ask(now, endpoint, JoinPhase::Opening, WorkerOperation::Open);
    }

    fn ask(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        phase: JoinPhase,
        operation: WorkerOperation,
    ) {
        self.phase = phase;
        self.op = endpoint.submit(now, operation, self.timeout);
    }

    /// Handles a reply. Returns true once the session has joined, and an error that starting over
    /// would not mend.
    pub(crate) fn on_reply(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    ) -> Result<bool, Error> {
        if op != self.op {
            return Ok(false);
        }
        let answer = match reply {
            Ok(answer) => answer,
            Err(error) => {
                let is_fenced = matches!(error, Error::Fenced)
                    || matches!(&error, Error::Refused { refusal, .. } if matches!(refusal, Refusal::UnknownEpoch { .. }));
                if is_fenced || !(timed_out(&error) || SessionEndpoint::has_moved_on(&error)) {
                    return Err(error);
                }
                self.begin(now, endpoint);
                return Ok(false);
            }
        };
        match (self.phase.clone(), answer) {
            (JoinPhase::Opening, _) => {
                if self.chief {
                    let first = endpoint.shards()[0];
                    let declare = WorkerOperation::Declare(first);
                    self.ask(now, endpoint, JoinPhase::Declaring(Vec::new()), declare);
                } else {
                    self.await_ready(now, endpoint, endpoint.shards().into());
                }
            }
            (JoinPhase::Declaring(mut found), WorkerAnswer::Found(declared)) => {
                let shards = endpoint.shards();
                found.push((shards[found.len()], declared));
                match shards.get(found.len()) {
                    Some(&next) => {
                        let declare = WorkerOperation::Declare(next);
                        self.ask(now, endpoint, JoinPhase::Declaring(found), declare);
                    }
                    None => {
                        let begun = endpoint.begin(&found);
                        self.initialize(now, endpoint, begun.into());
                    }
                }
            }
            (JoinPhase::Initializing(mut rest), WorkerAnswer::Done) => {
                rest.pop_front();
                self.initialize(now, endpoint, rest);
            }
            (JoinPhase::Awaiting(mut rest), WorkerAnswer::Done) => {
                rest.pop_front();
                self.await_ready(now, endpoint, rest);
            }
            (JoinPhase::Joining, WorkerAnswer::Done) => return Ok(true),
            (phase, answer) => panic!("unexpected answer in {phase:?}: {answer:?}"),
        }
        Ok(false)
    }

    fn initialize(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        rest: VecDeque<(ShardId, RestoreEpoch)>,
    ) {
        match rest.front() {
            Some(&(shard, epoch)) => {
                let initialize = WorkerOperation::Initialize(shard, epoch);
                self.ask(now, endpoint, JoinPhase::Initializing(rest), initialize);
            }
            None => self.ask(now, endpoint, JoinPhase::Joining, WorkerOperation::Join),
        }
    }

    fn await_ready(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        rest: VecDeque<ShardId>,
    ) {
        match rest.front() {
            Some(&shard) => {
                let ready = WorkerOperation::AwaitReady(shard);
                self.ask(now, endpoint, JoinPhase::Awaiting(rest), ready);
            }
            None => self.ask(now, endpoint, JoinPhase::Joining, WorkerOperation::Join),
        }
    }
}

/// Whether an operation has reached its deadline, on this side or on the server's.
pub(crate) fn timed_out(error: &Error) -> bool {
    match error {
        Error::Timeout { .. } => true,
        Error::Refused { refusal, .. } => matches!(refusal, Refusal::Deadline { .. }),
        _ => false,
    }
}
