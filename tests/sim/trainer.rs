//! The training loop of one worker process: from joining to its end, one operation at a time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RestoreEpoch, Sequence, ShardId, VariableId};
use pushpull_common::protocol::message::Declared;
use pushpull_common::protocol::{Grant, Refusal};
use pushpull_worker::Error;
use pushpull_worker::simulation::{Answer, Door, Want};

use crate::chance::Chance;
use crate::checker::{Checker, Known, Pulled, Pushed};
use crate::setting::Setting;

/// How far a worker is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    Opening,
    Declaring(Vec<(ShardId, Declared)>),
    Initializing(VecDeque<(ShardId, RestoreEpoch)>),
    Awaiting(VecDeque<ShardId>),
    Joining,
    Asking,
    Pulling(Grant),
    /// The values come variable by variable: those that are still to come, the next one last.
    PullingOneByOne(Grant, Vec<VariableId>),
    Computing(Grant, GlobalStep),
    StreamingPush(u64),
    /// Its gradients come one by one: the token, the push, and the variables that are left.
    Streaming(u64, Sequence, Vec<VariableId>),
    /// It was told that there are no more tokens, and looks at the last values.
    Looking,
    Leaving(VecDeque<ShardId>),
    /// It has left; whether it was told that the training is over.
    Left {
        ended: bool,
    },
    /// A newer process of its task has taken its place.
    Fenced,
}

/// What a worker does by itself, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Does {
    /// Computes a gradient.
    Gradient(Duration),
    /// Computes one that it has set aside.
    Aside(Duration),
    /// Waits before it does again what it could not do: this operation.
    Pause(Duration, u64),
}

/// A gradient that takes so long that another is begun meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Aside {
    Computing(Grant, GlobalStep),
    /// The operation, and the token.
    StreamingPush(u64, u64),
}

/// A training loop.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) task: u32,
    pub(crate) chief: bool,
    synchronous: bool,
    pub(crate) incarnation: u64,
    pub(crate) phase: Phase,
    /// The operation that is under way.
    op: u64,
    asked: Option<Instant>,
    timeout: Duration,
    /// The gradient that it pushes one by one.
    gradient: Vec<u8>,
    /// The values that it pulls one by one.
    values: Vec<u8>,
    /// What was known when it last asked for values.
    known: Known,
    /// It leaves before its next step.
    pub(crate) leaves: bool,
    /// The next gradient takes so long.
    pub(crate) holds: Option<Duration>,
    aside: Option<Aside>,
    /// It was told who is missing, before its time was over.
    told: Option<Error>,
    ended: bool,
    pub(crate) resumed: u64,
}

impl Trainer {
    pub(crate) fn new(
        task: u32,
        setting: &Setting,
        incarnation: u64,
        chance: &mut Chance,
    ) -> Trainer {
        Trainer {
            task,
            chief: task == 0,
            synchronous: !setting.asynchronous,
            incarnation,
            phase: Phase::Opening,
            op: 0,
            asked: None,
            timeout: chance.millis(1000, 20_000),
            gradient: Vec::new(),
            values: Vec::new(),
            known: Known::default(),
            leaves: false,
            holds: None,
            aside: None,
            told: None,
            ended: false,
            resumed: 0,
        }
    }

