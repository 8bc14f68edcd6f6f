//! Adversary test of a client's call session, its callers and its servers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{
    self, BodyCrc, CallEnded, CallInputs, CallOutcome, Described, Fetched, NamedValue, OutputPart,
    OutputRef, Refused, ServerIs,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Message, Refusal, limits, version};

use super::choices::ServiceChoices;
use super::frames::{framed, value_bytes, value_type};
use crate::Value;
use crate::call_session::{
    CallCommand, CallInput, CallOp, CallOrder, CallOutput, CallSession, LinkId,
};

/// The time for which an honest server remembers a silent client.
const LEASE: Duration = Duration::from_secs(10);

/// The most actions that one input plays.
const ACTIONS_MAX: usize = 300;

/// The servers' side of a connection.
#[derive(Debug)]
struct ServerLine {
    connection: u64,
    /// Whether the connection stands.
    is_open: bool,
    /// The incarnation that the server has named, and whether it knows the client.
    welcome: Option<(u64, bool)>,
    /// The requests that the client has sent, and whether each is a call.
    requests: Vec<(RequestId, bool)>,
    /// The length of the body that is due.
    body: Option<u64>,
    /// The request whose answer goes on in parts, and the bytes before the next one and in all.
    parts: Option<(RequestId, u64, u64)>,
}

/// The state of a command, as its caller knows it.
#[derive(Clone, Copy, Debug)]
struct KnownCommand {
    has_deadline: bool,
    is_replied: bool,
}

/// A session and the state of its callers and servers.
pub(super) struct CallSessionPlay<'a> {
    choices: ServiceChoices<'a>,
    session: CallSession,
    now: Instant,
    links: [LinkId; 2],
    lines: Vec<ServerLine>,
    callers: BTreeMap<CallOp, KnownCommand>,
    next_op: u64,
    /// The server to which each call was sent, by its number.
    sent_to: BTreeMap<u64, u64>,
    succeeded: usize,
}

