//! A public endpoint of the service of a function server, for the simulator of whole clusters.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::BodyCrc;
use pushpull_common::protocol::{
    EffectRef, Envelope, FrameEvent, FrameProgress, FrameReader, FrameSink, Message, Outcome, Poll,
};
use pushpull_worker::{Error, Push};

use super::frames::frame_of;
use crate::description::Description;
use crate::device_name::TaskDevice;
use crate::function_table::{FunctionFacts, FunctionTable};
use crate::planted::{PlantedServiceBugs, ServiceBug};
use crate::service::{
    ExecutionId, ExecutionOrder, Failure, InputSource, OutputUser, Service, ServiceConfig,
    ServiceInput, ServiceOutput,
};
use crate::trainer::{counted, function_error};
use crate::{FunctionError, Outputs, Value};

/// The service of a worker task, with its connections.
///
/// It does for the service what `services/runtime/server_core.rs` does, without a socket, a thread
/// or a clock. Functions are carried out by the caller.
#[derive(Debug)]
pub struct FunctionServerEndpoint {
    service: Service,
    task: TaskId,
    connections: BTreeMap<u64, ServerConnection>,
    /// The orders whose inputs are fetched, by the numbers of their fetches.
    resolving: BTreeMap<u64, (ExecutionOrder, usize)>,
    next_fetch: u64,
    events: VecDeque<FunctionServerEvent>,
}

/// The settings of a simulated function server.
#[derive(Clone, Debug)]
pub struct FunctionServerSettings {
    /// The worker task of the server.
    pub task: u32,
    /// The incarnation of the server, chosen at each start.
    pub incarnation: u64,
    /// The time for which a silent client is remembered.
    pub lease: Duration,
    /// The most functions that run at once.
    pub threads: usize,
    /// The names of the functions.
    pub functions: Vec<String>,
    /// The planted bug, if any.
    pub planted: PlantedServiceBugs,
}

/// An execution of a function, which the caller carries out.
#[derive(Clone, Debug)]
pub struct SimulatedExecution {
    /// The number of the execution, for [`FunctionServerEndpoint::returned`].
    pub execution: u64,
    /// The name of the function.
    pub function: String,
    /// The scheduled call of a coordinator of which this is an attempt.
    pub scheduled: Option<EffectRef>,
    /// The inputs, by their names.
    pub inputs: Vec<(String, Value)>,
}

/// An action that the service requests.
#[derive(Debug)]
pub enum FunctionServerEvent {
    /// Send a frame on a connection.
    Send {
        /// The number of the connection.
        connection: u64,
        /// The bytes of the frame.
        frame: Vec<u8>,
    },
    /// Close a connection after all earlier frames are sent.
    Close {
        /// The number of the connection.
        connection: u64,
    },
    /// Run a function, and report its end.
    Execute(SimulatedExecution),
    /// Tell a function that its caller has stopped waiting.
    Cancel {
        /// The execution to cancel.
        execution: u64,
    },
}

/// The failure of a simulated function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionFailure {
    /// Whether another execution may succeed.
    pub retry: bool,
    /// The text of the failure.
    pub detail: String,
}

/// Returns the result of a function after its scheduled push, from the outcome or the error of its
/// session.
///
/// # Errors
/// The failure by which the function ends.
pub fn scheduled_push_end(
    outcome: Result<Outcome, Error>,
    planted: PlantedServiceBugs,
) -> Result<(), FunctionFailure> {
    let push = outcome.map_err(function_error).map(Push::of);
    if planted.has(ServiceBug::EndWithoutEffect) {
        return push.map(|_| ()).map_err(FunctionFailure::from);
    }
    let counted = push.and_then(|push| counted(push.expect("a held push has no outcome")));
    counted.map(|_| ()).map_err(FunctionFailure::from)
}

impl From<FunctionError> for FunctionFailure {
    fn from(error: FunctionError) -> FunctionFailure {
        let (detail, retry) = error.into_parts();
        FunctionFailure { retry, detail }
    }
}

impl From<Error> for FunctionFailure {
    fn from(error: Error) -> FunctionFailure {
        function_error(error).into()
    }
}

