//! The process of a worker task: it serves functions, which train through one session.

use std::collections::BTreeMap;
use std::time::Duration;

use pushpull_common::ids::{GlobalStep, TaskId};
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{EffectRef, Grant, Outcome};
use pushpull_services::Value;
use pushpull_services::simulation::{
    FunctionFailure, FunctionServerEndpoint, FunctionServerEvent, FunctionServerSettings,
    SimulatedExecution, scheduled_push_end,
};
use pushpull_worker::Error;
use pushpull_worker::simulation::{WorkerAnswer, WorkerOperation};

use super::call_schedule::{INCREMENT, MAKE, QUIET};
use super::{CallProgram, CallTimer};
use crate::chance::SimChance;
use crate::joiner::Joiner;
use crate::network::{Direction, Item};
use crate::process_program::CallLinkEvent;
use crate::setting::LEASE;
use crate::world::{ScheduledEvent, SimWorld};

/// The state of a function server.
#[derive(Debug)]
pub(crate) struct FunctionServer {
    pub(crate) task: u32,
    incarnation: u64,
    joiner: Joiner,
    joined: bool,
    pub(crate) endpoint: FunctionServerEndpoint,
    /// The executions of functions, by their numbers.
    bodies: BTreeMap<u64, FunctionBody>,
    /// The executions that wait for operations of the session.
    operations: BTreeMap<u64, u64>,
    timeout: Duration,
}

/// The state of an execution.
#[derive(Debug)]
struct FunctionBody {
    function: String,
    effect: Option<EffectRef>,
    phase: BodyPhase,
    cancelled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum BodyPhase {
    /// Waiting until the session has joined.
    Waiting,
    Asking,
    Pulling(Grant),
    /// Computing, with a token and the step of its values if it pushes.
    Computing(Option<(Grant, GlobalStep)>),
    Pushing,
}

impl FunctionServer {
    pub(crate) fn is_remote(&self) -> bool {
        !self.incarnation.is_multiple_of(2)
    }

    pub(crate) fn waits(&self) -> String {
        let nobody = self.endpoint.remembers_nobody();
        format!("joined: {}, remembers nobody: {nobody}, {:?}", self.joined, self.bodies)
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.bodies.is_empty() && self.operations.is_empty()
    }
}

impl SimWorld<CallProgram> {
    pub(super) fn start_server(&mut self, task: u32) {
        let (life, mut chance) = self.next_life(&format!("worker {task}"));
        let incarnation = 1000 * u64::from(task) + 2 * life + chance.between(0, 1);
        let timeout = chance.millis(1000, 20_000);
        let settings = FunctionServerSettings {
            task,
            incarnation,
            lease: LEASE,
            threads: self.checker.schedule.threads,
            functions: [INCREMENT, QUIET, MAKE].map(str::to_owned).to_vec(),
            planted: self.setting.planted_worker,
        };
        let role = if task == 0 { Role::Chief {} } else { Role::Worker {} };
        let session = self.session(TaskId::worker(task), role, incarnation);
        let server = FunctionServer {
            task,
            incarnation,
            joiner: Joiner::new(task == 0, timeout),
            joined: false,
            endpoint: FunctionServerEndpoint::new(&settings),
            bodies: BTreeMap::new(),
            operations: BTreeMap::new(),
            timeout,
        };
        let program = CallProgram::Server(Box::new(server));
        let number = self.add_process(session, program, life, chance);
        let process = &mut self.processes[number];
        let CallProgram::Server(server) = &mut process.program else { return };
        server.joiner.begin(self.now, &mut process.endpoint);
        self.settle_process(number);
    }

    fn server(&mut self, number: usize) -> &mut FunctionServer {
        match &mut self.processes[number].program {
            CallProgram::Server(server) => server,
            CallProgram::Coordinator(_) => unreachable!("the process serves functions"),
        }
    }

    fn chance(&mut self, number: usize) -> &mut SimChance {
        &mut self.processes[number].chance
    }

    pub(super) fn tick_server(&mut self, number: usize) {
        let now = self.now;
        self.server(number).endpoint.tick(now);
        self.check_leases(number);
        self.drain_server(number);
    }

    /// Checks that a server has forgotten the coordinators that have ended a lease ago.
    fn check_leases(&self, number: usize) {
        let CallProgram::Server(server) = &self.processes[number].program else { return };
        for client in server.endpoint.remembered() {
            let is_client = |program: &CallProgram| match program {
                CallProgram::Coordinator(of) => (of.incarnation == client).then_some(of.ended_at),
                CallProgram::Server(_) => None,
            };
            let ended_at = self.processes.iter().find_map(|other| is_client(&other.program));
            let since = ended_at.expect("a client is a coordinator");
            // Leases are checked eight times in each.
            let is_late = since.is_some_and(|at| self.now > at + LEASE * 5 / 4);
            assert!(!is_late, "worker {} remembers client {client}, which is gone", server.task);
        }
    }

