//! A public endpoint of a coordinator, for the simulator of whole clusters.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::{EffectNumber, Incarnation, TaskId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::{FrameEvent, FrameProgress, FrameReader, FrameSink};
use pushpull_worker::OpenedCoordinator;

use super::frames::frame_of;
use crate::call_session::{
    CallCommand, CallInput, CallOp, CallOrder, CallOutput, CallReply, CallSession, LinkId, OutputId,
};
use crate::coordinator::call_digests::CallDigests;
use crate::coordinator::decisions::{self, PROBE_INTERVAL, PROBE_TIMEOUT};
use crate::dispatch::{
    Attempt, CallEnding, Dispatch, DispatchInput, DispatchOutput, ResourceId, WorkerId,
};
use crate::{Call, CoordinatorConfig, Outputs, PerWorker, ServiceError};

/// A coordinator with a name: its dispatch, and its session with the function servers.
///
/// It does for both what `services/coordinator` and `services/runtime/client_core.rs` do, without a
/// socket, a thread or a clock.
#[derive(Debug)]
pub struct CoordinatorEndpoint {
    dispatch: Dispatch<ServiceError>,
    session: CallSession,
    opened: OpenedCoordinator,
    workers: Vec<SimulatedWorker>,
    readers: BTreeMap<u64, FrameReader>,
    /// The calls that have not ended.
    calls: BTreeMap<u64, Call>,
    /// The digests of all calls that were scheduled, and those that the servers know.
    digests: BTreeMap<u64, u64>,
    scheduled: CallDigests,
    /// The results of attempts whose calls are about to end.
    results: BTreeMap<u64, Result<Outputs, ServiceError>>,
    operations: BTreeMap<CallOp, CoordinatorOperation>,
    next_op: u64,
    /// The calls that make per-worker values, by the ids of these.
    makers: Vec<Call>,
    /// The calls that have left per-worker values on workers.
    made: BTreeMap<(WorkerId, ResourceId), u64>,
    timeout: Duration,
    events: VecDeque<CoordinatorEvent>,
}

/// A worker of the coordinator.
#[derive(Debug)]
struct SimulatedWorker {
    task: TaskId,
    link: LinkId,
    /// The time of the next check whether the worker is absent; `None` while its description is
    /// requested.
    probe_at: Option<Instant>,
}

/// The operations of the coordinator that wait for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CoordinatorOperation {
    Attempt(Attempt),
    Making(WorkerId, ResourceId, u64),
    Probe(WorkerId),
}

/// The answer of [`CoordinatorEndpoint::schedule`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduledNumber {
    /// The call has this number.
    Scheduled(u64),
    /// The call has this number, and had ended before.
    EndedBefore(u64),
    /// The call is not the one that the servers know.
    Differs(String),
    /// The queue is full: the program must schedule again later.
    Full,
}

/// An action of a coordinator.
#[derive(Debug)]
pub enum CoordinatorEvent {
    /// Connect to the function server of a worker task.
    Connect {
        /// The number of the connection, chosen by the session.
        connection: u64,
        /// The index of the worker task.
        worker: u32,
    },
    /// Close a connection and drop its unsent frames.
    Disconnect {
        /// The number of the connection.
        connection: u64,
    },
    /// Send a frame on a connection.
    Send {
        /// The number of the connection.
        connection: u64,
        /// The bytes of the frame.
        frame: Vec<u8>,
    },
    /// A call has ended. Its program gets this result.
    Ended {
        /// The number of the call.
        number: u64,
        /// The outputs of its function, or the error.
        result: Result<Outputs, ServiceError>,
    },
}

/// Passes the frames of a connection to the session, at a fixed time.
struct CoordinatorSink<'a> {
    endpoint: &'a mut CoordinatorEndpoint,
    now: Instant,
    connection: u64,
}

impl FrameSink for CoordinatorSink<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        let connection = self.connection;
        let input = match event {
            FrameEvent::Message(header, message) => {
                CallInput::Message { connection, header, message }
            }
            FrameEvent::Body => CallInput::Body { connection },
            FrameEvent::Progress => CallInput::Progress { connection },
        };
        self.endpoint.session_input(self.now, input);
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.endpoint.session.with_body(self.connection, receive)
    }
}