impl<'a> CallSessionPlay<'a> {
    pub(super) fn new(now: Instant, choices: ServiceChoices<'a>) -> CallSessionPlay<'a> {
        let mut session = CallSession::new(Incarnation(5), TaskId::new("client", 0), 4 << 20);
        let known = session.add_link(now, "one:1".to_owned(), Some(TaskId::worker(2)));
        let links = [known, session.add_link(now, "other:1".to_owned(), None)];
        CallSessionPlay {
            choices,
            session,
            now,
            links,
            lines: Vec::new(),
            callers: BTreeMap::new(),
            next_op: 1,
            sent_to: BTreeMap::new(),
            succeeded: 0,
        }
    }

    /// Plays all choices. Returns how many commands have succeeded.
    pub(super) fn run(mut self) -> usize {
        for _ in 0..ACTIONS_MAX {
            if self.choices.is_empty() {
                break;
            }
            self.act();
        }
        // After its deadline every caller has a reply, even from hostile servers.
        self.now += 10 * LEASE;
        self.input(CallInput::Tick);
        for (op, caller) in &self.callers {
            assert!(caller.is_replied || !caller.has_deadline, "{op:?} has no reply");
        }
        self.succeeded
    }

    fn act(&mut self) {
        match self.choices.below(24) {
            0..5 => self.command(),
            5 => self.cancel(),
            6 => {
                let calls = (0..self.choices.below(4)).map(|_| self.choices.number());
                let calls = calls.collect();
                let link = self.choices.of(&self.links);
                self.input(CallInput::Release { link, calls });
            }
            7 => {
                self.now += self.choices.time(LEASE);
                self.input(CallInput::Tick);
            }
            8 if self.choices.one_in(3) => {
                if let Some(line) = self.line() {
                    self.disconnect(line);
                }
            }
            9..13 => self.welcome(),
            13 => self.send_anything(),
            _ => self.answer(),
        }
    }

    fn line(&mut self) -> Option<usize> {
        let count = self.lines.len();
        (count > 0).then(|| self.choices.below(count))
    }

    fn command(&mut self) {
        let op = CallOp(self.next_op);
        self.next_op += 1;
        let command = match self.choices.below(8) {
            0 => CallCommand::Describe,
            1 => {
                let call = self.choices.number();
                let output = Text::clipped("y");
                let owner = Incarnation(5);
                let server = Incarnation(0);
                let of = OutputRef { owner, server, call, output };
                CallCommand::Fetch { of, admission: None }
            }
            _ => {
                let elements = if self.choices.one_in(8) { 300_000 } else { 3 };
                let value = Value::zeros::<f32>(&[elements]).unwrap_or_else(|_| "".into());
                let number = self.session.number_call();
                let order = Box::new(CallOrder {
                    function: "f".to_owned(),
                    device: String::new(),
                    any_device: false,
                    depth: 0,
                    retain: self.choices.one_in(3),
                    scheduled: None,
                    ends_with_connection: self.choices.one_in(4),
                    inputs: CallInputs::default(),
                    values: vec![value],
                });
                CallCommand::Call { number, order }
            }
        };
        let has_deadline = !self.choices.one_in(4);
        let wait = self.choices.time(LEASE);
        let deadline = has_deadline.then(|| self.now + wait);
        self.callers.insert(op, KnownCommand { has_deadline, is_replied: false });
        let link = self.choices.of(&self.links);
        self.input(CallInput::Command { op, link, command, deadline });
    }

    fn cancel(&mut self) {
        let op = CallOp(1 + self.choices.below(self.next_op.min(200) as usize) as u64);
        // A caller with a reply has nothing to cancel.
        if self.callers.get(&op).is_some_and(|caller| !caller.is_replied) {
            self.callers.remove(&op);
            self.input(CallInput::Cancelled { op });
        }
    }

    fn disconnect(&mut self, line: usize) {
        let connection = self.lines.remove(line).connection;
        self.input(CallInput::Disconnected { connection, reason: "reset".to_owned() });
    }

    /// Accepts a connection and, mostly, the client.
    fn welcome(&mut self) {
        let Some(line) = self.line() else { return };
        let connection = self.lines[line].connection;
        if !self.lines[line].is_open {
            self.lines[line].is_open = true;
            self.input(CallInput::Connected { connection });
        }
        let is_honest = !self.choices.one_in(8);
        let server = ServerIs {
            version: version::NEWEST,
            job: Text::clipped("worker"),
            task: if is_honest { 2 } else { self.choices.number() as u32 },
            incarnation: Incarnation(1 + u64::from(self.choices.one_in(6))),
            known: !self.choices.one_in(4),
            lease_ms: if is_honest {
                LEASE.as_millis() as u32
            } else {
                self.choices.number() as u32
            },
            calls_max: if is_honest { 3 } else { self.choices.number() as u32 },
            bytes_max: self.choices.number(),
            body_crc: if self.choices.one_in(2) { BodyCrc::On {} } else { BodyCrc::Off {} },
            features: Default::default(),
        };
        if let Some(at) = self.lines.iter_mut().find(|line| line.connection == connection) {
            // A second welcome is a breach, and nothing is sent after it.
            at.welcome.get_or_insert((server.incarnation.0, server.known));
        }
        self.deliver(connection, RequestId(u64::MAX), server.into(), 0);
    }

    /// Answers a request, mostly as a server would.
    fn answer(&mut self) {
        let Some(line) = self.line() else { return };
        let at = &mut self.lines[line];
        let connection = at.connection;
        if let Some((request, offset, total)) = at.parts.take() {
            let bytes = (total - offset).min(limits::PART_BYTES_MAX);
            let next = offset + bytes;
            at.parts = (next < total).then_some((request, next, total));
            return self.deliver(connection, request, OutputPart { offset }.into(), bytes);
        }
        let count = at.requests.len();
        if count == 0 {
            return;
        }
        let (request, is_call) = at.requests.swap_remove(self.choices.below(count));
        let outputs: Vec<NamedValue> = (0..self.choices.below(3))
            .map(|_| NamedValue { name: Text::clipped("y"), is: value_type(&mut self.choices) })
            .collect();
        let total: u64 = outputs.iter().filter_map(|output| value_bytes(&output.is)).sum();
        let first = total.min(limits::PART_BYTES_MAX);
        let (message, bytes): (Message, u64) = match self.choices.below(8) {
            0 => (Refused { refusal: Refusal::Stopping {} }.into(), 0),
            1 if is_call => {
                let detail = Detail::clipped("no");
                (CallEnded { outcome: CallOutcome::Failed { retry: true, detail } }.into(), 0)
            }
            _ if is_call => {
                let outputs = List::new(outputs).unwrap_or_default();
                (CallEnded { outcome: CallOutcome::Done { outputs } }.into(), first)
            }
            2..5 => {
                let is = value_type(&mut self.choices);
                let bytes = value_bytes(&is).unwrap_or(0).min(limits::PART_BYTES_MAX);
                (Fetched { is }.into(), bytes)
            }
            _ => {
                let bytes = self.choices.below(20) as u64;
                (Described { bytes }.into(), bytes.next_multiple_of(8))
            }
        };
        if matches!(message, Message::CallEnded(_)) && bytes < total && bytes > 0 {
            self.lines[line].parts = Some((request, bytes, total));
        }
        let bytes = if self.choices.one_in(16) { self.choices.number() } else { bytes };
        self.deliver(connection, request, message, bytes);
    }

    /// Sends an arbitrary message, which may be invalid in this state.
    fn send_anything(&mut self) {
        let Some(line) = self.line() else { return };
        let connection = self.lines[line].connection;
        let request = RequestId(self.choices.number());
        let message: Message = match self.choices.below(10) {
            0 => message::Goodbye {}.into(),
            1 => message::HeartbeatAnswer {}.into(),
            2 => message::Released {}.into(),
            3 => OutputPart { offset: self.choices.number() }.into(),
            4 => Described { bytes: self.choices.number() }.into(),
            5 => Fetched { is: value_type(&mut self.choices) }.into(),
            6 => CallEnded { outcome: CallOutcome::Cancelled {} }.into(),
            7 => {
                let deadline =
                    Refusal::Deadline { waited_ms: u64::MAX, awaited: Detail::clipped("") };
                Refused { refusal: deadline }.into()
            }
            8 => message::RingPart { pass: 0, offset: self.choices.number() }.into(),
            _ => message::Heartbeat {}.into(),
        };
        let bytes = if self.choices.one_in(2) { 0 } else { self.choices.number() };
        self.deliver(connection, request, message, bytes);
    }

    /// Passes a message in as it arrives, behind the body before it. Its own body follows later.
    fn deliver(&mut self, connection: u64, request: RequestId, message: Message, bytes: u64) {
        self.finish_body(connection);
        let at = self.lines.iter_mut().find(|line| line.connection == connection && line.is_open);
        let Some(at) = at else { return };
        let Some((header, message)) = framed(request, 0, &message, bytes) else { return };
        at.body = (header.body_bytes > 0).then_some(header.body_bytes);
        self.input(CallInput::Message { connection, header: &header, message });
        if self.choices.one_in(2) {
            self.finish_body(connection);
        }
    }

    fn finish_body(&mut self, connection: u64) {
        let at = self.lines.iter_mut().find(|line| line.connection == connection);
        let Some(bytes) = at.and_then(|line| line.body.take()) else { return };
        if self.choices.one_in(4) {
            self.input(CallInput::Progress { connection });
        }
        self.session.with_body(connection, |targets| {
            let Some(targets) = targets else { return };
            let memory: u64 = targets.iter().map(|target| target.len() as u64).sum();
            assert_eq!(memory, bytes, "memory of another length than the body");
            targets.iter_mut().for_each(|target| target.fill(1));
        });
        self.input(CallInput::Body { connection });
    }

    fn input(&mut self, input: CallInput<'_>) {
        self.session.handle(self.now, input);
        while let Some(output) = self.session.poll_output() {
            match output {
                CallOutput::Connect { connection, .. } => self.lines.push(ServerLine {
                    connection,
                    is_open: false,
                    welcome: None,
                    requests: Vec::new(),
                    body: None,
                    parts: None,
                }),
                CallOutput::Disconnect { connection } => {
                    self.lines.retain(|line| line.connection != connection);
                }
                CallOutput::Send { connection, envelope, message, .. } => {
                    self.sent(connection, envelope.request, &message);
                }
                CallOutput::Reply { op, reply } => {
                    let Some(caller) = self.callers.get_mut(&op) else {
                        panic!("a reply to {op:?}, which was cancelled");
                    };
                    assert!(!caller.is_replied, "two replies to {op:?}");
                    caller.is_replied = true;
                    self.succeeded += usize::from(reply.is_ok());
                }
            }
        }
        let wake_at = self.session.wake_at();
        assert!(wake_at.is_none_or(|at| at > self.now), "the session asks for the past");
    }

    fn sent(&mut self, connection: u64, request: RequestId, message: &Message) {
        let Some(line) = self.lines.iter_mut().find(|line| line.connection == connection) else {
            panic!("a message on a closed connection: {message:?}");
        };
        assert!(line.is_open, "a message before the connection stands: {message:?}");
        match message {
            Message::Call(call) => {
                let (server, known) = line.welcome.expect("a call follows a welcome");
                let before = self.sent_to.insert(call.call, server);
                let may_repeat = before.is_none_or(|before| before == server && known);
                assert!(may_repeat, "call {} is sent to {before:?} and to {server}", call.call);
                line.requests.push((request, true));
            }
            Message::Describe(_) | Message::FetchOutput(_) => line.requests.push((request, false)),
            _ => {}
        }
    }
}