    pub(super) fn server_event(&mut self, number: usize, event: CallLinkEvent<'_>) -> bool {
        let now = self.now;
        let endpoint = &mut self.server(number).endpoint;
        let sound = match event {
            CallLinkEvent::ServerReceived(connection, bytes) => {
                endpoint.receive(now, connection, bytes)
            }
            CallLinkEvent::ServerLost(connection) => {
                endpoint.disconnected(now, connection);
                true
            }
            other => unreachable!("a server accepts connections: {other:?}"),
        };
        self.drain_server(number);
        self.settle_process(number);
        sound
    }

    /// Carries out the service's outputs until there are none.
    fn drain_server(&mut self, number: usize) {
        while let Some(event) = self.server(number).endpoint.poll() {
            match event {
                FunctionServerEvent::Send { connection, frame } => {
                    self.send(connection, Direction::ToClient, Item::Bytes(frame.into()));
                }
                FunctionServerEvent::Close { connection } => {
                    self.send(connection, Direction::ToClient, Item::End);
                }
                FunctionServerEvent::Cancel { execution } => {
                    if let Some(body) = self.server(number).bodies.get_mut(&execution) {
                        body.cancelled = true;
                    }
                }
                FunctionServerEvent::Execute(execution) => self.execute(number, execution),
            }
        }
    }

    fn execute(&mut self, number: usize, started: SimulatedExecution) {
        let SimulatedExecution { execution, function, scheduled: effect, inputs } = started;
        let task = self.server(number).task;
        self.trace.note(|| format!("  worker {task} executes {function} for {effect:?}"));
        if let Some(effect) = effect {
            self.checker.executed(effect.id.number.0, task);
        }
        for (name, value) in inputs {
            let made = value.element::<i64>().unwrap();
            assert_eq!(made, i64::from(task), "{name} is a value of another worker");
        }
        let pushes = function == INCREMENT;
        let phase = if pushes { BodyPhase::Waiting } else { BodyPhase::Computing(None) };
        let body = FunctionBody { function, effect, phase, cancelled: false };
        self.server(number).bodies.insert(execution, body);
        match pushes {
            false => self.compute(number, execution),
            true if self.server(number).joined => self.ask_for_token(number, execution),
            true => {}
        }
    }

    fn compute(&mut self, number: usize, execution: u64) {
        let chance = self.chance(number);
        let time = match chance.between(0, 19) {
            0 => chance.millis(500, 3000),
            _ => chance.millis(1, 60),
        };
        self.after(time, ScheduledEvent::Timer(CallTimer::Computed(number, execution)));
    }

    fn ask_for_token(&mut self, number: usize, execution: u64) {
        self.ask(number, execution, BodyPhase::Asking, WorkerOperation::Token);
    }

    fn ask(&mut self, number: usize, execution: u64, phase: BodyPhase, operation: WorkerOperation) {
        let now = self.now;
        let timeout = self.server(number).timeout;
        let op = self.processes[number].endpoint.submit(now, operation, timeout);
        let server = self.server(number);
        server.operations.insert(op, execution);
        if let Some(body) = server.bodies.get_mut(&execution) {
            body.phase = phase;
        }
    }