/// The reading side of a connection.
#[derive(Debug, Default)]
struct ServerConnection {
    reader: FrameReader,
    /// Whether the client has said hello.
    greeted: bool,
    closing: bool,
}

/// Passes the frames of a connection to the service, at a fixed time.
struct ServiceSink<'a> {
    endpoint: &'a mut FunctionServerEndpoint,
    now: Instant,
    connection: u64,
}

impl FrameSink for ServiceSink<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        let connection = self.connection;
        let input = match event {
            FrameEvent::Message(header, message) => {
                ServiceInput::Message { connection, header, message }
            }
            FrameEvent::Body => ServiceInput::Body { connection },
            FrameEvent::Progress => ServiceInput::Progress { connection },
        };
        self.endpoint.handle(self.now, input);
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.endpoint.service.with_body(self.connection, receive)
    }
}

impl FunctionServerEndpoint {
    /// Creates the service of a process.
    pub fn new(settings: &FunctionServerSettings) -> FunctionServerEndpoint {
        let task = TaskId::worker(settings.task);
        let facts = || FunctionFacts { signature: None, blocking: true };
        let functions = settings.functions.iter().map(|name| (name.clone(), facts())).collect();
        let functions = Arc::new(FunctionTable::new(functions));
        let devices = vec![TaskDevice::new(&task, "CPU", 0)];
        let description = Description::new(ClusterSpec::default(), &functions, &devices);
        let config = ServiceConfig {
            task: task.clone(),
            incarnation: Incarnation(settings.incarnation),
            lease: settings.lease,
            calls_max: 4,
            bytes_max: 1 << 20,
            total_bytes_max: 8 << 20,
            threads: settings.threads,
            asynchronous_max: 1,
            unreturned_max: 1000,
            clients_max: 64,
            devices,
            description: Value::bytes(&description.encode()).expect("a short description"),
            planted: settings.planted,
        };
        FunctionServerEndpoint {
            service: Service::new(config, functions),
            task,
            connections: BTreeMap::new(),
            resolving: BTreeMap::new(),
            next_fetch: 1,
            events: VecDeque::new(),
        }
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<FunctionServerEvent> {
        self.events.pop_front()
    }

    /// Returns when the next [`FunctionServerEndpoint::tick`] is due; `None` while nothing depends
    /// on the time.
    pub fn wake_at(&self) -> Option<Instant> {
        self.service.wake_at()
    }

    /// Reports that time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.handle(now, ServiceInput::Tick);
    }

    /// Yields the incarnations of the clients that are remembered.
    pub fn remembered(&self) -> impl Iterator<Item = u64> {
        self.service.remembered().map(|client| client.0)
    }

    /// Returns the number of a client's remembered calls, with their outputs.
    pub fn calls_of(&self, client: u64) -> usize {
        self.service.calls_of(Incarnation(client))
    }

    /// Returns whether no client is remembered, so that nothing of any client is retained.
    pub fn remembers_nobody(&self) -> bool {
        self.service.remembers_nobody()
    }

    /// Receives bytes over a connection; the first bytes of a connection open it. Returns false if
    /// they violate the protocol: the caller must cut the connection.
    pub fn receive(&mut self, now: Instant, connection: u64, bytes: &[u8]) -> bool {
        let place = self.connections.entry(connection).or_default();
        let mut reader = std::mem::take(&mut place.reader);
        let mut greeted = place.greeted;
        let mut source = slice_source(bytes);
        let is_closing = |endpoint: &FunctionServerEndpoint| {
            endpoint.connections.get(&connection).is_none_or(|of| of.closing)
        };
        let sound = loop {
            // A connection that is being closed is not read.
            if is_closing(self) {
                break true;
            }
            if greeted {
                let mut sink = ServiceSink { endpoint: self, now, connection };
                match reader.receive(&mut source, &mut sink) {
                    Err(_) => break false,
                    Ok(FrameProgress::Blocked | FrameProgress::Closed) => break true,
                    Ok(FrameProgress::Whole) => continue,
                }
            }
            match reader.poll(&mut source) {
                Err(_) => break false,
                Ok(Poll::Pending | Poll::Closed) => break true,
                Ok(Poll::Frame(header, Message::Hello(hello))) => {
                    greeted = true;
                    reader.open();
                    let request = header.request;
                    let client = hello.incarnation;
                    let on = connection.is_multiple_of(2);
                    let body_crc = if on { BodyCrc::On {} } else { BodyCrc::Off {} };
                    let input = ServiceInput::Connected {
                        connection,
                        request,
                        client,
                        body_crc,
                        principal: None,
                    };
                    self.handle(now, input);
                }
                Ok(Poll::Frame(..)) => break false,
            }
        };
        if let Some(place) = self.connections.get_mut(&connection) {
            place.reader = reader;
            place.greeted = greeted;
        }
        sound
    }