impl CoordinatorEndpoint {
    /// Creates the coordinator of a process, which is open. Each process has its own
    /// incarnation.
    pub fn new(
        now: Instant,
        incarnation: u64,
        workers: u32,
        config: &CoordinatorConfig,
        opened: OpenedCoordinator,
        timeout: Duration,
    ) -> CoordinatorEndpoint {
        let name = TaskId::new("coordinator", 0);
        let mut session = CallSession::new(Incarnation(incarnation), name, 1 << 20);
        let workers = (0..workers).map(|index| {
            let task = TaskId::worker(index);
            let link = session.add_link(now, index.to_string(), Some(task.clone()));
            SimulatedWorker { task, link, probe_at: Some(now) }
        });
        let workers: Vec<_> = workers.collect();
        CoordinatorEndpoint {
            dispatch: decisions::dispatch(config, workers.len(), Some(&opened)),
            workers,
            session,
            opened,
            digests: BTreeMap::new(),
            scheduled: CallDigests::new("simulated", opened.digests),
            readers: BTreeMap::new(),
            calls: BTreeMap::new(),
            results: BTreeMap::new(),
            operations: BTreeMap::new(),
            next_op: 1,
            makers: Vec::new(),
            made: BTreeMap::new(),
            timeout,
            events: VecDeque::new(),
        }
    }

    /// Returns the calls that the coordinator has opened.
    pub fn opened(&self) -> OpenedCoordinator {
        self.opened
    }

    /// Schedules a call, which is pinned to a worker task or to none.
    pub fn schedule(&mut self, now: Instant, call: Call, pinned: Option<u32>) -> ScheduledNumber {
        if !self.dispatch.has_room() {
            return ScheduledNumber::Full;
        }
        let number = self.dispatch.number_call();
        let digest = self.scheduled.next(number, &call);
        if let Err(error) = &digest {
            return ScheduledNumber::Differs(error.to_string());
        }
        if self.dispatch.has_ended(number) {
            return ScheduledNumber::EndedBefore(number);
        }
        let resources = call.resources();
        let pinned = pinned.map(WorkerId);
        self.calls.insert(number, call);
        self.digests.insert(number, digest.unwrap_or_default());
        self.dispatch_input(now, DispatchInput::Schedule { number, pinned, resources });
        ScheduledNumber::Scheduled(number)
    }

    /// Makes a per-worker value: each worker calls a function whose outputs stay there.
    pub fn per_worker(&mut self, now: Instant, call: Call) -> PerWorker {
        let resource = ResourceId(self.makers.len() as u32);
        self.makers.push(call);
        self.dispatch_input(now, DispatchInput::Resource { resource });
        PerWorker::new(resource)
    }

    /// Gives the next call this number, if it is above the numbers of earlier calls.
    pub fn skip_to(&mut self, number: u64) {
        self.dispatch.skip_to(number);
    }

    /// Returns the number up to which all calls have ended.
    pub fn settled(&self) -> u64 {
        self.dispatch.settled()
    }

    /// Whether every scheduled call has ended.
    ///
    /// # Errors
    /// The first error of a call that is final, once every call has ended.
    pub fn done(&mut self, now: Instant) -> Result<bool, ServiceError> {
        self.dispatch_input(now, DispatchInput::Look);
        match self.dispatch.take_error() {
            Some(error) => Err(error),
            None => Ok(self.dispatch.is_idle()),
        }
    }

    /// Releases the per-worker values, like the end of a coordinator.
    pub fn release(&mut self, now: Instant) {
        for ((worker, _), call) in std::mem::take(&mut self.made) {
            self.release_call(now, worker, call);
        }
    }

    /// Panics unless nothing is under way.
    ///
    /// # Panics
    /// If an operation, a call or a result is left.
    pub fn check_idle(&self) {
        assert!(self.calls.is_empty(), "calls have not ended: {:?}", self.calls.keys());
        assert!(self.results.is_empty(), "results are left");
        let attempt = |operation: &&CoordinatorOperation| {
            matches!(operation, CoordinatorOperation::Attempt(_))
        };
        assert_eq!(self.operations.values().find(attempt), None, "an attempt is under way");
    }

