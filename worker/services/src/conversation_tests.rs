//! Sessions and services together, over connections that break and with servers that restart.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{BodyCrc, CallInputs, Input, NamedInput};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Header, Message, Poll, encode};
use pushpull_net::SendBody;
use pushpull_worker::simulation::SeededRandom;

use super::call_session::{
    CallCommand, CallInput, CallOp, CallOrder, CallOutput, CallReply, CallSession, LinkId,
};
use super::device_name::TaskDevice;
use super::error::ServiceError;
use super::function_table::{FunctionFacts, FunctionTable};
use super::service::{
    ExecutionOrder, InputSource, Service, ServiceConfig, ServiceInput, ServiceOutput,
};
use super::value::Value;
use super::value_body::ValueBody;
use crate::planted::PlantedServiceBugs;

const SERVERS: usize = 2;
const CLIENTS: usize = 2;
const LEASE: Duration = Duration::from_secs(2);

/// A frame in transit: a message with its envelope and its body.
type Frame = (Envelope, Message, Vec<u8>);

/// A connection of a client to a server.
#[derive(Default)]
struct Connection {
    client: usize,
    server: usize,
    /// The client's number of the connection.
    number: u64,
    to_server: VecDeque<Frame>,
    to_client: VecDeque<Frame>,
    accepted: bool,
}

struct World {
    random: SeededRandom,
    now: Instant,
    sessions: Vec<CallSession>,
    services: Vec<Service>,
    incarnations: u64,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    /// The executions that run, with their servers.
    executing: Vec<(usize, ExecutionOrder)>,
    /// The number of executions of each call, by client and call number.
    executed: HashMap<(u64, u64), u32>,
    next_op: u64,
    /// The calls of each operation: the client and the number.
    asked: HashMap<(usize, CallOp), u64>,
    replies: HashMap<(usize, CallOp), Result<CallReply, ServiceError>>,
}

fn task(server: usize) -> TaskId {
    TaskId::worker(server as u32)
}

fn service(server: usize, incarnation: u64) -> Service {
    let facts = |blocking| FunctionFacts { signature: None, blocking };
    let functions = [("f", facts(true)), ("g", facts(false))];
    let functions = functions.map(|(name, facts)| (name.to_owned(), facts)).into();
    let config = ServiceConfig {
        task: task(server),
        incarnation: Incarnation(incarnation),
        lease: LEASE,
        calls_max: 4,
        bytes_max: 1 << 20,
        total_bytes_max: 8 << 20,
        threads: 2,
        asynchronous_max: 4,
        unreturned_max: 100,
        clients_max: 10,
        devices: vec![TaskDevice::new(&task(server), "CPU", 0)],
        description: Value::from(""),
        planted: PlantedServiceBugs::default(),
    };
    Service::new(config, Arc::new(FunctionTable::new(functions)))
}

impl World {
    fn new(seed: u64) -> World {
        let now = Instant::now();
        let session = |client: usize| {
            let incarnation = Incarnation(100 + client as u64);
            let mut session = CallSession::new(incarnation, TaskId::new("client", 0), 1 << 20);
            for server in 0..SERVERS {
                session.add_link(now, server.to_string(), Some(task(server)));
            }
            session
        };
        World {
            random: SeededRandom(seed),
            now,
            sessions: (0..CLIENTS).map(session).collect(),
            services: (0..SERVERS).map(|server| service(server, server as u64)).collect(),
            incarnations: SERVERS as u64,
            connections: BTreeMap::new(),
            next_connection: 1,
            executing: Vec::new(),
            executed: HashMap::new(),
            next_op: 1,
            asked: HashMap::new(),
            replies: HashMap::new(),
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit as u64) as usize
    }

    fn session_input(&mut self, client: usize, input: CallInput<'_>) {
        self.sessions[client].handle(self.now, input);
        while let Some(output) = self.sessions[client].poll_output() {
            match output {
                CallOutput::Connect { connection: number, address } => {
                    let server = address.parse().unwrap();
                    let connection = Connection { client, server, number, ..Connection::default() };
                    self.connections.insert(self.next_connection, connection);
                    self.next_connection += 1;
                }
                CallOutput::Disconnect { connection } => {
                    if let Some(id) = self.connection_of(client, connection) {
                        self.disconnect(id, false);
                    }
                }
                CallOutput::Send { connection, envelope, message, body, .. } => {
                    if let Some(id) = self.connection_of(client, connection) {
                        let frame = (envelope, message, bytes_of(&body));
                        self.connections.get_mut(&id).unwrap().to_server.push_back(frame);
                    }
                }
                CallOutput::Reply { op, reply } => {
                    let first = self.replies.insert((client, op), reply).is_none();
                    assert!(first, "{op:?} is answered twice");
                }
            }
        }
    }

