//! [`CallEntry`]: one call on a server, from its first byte until its client has the answer.

use std::time::Instant;

use pushpull_common::ids::RequestId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::CallOutcome;

use super::io::{ExecutionId, ExecutionOrder};
use crate::value::Value;
use crate::value_body::IncomingValues;

/// One call on a server, from its arrival until it is acknowledged and its outputs are released.
#[derive(Debug)]
pub(super) struct CallEntry {
    /// The name of the function.
    pub(super) function: String,
    /// Whether the outputs stay on the server.
    pub(super) retain: bool,
    /// The time at which the client stops waiting; `None` for no deadline.
    pub(super) deadline: Option<Instant>,
    /// The time at which the call arrived.
    pub(super) arrived: Instant,
    /// The request to be answered, and its connection; `None` once it is answered or if the
    /// connection has ended.
    pub(super) request: Option<(u64, RequestId)>,
    /// Whether the client has the answer.
    pub(super) acknowledged: bool,
    /// The bytes that are charged to the client.
    pub(super) bytes: u64,
    /// The present state, which changes in the order of [`CallState`].
    pub(super) state: CallState,
}

/// The state of a call on its server.
#[derive(Debug)]
pub(super) enum CallState {
    /// The inputs of the call arrive on a connection.
    Receiving {
        connection: u64,
        incoming: IncomingValues,
        /// The order. The inputs whose indices are in `values` come from the body.
        order: Box<ExecutionOrder>,
        values: Vec<usize>,
    },
    /// The call waits for a thread.
    Queued { order: Box<ExecutionOrder> },
    /// The function of the call runs.
    Running { execution: ExecutionId },
    /// The call has ended, with its answer.
    Ended(CallEnd),
}

/// The end of a call, as it is answered.
#[derive(Debug)]
pub(super) enum CallEnd {
    /// The call was refused, or its caller has stopped waiting.
    Refused(Refusal),
    /// The call has run, or was cancelled. The values are the outputs of the outcome.
    Outcome(CallOutcome, Vec<Value>),
}

impl CallEntry {
    /// Returns whether the call has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, CallState::Ended(_))
    }

    /// Returns the execution of the call, if it runs.
    pub(super) fn execution(&self) -> Option<ExecutionId> {
        match self.state {
            CallState::Running { execution } => Some(execution),
            _ => None,
        }
    }

    /// Returns whether the call has outputs that stay on the server.
    pub(super) fn holds_outputs(&self) -> bool {
        let done = |end: &CallEnd| matches!(end, CallEnd::Outcome(CallOutcome::Done { .. }, _));
        self.retain && matches!(&self.state, CallState::Ended(end) if done(end))
    }
}
