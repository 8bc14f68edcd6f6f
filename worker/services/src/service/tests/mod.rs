//! The service of a task, by messages.

mod calls;
mod fairness;
mod outputs;
mod principals;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{BodyCrc, Call, CallInputs, Input, NamedInput, Refused};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Header, Message, Poll, Refusal, encode,
};
use pushpull_common::tensor::DType;
use pushpull_net::SendBody;

use super::*;
use crate::device_name::TaskDevice;
use crate::function_table::FunctionFacts;
use crate::planted::PlantedServiceBugs;
use crate::signature::Signature;
use crate::value::{Value, beyond_memory};

/// The time for which these services remember a silent client.
const LEASE: Duration = Duration::from_secs(10);

/// A service, the time, and what it has sent.
struct World {
    service: Service,
    now: Instant,
    next_connection: u64,
    orders: Vec<ExecutionOrder>,
    cancelled: Vec<ExecutionId>,
    closed: Vec<u64>,
    sent: Vec<(u64, RequestId, Message, Vec<u8>)>,
    local: Vec<(u64, Result<Value, Refusal>)>,
}

/// A service with the functions `f`, which blocks, `async`, and `typed`, which takes `x` of two f32
/// and returns an f32.
fn world() -> World {
    world_of(|_| {})
}

/// Returns the configuration of these services.
pub(super) fn config() -> ServiceConfig {
    let task = TaskId::worker(1);
    ServiceConfig {
        incarnation: Incarnation(77),
        lease: LEASE,
        calls_max: 4,
        bytes_max: 4 << 20,
        total_bytes_max: 8 << 20,
        threads: 1,
        asynchronous_max: 2,
        unreturned_max: 2,
        clients_max: 3,
        devices: vec![TaskDevice::new(&task, "CPU", 0)],
        description: Value::from("described"),
        planted: PlantedServiceBugs::default(),
        task,
    }
}

fn world_of(change: impl FnOnce(&mut ServiceConfig)) -> World {
    let mut config = config();
    change(&mut config);
    let facts = |blocking| FunctionFacts { signature: None, blocking };
    let typed = Signature::new().input("x", DType::F32, [Some(2)]).output("value", DType::F32, []);
    let typed = FunctionFacts { signature: Some(typed), blocking: true };
    let functions: BTreeMap<_, _> = [("async", facts(false)), ("f", facts(true)), ("typed", typed)]
        .map(|(name, facts)| (name.to_owned(), facts))
        .into();
    World {
        service: Service::new(config, Arc::new(FunctionTable::new(functions))),
        now: Instant::now(),
        next_connection: 1,
        orders: Vec::new(),
        cancelled: Vec::new(),
        closed: Vec::new(),
        sent: Vec::new(),
        local: Vec::new(),
    }
}

/// A call of a function without inputs.
fn call(number: u64, function: &str) -> Call {
    Call {
        call: number,
        settled: 0,
        ended: List::default(),
        depth: 0,
        function: Text::clipped(function),
        device: Text::clipped(""),
        any_device: false,
        retain: false,
        scheduled: None,
        inputs: CallInputs::default(),
    }
}

/// A call with values under the names `x`, `y`, ...
fn call_with(number: u64, function: &str, values: &[&Value]) -> Call {
    let names = ["x", "y", "z"].into_iter();
    let inputs = names.zip(values).map(|(name, value)| NamedInput {
        name: Text::clipped(name),
        input: Input::Value { is: value.value_type().to_wire() },
    });
    Call { inputs: CallInputs::of(inputs).unwrap(), ..call(number, function) }
}

impl World {
    fn input(&mut self, input: ServiceInput<'_>) {
        self.service.handle(self.now, input);
        while let Some(output) = self.service.poll_output() {
            match output {
                ServiceOutput::Send { connection, request, message, body, .. } => {
                    let body = body.slices().flatten().copied().collect();
                    self.sent.push((connection, request, message, body));
                }
                ServiceOutput::Execute(order) => self.orders.push(*order),
                ServiceOutput::Cancel { execution } => self.cancelled.push(execution),
                ServiceOutput::Close { connection } => self.closed.push(connection),
                ServiceOutput::LocalFetched { fetch, result } => self.local.push((fetch, result)),
            }
        }
        self.service.check_invariants();
    }

    /// Connects a client and returns the connection, and whether the service knows the client.
    fn connect(&mut self, client: u64) -> (u64, bool) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let request = RequestId(9);
        let client = Incarnation(client);
        self.input(ServiceInput::Connected {
            connection,
            request,
            client,
            body_crc: BodyCrc::Off {},
            principal: None,
        });
        match self.sent.pop() {
            Some((_, _, Message::ServerIs(server), _)) => (connection, server.known),
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, connection: u64, request: u64, message: impl Into<Message>) {
        self.send_within(connection, request, message, 0, &[]);
    }

    /// Sends a message with a body and a deadline in milliseconds.
    fn send_within(
        &mut self,
        connection: u64,
        request: u64,
        message: impl Into<Message>,
        deadline_ms: u32,
        body: &[u8],
    ) {
        let (header, message) = framed(request, &message.into(), deadline_ms, body.len() as u64);
        self.input(ServiceInput::Message { connection, header: &header, message });
        if !body.is_empty() {
            self.service.with_body(connection, |targets| {
                if let Some([target]) = targets {
                    target.copy_from_slice(body);
                }
            });
            self.input(ServiceInput::Body { connection });
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.input(ServiceInput::Tick);
    }

    fn returns(&mut self, execution: ExecutionId, value: impl Into<Value>) {
        let result = Ok(vec![("value".to_owned(), value.into())]);
        self.input(ServiceInput::Returned { execution, result });
    }

    /// Takes the next order.
    fn order(&mut self) -> ExecutionOrder {
        assert!(!self.orders.is_empty(), "nothing is executed");
        self.orders.remove(0)
    }

    /// Takes the only message, and returns its request with it.
    fn answer(&mut self) -> (u64, Message) {
        assert_eq!(self.sent.len(), 1, "{:?}", self.sent);
        let (_, request, message, _) = self.sent.remove(0);
        (request.0, message)
    }

    /// Takes the only message, a refusal.
    fn refusal(&mut self) -> Refusal {
        match self.answer() {
            (_, Message::Refused(Refused { refusal })) => refusal,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns a message as it arrives, with its header.
fn framed(request: u64, message: &Message, deadline_ms: u32, bytes: u64) -> (Header, Message) {
    let envelope = Envelope { request: RequestId(request), deadline_ms, ..Envelope::default() };
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, message, BodyStamp::plain(bytes));
    let mut reader = FrameReader::new();
    reader.open();
    match reader.poll(&mut slice_source(&frame)) {
        Ok(Poll::Frame(header, message)) => (header, message),
        other => panic!("{other:?}"),
    }
}