    fn connection_of(&self, client: usize, number: u64) -> Option<u64> {
        let mut all = self.connections.iter();
        all.find(|(_, c)| c.client == client && c.number == number).map(|(&id, _)| id)
    }

    fn service_input(&mut self, server: usize, input: ServiceInput<'_>) {
        self.services[server].handle(self.now, input);
        while let Some(output) = self.services[server].poll_output() {
            match output {
                ServiceOutput::Send { connection, request, message, body, .. } => {
                    if let Some(open) = self.connections.get_mut(&connection) {
                        let envelope = Envelope { request, ..Envelope::default() };
                        open.to_client.push_back((envelope, message, bytes_of(&body)));
                    }
                }
                ServiceOutput::Execute(order) => {
                    *self.executed.entry((order.client.0, order.call)).or_default() += 1;
                    self.executing.push((server, *order));
                }
                ServiceOutput::Close { connection } => self.disconnect(connection, true),
                ServiceOutput::Cancel { .. } | ServiceOutput::LocalFetched { .. } => {}
            }
        }
    }

    /// Ends a connection, and tells the sides.
    fn disconnect(&mut self, id: u64, tells_client: bool) {
        let Some(connection) = self.connections.remove(&id) else { return };
        if connection.accepted {
            self.service_input(connection.server, ServiceInput::Disconnected { connection: id });
        }
        if tells_client {
            let number = connection.number;
            let reason = "reset".to_owned();
            let ended = CallInput::Disconnected { connection: number, reason };
            self.session_input(connection.client, ended);
        }
    }

    /// Delivers the next frame of a connection in one direction.
    fn deliver(&mut self, id: u64, to_server: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let client = connection.client;
        let server = connection.server;
        let number = connection.number;
        let queue = if to_server { &mut connection.to_server } else { &mut connection.to_client };
        let Some((envelope, message, body)) = queue.pop_front() else { return };
        let header = header_of(&envelope, &message, body.len() as u64);
        if !to_server {
            let header = &header;
            self.session_input(client, CallInput::Message { connection: number, header, message });
            if !body.is_empty() {
                self.sessions[client].with_body(number, |targets| fill(targets, &body));
                self.session_input(client, CallInput::Body { connection: number });
            }
            return;
        }
        match message {
            Message::Hello(hello) => {
                self.connections.get_mut(&id).unwrap().accepted = true;
                let request = envelope.request;
                let client = hello.incarnation;
                let body_crc = BodyCrc::Off {};
                let input = ServiceInput::Connected {
                    connection: id,
                    request,
                    client,
                    body_crc,
                    principal: None,
                };
                self.service_input(server, input);
            }
            message => {
                let input = ServiceInput::Message { connection: id, header: &header, message };
                self.service_input(server, input);
                if !body.is_empty() {
                    self.services[server].with_body(id, |targets| fill(targets, &body));
                    self.service_input(server, ServiceInput::Body { connection: id });
                }
            }
        }
    }

    /// Establishes the connections that clients have asked for, a moment later.
    fn connect_all(&mut self) {
        let new: Vec<(usize, u64)> = self
            .connections
            .values()
            .filter(|c| !c.accepted && c.to_server.is_empty())
            .map(|c| (c.client, c.number))
            .collect();
        for (client, connection) in new {
            self.session_input(client, CallInput::Connected { connection });
        }
    }

    fn call(&mut self) {
        let client = self.below(CLIENTS);
        let server = self.below(SERVERS);
        let op = CallOp(self.next_op);
        self.next_op += 1;
        let number = self.sessions[client].number_call();
        let elements = [0, 3, 140_000][self.below(3)];
        let value = Value::zeros::<f64>(&[elements]).unwrap();
        let named = NamedInput {
            name: Text::clipped("x"),
            input: Input::Value { is: value.value_type().to_wire() },
        };
        let order = CallOrder {
            function: ["f", "g"][self.below(2)].to_owned(),
            device: String::new(),
            any_device: false,
            depth: 0,
            retain: self.below(4) == 0,
            scheduled: None,
            ends_with_connection: self.below(4) == 0,
            inputs: CallInputs::of([named]).unwrap(),
            values: vec![value],
        };
        self.asked.insert((client, op), number);
        let within = Duration::from_millis(500 + self.below(5_000) as u64);
        let link = LinkId(server);
        let deadline = Some(self.now + within);
        let command = CallCommand::Call { number, order: Box::new(order) };
        self.session_input(client, CallInput::Command { op, link, command, deadline });
    }