    /// Handles the reply to an operation of the session.
    pub(super) fn server_replied(
        &mut self,
        number: usize,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    ) {
        let now = self.now;
        let process = &mut self.processes[number];
        let CallProgram::Server(server) = &mut process.program else { return };
        if !server.joined {
            let joined = server.joiner.on_reply(now, &mut process.endpoint, op, reply);
            if joined.unwrap_or_else(|error| panic!("worker {} joins: {error}", server.task)) {
                server.joined = true;
                let waiting: Vec<u64> = server
                    .bodies
                    .iter()
                    .filter(|(_, body)| body.phase == BodyPhase::Waiting)
                    .map(|(&e, _)| e)
                    .collect();
                waiting.into_iter().for_each(|execution| self.ask_for_token(number, execution));
            }
            return;
        }
        let Some(execution) = server.operations.remove(&op) else { return };
        let Some(body) = server.bodies.get(&execution) else { return };
        let phase = body.phase;
        let cancelled = body.cancelled;
        match (phase, reply) {
            (BodyPhase::Asking, Ok(WorkerAnswer::Token(Some(grant)))) => {
                let pulls = self.chance(number).percent(60);
                let notices = self.chance(number).percent(50);
                match (cancelled && notices, pulls) {
                    (true, _) => self.drop_token(number, execution, grant, cancelled_failure()),
                    (false, true) => {
                        let pull = WorkerOperation::Pull(Some(grant.step));
                        self.ask(number, execution, BodyPhase::Pulling(grant), pull);
                    }
                    (false, false) => self.computes(number, execution, grant, grant.step),
                }
            }
            (BodyPhase::Pulling(grant), Ok(WorkerAnswer::Pulled(_, step))) => {
                self.computes(number, execution, grant, step);
            }
            (BodyPhase::Pulling(grant), Ok(WorkerAnswer::Stale)) => {
                self.processes[number].endpoint.drop_token(now, grant);
                self.ask_for_token(number, execution);
            }
            (BodyPhase::Pulling(grant), Err(error)) => {
                self.drop_token(number, execution, grant, error.into());
            }
            (BodyPhase::Asking, Err(error)) => self.ends(number, execution, Err(error.into())),
            (BodyPhase::Pushing, Ok(WorkerAnswer::Pushed(outcome))) => {
                match outcome {
                    Outcome::Repeated {} => self.checker.count("repeated"),
                    Outcome::Stale { .. } | Outcome::Withdrawn {} => {
                        self.checker.count("without_effect")
                    }
                    _ => {}
                }
                let end = scheduled_push_end(Ok(outcome), self.setting.planted_worker);
                self.ends(number, execution, end);
            }
            (BodyPhase::Pushing, Err(error)) => {
                let end = scheduled_push_end(Err(error), self.setting.planted_worker);
                self.ends(number, execution, end);
            }
            (phase, reply) => panic!("unexpected reply in {phase:?}: {reply:?}"),
        }
    }

    fn computes(&mut self, number: usize, execution: u64, grant: Grant, read: GlobalStep) {
        if let Some(body) = self.server(number).bodies.get_mut(&execution) {
            body.phase = BodyPhase::Computing(Some((grant, read)));
        }
        self.compute(number, execution);
    }

    fn drop_token(
        &mut self,
        number: usize,
        execution: u64,
        grant: Grant,
        failure: FunctionFailure,
    ) {
        let now = self.now;
        self.processes[number].endpoint.drop_token(now, grant);
        self.ends(number, execution, Err(failure));
    }

    /// An execution has computed: it pushes, or returns.
    pub(super) fn computed(&mut self, number: usize, execution: u64) {
        if !self.processes[number].is_alive {
            return;
        }
        let notices = self.chance(number).percent(50);
        let Some(body) = self.server(number).bodies.get(&execution) else { return };
        let phase = body.phase;
        let effect = body.effect;
        let gives_up = body.cancelled && notices;
        match (phase, effect) {
            (BodyPhase::Computing(None), _) => self.ends(number, execution, Ok(())),
            (BodyPhase::Computing(Some((grant, _))), _) if gives_up => {
                self.drop_token(number, execution, grant, cancelled_failure());
            }
            (BodyPhase::Computing(Some((grant, read))), Some(effect)) => {
                let endpoint = &self.processes[number].endpoint;
                let mut bytes = vec![0; endpoint.bytes()];
                let variables = endpoint.variables();
                for &id in &variables {
                    let spec = self.setting.catalogue.variable(id);
                    let length = spec.bytes() as usize / spec.dtype().size();
                    let gradient = self.checker.gradient(effect.id.number.0, spec.dtype(), length);
                    bytes[endpoint.range(id)].copy_from_slice(&gradient.to_bytes());
                }
                let effect = Some(effect);
                let push = WorkerOperation::Push { grant, effect, read, variables, bytes };
                self.ask(number, execution, BodyPhase::Pushing, push);
            }
            (phase, effect) => panic!("a function for {effect:?} has computed in {phase:?}"),
        }
        self.drain_server(number);
        self.settle_process(number);
    }

    /// Ends an execution.
    fn ends(&mut self, number: usize, execution: u64, end: Result<(), FunctionFailure>) {
        let now = self.now;
        let server = self.server(number);
        let Some(body) = server.bodies.remove(&execution) else { return };
        let value = match body.effect {
            Some(effect) => effect.id.number.0 as i64,
            None => i64::from(server.task),
        };
        server.endpoint.returned(now, execution, end.clone().map(|()| Value::from(value)));
        let function = body.function;
        let effect = body.effect.map(|effect| effect.id.number);
        self.trace.note(|| format!("  {function} for {effect:?} ends: {end:?}"));
        self.drain_server(number);
    }
}

fn cancelled_failure() -> FunctionFailure {
    FunctionFailure { retry: false, detail: "nobody waits".to_owned() }
}
