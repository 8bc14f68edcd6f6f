//! The errors of calls.

use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Refusal;
use pushpull_common::rounding::rounded;
use thiserror::Error;

use super::value_error::ValueError;

/// Why a call, or another operation of a client, failed.
///
/// A task is named as in `/job:worker/task:3`, or by its address as long as its name is unknown.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The server of a task could not be reached. The function has not run.
    #[error("cannot {doing}: {task} was not reached for {:?}: {reason}", rounded(.waited))]
    Unavailable {
        /// The operation, as in "cannot call \"add\"".
        doing: String,
        /// The task.
        task: String,
        /// Since when.
        waited: Duration,
        /// The last failure.
        reason: String,
    },
    /// The server of a task was lost while a call was under way: it has restarted, has forgotten
    /// this client, or the connection has ended. The function may have run.
    #[error("cannot {doing}: {task} was lost, {reason}; the function may have run")]
    Lost {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// What was seen.
        reason: String,
    },
    /// The deadline has passed. The function may run, or have run, unless the call waited for a
    /// thread or its inputs.
    #[error("cannot {doing}: waited {:?} for {awaited}", rounded(.waited))]
    Timeout {
        /// The operation.
        doing: String,
        /// The task that was called.
        task: String,
        /// How long.
        waited: Duration,
        /// What the call waited for, and on which task: as the server says, if it was the first to
        /// notice.
        awaited: String,
    },
    /// The server has refused the operation. The function has not run, unless the refusal is a
    /// deadline.
    #[error("cannot {doing}: {task} refuses: {refusal}")]
    Refused {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// The reason.
        refusal: Refusal,
    },
    /// The function has returned an error, or outputs that the server does not keep: of other types
    /// than it has declared, or beyond the budget of the client.
    #[error("cannot {doing}: the function failed on {task}: {detail}")]
    Failed {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// Whether the function says that another execution may succeed.
        retry: bool,
        /// The error of the function, in at most 512 bytes.
        detail: String,
    },
    /// The function has panicked.
    #[error("cannot {doing}: the function panicked on {task}: {detail}")]
    Panicked {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// The message of the panic, in at most 512 bytes.
        detail: String,
    },
    /// The client belongs to another process, which has forked this one. It continues there; a child
    /// connects by itself.
    #[error("cannot {doing} in a child of fork: the client belongs to process {parent}")]
    Forked {
        /// The operation.
        doing: String,
        /// The process of the client.
        parent: u32,
    },
    /// The call was cancelled.
    #[error("cannot {doing}: it was cancelled")]
    Cancelled {
        /// The operation.
        doing: String,
    },
    /// The server at an address is another task than the cluster says.
    #[error("cannot {doing}: the server at {address} is {found}, not {expected}")]
    OtherTask {
        /// The operation.
        doing: String,
        /// The address.
        address: String,
        /// The task of the server.
        found: String,
        /// The task in the cluster.
        expected: String,
    },
    /// The device of a call names no task of the cluster, or one that the device filters exclude.
    #[error("cannot {doing}: {reason}")]
    NoTask {
        /// The operation.
        doing: String,
        /// Why there is none.
        reason: String,
    },
    /// Tasks have different functions under one name.
    #[error("cannot {doing}: {left} has {left_signature}, {right} has {right_signature}")]
    SignaturesDiffer {
        /// The operation.
        doing: String,
        /// A task.
        left: String,
        /// The signature of the function on it.
        left_signature: String,
        /// Another task.
        right: String,
        /// The signature of the function on that.
        right_signature: String,
    },
    /// The answer needs more memory than the client accepts. The function has run.
    #[error("cannot {doing}: the answer of {task} has {bytes} bytes, the limit is {limit}")]
    AnswerTooLarge {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// The bytes of the answer.
        bytes: u64,
        /// The limit: `ClientConfig::answer_bytes_max`, in a function
        /// `ServerConfig::client_bytes_max`.
        limit: u64,
    },
    /// The system has no memory for the answer. The function has run.
    #[error(
        "cannot {doing}: the system has no memory for the {bytes} bytes of the answer of {task}"
    )]
    NoMemory {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// The bytes of the answer.
        bytes: u64,
    },
    /// What a server has sent makes no sense. It is hostile, or of another version.
    #[error("cannot {doing}: {task} has sent {what}")]
    Protocol {
        /// The operation.
        doing: String,
        /// The task.
        task: String,
        /// What is wrong.
        what: String,
    },
    /// A call that this program made is invalid.
    #[error("cannot {doing}: {reason}")]
    Invalid {
        /// The operation.
        doing: String,
        /// What is wrong.
        reason: String,
    },
    /// The call had ended in an earlier run of its coordinator, and its value is gone. Its effect
    /// has counted.
    #[error("cannot fetch the value of call {number}: it had ended in an earlier run")]
    EndedBefore {
        /// The number of the call.
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
        /// The coordinator.
        name: String,
        /// The number of the call.
        number: u64,
        /// The function of the call in this program.
        function: String,
        /// The digest of the functions and inputs of calls 1 to `number` in this program.
        digest: u64,
        /// The shard that knows other calls.
        shard: ShardId,
        /// The digest of its calls.
        recorded: u64,
    },
    /// The parameter servers have failed.
    #[error("cannot {doing}: {source}")]
    Servers {
        /// The operation.
        doing: String,
        /// Their error.
        source: Box<pushpull_worker::Error>,
    },
    /// A value cannot be used as the program uses it.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// The client has ended.
    #[error("cannot {doing}: the client has ended")]
    Ended {
        /// The operation.
        doing: String,
    },
    /// The operating system did not start a thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The operating system's error.
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