    /// Ends an execution. The function returns its inputs.
    fn finish(&mut self, index: usize) {
        let (server, order) = self.executing.swap_remove(index);
        let value = |(name, source): (String, InputSource)| match source {
            InputSource::Value(value) => (name, value),
            other => panic!("{other:?}"),
        };
        let result = Ok(order.inputs.into_iter().map(value).collect());
        let execution = order.execution;
        self.service_input(server, ServiceInput::Returned { execution, result });
    }

    fn restart(&mut self, server: usize) {
        let open = self.connections.iter().filter(|(_, c)| c.server == server);
        let open: Vec<u64> = open.map(|(&id, _)| id).collect();
        for id in open {
            self.disconnect(id, true);
        }
        self.executing.retain(|(of, _)| *of != server);
        self.incarnations += 1;
        self.services[server] = service(server, self.incarnations);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for client in 0..CLIENTS {
            self.session_input(client, CallInput::Tick);
        }
        for server in 0..SERVERS {
            self.service_input(server, ServiceInput::Tick);
        }
    }

    /// Makes one random move.
    fn step(&mut self) {
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        match self.below(100) {
            0..8 => self.call(),
            8..70 if !ids.is_empty() => {
                let id = ids[self.below(ids.len())];
                let to_server = self.below(2) == 0;
                self.deliver(id, to_server);
            }
            70..80 if !self.executing.is_empty() => {
                let index = self.below(self.executing.len());
                self.finish(index);
            }
            80..82 if !ids.is_empty() => {
                let id = ids[self.below(ids.len())];
                self.disconnect(id, true);
            }
            82 if self.below(4) == 0 => {
                let server = self.below(SERVERS);
                self.restart(server);
            }
            83..88 => {
                let time = Duration::from_millis(self.below(300) as u64);
                self.pass(time);
            }
            _ => self.connect_all(),
        }
    }

    /// Delivers frames and passes time until no call is under way.
    fn settle(&mut self) {
        for _ in 0..400 {
            self.connect_all();
            let ids: Vec<u64> = self.connections.keys().copied().collect();
            for id in ids {
                for to_server in [true, false, true, false] {
                    self.deliver(id, to_server);
                }
            }
            while !self.executing.is_empty() {
                self.finish(0);
            }
            self.pass(Duration::from_millis(50));
        }
    }
}

fn fill(targets: Option<&mut [&mut [u8]]>, body: &[u8]) {
    if let Some([target]) = targets {
        target.copy_from_slice(body);
    }
}

fn header_of(envelope: &Envelope, message: &Message, bytes: u64) -> Header {
    let mut frame = Vec::new();
    encode(&mut frame, envelope, message, BodyStamp::plain(bytes));
    let mut reader = FrameReader::new();
    reader.open();
    match reader.poll(&mut slice_source(&frame)) {
        Ok(Poll::Frame(header, _)) => header,
        other => panic!("{other:?}"),
    }
}

fn bytes_of(body: &ValueBody) -> Vec<u8> {
    body.slices().flatten().copied().collect()
}

/// Returns the number of seeds. `PUSHPULL_THOROUGH=1` raises it.
fn seeds() -> u64 {
    if std::env::var_os("PUSHPULL_THOROUGH").is_some() { 100 } else { 20 }
}

#[test]
fn every_call_is_answered_once_and_executed_at_most_once() {
    let mut done = 0;
    let mut lost = 0;
    let mut late = 0;
    for seed in 0..seeds() {
        let mut world = World::new(seed);
        for _ in 0..1_500 {
            world.step();
        }
        world.settle();
        for ((client, op), number) in &world.asked {
            let reply = world.replies.get(&(*client, *op));
            let reply = reply.unwrap_or_else(|| panic!("seed {seed}: {op:?} has no answer"));
            let executed = world.executed.get(&(100 + *client as u64, *number)).copied();
            let executed = executed.unwrap_or(0);
            assert!(
                executed <= 1,
                "seed {seed}: call {number} of client {client} ran {executed} times"
            );
            match reply {
                Ok(_) => {
                    assert_eq!(executed, 1, "seed {seed}: call {number} of client {client}");
                    done += 1;
                }
                Err(ServiceError::Unavailable { .. }) => {
                    assert_eq!(executed, 0, "seed {seed}: call {number} of client {client}");
                    late += 1;
                }
                Err(ServiceError::Lost { .. }) => lost += 1,
                Err(ServiceError::Timeout { .. } | ServiceError::Refused { .. }) => late += 1,
                Err(other) => panic!("seed {seed}: {other}"),
            }
        }
    }
    println!("{done} calls done, {lost} lost, {late} late or refused");
    assert!(done > lost && lost > 0 && late > 0);
}
