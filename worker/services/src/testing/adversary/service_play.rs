//! Adversary test of a service, its clients and its functions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{
    self, BodyCrc, Call, CancelCall, FetchOutput, Input, InputPart, NamedInput, OutputRef, Release,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Message, limits};
use pushpull_common::tensor::DType;

use super::choices::ServiceChoices;
use super::frames::{framed, value_bytes, value_type};
use crate::device_name::TaskDevice;
use crate::function_table::{FunctionFacts, FunctionTable};
use crate::planted::PlantedServiceBugs;
use crate::service::{
    ExecutionId, Failure, OutputUser, Service, ServiceConfig, ServiceInput, ServiceOutput,
};
use crate::{Signature, Value};

/// The time for which the service remembers a silent client.
const LEASE: Duration = Duration::from_secs(10);

/// The most actions that one input plays.
const ACTIONS_MAX: usize = 300;

/// The client's side of a connection.
#[derive(Clone, Copy, Debug)]
struct ClientLine {
    connection: u64,
    client: Incarnation,
    /// The length of the body that is due.
    body: Option<u64>,
    /// The inputs that are due in parts.
    upload: Option<Upload>,
}

/// Inputs of a call that are sent in parts.
#[derive(Clone, Copy, Debug)]
struct Upload {
    request: RequestId,
    call: u64,
    offset: u64,
    total: u64,
}

/// A service and the state of its clients and functions.
pub(super) struct ServicePlay<'a> {
    choices: ServiceChoices<'a>,
    service: Service,
    now: Instant,
    lines: Vec<ClientLine>,
    next_connection: u64,
    next_request: u64,
    running: Vec<ExecutionId>,
    /// The calls that were executed and may not be again.
    executed: BTreeSet<(Incarnation, u64)>,
    /// The requests that were answered, of open connections.
    answered: BTreeSet<(u64, RequestId)>,
    fetched: BTreeSet<u64>,
    executions: usize,
}

impl<'a> ServicePlay<'a> {
    pub(super) fn new(now: Instant, choices: ServiceChoices<'a>) -> ServicePlay<'a> {
        let task = TaskId::worker(1);
        let config = ServiceConfig {
            incarnation: Incarnation(77),
            lease: LEASE,
            calls_max: 4,
            bytes_max: 4 << 20,
            total_bytes_max: 8 << 20,
            threads: 2,
            asynchronous_max: 2,
            unreturned_max: 2,
            clients_max: 3,
            devices: vec![TaskDevice::new(&task, "CPU", 0)],
            description: Value::from("described"),
            planted: PlantedServiceBugs::default(),
            task,
        };
        let facts = |signature, blocking| FunctionFacts { signature, blocking };
        let typed = Signature::new().input("x", DType::F32, [None]).output("y", DType::F32, [None]);
        let functions: BTreeMap<_, _> =
            [("a", facts(None, false)), ("f", facts(None, true)), ("t", facts(Some(typed), true))]
                .map(|(name, facts)| (name.to_owned(), facts))
                .into();
        ServicePlay {
            choices,
            service: Service::new(config, Arc::new(FunctionTable::new(functions))),
            now,
            lines: Vec::new(),
            next_connection: 1,
            next_request: 1,
            running: Vec::new(),
            executed: BTreeSet::new(),
            answered: BTreeSet::new(),
            fetched: BTreeSet::new(),
            executions: 0,
        }
    }

    /// Plays all choices. Returns how many functions have run.
    pub(super) fn run(mut self) -> usize {
        for _ in 0..ACTIONS_MAX {
            if self.choices.is_empty() {
                break;
            }
            self.act();
        }
        self.end();
        self.executions
    }

    /// Stops the service: every call that was accepted ends, and every client is forgotten.
    fn end(&mut self) {
        self.input(ServiceInput::Drain);
        while !self.lines.is_empty() {
            self.disconnect(0);
        }
        while !self.running.is_empty() {
            self.return_execution();
        }
        assert!(self.service.is_drained(), "a call has not ended");
        self.now += 2 * LEASE;
        self.input(ServiceInput::Tick);
        assert!(self.service.remembers_nobody(), "a silent client is remembered");
    }

    fn act(&mut self) {
        match self.choices.below(24) {
            0 | 1 => self.connect(),
            2 if self.choices.one_in(3) => {
                if let Some(line) = self.line() {
                    self.disconnect(line);
                }
            }
            3 => {
                self.now += self.choices.time(LEASE);
                self.input(ServiceInput::Tick);
            }
            4..8 => self.return_execution(),
            8 => self.fetch_locally(),
            9..13 => self.send_control(),
            13 if self.choices.one_in(32) => self.input(ServiceInput::Drain),
            _ => self.send_call(),
        }
    }

    fn line(&mut self) -> Option<usize> {
        let count = self.lines.len();
        (count > 0).then(|| self.choices.below(count))
    }

    fn connect(&mut self) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let request = self.request();
        let client = Incarnation(1 + self.choices.below(4) as u64);
        self.lines.push(ClientLine { connection, client, body: None, upload: None });
        let body_crc = if self.choices.one_in(2) { BodyCrc::On {} } else { BodyCrc::Off {} };
        self.input(ServiceInput::Connected {
            connection,
            request,
            client,
            body_crc,
            principal: None,
        });
    }

