//! The process of a coordinator: its program schedules the calls of a seed, and closes them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Role;
use pushpull_services::simulation::{CoordinatorEndpoint, CoordinatorEvent, ScheduledNumber};
use pushpull_services::{Call, CoordinatorConfig, Outputs, PerWorker};
use pushpull_worker::simulation::{WorkerAnswer, WorkerOperation};
use pushpull_worker::{Error, OpenedCoordinator};

use super::call_schedule::{COORDINATOR, INCREMENT, MAKE, QUIET};
use super::checker::CallChecker;
use super::{CallProgram, CallTimer};
use crate::joiner::{Joiner, timed_out};
use crate::network::{Direction, Item, LinkClient, LinkServer};
use crate::process_program::CallLinkEvent;
use crate::setting::LEASE;
use crate::world::{ScheduledEvent, SimProcess, SimWorld};

/// How long a call is tried again, and how long an attempt may take.
const LONGER_THAN_A_RUN: Duration = Duration::from_secs(100_000);

/// The time after the faults within which every link is made again, and every paused process runs.
const LINKS_WORK: Duration = Duration::from_secs(6);

/// The state of a coordinator's process.
#[derive(Debug)]
pub(crate) struct Coordinating {
    pub(crate) incarnation: u64,
    /// When its process has ended.
    pub(crate) ended_at: Option<Instant>,
    pub(crate) phase: CoordinatorPhase,
    /// Whether it has asked to open the coordinator.
    has_asked: bool,
    /// The calls that had ended well when it asked.
    known: BTreeSet<u64>,
    joiner: Joiner,
    op: u64,
    timeout: Duration,
    pub(crate) endpoint: Option<CoordinatorEndpoint>,
    kept: Option<PerWorker>,
    /// The simulated connections, by their numbers in the session.
    connections: BTreeMap<u64, u64>,
    /// The calls whose results the program has.
    results: BTreeSet<u64>,
    /// Whether the program schedules more calls after a pause.
    pauses: bool,
    /// How many calls the program schedules at a time.
    burst: u64,
    scheduled: u64,
}

/// The state of a coordinator's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CoordinatorPhase {
    Joining,
    Opening,
    Running,
    /// Asking which calls have settled, after all have ended.
    Checking,
    Closing,
    /// Waiting until the last messages are sent.
    Leaving,
    Ended,
}

impl Coordinating {
    pub(crate) fn is_remote(&self) -> bool {
        !self.incarnation.is_multiple_of(2)
    }

    pub(crate) fn waits(&self) -> Option<String> {
        let waits = self.endpoint.as_ref().map(CoordinatorEndpoint::waits);
        let ended = self.phase == CoordinatorPhase::Ended;
        let phase = self.phase;
        let scheduled = self.scheduled;
        (!ended).then(|| format!("in {phase:?}, {scheduled} scheduled, {waits:?}"))
    }
}

impl SimWorld<CallProgram> {
    pub(super) fn start_coordinator(&mut self) {
        let (life, mut chance) = self.next_life("the coordinator");
        let incarnation = 1_000_000 + 2 * life + chance.between(0, 1);
        let timeout = chance.millis(1000, 20_000);
        let session = self.session(TaskId::new("coordinator", 0), Role::Reader {}, incarnation);
        let program = Coordinating {
            incarnation,
            ended_at: None,
            phase: CoordinatorPhase::Joining,
            has_asked: false,
            known: BTreeSet::new(),
            joiner: Joiner::new(false, timeout),
            op: 0,
            timeout,
            endpoint: None,
            kept: None,
            connections: BTreeMap::new(),
            results: BTreeSet::new(),
            pauses: false,
            burst: chance.between(1, 30),
            scheduled: 0,
        };
        let program = CallProgram::Coordinator(Box::new(program));
        let number = self.add_process(session, program, life, chance);
        self.begin_coordinator(number);
        self.settle_process(number);
    }

    fn begin_coordinator(&mut self, number: usize) {
        let process = &mut self.processes[number];
        let CallProgram::Coordinator(program) = &mut process.program else { return };
        program.phase = CoordinatorPhase::Joining;
        program.joiner.begin(self.now, &mut process.endpoint);
    }

    fn coordinating(&mut self, number: usize) -> &mut Coordinating {
        match &mut self.processes[number].program {
            CallProgram::Coordinator(program) => program,
            CallProgram::Server(_) => unreachable!("the process coordinates"),
        }
    }