    /// Describes the calls that have not ended, and the workers.
    pub fn waits(&self) -> String {
        format!("{:?}; under way: {:?}", self.dispatch, self.operations)
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<CoordinatorEvent> {
        self.events.pop_front()
    }

    /// Returns when the next [`CoordinatorEndpoint::tick`] is due.
    pub fn wake_at(&self) -> Option<Instant> {
        let probes = self.workers.iter().filter_map(|worker| worker.probe_at);
        probes.chain(self.session.wake_at()).chain(self.dispatch.wake_at()).min()
    }

    /// Reports that time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.session_input(now, CallInput::Tick);
        self.dispatch_input(now, DispatchInput::Tick);
        for index in 0..self.workers.len() {
            if self.workers[index].probe_at.is_some_and(|at| at <= now) {
                self.probe(now, WorkerId(index as u32));
            }
        }
    }

    /// Reports a connection that is made.
    pub fn connected(&mut self, now: Instant, connection: u64) {
        let mut reader = FrameReader::new();
        reader.open();
        self.readers.insert(connection, reader);
        self.session_input(now, CallInput::Connected { connection });
    }

    /// Reports a connection that could not be made or is lost.
    pub fn disconnected(&mut self, now: Instant, connection: u64, reason: &str) {
        self.readers.remove(&connection);
        let reason = reason.to_owned();
        self.session_input(now, CallInput::Disconnected { connection, reason });
    }

    /// Receives bytes over a connection. Returns false if they break the protocol.
    pub fn receive(&mut self, now: Instant, connection: u64, bytes: &[u8]) -> bool {
        let Some(place) = self.readers.get_mut(&connection) else { return true };
        let mut reader = std::mem::take(place);
        let mut source = slice_source(bytes);
        let mut sink = CoordinatorSink { endpoint: self, now, connection };
        let sound = loop {
            match reader.receive(&mut source, &mut sink) {
                Err(_) => break false,
                Ok(FrameProgress::Whole) if sink.endpoint.readers.contains_key(&connection) => {}
                Ok(_) => break true,
            }
        };
        if let Some(place) = self.readers.get_mut(&connection) {
            *place = reader;
        }
        sound
    }

    /// Requests the description of a worker that is absent.
    fn probe(&mut self, now: Instant, worker: WorkerId) {
        let index = worker.0 as usize;
        if self.dispatch.is_up(worker) {
            self.workers[index].probe_at = Some(now + PROBE_INTERVAL);
            return;
        }
        self.workers[index].probe_at = None;
        let link = self.workers[index].link;
        let deadline = Some(now + PROBE_TIMEOUT);
        self.command(
            now,
            CoordinatorOperation::Probe(worker),
            link,
            CallCommand::Describe,
            deadline,
        );
    }

    fn command(
        &mut self,
        now: Instant,
        operation: CoordinatorOperation,
        link: LinkId,
        command: CallCommand,
        deadline: Option<Instant>,
    ) {
        let op = CallOp(self.next_op);
        self.next_op += 1;
        self.operations.insert(op, operation);
        self.session_input(now, CallInput::Command { op, link, command, deadline });
    }

    fn call(
        &mut self,
        now: Instant,
        operation: CoordinatorOperation,
        link: LinkId,
        number: u64,
        order: CallOrder,
    ) {
        let command = CallCommand::Call { number, order: Box::new(order) };
        self.command(now, operation, link, command, Some(now + self.timeout));
    }

    fn session_input(&mut self, now: Instant, input: CallInput<'_>) {
        self.session.handle(now, input);
        while let Some(output) = self.session.poll_output() {
            match output {
                CallOutput::Connect { connection, address } => {
                    let worker = address.parse().expect("an address is the number of a worker");
                    self.events.push_back(CoordinatorEvent::Connect { connection, worker });
                }
                CallOutput::Disconnect { connection } => {
                    self.readers.remove(&connection);
                    self.events.push_back(CoordinatorEvent::Disconnect { connection });
                }
                CallOutput::Send { connection, envelope, message, body, crc } => {
                    let frame = frame_of(&envelope, &message, &body, crc);
                    self.events.push_back(CoordinatorEvent::Send { connection, frame });
                }
                CallOutput::Reply { op, reply } => self.replied(now, op, reply),
            }
        }
    }

