//! What goes into a service, and what comes out.

use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{BodyCrc, OutputRef};
use pushpull_common::protocol::{CallRef, Header, Message, Refusal};

use crate::device_name::TaskDevice;
use crate::testing::planted::PlantedServiceBugs;
use crate::value::Value;
use crate::value_body::ValueBody;

/// The settings of a service.
#[derive(Clone, Debug)]
pub(crate) struct ServiceConfig {
    /// The task of the server.
    pub(crate) task: TaskId,
    /// Chosen by the server at each start.
    pub(crate) incarnation: Incarnation,
    /// How long a silent client is remembered.
    pub(crate) lease: Duration,
    /// The most calls of one client that have not ended or are not settled.
    pub(crate) calls_max: usize,
    /// The most bytes of inputs and outputs of one client.
    pub(crate) bytes_max: u64,
    /// The most bytes of inputs and outputs of all clients.
    pub(crate) total_bytes_max: u64,
    /// The most blocking functions of one client that run at once.
    pub(crate) threads: usize,
    /// The most asynchronous functions that run at once, beside the first of each client.
    pub(crate) asynchronous_max: usize,
    /// The most executions of one function for one client that have passed their deadlines and not
    /// returned.
    pub(crate) unreturned_max: usize,
    /// The most clients.
    pub(crate) clients_max: usize,
    /// The devices of the task.
    pub(crate) devices: Vec<TaskDevice>,
    /// The encoded description of the server.
    pub(crate) description: Value,
    /// The planted bug, if any.
    pub(crate) planted: PlantedServiceBugs,
}

/// Numbers the executions of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ExecutionId(pub(crate) u64);

/// An event for a service.
#[derive(Debug)]
pub(crate) enum ServiceInput<'a> {
    /// A client has connected.
    Connected {
        /// The number of the connection, never used before.
        connection: u64,
        /// The request of its hello.
        request: RequestId,
        /// The client.
        client: Incarnation,
        /// Whether bodies have checksums on this connection: `On` or `Off`.
        body_crc: BodyCrc,
    },
    /// A message has arrived. Its body follows, if it has one.
    Message {
        /// The connection.
        connection: u64,
        /// Its header.
        header: &'a Header,
        /// The message.
        message: Message,
    },
    /// The body of the last message of a connection is whole.
    Body {
        /// The connection.
        connection: u64,
    },
    /// Bytes of an incomplete frame have arrived.
    Progress {
        /// The connection.
        connection: u64,
    },
    /// A connection has ended.
    Disconnected {
        /// The connection.
        connection: u64,
    },
    /// A function of this server needs an output. Its fetch ends with its execution.
    LocalFetch {
        /// Numbers the request.
        fetch: u64,
        /// The execution that needs it.
        execution: ExecutionId,
        /// The client whose call needs it.
        client: Incarnation,
        /// The output.
        of: OutputRef,
        /// When nobody waits any more.
        deadline: Option<Instant>,
    },
    /// A function waits for something, in words, or goes on.
    Waits {
        /// The execution.
        execution: ExecutionId,
        /// What it waits for; `None` once it goes on.
        awaited: Option<String>,
    },
    /// A function has returned.
    Returned {
        /// The execution.
        execution: ExecutionId,
        /// What it returned.
        result: Result<Vec<(String, Value)>, Failure>,
    },
    /// No more calls are accepted. Those that were accepted still end.
    Drain,
    /// Time has passed.
    Tick,
}

/// How an execution failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    /// The function did not run: an input could not be had or does not suit it.
    Refused(Refusal),
    /// The function returned an error.
    Failed {
        /// Whether another execution may succeed.
        retry: bool,
        /// The error, in words.
        detail: String,
    },
    /// The function panicked.
    Panicked {
        /// The panic, in words.
        detail: String,
    },
    /// The function noticed that it was cancelled.
    Cancelled,
}

/// Where an input of an execution comes from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum InputSource {
    /// The call brought it.
    Value(Value),
    /// A variable of the parameter servers.
    Variable(String),
    /// An output that another call leaves.
    Output {
        /// The task that holds it.
        task: TaskId,
        /// The output.
        of: OutputRef,
    },
}

/// An execution of a function.
#[derive(Clone, Debug)]
pub(crate) struct ExecutionOrder {
    /// Its number, to be returned with the result.
    pub(crate) execution: ExecutionId,
    /// The name of the function.
    pub(crate) function: String,
    /// The client of the call.
    pub(crate) client: Incarnation,
    /// The number of the call.
    pub(crate) call: u64,
    /// How many calls it is nested in.
    pub(crate) depth: u8,
    /// The call of a coordinator that it belongs to.
    pub(crate) scheduled: Option<CallRef>,
    /// The index of the device on which it runs in [`ServiceConfig::devices`].
    pub(crate) device: usize,
    /// When the client stops waiting; `None` for never.
    pub(crate) deadline: Option<Instant>,
    /// The inputs by name.
    pub(crate) inputs: Vec<(String, InputSource)>,
}

/// An action of a service.
#[derive(Debug)]
pub(crate) enum ServiceOutput {
    /// Send a message under a request.
    Send {
        /// The connection.
        connection: u64,
        /// The request that it answers; 0 for none.
        request: RequestId,
        /// The message.
        message: Message,
        /// Its body.
        body: ValueBody,
        /// Whether the body has a checksum.
        crc: bool,
    },
    /// Answer a local fetch.
    LocalFetched {
        /// The request.
        fetch: u64,
        /// The output.
        result: Result<Value, Refusal>,
    },
    /// Run a function.
    Execute(Box<ExecutionOrder>),
    /// Tell a function that nobody waits for it any more.
    Cancel {
        /// The execution.
        execution: ExecutionId,
    },
    /// Close a connection once everything is sent.
    Close {
        /// The connection.
        connection: u64,
    },
}