    fn ask_shards(&mut self, number: usize, phase: CoordinatorPhase, operation: WorkerOperation) {
        let now = self.now;
        let timeout = self.coordinating(number).timeout;
        let op = self.processes[number].endpoint.submit(now, operation, timeout);
        let program = self.coordinating(number);
        program.phase = phase;
        program.op = op;
    }

    /// Handles the reply to an operation of the session.
    pub(super) fn coordinator_replied(
        &mut self,
        number: usize,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    ) {
        let process = &mut self.processes[number];
        let CallProgram::Coordinator(program) = &mut process.program else { return };
        if program.phase == CoordinatorPhase::Joining {
            let joined = program.joiner.on_reply(self.now, &mut process.endpoint, op, reply);
            if joined.unwrap_or_else(|error| panic!("the coordinator joins: {error}")) {
                program.has_asked = true;
                program.known = self.checker.done();
                let open = WorkerOperation::OpenCoordinator(COORDINATOR.to_owned());
                self.ask_shards(number, CoordinatorPhase::Opening, open);
            }
            return;
        }
        if op != program.op {
            return;
        }
        match (program.phase, reply) {
            (CoordinatorPhase::Opening, Ok(WorkerAnswer::Calls(opened))) => {
                self.calls_opened(number, opened);
            }
            // The program is started again with a new session, which resumes.
            (CoordinatorPhase::Opening, Err(error)) if timed_out(&error) || is_behind(&error) => {
                self.begin_coordinator(number);
            }
            (CoordinatorPhase::Checking, Ok(WorkerAnswer::Calls(found))) => {
                let last = self.checker.schedule.last();
                let unsettled: Vec<u64> = found
                    .window
                    .unsettled(pushpull_common::ids::EffectNumber(last))
                    .map(|number| number.0)
                    .filter(|&number| self.checker.schedule.call(number).pushes)
                    .collect();
                if unsettled.is_empty() {
                    return self.close_coordinator(number);
                }
                // A newer process may have closed the calls and opened others under the name.
                assert!(
                    self.is_replaced(number),
                    "calls have ended and not settled: {unsettled:?}"
                );
                self.coordinating(number).phase = CoordinatorPhase::Ended;
            }
            (CoordinatorPhase::Checking, Err(error)) if timed_out(&error) => {
                self.check_settled(number);
            }
            (CoordinatorPhase::Closing, Ok(WorkerAnswer::Done)) => {
                self.checker.closed = true;
                self.leave(number);
            }
            (CoordinatorPhase::Closing, Err(error)) if timed_out(&error) => {
                self.close_coordinator(number);
            }
            (
                CoordinatorPhase::Opening | CoordinatorPhase::Checking | CoordinatorPhase::Closing,
                Err(Error::Refused {
                    refusal:
                        refusal
                        @ (Refusal::CoordinatorEpoch { .. } | Refusal::UnknownCoordinator { .. }),
                    ..
                }),
            ) => {
                assert!(self.is_replaced(number), "the only coordinator is refused: {refusal}");
                self.coordinating(number).phase = CoordinatorPhase::Ended;
            }
            (phase, reply) => panic!("unexpected reply to the coordinator in {phase:?}: {reply:?}"),
        }
    }

    /// Whether another process of the coordinator may have opened it after this one.
    fn is_replaced(&self, number: usize) -> bool {
        let coordinating = |process: &SimProcess<CallProgram>| match &process.program {
            CallProgram::Coordinator(program) => {
                let opened = program.endpoint.as_ref().map(|endpoint| endpoint.opened().epoch);
                Some((program.has_asked, opened))
            }
            CallProgram::Server(_) => None,
        };
        let own = coordinating(&self.processes[number]).and_then(|(_, opened)| opened);
        let others = self.processes.iter().enumerate().filter(|&(other, _)| other != number);
        others.filter_map(|(_, process)| coordinating(process)).any(|(has_asked, opened)| {
            has_asked && (opened.is_none() || own.is_none() || opened > own)
        })
    }

