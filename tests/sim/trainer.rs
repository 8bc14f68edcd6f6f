//! The training loop of one worker process, from joining to leaving, one operation at a time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pushpull_common::data_set::DataSet;
use pushpull_common::ids::{GlobalStep, Sequence, ShardId, VariableId};
use pushpull_common::protocol::{Grant, Refusal};
use pushpull_worker::Error;
use pushpull_worker::simulation::{SessionEndpoint, WorkerAnswer, WorkerOperation};

use crate::chance::SimChance;
use crate::checker::{CheckedPull, Checker, Known, Pushed};
use crate::joiner::{Joiner, timed_out};
use crate::setting::Setting;

/// The state of a worker's training loop.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    Joining,
    DeclaringData,
    Asking,
    Pulling(Grant),
    /// Pulling variable by variable: the variables that are left, the next one last.
    PullingOneByOne(Grant, Vec<VariableId>),
    Computing(Grant, GlobalStep),
    /// Waiting for the outcome of the push of this token.
    StreamingPush(u64),
    /// Pushing variable by variable: the token, the push, and the variables that are left.
    Streaming(u64, Sequence, Vec<VariableId>),
    /// There are no more tokens: waiting until all workers have ended.
    AwaitingEnd,
    /// Pulling the final values.
    PullingLast,
    Leaving(VecDeque<ShardId>),
    /// The worker has left; `ended` if it has learned that the training is over.
    Left {
        ended: bool,
    },
    /// A newer process of its task has fenced this one off.
    Fenced,
}

/// The next action of a worker that needs no server, with its duration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NextAction {
    /// Compute a gradient.
    Gradient(Duration),
    /// Compute the slow gradient, beside the training loop.
    SlowGradient(Duration),
    /// Pause, then call [`Trainer::again`] for this operation.
    Pause(Duration, u64),
}

/// A slow gradient, beside which the training loop continues with other tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SlowGradient {
    Computing(Grant, GlobalStep),
    /// The operation and the token of its push.
    StreamingPush(u64, u64),
}

/// The training loop of one worker process.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) task: u32,
    pub(crate) chief: bool,
    synchronous: bool,
    data: Option<DataSet>,
    pub(crate) incarnation: u64,
    pub(crate) phase: Phase,
    joiner: Joiner,
    /// The operation in progress.
    op: u64,
    asked: Option<Instant>,
    timeout: Duration,
    /// The gradient that is pushed variable by variable.
    gradient: Vec<u8>,
    /// The values that are pulled variable by variable.
    values: Vec<u8>,
    /// The pushes that were known to be applied when the last pull began.
    known: Known,
    /// Whether the worker leaves before its next step.
    pub(crate) leaves: bool,
    /// How long the next gradient takes, if a fault makes it slow.
    pub(crate) holds: Option<Duration>,
    slow: Option<SlowGradient>,
    /// The error that named stragglers before the deadline.
    early_error: Option<Error>,
    ended: bool,
    pub(crate) resumed: u64,
    /// Whether all state of the servers was lost while this process was stopped. It must be told.
    pub(crate) was_away: bool,
    /// Whether it has used the token that its session had kept from before.
    has_used_token: bool,
    /// Whether a process of its task that was away may have replaced this one, and has ended.
    pub(crate) is_replaced: bool,
}

impl Trainer {
    pub(crate) fn new(
        task: u32,
        setting: &Setting,
        incarnation: u64,
        chance: &mut SimChance,
    ) -> Trainer {
        let timeout = chance.millis(1000, 20_000);
        Trainer {
            task,
            chief: task == 0,
            synchronous: !setting.asynchronous,
            data: setting.data.clone(),
            incarnation,
            phase: Phase::Joining,
            joiner: Joiner::new(task == 0, timeout),
            op: 0,
            asked: None,
            timeout,
            gradient: Vec::new(),
            values: Vec::new(),
            known: Known::default(),
            leaves: false,
            holds: None,
            slow: None,
            early_error: None,
            ended: false,
            resumed: 0,
            was_away: false,
            has_used_token: false,
            is_replaced: false,
        }
    }

