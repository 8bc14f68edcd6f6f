//! The session of a client, by messages.

mod breaches;
mod calls;
mod cost;
mod links;

use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{
    BodyCrc, CallEnded, CallInputs, CallOutcome, NamedValue, OutputRef, ServerIs,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Header, Message, Poll, encode, version,
};
use pushpull_net::SendBody;

use super::*;
use crate::value::Value;

/// The lease of the servers here.
const LEASE: Duration = Duration::from_secs(10);

/// The incarnation of the client here.
const OWN: Incarnation = Incarnation(5);

/// The name of the output "out" of a call.
fn output_of(owner: Incarnation, call: u64) -> OutputRef {
    OutputRef { owner, server: Incarnation(0), call, output: Text::clipped("out") }
}

/// A fetch of an output.
fn fetch(of: OutputRef) -> CallCommand {
    CallCommand::Fetch { of, admission: None }
}

/// A session with one link, the time, and what it has sent.
struct World {
    session: CallSession,
    link: LinkId,
    now: Instant,
    next_op: u64,
    connects: Vec<(u64, String)>,
    disconnects: Vec<u64>,
    sent: Vec<(u64, Envelope, Message, Vec<u8>)>,
    replies: Vec<(CallOp, Result<CallReply, ServiceError>)>,
}

fn world() -> World {
    world_of(1 << 20)
}

/// Creates a world whose session takes answers of at most this many bytes.
fn world_of(answer_bytes_max: u64) -> World {
    let mut session = CallSession::new(OWN, TaskId::new("client", 0), answer_bytes_max);
    let link = session.add_link(Instant::now(), "there:1".to_owned(), Some(TaskId::worker(2)));
    World {
        session,
        link,
        now: Instant::now(),
        next_op: 1,
        connects: Vec::new(),
        disconnects: Vec::new(),
        sent: Vec::new(),
        replies: Vec::new(),
    }
}

/// The welcome of a server.
fn server(incarnation: u64, known: bool) -> ServerIs {
    ServerIs {
        version: version::NEWEST,
        job: Text::clipped("worker"),
        task: 2,
        incarnation: Incarnation(incarnation),
        known,
        lease_ms: LEASE.as_millis() as u32,
        calls_max: 2,
        bytes_max: 1 << 20,
        body_crc: BodyCrc::Off {},
        features: Default::default(),
    }
}

fn order(values: &[Value]) -> CallOrder {
    CallOrder {
        function: "f".to_owned(),
        device: String::new(),
        any_device: false,
        depth: 0,
        retain: false,
        scheduled: None,
        ends_with_connection: false,
        inputs: CallInputs::default(),
        values: values.to_vec(),
    }
}

/// The end of a call with these outputs.
fn done(values: &[(&str, &Value)]) -> CallEnded {
    let outputs = values.iter().map(|(name, value)| NamedValue {
        name: Text::clipped(*name),
        is: value.value_type().to_wire(),
    });
    let outputs = pushpull_common::protocol::wire::List::of(outputs).unwrap();
    CallEnded { outcome: CallOutcome::Done { outputs } }
}

impl World {
    fn input(&mut self, input: CallInput<'_>) {
        self.session.handle(self.now, input);
        while let Some(output) = self.session.poll_output() {
            match output {
                CallOutput::Connect { connection, address } => {
                    self.connects.push((connection, address));
                }
                CallOutput::Disconnect { connection } => self.disconnects.push(connection),
                CallOutput::Send { connection, envelope, message, body, .. } => {
                    let body = body.slices().flatten().copied().collect();
                    self.sent.push((connection, envelope, message, body));
                }
                CallOutput::Reply { op, reply } => self.replies.push((op, reply)),
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.input(CallInput::Tick);
    }

    /// Gives a command with a deadline.
    fn command(&mut self, command: CallCommand, within: Option<Duration>) -> CallOp {
        let op = CallOp(self.next_op);
        self.next_op += 1;
        let link = self.link;
        let deadline = within.map(|within| self.now + within);
        self.input(CallInput::Command { op, link, command, deadline });
        op
    }

    /// Gives the command of a call without a deadline.
    fn call(&mut self, order: CallOrder) -> CallOp {
        let number = self.session.number_call();
        self.command(CallCommand::Call { number, order: Box::new(order) }, Some(LEASE))
    }

    /// Accepts the connection that the session has asked for.
    fn accept(&mut self, server: ServerIs) -> u64 {
        let (connection, _) = self.connects.pop().expect("the session connects");
        self.input(CallInput::Connected { connection });
        let (_, envelope, hello, _) = self.sent.remove(0);
        assert!(matches!(hello, Message::Hello(_)), "{hello:?}");
        self.receive(connection, envelope.request, server, &[]);
        connection
    }

    /// Passes a message of the server in.
    fn receive(
        &mut self,
        connection: u64,
        request: RequestId,
        message: impl Into<Message>,
        body: &[u8],
    ) {
        let message = message.into();
        let envelope = Envelope { request, ..Envelope::default() };
        let mut frame = Vec::new();
        encode(&mut frame, &envelope, &message, BodyStamp::plain(body.len() as u64));
        let mut reader = FrameReader::new();
        reader.open();
        let (header, message): (Header, Message) = match reader.poll(&mut slice_source(&frame)) {
            Ok(Poll::Frame(header, message)) => (header, message),
            other => panic!("{other:?}"),
        };
        self.input(CallInput::Message { connection, header: &header, message });
        if !body.is_empty() {
            self.session.with_body(connection, |targets| {
                if let Some([target]) = targets {
                    target.copy_from_slice(body);
                }
            });
            self.input(CallInput::Body { connection });
        }
    }

    fn breaks(&mut self, connection: u64) {
        self.input(CallInput::Disconnected { connection, reason: "reset".to_owned() });
    }

    /// Takes the calls that were sent: their requests and messages.
    fn sent_calls(&mut self) -> Vec<(RequestId, pushpull_common::protocol::message::Call)> {
        let taken = std::mem::take(&mut self.sent);
        let call = |(_, envelope, message, _): (u64, Envelope, Message, Vec<u8>)| match message {
            Message::Call(call) => Some((envelope.request, call)),
            _ => None,
        };
        taken.into_iter().filter_map(call).collect()
    }

    /// Takes the only reply.
    fn reply(&mut self) -> (CallOp, Result<CallReply, ServiceError>) {
        assert_eq!(self.replies.len(), 1, "{:?}", self.replies);
        self.replies.remove(0)
    }

    /// Takes the only reply, an error.
    fn error(&mut self) -> String {
        self.reply().1.expect_err("an error").to_string()
    }
}