    fn calls_opened(&mut self, number: usize, opened: OpenedCoordinator) {
        let known = std::mem::take(&mut self.coordinating(number).known);
        self.checker.opened(opened.window, &known);
        let CallChecker { schedule, closing, .. } = &self.checker;
        let skips = schedule.skips;
        let has_kept = schedule.has_kept;
        let closing = *closing;
        let config = CoordinatorConfig::new()
            .queue_max(schedule.queue_max)
            .calls_per_worker(schedule.calls_per_worker)
            .retry_for(LONGER_THAN_A_RUN)
            .planted(self.setting.planted_worker);
        let now = self.now;
        let workers = self.setting.workers;
        let program = self.coordinating(number);
        let mut endpoint = CoordinatorEndpoint::new(
            now,
            program.incarnation,
            workers,
            &config,
            opened,
            LONGER_THAN_A_RUN,
        );
        if closing {
            // An earlier process has recorded that all calls have ended, and was killed while it
            // closed them.
            program.endpoint = Some(endpoint);
            return self.close_coordinator(number);
        }
        program.phase = CoordinatorPhase::Running;
        program.kept = has_kept.then(|| endpoint.per_worker(now, Call::new(MAKE)));
        if skips {
            program.scheduled = endpoint.settled();
            endpoint.skip_to(program.scheduled + 1);
        }
        program.endpoint = Some(endpoint);
        self.schedule_calls(number);
        self.drain_coordinator(number);
    }

    /// Schedules some calls, until the queue is full.
    fn schedule_calls(&mut self, number: usize) {
        let now = self.now;
        let last = self.checker.schedule.last();
        for _ in 0..self.coordinating(number).burst {
            let next = self.coordinating(number).scheduled + 1;
            if next > last {
                return;
            }
            let planned = self.checker.schedule.call(next);
            let program = self.coordinating(number);
            let call = Call::new(if planned.pushes { INCREMENT } else { QUIET });
            let call = match program.kept.filter(|_| planned.uses_kept) {
                Some(kept) => call.per_worker("made", &kept, Outputs::NAME),
                None => call,
            };
            let Some(endpoint) = &mut program.endpoint else { return };
            match endpoint.schedule(now, call, planned.pinned) {
                ScheduledNumber::Full => return,
                ScheduledNumber::Differs(error) => panic!("the calls are the same: {error}"),
                ScheduledNumber::Scheduled(given) => assert_eq!(given, next, "numbers ascend"),
                ScheduledNumber::EndedBefore(given) => {
                    assert_eq!(given, next, "numbers ascend");
                    let (checker, shards) = self.checker_and_shards();
                    checker.ended_before(next, shards);
                }
            }
            self.coordinating(number).scheduled = next;
        }
        if !self.coordinating(number).pauses {
            self.coordinating(number).pauses = true;
            let pause = self.processes[number].chance.millis(1, 80);
            self.after(pause, ScheduledEvent::Timer(CallTimer::Schedule(number)));
        }
    }

    /// The program schedules more calls after its pause.
    pub(super) fn schedule_more(&mut self, number: usize) {
        if !self.processes[number].is_alive {
            return;
        }
        let program = self.coordinating(number);
        program.pauses = false;
        if program.phase == CoordinatorPhase::Running {
            self.schedule_calls(number);
        }
        self.drain_coordinator(number);
        self.settle_process(number);
    }

    pub(super) fn tick_coordinator(&mut self, number: usize) {
        let now = self.now;
        if let Some(endpoint) = &mut self.coordinating(number).endpoint {
            endpoint.tick(now);
        }
        self.drain_coordinator(number);
    }

    pub(super) fn coordinator_event(&mut self, number: usize, event: CallLinkEvent<'_>) -> bool {
        let now = self.now;
        let program = self.coordinating(number);
        let Some(endpoint) = &mut program.endpoint else { return true };
        let sound = match event {
            CallLinkEvent::Connected(connection) => {
                endpoint.connected(now, connection);
                true
            }
            CallLinkEvent::ClientReceived(connection, bytes) => {
                !program.connections.contains_key(&connection)
                    || endpoint.receive(now, connection, bytes)
            }
            CallLinkEvent::ClientLost(connection) => {
                if program.connections.remove(&connection).is_some() {
                    endpoint.disconnected(now, connection, "connection lost");
                }
                true
            }
            other => unreachable!("a coordinator makes connections: {other:?}"),
        };
        self.drain_coordinator(number);
        self.settle_process(number);
        sound
    }