    fn disconnect(&mut self, line: usize) {
        let ClientLine { connection, .. } = self.lines.remove(line);
        self.input(ServiceInput::Disconnected { connection });
    }

    fn request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn return_execution(&mut self) {
        let count = self.running.len();
        if count == 0 {
            return;
        }
        let execution = self.running.swap_remove(self.choices.below(count));
        let value = |elements: u64| Value::zeros::<f32>(&[elements]).unwrap_or_else(|_| "".into());
        let result = match self.choices.below(8) {
            0 => Err(Failure::Cancelled),
            1 => Err(Failure::Panicked { detail: "panic".to_owned() }),
            2 => Err(Failure::Failed { retry: true, detail: "x".repeat(2000) }),
            3 => Ok(vec![("x".repeat(100), value(1))]),
            4 => Ok(vec![("y".to_owned(), value(600_000)), ("z".to_owned(), value(5))]),
            5 => Ok(Vec::new()),
            _ => Ok(vec![("y".to_owned(), value(self.choices.below(9) as u64))]),
        };
        self.input(ServiceInput::Returned { execution, result });
    }

    fn fetch_locally(&mut self) {
        let RequestId(fetch) = self.request();
        let of = self.output_ref();
        let client = Incarnation(1 + self.choices.below(5) as u64);
        let wait = self.choices.time(LEASE);
        let deadline = self.choices.one_in(2).then(|| self.now + wait);
        let execution = ExecutionId(1 + self.choices.below(8) as u64);
        self.input(ServiceInput::LocalFetch {
            fetch,
            execution,
            client,
            user: OutputUser::Anybody,
            of,
            deadline,
        });
    }

    fn output_ref(&mut self) -> OutputRef {
        OutputRef {
            owner: Incarnation(1 + self.choices.below(5) as u64),
            server: Incarnation(self.choices.below(3) as u64),
            call: self.choices.number(),
            output: Text::clipped("y"),
        }
    }

    fn send_control(&mut self) {
        let call = self.choices.number();
        let message: Message = match self.choices.below(8) {
            0 => message::Heartbeat {}.into(),
            1 => message::Describe {}.into(),
            2 => CancelCall { call }.into(),
            3 | 4 => FetchOutput { of: self.output_ref(), principal: Text::default() }.into(),
            5 => {
                let count = self.choices.below(4);
                let calls: Vec<u64> = (0..count).map(|_| self.choices.number()).collect();
                Release { calls: List::new(calls).unwrap_or_default() }.into()
            }
            6 => InputPart { call, offset: self.choices.number() }.into(),
            _ if self.choices.one_in(2) => message::RingPart { pass: 0, offset: call }.into(),
            _ => message::Finish {}.into(),
        };
        let bytes = match message {
            Message::InputPart(_) | Message::RingPart(_) => self.choices.number(),
            _ => 0,
        };
        let request = self.request();
        self.send(request, message, bytes);
    }

    fn send_call(&mut self) {
        let count = if self.choices.one_in(3) { 2 } else { self.choices.below(2) };
        let mut total = 0;
        let inputs: Vec<NamedInput> = (0..count)
            .map(|_| {
                let input = match self.choices.below(8) {
                    0 => Input::Variable { variable: Text::clipped("w") },
                    1 => Input::Output {
                        job: Text::clipped("worker"),
                        task: 1,
                        of: self.output_ref(),
                    },
                    _ => {
                        let is = value_type(&mut self.choices);
                        total += value_bytes(&is).unwrap_or(0);
                        Input::Value { is }
                    }
                };
                let name = self.choices.of(&["x", "x", "b", "c"]);
                NamedInput { name: Text::clipped(name), input }
            })
            .collect();
        let ended = if self.choices.one_in(4) { self.choices.below(3) } else { 0 };
        let ended: Vec<u64> = (0..ended).map(|_| self.choices.number()).collect();
        let call = Call {
            call: self.choices.number(),
            settled: if self.choices.one_in(4) { self.choices.number() } else { 0 },
            ended: List::new(ended).unwrap_or_default(),
            depth: if self.choices.one_in(16) { self.choices.byte() } else { 0 },
            function: Text::clipped(self.choices.of(&["f", "f", "a", "t", "unknown"])),
            device: Text::clipped(self.choices.of(&["", "", "/cpu:0", "/gpu:0", "/job:ps"])),
            any_device: self.choices.one_in(2),
            retain: self.choices.one_in(3),
            scheduled: None,
            inputs: List::new(inputs).unwrap_or_default(),
        };
        let first = total.min(limits::PART_BYTES_MAX);
        let bytes = if self.choices.one_in(16) { self.choices.number() } else { first };
        let request = self.request();
        let number = call.call;
        let upload = Upload { request, call: number, offset: first, total };
        if let Some(line) = self.send(request, call.into(), bytes)
            && bytes == first
            && first < total
        {
            self.lines[line].upload = Some(upload);
        }
    }

