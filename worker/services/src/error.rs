//! [`ServiceError`]: the errors of calls, by their cause.

use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Refusal;
use pushpull_common::rounding::rounded;
use thiserror::Error;

use super::value_error::ValueError;

/// The failure of a call, or of another operation of a client.
///
/// A task is named as in `/job:worker/task:3`, or by its address as long as its name is unknown.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The server of a task could not be reached. The function has not run.
    #[error("cannot {doing}: {task} was not reached for {:?}: {reason}", rounded(.waited))]
    Unavailable {
        /// The operation that failed, as in "cannot call \"add\"".
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The time since the link to the server began to fail.
        waited: Duration,
        /// The reason of the last failed attempt.
        reason: String,
    },
    /// The server of a task was lost while a call was under way. It has restarted or has forgotten
    /// this client, or the connection has ended. The function may have run.
    #[error("cannot {doing}: {task} was lost, {reason}; the function may have run")]
    Lost {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The sign of the loss, such as a restart of the server.
        reason: String,
    },
    /// The deadline has passed. The function may run, or have run, unless the call waited for a
    /// thread or its inputs.
    #[error("cannot {doing}: waited {:?} for {awaited}", rounded(.waited))]
    Timeout {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The time for which the call has waited.
        waited: Duration,
        /// The cause of the wait, with its task. The server names it if it is the first to notice
        /// the deadline.
        awaited: String,
    },
    /// The server has refused the operation. The function has not run, unless the refusal is a
    /// deadline.
    #[error("cannot {doing}: {task} refuses: {refusal}")]
    Refused {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The server's reason; `protocol.md` lists all refusals.
        refusal: Refusal,
    },
    /// The function has returned an error, or outputs that the server does not keep. Such outputs
    /// have undeclared types, or exceed the budget of the client.
    #[error("cannot {doing}: the function failed on {task}: {detail}")]
    Failed {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// Whether the function says that another execution may succeed.
        retry: bool,
        /// The error of the function, in at most 512 bytes.
        detail: String,
    },
    /// The function has panicked, which ends its call and nothing else.
    #[error("cannot {doing}: the function panicked on {task}: {detail}")]
    Panicked {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The message of the panic, in at most 512 bytes.
        detail: String,
    },
    /// The client belongs to another process, which has forked this one. It continues there; a child
    /// connects by itself.
    #[error("cannot {doing} in a child of fork: the client belongs to process {parent}")]
    Forked {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The process id of the program that owns the client.
        parent: u32,
    },
    /// The call was cancelled on its server.
    #[error("cannot {doing}: it was cancelled")]
    Cancelled {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
    },
    /// The server at an address is another task than the cluster says.
    #[error("cannot {doing}: the server at {address} is {found}, not {expected}")]
    OtherTask {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The address that the client has connected to.
        address: String,
        /// The task that the server names in its welcome.
        found: String,
        /// The task that has this address in the cluster.
        expected: String,
    },
    /// The device of a call names no task of the cluster, or one that the device filters exclude.
    #[error("cannot {doing}: {reason}")]
    NoTask {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The reason, with the device or the task that the cluster lacks or the filters exclude.
        reason: String,
    },
    /// Tasks have different functions under one name.
    #[error("cannot {doing}: {left} has {left_signature}, {right} has {right_signature}")]
    SignaturesDiffer {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The first task that has the function.
        left: String,
        /// The signature of the function on the first task.
        left_signature: String,
        /// The second task, with another signature.
        right: String,
        /// The signature of the function on the second task.
        right_signature: String,
    },
    /// The answer needs more memory than the client accepts. The function has run.
    #[error("cannot {doing}: the answer of {task} has {bytes} bytes: the limit is {limit}")]
    AnswerTooLarge {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The size of the answer in bytes.
        bytes: u64,
        /// The limit in bytes: `FunctionClientConfig::answer_bytes_max`, in a function
        /// `FunctionServerConfig::client_bytes_max`.
        limit: u64,
    },
    /// The system has no memory for the answer. The function has run.
    #[error(
        "cannot {doing}: the system has no memory for the {bytes} bytes of the answer of {task}"
    )]
    NoMemory {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The size of the answer in bytes.
        bytes: u64,
    },
    /// The server has broken the protocol. It is hostile, or of another version.
    #[error("cannot {doing}: {task} has sent {what}")]
    Protocol {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The task that was called, or the address of its server while its name is unknown.
        task: String,
        /// The breach, in words that follow "has sent".
        what: String,
    },
    /// A call that this program made is invalid.
    #[error("cannot {doing}: {reason}")]
    Invalid {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The reason why the call is invalid, such as a name that is too long.
        reason: String,
    },
    /// The call had ended in an earlier run of its coordinator, and its value is gone. Its effect
    /// has counted.
    #[error("cannot fetch the value of call {number}: it had ended in an earlier run")]
    EndedBefore {
        /// The number of the call among those of its coordinator.
        number: u64,
    },
    /// A coordinator that resumes schedules other calls than those that the servers have counted
    /// under its name. Nothing that it schedules runs any more: schedule the same calls, or use
    /// another name.
    #[error(
        "cannot schedule call {number} of coordinator {name:?}: with {function:?} the calls up to \
         it have the digest {digest:016x}, and those that have counted on {shard} have \
         {recorded:016x}"
    )]
    CallsDiffer {
        /// The name of the coordinator.
        name: String,
        /// The number of the call whose digest differs.
        number: u64,
        /// The function of the call in this program.
        function: String,
        /// The digest of the functions and inputs of calls 1 to `number` in this program.
        digest: u64,
        /// The shard whose recorded calls differ.
        shard: ShardId,
        /// The digest of the same calls that the shard has recorded.
        recorded: u64,
    },
    /// The parameter servers have failed, or have refused the operation.
    #[error("cannot {doing}")]
    Servers {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
        /// The error of the session with the parameter servers.
        source: Box<pushpull_worker::Error>,
    },
    /// A value cannot be used as the program uses it.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// The client was ended before or during the operation.
    #[error("cannot {doing}: the client has ended")]
    Ended {
        /// The operation that failed, in the words behind "cannot", such as `call "add"`.
        doing: String,
    },
    /// The operating system did not start a thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The error of the operating system, in words.
        reason: String,
    },
}

impl ServiceError {
    /// Returns whether the server may still run the call, or may have run it.
    pub(crate) fn is_unsure(&self) -> bool {
        use ServiceError::{Lost, Protocol, Timeout};
        matches!(self, Lost { .. } | Protocol { .. } | Timeout { .. })
    }
}
