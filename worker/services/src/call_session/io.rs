//! The inputs and outputs of a call session, and the commands of its callers.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{CallInputs, OutputRef};
use pushpull_common::protocol::{EffectRef, Envelope, Header, Message, Refusal};

use crate::error::ServiceError;
use crate::value::{Value, ValueType};
use crate::value_body::ValueBody;

/// The number of an operation of one of the session's callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CallOp(pub(crate) u64);

/// The index of a link, in the order in which links were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(crate) usize);

/// The order for one call of a function.
#[derive(Clone, Debug)]
pub(crate) struct CallOrder {
    /// The name of the function.
    pub(crate) function: String,
    /// The device in the notation of the call; empty for any.
    pub(crate) device: String,
    pub(crate) any_device: bool,
    /// The number of calls that this one is nested in.
    pub(crate) depth: u8,
    /// Whether the outputs stay on the server.
    pub(crate) retain: bool,
    /// The scheduled call of a coordinator of which this is an execution.
    pub(crate) scheduled: Option<EffectRef>,
    /// Whether a lost connection ends the call at once. Otherwise the call goes on once the server
    /// is reached again, as long as the server remembers it.
    pub(crate) ends_with_connection: bool,
    /// The inputs on the wire, and the values among them in order.
    pub(crate) inputs: CallInputs,
    /// The values among `inputs`, in their order.
    pub(crate) values: Vec<Value>,
}

/// A command of a caller to a session.
#[derive(Debug)]
pub(crate) enum CallCommand {
    /// Calls a function. The number is from [`super::CallSession::number_call`].
    Call { number: u64, order: Box<CallOrder> },
    /// Fetches a kept output of a call. The admission is asked before memory is allocated.
    Fetch { of: OutputRef, admission: Option<Admission> },
    /// Fetches the description of the server.
    Describe,
}

/// Decides whether a value of a number of bytes may be received, and charges it.
///
/// The session asks again for a value that it fetches again. The admission must not use the session
/// that asks.
#[derive(Clone)]
pub(crate) struct Admission {
    admits: Arc<dyn Fn(u64) -> Result<(), Refusal> + Send + Sync>,
    /// For whom the value is fetched; empty for this side.
    principal: String,
}

impl Admission {
    pub(crate) fn new(
        admits: impl Fn(u64) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Admission {
        Admission { admits: Arc::new(admits), principal: String::new() }
    }

    /// Names the principal for whom the value is fetched.
    pub(crate) fn of_principal(self, name: &str) -> Admission {
        Admission { principal: name.to_owned(), ..self }
    }

    /// Returns the name of the principal for whom the value is fetched; empty for this side.
    pub(crate) fn principal(&self) -> &str {
        &self.principal
    }

    pub(crate) fn ask(&self, bytes: u64) -> Result<(), Refusal> {
        (self.admits)(bytes)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").finish_non_exhaustive()
    }
}

/// The kept outputs of a call, as their owner names them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputId {
    pub(crate) owner: Incarnation,
    /// The server that has the outputs, as far as the owner knows. The owner's session fills it in
    /// when it sends the requests that need them.
    pub(crate) server: Incarnation,
    pub(crate) call: u64,
}

impl CallCommand {
    /// Returns the operation, as in "cannot call \"add\"".
    pub(crate) fn doing(&self) -> String {
        match self {
            CallCommand::Call { order, .. } => doing_call(&order.function),
            CallCommand::Fetch { of, .. } => {
                format!("fetch {:?} of call {}", of.output.as_str(), of.call)
            }
            CallCommand::Describe => "describe the server".to_owned(),
        }
    }
}

/// Returns the operation of a call, as in "cannot call \"add\"".
pub(crate) fn doing_call(function: &str) -> String {
    format!("call {function:?}")
}

/// An event for a session.
#[derive(Debug)]
pub(crate) enum CallInput<'a> {
    /// A caller has a command for the server of a link.
    Command { op: CallOp, link: LinkId, command: CallCommand, deadline: Option<Instant> },
    /// A caller no longer waits for its operation.
    Cancelled { op: CallOp },
    /// The kept outputs of these calls on the server of a link are no longer needed.
    Release { link: LinkId, calls: Vec<u64> },
    /// A connection is established.
    Connected { connection: u64 },
    /// A message has arrived. Its body follows, if it has one.
    Message { connection: u64, header: &'a Header, message: Message },
    /// The body of the last message of a connection is whole.
    Body { connection: u64 },
    /// Bytes of an incomplete frame have arrived.
    Progress { connection: u64 },
    /// A connection could not be made, or has ended.
    Disconnected { connection: u64, reason: String },
    /// The time that [`super::CallSession::wake_at`] has asked for has come.
    Tick,
}

/// An action of a session.
#[derive(Debug)]
pub(crate) enum CallOutput {
    /// Connect to an address.
    Connect { connection: u64, address: String },
    /// Give a connection up.
    Disconnect { connection: u64 },
    /// Send a message with its body on a connection.
    Send { connection: u64, envelope: Envelope, message: Message, body: ValueBody, crc: bool },
    /// Reply to a caller.
    Reply { op: CallOp, reply: Result<CallReply, ServiceError> },
}

/// The reply to a command.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CallReply {
    /// The outputs of a call.
    Done(Vec<(String, Value)>),
    /// The types of the outputs that stay on the server of the call.
    Kept(Vec<(String, ValueType)>),
    /// The value of a fetched output.
    Fetched(Value),
    /// The description of the server, which is this task.
    Described(TaskId, Vec<u8>),
}

/// Returns the envelope of a request with a deadline in milliseconds; 0 for no deadline.
pub(crate) fn envelope(request: RequestId, deadline_ms: u32) -> Envelope {
    Envelope { request, deadline_ms, ..Envelope::default() }
}