    /// Whether the loop has ended.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Left { .. } | Phase::Fenced)
    }

    /// Starts the loop, or restarts it from the beginning.
    pub(crate) fn begin(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        self.phase = Phase::Joining;
        self.joiner.begin(now, endpoint);
    }

    fn pull(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        token: Option<GlobalStep>,
        checker: &Checker,
    ) {
        self.known = checker.known();
        self.ask(now, endpoint, WorkerOperation::Pull(token));
    }

    /// Pulls the last variable of `rest`.
    fn pull_next(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        grant: Grant,
        rest: Vec<VariableId>,
    ) {
        let next = rest.last().copied().expect("a cluster has variables");
        self.phase = Phase::PullingOneByOne(grant, rest);
        self.ask(now, endpoint, WorkerOperation::PullVariable(next, Some(grant.step)));
    }

    fn pulled(
        &self,
        step: GlobalStep,
        bytes: &[u8],
        endpoint: &SessionEndpoint,
        checker: &mut Checker,
    ) {
        let range = |id| endpoint.range(id);
        checker.pulled(CheckedPull { known: &self.known, step, bytes, range });
    }

    fn ask(&mut self, now: Instant, endpoint: &mut SessionEndpoint, operation: WorkerOperation) {
        self.op = endpoint.submit(now, operation, self.timeout);
        self.asked = Some(now);
        self.early_error = None;
    }

    /// All state is lost while the process is stopped. Replies to earlier operations may still be on
    /// the way to it, and tell nothing.
    pub(crate) fn stay_away(&mut self) {
        self.was_away = true;
        self.op = 0;
    }

    /// Asks for a token, after all state was lost while the process was stopped.
    pub(crate) fn return_from_away(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        // One that had not joined continues to join, and is no member that could ask.
        if self.phase != Phase::Joining {
            self.ask(now, endpoint, WorkerOperation::Token);
        }
    }

    /// Handles a reply to a process that was away while all state was lost. Returns whether it was
    /// told.
    pub(crate) fn is_told(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        op: u64,
        reply: &Result<WorkerAnswer, Error>,
    ) -> bool {
        match reply {
            Err(Error::RolledBack { .. } | Error::StateLost { .. } | Error::Fenced) => return true,
            // Before it had joined, it had nothing to lose.
            _ if self.phase == Phase::Joining => return true,
            // The session may have learned of the end before the loss. It then grants no token without
            // asking a server, and the wait for the end asks one.
            Ok(WorkerAnswer::Token(None)) if op == self.op => self.await_end(now, endpoint),
            // The session may have kept one token from before the loss. It asks for the next.
            Ok(WorkerAnswer::Token(Some(_))) if op == self.op && !self.has_used_token => {
                self.has_used_token = true;
                self.return_from_away(now, endpoint);
            }
            Ok(answer) if op == self.op => {
                panic!("worker {} is not told that all state was lost: {answer:?}", self.task)
            }
            Err(error) if op == self.op => {
                assert!(timed_out(error), "worker {} is told otherwise: {error}", self.task);
                self.return_from_away(now, endpoint);
            }
            // The reply to an operation from before.
            _ => {}
        }
        false
    }

    /// Handles the reply to an operation. Returns what the worker does next, unless it waits for
    /// another reply.
    pub(crate) fn on_reply(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
        checker: &mut Checker,
        chance: &mut SimChance,
    ) -> Option<NextAction> {
        if let Some(SlowGradient::StreamingPush(other, token)) = self.slow
            && op == other
        {
            self.on_slow_reply(now, endpoint, token, reply, checker);
            return None;
        }
        if self.phase == Phase::Joining {
            match self.joiner.on_reply(now, endpoint, op, reply) {
                Ok(false) => {}
                Ok(true) => self.joined(now, endpoint),
                Err(error) => self.fail(now, endpoint, error, checker),
            }
            return None;
        }
        if op != self.op {
            return None;
        }
        let answer = match reply {
            Ok(answer) => answer,
            Err(error) => {
                if self.is_early_error(now, &error, checker) {
                    self.early_error = Some(error);
                    return Some(NextAction::Pause(chance.millis(50, 400), op));
                }
                self.fail(now, endpoint, error, checker);
                return None;
            }
        };
        match (self.phase.clone(), answer) {
            (Phase::DeclaringData, WorkerAnswer::Done) => self.continue_training(now, endpoint),
            (Phase::Asking, WorkerAnswer::Token(Some(grant))) => {
                // Only in synchronous mode: in asynchronous mode each variable could be of another
                // step.
                if self.synchronous && grant.token.0 % 4 == 1 {
                    self.known = checker.known();
                    self.values = vec![0; endpoint.bytes()];
                    self.pull_next(now, endpoint, grant, endpoint.variables());
                } else {
                    self.phase = Phase::Pulling(grant);
                    self.pull(now, endpoint, Some(grant.step), checker);
                }
            }
            (Phase::Asking, WorkerAnswer::Token(None)) => {
                self.ended = true;
                self.await_end(now, endpoint);
            }
            (Phase::AwaitingEnd, WorkerAnswer::Done) => {
                self.phase = Phase::PullingLast;
                self.pull(now, endpoint, None, checker);
            }
            (Phase::PullingOneByOne(grant, mut rest), WorkerAnswer::Pulled(bytes, step)) => {
                assert_eq!(step, grant.step, "values for a token");
                if let Some(variable) = rest.pop() {
                    let range = endpoint.range(variable);
                    let length = range.len();
                    self.values[range].copy_from_slice(&bytes[..length]);
                }
                if !rest.is_empty() {
                    self.pull_next(now, endpoint, grant, rest);
                    return None;
                }
                let values = std::mem::take(&mut self.values);
                self.pulled(step, &values, endpoint, checker);
                self.phase = Phase::Computing(grant, step);
                return Some(NextAction::Gradient(
                    self.holds.take().unwrap_or(chance.millis(5, 200)),
                ));
            }
            (Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _), WorkerAnswer::Stale) => {
                endpoint.drop_token(now, grant);
                self.continue_training(now, endpoint);
            }
            (Phase::Pulling(grant), WorkerAnswer::Pulled(bytes, step)) => {
                let is_of = if self.synchronous { step == grant.step } else { step >= grant.step };
                assert!(is_of, "values of {step} for a token of {}", grant.step);
                self.pulled(step, &bytes, endpoint, checker);
                let usual = chance.millis(5, 200);
                let continues = chance.percent(50);
                let holds = self.holds.take();
                if let Some(time) = holds.filter(|_| continues && self.slow.is_none()) {
                    self.slow = Some(SlowGradient::Computing(grant, step));
                    self.continue_training(now, endpoint);
                    return Some(NextAction::SlowGradient(time));
                }
                self.phase = Phase::Computing(grant, step);
                return Some(NextAction::Gradient(holds.unwrap_or(usual)));
            }
            (Phase::Streaming(token, _, rest), WorkerAnswer::Begun(sequence)) => {
                self.phase = Phase::Streaming(token, sequence, rest);
                return Some(NextAction::Pause(chance.millis(0, 30), op));
            }
            (Phase::Streaming(..), WorkerAnswer::Done) => {
                if chance.percent(4) {
                    // The worker changes its mind.
                    self.cancel(now, endpoint, checker);
                    return None;
                }
                return Some(NextAction::Pause(chance.millis(0, 30), op));
            }
            (Phase::StreamingPush(token), WorkerAnswer::Pushed(outcome)) => {
                checker.settled(token, outcome);
                self.continue_training(now, endpoint);
            }
            (Phase::PullingLast, WorkerAnswer::Pulled(bytes, step)) => {
                self.pulled(step, &bytes, endpoint, checker);
                checker.pulled_final(step, bytes);
                self.leave(now, endpoint, endpoint.shards().into());
            }
            (Phase::Leaving(mut rest), WorkerAnswer::Done) => {
                rest.pop_front();
                self.leave(now, endpoint, rest);
            }
            (phase, answer) => panic!("unexpected answer in {phase:?}: {answer:?}"),
        }
        None
    }

    fn joined(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        match self.data.clone() {
            Some(set) => {
                self.phase = Phase::DeclaringData;
                self.ask(now, endpoint, WorkerOperation::DeclareData(set));
            }
            None => self.continue_training(now, endpoint),
        }
    }

    /// Whether an error names stragglers before the deadline. The checker gets it if so.
    fn is_early_error(&self, now: Instant, error: &Error, checker: &mut Checker) -> bool {
        let of_step = matches!(self.phase, Phase::Asking | Phase::StreamingPush(_));
        let awaited = match error {
            Error::Timeout { awaited, sequence: Some(_), .. } => awaited.to_string(),
            Error::Refused { refusal: Refusal::Deadline { awaited, .. }, .. } => {
                awaited.to_string()
            }
            Error::ReplicasAbsent { awaited, .. } => awaited.clone(),
            _ => return false,
        };
        // Shards answer a little before the deadline, so that the answer arrives in time.
        let time = self.timeout.saturating_sub(Duration::from_millis(300));
        let early = of_step && self.asked.is_some_and(|asked| now < asked + time);
        if early {
            checker.early_error(&awaited);
        }
        early
    }

    /// Ends a pause: pushes the next variable, or handles the error that named stragglers.
    pub(crate) fn again(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        op: u64,
        checker: &mut Checker,
    ) {
        if self.op != op {
            return;
        }
        if let Some(error) = self.early_error.take() {
            return self.fail(now, endpoint, error, checker);
        }
        let Phase::Streaming(token, sequence, mut rest) = self.phase.clone() else { return };
        match rest.pop() {
            Some(variable) => {
                self.phase = Phase::Streaming(token, sequence, rest);
                let variables = vec![variable];
                let bytes = self.gradient.clone();
                self.ask(
                    now,
                    endpoint,
                    WorkerOperation::AddGradients { sequence, variables, bytes },
                );
            }
            None => {
                self.phase = Phase::StreamingPush(token);
                self.ask(now, endpoint, WorkerOperation::End(sequence));
            }
        }
    }

    /// Handles the reply to the push of the slow gradient.
    fn on_slow_reply(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        token: u64,
        reply: Result<WorkerAnswer, Error>,
        checker: &mut Checker,
    ) {
        self.slow = None;
        match reply {
            Ok(WorkerAnswer::Pushed(outcome)) => checker.settled(token, outcome),
            Err(Error::Refused { shard, .. }) => checker.refused(token, shard),
            Err(
                error @ (Error::Timeout { sequence: Some(_), .. }
                | Error::ReplicasAbsent { sequence: Some(_), .. }),
            ) => {
                self.resumed += 1;
                let op = endpoint.submit(now, WorkerOperation::Resume(error), self.timeout);
                self.slow = Some(SlowGradient::StreamingPush(op, token));
            }
            // The loop's other operation gets the same error.
            Err(Error::Fenced) => {}
            other => panic!("unexpected answer to the push of token {token}: {other:?}"),
        }
    }

    fn fail(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        error: Error,
        checker: &mut Checker,
    ) {
        let timed_out = timed_out(&error);
        match (self.phase.clone(), error) {
            (_, Error::Fenced) => self.phase = Phase::Fenced,
            // The step owner has ended this process's run, which had stayed away for too long.
            (_, Error::Refused { refusal: Refusal::UnknownEpoch { .. }, .. }) => {
                self.phase = Phase::Fenced;
            }
            (Phase::AwaitingEnd, Error::Refused { refusal: Refusal::NotFinal { pushes }, .. }) => {
                checker.not_final(pushes);
                self.leave(now, endpoint, endpoint.shards().into());
            }
            (
                Phase::StreamingPush(_),
                error @ (Error::Timeout { sequence: Some(_), .. }
                | Error::ReplicasAbsent { sequence: Some(_), .. }),
            ) => {
                self.resumed += 1;
                self.ask(now, endpoint, WorkerOperation::Resume(error));
            }
            (Phase::StreamingPush(token), Error::Refused { shard, .. }) => {
                checker.refused(token, shard);
                self.continue_training(now, endpoint);
            }
            (
                Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _),
                Error::Timeout { .. } | Error::Refused { .. },
            ) => {
                endpoint.drop_token(now, grant);
                self.continue_training(now, endpoint);
            }
            (
                Phase::Asking,
                Error::Timeout { .. } | Error::Refused { .. } | Error::ReplicasAbsent { .. },
            ) => {
                self.continue_training(now, endpoint);
            }
            (Phase::AwaitingEnd, _) if timed_out => self.await_end(now, endpoint),
            (Phase::PullingLast, _) if timed_out => self.pull(now, endpoint, None, checker),
            (Phase::Leaving(mut rest), _) => {
                // A shard that cannot be reached notices when the lease expires.
                rest.pop_front();
                self.leave(now, endpoint, rest);
            }
            (Phase::DeclaringData, error) if timed_out || SessionEndpoint::has_moved_on(&error) => {
                self.begin(now, endpoint);
            }
            (phase, error) => panic!("worker {} in {phase:?}: {error}", self.task),
        }
    }

    /// Cancels the operation in progress and continues; false if it cannot be cancelled.
    pub(crate) fn cancel(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        checker: &mut Checker,
    ) -> bool {
        match self.phase.clone() {
            Phase::Asking | Phase::StreamingPush(_) => endpoint.cancel(now, self.op),
            Phase::Streaming(token, sequence, _) => {
                endpoint.abandon(now, sequence);
                checker.withdrawn(token);
            }
            Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _) => {
                endpoint.cancel(now, self.op);
                endpoint.drop_token(now, grant);
            }
            _ => return false,
        }
        self.continue_training(now, endpoint);
        true
    }

    /// Pushes the computed gradient, at once or variable by variable. Sometimes drops the token.
    pub(crate) fn push(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut SimChance,
    ) {
        let Phase::Computing(grant, read) = self.phase else { return };
        if chance.percent(3) {
            // This batch has nothing to learn from.
            match self.data.is_some() && chance.percent(50) {
                true => {
                    checker.skipped(grant);
                    endpoint.skip_token(now, grant);
                }
                false => endpoint.drop_token(now, grant),
            }
            return self.continue_training(now, endpoint);
        }
        let operation = self.gradient(grant, read, endpoint, setting, checker, chance);
        let token = grant.token.0;
        match operation {
            WorkerOperation::Push { grant, read, variables, bytes, .. } if chance.percent(30) => {
                self.gradient = bytes;
                self.phase = Phase::Streaming(token, Sequence(0), variables);
                self.ask(now, endpoint, WorkerOperation::Begin { grant, read });
            }
            operation => {
                self.phase = Phase::StreamingPush(token);
                self.ask(now, endpoint, operation);
            }
        }
    }

    /// Pushes the slow gradient. Another push of this worker may be in flight.
    pub(crate) fn push_slow(
        &mut self,
        now: Instant,
        endpoint: &mut SessionEndpoint,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut SimChance,
    ) {
        let Some(SlowGradient::Computing(grant, read)) = self.slow else { return };
        let operation = self.gradient(grant, read, endpoint, setting, checker, chance);
        let op = endpoint.submit(now, operation, self.timeout);
        self.slow = Some(SlowGradient::StreamingPush(op, grant.token.0));
    }

    /// Draws a gradient, announces it to the checker and returns its push.
    fn gradient(
        &self,
        grant: Grant,
        read: GlobalStep,
        endpoint: &SessionEndpoint,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut SimChance,
    ) -> WorkerOperation {
        let token = grant.token.0;
        let variables = setting.catalogue.variables();
        let left_out =
            chance.percent(15).then(|| chance.between(0, variables.len() as u64 - 1) as usize);
        let mut bytes = vec![0; endpoint.bytes()];
        let mut present = vec![];
        let mut gradient = vec![];
        for (index, variable) in variables.iter().enumerate() {
            let draw = token * 7 + u64::from(self.task) * 3 + self.incarnation;
            let line = checker.line(variable, draw);
            let id = VariableId(index as u32);
            if left_out == Some(index) {
                gradient.push(None);
                continue;
            }
            bytes[endpoint.range(id)].copy_from_slice(&line.to_bytes());
            present.push(id);
            gradient.push(Some(line));
        }
        let samples = grant.samples;
        checker.pushes(Pushed { token, task: self.task, read, samples, gradient });
        WorkerOperation::Push { grant, effect: None, read, variables: present, bytes }
    }

    fn continue_training(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        if self.leaves {
            return self.leave(now, endpoint, endpoint.shards().into());
        }
        self.phase = Phase::Asking;
        self.ask(now, endpoint, WorkerOperation::Token);
    }

    fn await_end(&mut self, now: Instant, endpoint: &mut SessionEndpoint) {
        self.phase = Phase::AwaitingEnd;
        self.ask(now, endpoint, WorkerOperation::AwaitEnd);
    }

    fn leave(&mut self, now: Instant, endpoint: &mut SessionEndpoint, rest: VecDeque<ShardId>) {
        match rest.front() {
            Some(&shard) => {
                self.phase = Phase::Leaving(rest);
                self.ask(now, endpoint, WorkerOperation::Leave(shard));
            }
            None => self.phase = Phase::Left { ended: self.ended },
        }
    }
}