    /// Ends a connection that is gone.
    pub fn disconnected(&mut self, now: Instant, connection: u64) {
        if self.connections.remove(&connection).is_some_and(|of| of.greeted) {
            self.handle(now, ServiceInput::Disconnected { connection });
        }
    }

    /// Reports that a function has returned a value under [`Outputs::NAME`], or has failed.
    pub fn returned(
        &mut self,
        now: Instant,
        execution: u64,
        result: Result<Value, FunctionFailure>,
    ) {
        let result = match result {
            Ok(value) => Ok(vec![(Outputs::NAME.to_owned(), value)]),
            Err(FunctionFailure { retry, detail }) => Err(Failure::Failed { retry, detail }),
        };
        let execution = ExecutionId(execution);
        self.handle(now, ServiceInput::Returned { execution, result });
    }

    fn handle(&mut self, now: Instant, input: ServiceInput<'_>) {
        self.service.handle(now, input);
        self.service.check_invariants();
        while let Some(output) = self.service.poll_output() {
            match output {
                ServiceOutput::Send { connection, request, message, body, crc } => {
                    let envelope = Envelope { request, ..Envelope::default() };
                    let frame = frame_of(&envelope, &message, &body, crc);
                    self.events.push_back(FunctionServerEvent::Send { connection, frame });
                }
                ServiceOutput::Close { connection } => {
                    if let Some(of) = self.connections.get_mut(&connection) {
                        of.closing = true;
                    }
                    self.events.push_back(FunctionServerEvent::Close { connection });
                }
                ServiceOutput::Cancel { execution: ExecutionId(execution) } => {
                    self.events.push_back(FunctionServerEvent::Cancel { execution });
                }
                ServiceOutput::Execute(order) => self.resolve(now, *order),
                ServiceOutput::LocalFetched { fetch, result } => {
                    let Some((mut order, index)) = self.resolving.remove(&fetch) else { continue };
                    match result {
                        Ok(value) => {
                            order.inputs[index].1 = InputSource::Value(value);
                            self.resolve(now, order);
                        }
                        Err(refusal) => {
                            let execution = order.execution;
                            let result = Failure::Refused(refusal);
                            let result = Err(result);
                            self.handle(now, ServiceInput::Returned { execution, result });
                        }
                    }
                }
            }
        }
    }

    /// Fetches the next input of an execution, or begins it once it has all.
    fn resolve(&mut self, now: Instant, order: ExecutionOrder) {
        let missing = order.inputs.iter().position(|(_, of)| !matches!(of, InputSource::Value(_)));
        let Some(index) = missing else {
            let value = |(name, source)| match source {
                InputSource::Value(value) => (name, value),
                other => unreachable!("{other:?} is resolved"),
            };
            return self.events.push_back(FunctionServerEvent::Execute(SimulatedExecution {
                execution: order.execution.0,
                function: order.function,
                scheduled: order.scheduled,
                inputs: order.inputs.into_iter().map(value).collect(),
            }));
        };
        let InputSource::Output { task, of } = order.inputs[index].1.clone() else {
            unreachable!("the simulated calls have no variables as inputs")
        };
        assert_eq!(task, self.task, "a per-worker value is on its worker");
        let ExecutionOrder { execution, client, deadline, .. } = order;
        let fetch = self.next_fetch;
        self.next_fetch += 1;
        self.resolving.insert(fetch, (order, index));
        let fetch = ServiceInput::LocalFetch {
            fetch,
            execution,
            client,
            user: OutputUser::Anybody,
            of,
            deadline,
        };
        self.handle(now, fetch);
    }
}
