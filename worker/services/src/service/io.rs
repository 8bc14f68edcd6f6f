//! The inputs and outputs of a service, and its settings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::access::Principal;
use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{BodyCrc, OutputRef};
use pushpull_common::protocol::{EffectRef, Header, Message, Refusal};

use crate::device_name::TaskDevice;
use crate::planted::PlantedServiceBugs;
use crate::value::Value;
use crate::value_body::ValueBody;

/// The settings of a service.
#[derive(Clone, Debug)]
pub(crate) struct ServiceConfig {
    /// The task that the server serves.
    pub(crate) task: TaskId,
    /// The incarnation that the server draws at each start.
    pub(crate) incarnation: Incarnation,
    /// The time for which a silent client is remembered.
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
    /// The most clients that are remembered.
    pub(crate) clients_max: usize,
    /// The devices of the task, in the order of their indices.
    pub(crate) devices: Vec<TaskDevice>,
    /// The encoded description of the server.
    pub(crate) description: Value,
    /// The planted bug, if any.
    pub(crate) planted: PlantedServiceBugs,
}

/// The number of an execution of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ExecutionId(pub(crate) u64);

/// To whom an output must belong that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutputUser {
    /// To anybody: the user has the output itself, or nobody was asked who it is.
    Anybody,
    /// To this principal.
    Principal(String),
    /// To this principal, or to a client that was not asked who it is, as the user was not.
    PrincipalOrUnasked(String),
}

impl OutputUser {
    /// Returns the user that a client is: its principal, unless the output is its own.
    pub(crate) fn of(
        client: Incarnation,
        principal: Option<&Principal>,
        owner: Incarnation,
    ) -> OutputUser {
        match principal.filter(|_| client != owner) {
            Some(own) => OutputUser::Principal(own.name.clone()),
            None => OutputUser::Anybody,
        }
    }

    /// Returns whether it may use the outputs of this principal; `None` for one that was not asked.
    pub(crate) fn may_use(&self, owner: Option<&Principal>) -> bool {
        let owner = owner.map(|owner| &*owner.name);
        match self {
            OutputUser::Anybody => true,
            OutputUser::Principal(user) => owner == Some(user),
            OutputUser::PrincipalOrUnasked(user) => owner.is_none_or(|owner| owner == user),
        }
    }
}

/// An event for a service.
#[derive(Debug)]
pub(crate) enum ServiceInput<'a> {
    /// A client has connected and said hello.
    Connected {
        /// The number of the connection, never used before.
        connection: u64,
        /// The request of its hello.
        request: RequestId,
        /// The incarnation of the client.
        client: Incarnation,
        /// Whether bodies have checksums on this connection: `On` or `Off`.
        body_crc: BodyCrc,
        /// The principal that the client has proved to be; `None` if it was not asked.
        principal: Option<Arc<Principal>>,
    },
    /// A message has arrived. Its body follows, if it has one.
    Message {
        /// The number of the connection.
        connection: u64,
        /// The header of the message, which has its request.
        header: &'a Header,
        /// The message, decoded and checked by itself.
        message: Message,
    },
    /// The body of the last message of a connection is whole.
    Body {
        /// The number of the connection.
        connection: u64,
    },
    /// Bytes of an incomplete frame have arrived.
    Progress {
        /// The number of the connection.
        connection: u64,
    },
    /// A connection has ended, by either side.
    Disconnected {
        /// The number of the connection.
        connection: u64,
    },
    /// A function of this server needs a kept output. The fetch ends with its execution.
    LocalFetch {
        /// The number of the fetch, returned with its answer.
        fetch: u64,
        /// The execution that needs the output.
        execution: ExecutionId,
        /// The client whose call needs the output.
        client: Incarnation,
        /// To whom it must belong.
        user: OutputUser,
        /// The name of the output on the wire.
        of: OutputRef,
        /// The time at which the fetch is refused; `None` for no deadline.
        deadline: Option<Instant>,
    },
    /// A function begins to wait, or goes on.
    Waits {
        /// The execution of the function.
        execution: ExecutionId,
        /// The cause of the wait, in words; `None` once the function goes on.
        awaited: Option<String>,
    },
    /// A function has returned, or could not be run.
    Returned {
        /// The execution of the function.
        execution: ExecutionId,
        /// The outputs by name, or the failure.
        result: Result<Vec<(String, Value)>, Failure>,
    },
    /// The server stops: no more calls are accepted. Those that were accepted still end.
    Drain,
    /// The time that [`super::Service::wake_at`] has asked for has come.
    Tick,
}

/// The failure of an execution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    /// The function did not run, because an input was missing or does not suit it.
    Refused(Refusal),
    /// The function returned an error.
    Failed {
        /// Whether another execution may succeed.
        retry: bool,
        /// The text of the error.
        detail: String,
    },
    /// The function panicked, which the runtime has caught.
    Panicked {
        /// The text of the panic.
        detail: String,
    },
    /// The function was cancelled, or did not begin.
    Cancelled,
}

/// The source of an input of an execution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum InputSource {
    /// A value that the call itself has brought.
    Value(Value),
    /// A variable of the parameter servers.
    Variable(String),
    /// An output that another call leaves.
    Output {
        /// The task that holds it.
        task: TaskId,
        /// The name of the output on the wire.
        of: OutputRef,
    },
}

/// An execution of a function.
#[derive(Clone, Debug)]
pub(crate) struct ExecutionOrder {
    /// The number of the execution, returned with its result.
    pub(crate) execution: ExecutionId,
    /// The name of the function.
    pub(crate) function: String,
    /// The client of the call.
    pub(crate) client: Incarnation,
    /// Who the client has proved to be; `None` if it was not asked.
    pub(crate) principal: Option<Arc<Principal>>,
    /// The number of the call.
    pub(crate) call: u64,
    /// The number of calls that this one is nested in.
    pub(crate) depth: u8,
    /// The scheduled call of a coordinator, if the execution belongs to one.
    pub(crate) scheduled: Option<EffectRef>,
    /// The index of the device on which it runs in [`ServiceConfig::devices`].
    pub(crate) device: usize,
    /// The time at which the client stops waiting; `None` for no deadline.
    pub(crate) deadline: Option<Instant>,
    /// The inputs by name, in the order of the call.
    pub(crate) inputs: Vec<(String, InputSource)>,
}

/// An action of a service.
#[derive(Debug)]
pub(crate) enum ServiceOutput {
    /// Send a message under a request.
    Send {
        /// The number of the connection.
        connection: u64,
        /// The request that it answers; 0 for none.
        request: RequestId,
        /// The message to send.
        message: Message,
        /// The body of the message, empty for most messages.
        body: ValueBody,
        /// Whether the body has a checksum.
        crc: bool,
    },
    /// Answer a local fetch.
    LocalFetched {
        /// The number of the fetch.
        fetch: u64,
        /// The output, or the reason why there is none.
        result: Result<Value, Refusal>,
    },
    /// Run a function once its inputs are fetched.
    Execute(Box<ExecutionOrder>),
    /// Tell a function that its caller has stopped waiting.
    Cancel {
        /// The execution to cancel.
        execution: ExecutionId,
    },
    /// Close a connection once everything is sent.
    Close {
        /// The number of the connection.
        connection: u64,
    },
}