    /// Whether it does nothing any more.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Left { .. } | Phase::Fenced)
    }

    /// Begins, or begins again.
    pub(crate) fn begin(&mut self, now: Instant, door: &mut Door) {
        self.phase = Phase::Opening;
        self.ask(now, door, Want::Open);
    }

    fn pull(
        &mut self,
        now: Instant,
        door: &mut Door,
        token: Option<GlobalStep>,
        checker: &Checker,
    ) {
        self.known = checker.known();
        self.ask(now, door, Want::Pull(token));
    }

    /// Pulls the last of these variables.
    fn pull_next(&mut self, now: Instant, door: &mut Door, grant: Grant, rest: Vec<VariableId>) {
        let next = rest.last().copied().expect("a cluster has variables");
        self.phase = Phase::PullingOneByOne(grant, rest);
        self.ask(now, door, Want::PullVariable(next, Some(grant.step)));
    }

    fn pulled(&self, step: GlobalStep, bytes: &[u8], door: &Door, checker: &mut Checker) {
        let range = |id| door.range(id);
        checker.pulled(Pulled { known: &self.known, step, bytes, range });
    }

    fn ask(&mut self, now: Instant, door: &mut Door, want: Want) {
        self.op = door.ask(now, want, self.timeout);
        (self.asked, self.told) = (Some(now), None);
    }

    /// An operation was answered. Returns what the worker does now, if it does not wait.
    pub(crate) fn hear(
        &mut self,
        now: Instant,
        door: &mut Door,
        op: u64,
        reply: Result<Answer, Error>,
        checker: &mut Checker,
        chance: &mut Chance,
    ) -> Option<Does> {
        if let Some(Aside::StreamingPush(other, token)) = self.aside
            && op == other
        {
            self.hear_aside(now, door, token, reply, checker);
            return None;
        }
        if op != self.op {
            return None;
        }
        let answer = match reply {
            Ok(answer) => answer,
            Err(error) => {
                if self.is_told(now, &error, checker) {
                    self.told = Some(error);
                    return Some(Does::Pause(chance.millis(50, 400), op));
                }
                self.fail(now, door, error, checker);
                return None;
            }
        };
        match (self.phase.clone(), answer) {
            (Phase::Opening, _) => {
                if self.chief {
                    self.phase = Phase::Declaring(Vec::new());
                    let first = door.shards()[0];
                    self.ask(now, door, Want::Declare(first));
                } else {
                    self.await_ready(now, door, door.shards().into());
                }
            }
            (Phase::Declaring(mut found), Answer::Found(declared)) => {
                let shards = door.shards();
                found.push((shards[found.len()], declared));
                match shards.get(found.len()) {
                    Some(&next) => {
                        self.phase = Phase::Declaring(found);
                        self.ask(now, door, Want::Declare(next));
                    }
                    None => {
                        let begun = door.begin(&found);
                        self.initialize(now, door, begun.into());
                    }
                }
            }
            (Phase::Initializing(mut rest), Answer::Done) => {
                rest.pop_front();
                self.initialize(now, door, rest);
            }
            (Phase::Awaiting(mut rest), Answer::Done) => {
                rest.pop_front();
                self.await_ready(now, door, rest);
            }
            (Phase::Joining, Answer::Done) => self.go_on(now, door),
            (Phase::Asking, Answer::Token(Some(grant))) => {
                // In asynchronous mode each variable would be of a step of its own.
                if self.synchronous && grant.token.0 % 4 == 1 {
                    self.known = checker.known();
                    self.values = vec![0; door.bytes()];
                    self.pull_next(now, door, grant, door.variables());
                } else {
                    self.phase = Phase::Pulling(grant);
                    self.pull(now, door, Some(grant.step), checker);
                }
            }
            (Phase::Asking, Answer::Token(None)) => {
                self.ended = true;
                self.phase = Phase::Looking;
                self.pull(now, door, None, checker);
            }
            (Phase::PullingOneByOne(grant, mut rest), Answer::Pulled(bytes, step)) => {
                assert_eq!(step, grant.step, "values for a token");
                if let Some(variable) = rest.pop() {
                    let range = door.range(variable);
                    let length = range.len();
                    self.values[range].copy_from_slice(&bytes[..length]);
                }
                if !rest.is_empty() {
                    self.pull_next(now, door, grant, rest);
                    return None;
                }
                let values = std::mem::take(&mut self.values);
                self.pulled(step, &values, door, checker);
                self.phase = Phase::Computing(grant, step);
                return Some(Does::Gradient(self.holds.take().unwrap_or(chance.millis(5, 200))));
            }
            (Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _), Answer::Stale) => {
                door.drop_token(now, grant);
                self.go_on(now, door);
            }
            (Phase::Pulling(grant), Answer::Pulled(bytes, step)) => {
                let is_of = if self.synchronous { step == grant.step } else { step >= grant.step };
                assert!(is_of, "values of {step} for a token of {}", grant.step);
                self.pulled(step, &bytes, door, checker);
                let (usual, goes_on) = (chance.millis(5, 200), chance.percent(50));
                let holds = self.holds.take();
                if let Some(time) = holds.filter(|_| goes_on && self.aside.is_none()) {
                    self.aside = Some(Aside::Computing(grant, step));
                    self.go_on(now, door);
                    return Some(Does::Aside(time));
                }
                self.phase = Phase::Computing(grant, step);
                return Some(Does::Gradient(holds.unwrap_or(usual)));
            }
            (Phase::Streaming(token, _, rest), Answer::Begun(sequence)) => {
                self.phase = Phase::Streaming(token, sequence, rest);
                return Some(Does::Pause(chance.millis(0, 30), op));
            }
            (Phase::Streaming(..), Answer::Done) => {
                if chance.percent(4) {
                    // It thinks better of it.
                    self.cancel(now, door, checker);
                    return None;
                }
                return Some(Does::Pause(chance.millis(0, 30), op));
            }
            (Phase::StreamingPush(token), Answer::Pushed(outcome)) => {
                checker.settled(token, outcome);
                self.go_on(now, door);
            }
            (Phase::Looking, Answer::Pulled(bytes, step)) => {
                self.pulled(step, &bytes, door, checker);
                self.leave(now, door, door.shards().into());
            }
            (Phase::Leaving(mut rest), Answer::Done) => {
                rest.pop_front();
                self.leave(now, door, rest);
            }
            (phase, answer) => panic!("{phase:?} is answered {answer:?}"),
        }
        None
    }

    /// Whether this says, before the deadline, who is missing.
    fn is_told(&self, now: Instant, error: &Error, checker: &mut Checker) -> bool {
        let of_step = matches!(self.phase, Phase::Asking | Phase::StreamingPush(_));
        let awaited = match error {
            Error::Timeout { awaited, sequence: Some(_), .. } => awaited.to_string(),
            Error::Refused { refusal: Refusal::Deadline { awaited, .. }, .. } => {
                awaited.to_string()
            }
            _ => return false,
        };
        // Shards answer a little before the deadline, so that the answer comes in time.
        let time = self.timeout.saturating_sub(Duration::from_millis(300));
        let early = of_step && self.asked.is_some_and(|asked| now < asked + time);
        if early {
            checker.told(&awaited);
        }
        early
    }

    /// The pause is over: goes on with its push, or with what it was told that it cannot do.
    pub(crate) fn again(&mut self, now: Instant, door: &mut Door, op: u64, checker: &mut Checker) {
        if self.op != op {
            return;
        }
        if let Some(error) = self.told.take() {
            return self.fail(now, door, error, checker);
        }
        let Phase::Streaming(token, sequence, mut rest) = self.phase.clone() else { return };
        match rest.pop() {
            Some(variable) => {
                self.phase = Phase::Streaming(token, sequence, rest);
                let (variables, bytes) = (vec![variable], self.gradient.clone());
                self.ask(now, door, Want::More { sequence, variables, bytes });
            }
            None => {
                self.phase = Phase::StreamingPush(token);
                self.ask(now, door, Want::End(sequence));
            }
        }
    }

    /// The push of the gradient that was set aside was answered.
    fn hear_aside(
        &mut self,
        now: Instant,
        door: &mut Door,
        token: u64,
        reply: Result<Answer, Error>,
        checker: &mut Checker,
    ) {
        self.aside = None;
        match reply {
            Ok(Answer::Pushed(outcome)) => checker.settled(token, outcome),
            Err(Error::Refused { shard, .. }) => checker.refused(token, shard),
            Err(error @ Error::Timeout { sequence: Some(_), .. }) => {
                self.resumed += 1;
                let op = door.ask(now, Want::Resume(error), self.timeout);
                self.aside = Some(Aside::StreamingPush(op, token));
            }
            // Its other operation is told the same.
            Err(Error::Fenced) => {}
            other => panic!("a push of token {token} is answered {other:?}"),
        }
    }

    fn fail(&mut self, now: Instant, door: &mut Door, error: Error, checker: &mut Checker) {
        let timed_out = match &error {
            Error::Timeout { .. } => true,
            Error::Refused { refusal, .. } => matches!(refusal, Refusal::Deadline { .. }),
            _ => false,
        };
        match (self.phase.clone(), error) {
            (_, Error::Fenced) => self.phase = Phase::Fenced,
            // It would be refused for ever: nobody has an epoch that was not given to it.
            (_, Error::Refused { refusal: refusal @ Refusal::UnknownEpoch { .. }, .. }) => {
                panic!("worker {} is refused: {refusal}", self.task)
            }
            (Phase::StreamingPush(_), error @ Error::Timeout { sequence: Some(_), .. }) => {
                self.resumed += 1;
                self.ask(now, door, Want::Resume(error));
            }
            (Phase::StreamingPush(token), Error::Refused { shard, .. }) => {
                checker.refused(token, shard);
                self.go_on(now, door);
            }
            (
                Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _),
                Error::Timeout { .. } | Error::Refused { .. },
            ) => {
                door.drop_token(now, grant);
                self.go_on(now, door);
            }
            (Phase::Asking, Error::Timeout { .. } | Error::Refused { .. }) => {
                self.go_on(now, door);
            }
            (Phase::Looking, _) if timed_out => self.pull(now, door, None, checker),
            (Phase::Leaving(mut rest), _) => {
                // Whoever cannot be told misses it when its lease runs out.
                rest.pop_front();
                self.leave(now, door, rest);
            }
            (
                Phase::Opening
                | Phase::Declaring(_)
                | Phase::Initializing(_)
                | Phase::Awaiting(_)
                | Phase::Joining,
                error,
            ) if timed_out || Door::has_moved_on(&error) => self.begin(now, door),
            (phase, error) => panic!("worker {} in {phase:?}: {error}", self.task),
        }
    }

    /// Waits no longer for what it has asked for, and goes on; false if it could not.
    pub(crate) fn cancel(&mut self, now: Instant, door: &mut Door, checker: &mut Checker) -> bool {
        match self.phase.clone() {
            Phase::Asking | Phase::StreamingPush(_) => door.cancel(now, self.op),
            Phase::Streaming(token, sequence, _) => {
                door.abandon(now, sequence);
                checker.withdrawn(token);
            }
            Phase::Pulling(grant) | Phase::PullingOneByOne(grant, _) => {
                door.cancel(now, self.op);
                door.drop_token(now, grant);
            }
            _ => return false,
        }
        self.go_on(now, door);
        true
    }

    /// The gradient is there: pushes it.
    pub(crate) fn push(
        &mut self,
        now: Instant,
        door: &mut Door,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut Chance,
    ) {
        let Phase::Computing(grant, read) = self.phase else { return };
        if chance.percent(3) {
            // There was nothing to learn.
            door.drop_token(now, grant);
            return self.go_on(now, door);
        }
        let want = self.gradient(grant, read, door, setting, checker, chance);
        let token = grant.token.0;
        match want {
            Want::Push { grant, read, variables, bytes } if chance.percent(30) => {
                self.gradient = bytes;
                self.phase = Phase::Streaming(token, Sequence(0), variables);
                self.ask(now, door, Want::Begin { grant, read });
            }
            want => {
                self.phase = Phase::StreamingPush(token);
                self.ask(now, door, want);
            }
        }
    }

    /// The gradient that was set aside is there: pushes it, though another may be under way.
    pub(crate) fn push_aside(
        &mut self,
        now: Instant,
        door: &mut Door,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut Chance,
    ) {
        let Some(Aside::Computing(grant, read)) = self.aside else { return };
        let want = self.gradient(grant, read, door, setting, checker, chance);
        let op = door.ask(now, want, self.timeout);
        self.aside = Some(Aside::StreamingPush(op, grant.token.0));
    }

    /// A gradient, which the checker is told of, and its push.
    fn gradient(
        &self,
        grant: Grant,
        read: GlobalStep,
        door: &Door,
        setting: &Setting,
        checker: &mut Checker,
        chance: &mut Chance,
    ) -> Want {
        let token = grant.token.0;
        let variables = setting.catalogue.variables();
        let left_out =
            chance.percent(15).then(|| chance.between(0, variables.len() as u64 - 1) as usize);
        let (mut bytes, mut present, mut gradient) = (vec![0; door.bytes()], vec![], vec![]);
        for (index, variable) in variables.iter().enumerate() {
            let draw = token * 7 + u64::from(self.task) * 3 + self.incarnation;
            let line = checker.line(variable, draw);
            let id = VariableId(index as u32);
            if left_out == Some(index) {
                gradient.push(None);
                continue;
            }
            bytes[door.range(id)].copy_from_slice(&line.to_bytes());
            present.push(id);
            gradient.push(Some(line));
        }
        checker.pushes(Pushed { token, task: self.task, read, gradient });
        Want::Push { grant, read, variables: present, bytes }
    }

    fn go_on(&mut self, now: Instant, door: &mut Door) {
        if self.leaves {
            return self.leave(now, door, door.shards().into());
        }
        self.phase = Phase::Asking;
        self.ask(now, door, Want::Token);
    }

    fn initialize(
        &mut self,
        now: Instant,
        door: &mut Door,
        rest: VecDeque<(ShardId, RestoreEpoch)>,
    ) {
        match rest.front() {
            Some(&(shard, epoch)) => {
                self.phase = Phase::Initializing(rest);
                self.ask(now, door, Want::Initialize(shard, epoch));
            }
            None => {
                self.phase = Phase::Joining;
                self.ask(now, door, Want::Joined);
            }
        }
    }

    fn await_ready(&mut self, now: Instant, door: &mut Door, rest: VecDeque<ShardId>) {
        match rest.front() {
            Some(&shard) => {
                self.phase = Phase::Awaiting(rest);
                self.ask(now, door, Want::AwaitReady(shard));
            }
            None => {
                self.phase = Phase::Joining;
                self.ask(now, door, Want::Joined);
            }
        }
    }

    fn leave(&mut self, now: Instant, door: &mut Door, rest: VecDeque<ShardId>) {
        match rest.front() {
            Some(&shard) => {
                self.phase = Phase::Leaving(rest);
                self.ask(now, door, Want::Leave(shard));
            }
            None => self.phase = Phase::Left { ended: self.ended },
        }
    }
}