    /// Carries out the coordinator's outputs until there are none, and lets its program go on.
    fn drain_coordinator(&mut self, number: usize) {
        loop {
            let Some(endpoint) = &mut self.coordinating(number).endpoint else { return };
            match endpoint.poll() {
                None => break,
                Some(CoordinatorEvent::Connect { connection, worker }) => {
                    let client = LinkClient::Caller { process: number, connection };
                    let opened = self.open(client, LinkServer::Functions(worker));
                    self.coordinating(number).connections.insert(connection, opened);
                }
                Some(CoordinatorEvent::Disconnect { connection }) => {
                    if let Some(opened) = self.coordinating(number).connections.remove(&connection)
                    {
                        self.drop_connection(opened);
                    }
                }
                Some(CoordinatorEvent::Send { connection, frame }) => {
                    if let Some(&opened) = self.coordinating(number).connections.get(&connection) {
                        self.send(opened, Direction::ToServer, Item::Bytes(frame.into()));
                    }
                }
                Some(CoordinatorEvent::Ended { number: call, result }) => {
                    let first = self.coordinating(number).results.insert(call);
                    assert!(first, "call {call} is answered twice");
                    match result {
                        Ok(outputs) => {
                            let value = outputs.value().and_then(|value| value.element::<i64>());
                            assert_eq!(value.unwrap(), call as i64, "the result of another call");
                            let (checker, shards) = self.checker_and_shards();
                            checker.ended(call, shards);
                        }
                        Err(error) => {
                            assert!(self.is_replaced(number), "call {call} has failed: {error}");
                        }
                    }
                }
            }
        }
        self.continue_program(number);
    }

    /// Ends the program's wait for its calls, if they have ended.
    fn continue_program(&mut self, number: usize) {
        let now = self.now;
        let last = self.checker.schedule.last();
        let program = self.coordinating(number);
        if program.phase != CoordinatorPhase::Running {
            return;
        }
        let Some(endpoint) = &mut program.endpoint else { return };
        match endpoint.done(now) {
            Err(error) => {
                assert!(self.is_replaced(number), "the coordinator has failed: {error}");
                self.coordinating(number).phase = CoordinatorPhase::Ended;
            }
            Ok(true) if program.scheduled == last => {
                endpoint.check_idle();
                self.check_settled(number);
            }
            Ok(_) => {
                if program.scheduled < last && !program.pauses {
                    self.schedule_calls(number);
                }
            }
        }
    }

    fn check_settled(&mut self, number: usize) {
        let query = WorkerOperation::SettledEffects(COORDINATOR.to_owned());
        self.ask_shards(number, CoordinatorPhase::Checking, query);
    }

    fn close_coordinator(&mut self, number: usize) {
        self.checker.closing = true;
        let endpoint = self.coordinating(number).endpoint.as_ref();
        let epoch = endpoint.expect("the calls are opened").opened().epoch;
        let close = WorkerOperation::CloseCoordinator(COORDINATOR.to_owned(), epoch);
        self.ask_shards(number, CoordinatorPhase::Closing, close);
    }

    /// The program has closed its calls, and ends soon.
    fn leave(&mut self, number: usize) {
        self.coordinating(number).phase = CoordinatorPhase::Leaving;
        if self.checker.schedule.releases {
            // Once every link works, so that the servers can be checked.
            let healed = self.heal_time().saturating_duration_since(self.now);
            let release = ScheduledEvent::Timer(CallTimer::Release(number));
            return self.after(healed + LINKS_WORK, release);
        }
        let pause = self.processes[number].chance.millis(0, 200);
        self.after(pause, ScheduledEvent::Timer(CallTimer::Leave(number)));
    }

    /// The program releases the per-worker values.
    pub(super) fn release(&mut self, number: usize) {
        if !self.processes[number].is_alive {
            return;
        }
        let now = self.now;
        if let Some(endpoint) = &mut self.coordinating(number).endpoint {
            endpoint.release(now);
        }
        self.drain_coordinator(number);
        self.settle_process(number);
        self.after(LEASE, ScheduledEvent::Timer(CallTimer::Leave(number)));
    }

    /// Checks that no server remembers a call of a program that has released everything.
    fn check_released(&self, number: usize) {
        let CallProgram::Coordinator(program) = &self.processes[number].program else { return };
        for process in self.processes.iter().filter(|process| process.is_alive) {
            if let CallProgram::Server(server) = &process.program {
                let task = server.task;
                let calls = server.endpoint.calls_of(program.incarnation);
                assert_eq!(calls, 0, "worker {task} remembers calls that nobody needs");
            }
        }
    }

    pub(super) fn left(&mut self, number: usize) {
        if self.processes[number].is_alive {
            if self.checker.schedule.releases {
                self.check_released(number);
            }
            self.coordinating(number).phase = CoordinatorPhase::Ended;
            self.settle_process(number);
        }
    }
}

/// Whether a shard could not judge a request, because it has not heard yet of what the step owner
/// has assigned.
fn is_behind(error: &Error) -> bool {
    matches!(error, Error::Refused { refusal: Refusal::Unavailable { .. }, .. })
}