    /// Sends a message on a connection, after what is due there. Returns the connection's line.
    fn send(&mut self, request: RequestId, message: Message, bytes: u64) -> Option<usize> {
        let line = self.line()?;
        self.continue_upload(line);
        let deadline_ms = if self.choices.one_in(2) { 0 } else { self.choices.number() as u32 };
        self.deliver(line, request, deadline_ms, message, bytes)
    }

    /// Finishes the body that is due on a line, and sends the next part.
    fn continue_upload(&mut self, line: usize) {
        while let Some(upload) = self.lines[line].upload.take() {
            if upload.offset >= upload.total || self.choices.one_in(8) {
                break;
            }
            let bytes = (upload.total - upload.offset).min(limits::PART_BYTES_MAX);
            let part = InputPart { call: upload.call, offset: upload.offset };
            let next = Upload { offset: upload.offset + bytes, ..upload };
            // Two calls of one number share their parts, so that a part may be refused after its call.
            let is_answered =
                self.answered.contains(&(self.lines[line].connection, upload.request));
            let request = if is_answered { self.request() } else { upload.request };
            if self.deliver(line, request, 0, part.into(), bytes).is_none() {
                return;
            }
            self.lines[line].upload = Some(next);
        }
    }

    /// Passes a message in as it arrives, behind the body before it. Its own body follows later.
    fn deliver(
        &mut self,
        line: usize,
        request: RequestId,
        deadline_ms: u32,
        message: Message,
        bytes: u64,
    ) -> Option<usize> {
        let connection = self.lines[line].connection;
        self.finish_body(line);
        // The service may have closed the connection.
        let line = self.lines.iter().position(|line| line.connection == connection)?;
        let (header, message) = framed(request, deadline_ms, &message, bytes)?;
        self.learn_acknowledged(self.lines[line].client, &message);
        self.lines[line].body = (header.body_bytes > 0).then_some(header.body_bytes);
        self.input(ServiceInput::Message { connection, header: &header, message });
        self.lines.iter().position(|line| line.connection == connection)
    }

    fn finish_body(&mut self, line: usize) {
        let connection = self.lines[line].connection;
        let Some(bytes) = self.lines[line].body.take() else { return };
        if self.choices.one_in(4) {
            self.input(ServiceInput::Progress { connection });
        }
        self.service.with_body(connection, |targets| {
            let Some(targets) = targets else { return };
            let memory: u64 = targets.iter().map(|target| target.len() as u64).sum();
            assert_eq!(memory, bytes, "memory of another length than the body");
            targets.iter_mut().for_each(|target| target.fill(1));
        });
        self.input(ServiceInput::Body { connection });
    }

    /// Takes the calls that a client acknowledges out of those that may not run again.
    fn learn_acknowledged(&mut self, client: Incarnation, message: &Message) {
        let acknowledged: &[u64] = match message {
            Message::Call(call) => {
                let settled = call.settled.min(call.call.saturating_sub(1));
                self.executed.retain(|&(of, number)| of != client || number > settled);
                call.ended.items()
            }
            Message::Release(release) => release.calls.items(),
            _ => return,
        };
        for &number in acknowledged {
            self.executed.remove(&(client, number));
        }
    }

    fn input(&mut self, input: ServiceInput<'_>) {
        self.service.handle(self.now, input);
        while let Some(output) = self.service.poll_output() {
            match output {
                ServiceOutput::Send { connection, request, message, .. } => {
                    self.sent(connection, request, &message);
                }
                ServiceOutput::LocalFetched { fetch, .. } => {
                    assert!(self.fetched.insert(fetch), "a fetch is answered twice");
                }
                ServiceOutput::Execute(order) => {
                    let call = (order.client, order.call);
                    assert!(self.executed.insert(call), "{call:?} is executed twice");
                    self.running.push(order.execution);
                    self.executions += 1;
                }
                ServiceOutput::Cancel { .. } => {}
                ServiceOutput::Close { connection } => {
                    self.lines.retain(|line| line.connection != connection);
                }
            }
        }
        self.service.check_invariants();
        let wake_at = self.service.wake_at();
        assert!(wake_at.is_none_or(|at| at > self.now), "the service asks for the past");
    }

    fn sent(&mut self, connection: u64, request: RequestId, message: &Message) {
        let Some(line) = self.lines.iter().find(|line| line.connection == connection) else {
            panic!("a message to a closed connection: {message:?}");
        };
        if let Message::ServerIs(server) = message
            && !server.known
        {
            self.executed.retain(|&(client, _)| client != line.client);
        }
        let continues = matches!(message, Message::OutputPart(_));
        let first = self.answered.insert((connection, request));
        assert!(first != continues, "{message:?} to request {}", request.0);
    }
}