    fn replied(&mut self, now: Instant, op: CallOp, reply: Result<CallReply, ServiceError>) {
        // Nobody waits for the reply to a cancelled operation.
        let Some(operation) = self.operations.remove(&op) else { return };
        match operation {
            CoordinatorOperation::Probe(worker) => {
                self.workers[worker.0 as usize].probe_at = Some(now + PROBE_INTERVAL);
                if reply.is_ok() {
                    self.dispatch_input(now, DispatchInput::WorkerUp { worker });
                }
            }
            CoordinatorOperation::Making(worker, resource, call) => {
                let end = decisions::making_end(worker, resource, reply.as_ref().err());
                let old = match reply {
                    Ok(_) => self.made.insert((worker, resource), call),
                    Err(_) => self.made.remove(&(worker, resource)),
                };
                if let Some(old) = old {
                    self.release_call(now, worker, old);
                }
                self.dispatch_input(now, end);
            }
            CoordinatorOperation::Attempt(attempt) => {
                let uses_kept =
                    self.calls.get(&attempt.number).is_some_and(|c| !c.resources().is_empty());
                let end = decisions::attempt_end(reply.as_ref().err(), uses_kept);
                let result = reply.map(|reply| match reply {
                    CallReply::Done(values) => Outputs::from(values),
                    _ => Outputs::new(),
                });
                self.results.insert(attempt.number, result);
                self.dispatch_input(now, DispatchInput::AttemptEnded { attempt, end });
                self.results.remove(&attempt.number);
            }
        }
    }

    fn release_call(&mut self, now: Instant, worker: WorkerId, call: u64) {
        let link = self.workers[worker.0 as usize].link;
        self.session_input(now, CallInput::Release { link, calls: vec![call] });
    }

    fn dispatch_input(&mut self, now: Instant, input: DispatchInput<ServiceError>) {
        self.dispatch.handle(now, input);
        while let Some(output) = self.dispatch.poll_output() {
            match output {
                DispatchOutput::Start { attempt, settled } => self.start(now, attempt, settled),
                DispatchOutput::Cancel { attempt } => {
                    let of = |operation: &CoordinatorOperation| {
                        *operation == CoordinatorOperation::Attempt(attempt)
                    };
                    let op = self.operations.iter().find(|(_, operation)| of(operation));
                    if let Some(op) = op.map(|(&op, _)| op) {
                        self.operations.remove(&op);
                        self.session_input(now, CallInput::Cancelled { op });
                    }
                }
                DispatchOutput::Make { worker, resource } => {
                    let SimulatedWorker { task, link, .. } = &self.workers[worker.0 as usize];
                    let device = DeviceSpec::of_task(task).to_string();
                    let link = *link;
                    let call = self.makers[resource.0 as usize].clone();
                    let order = call.on(&device).ends_with_connection().order(true);
                    let order = order.expect("the call of a per-worker value is valid");
                    let number = self.session.number_call();
                    let operation = CoordinatorOperation::Making(worker, resource, number);
                    self.call(now, operation, link, number, order);
                }
                DispatchOutput::Ended { number, ending } => {
                    let call = self.calls.remove(&number).expect("a call ends once");
                    let cancelled = || Err(ServiceError::Cancelled { doing: call.doing() });
                    let result = match ending {
                        CallEnding::Cancelled => cancelled(),
                        CallEnding::Done | CallEnding::Failed => {
                            self.results.remove(&number).unwrap_or_else(cancelled)
                        }
                        CallEnding::WithoutResource { resource } => {
                            let error = self.dispatch.resource_error(resource).cloned();
                            error.map_or_else(cancelled, Err)
                        }
                    };
                    self.events.push_back(CoordinatorEvent::Ended { number, result });
                }
            }
        }
    }

    fn start(&mut self, now: Instant, attempt: Attempt, settled: u64) {
        let Attempt { number, worker, .. } = attempt;
        let SimulatedWorker { task, link, .. } = &self.workers[worker.0 as usize];
        let made = |resource| {
            let &call = self.made.get(&(worker, resource))?;
            let owner = self.session.incarnation();
            let server = Incarnation(0);
            Some(OutputId { owner, server, call })
        };
        let call = self.calls[&number].on_worker(task, made);
        let digest = self.digests[&number];
        let scheduled = Some(self.opened.effect(number, EffectNumber(settled), digest));
        let order = decisions::attempt_order(&call, scheduled);
        let order = order.expect("the scheduled calls are valid");
        let link = *link;
        let of_client = self.session.number_call();
        self.call(now, CoordinatorOperation::Attempt(attempt), link, of_client, order);
    }
}
