//! One call on a server, from its first byte until its client has the answer.

use std::time::Instant;

use pushpull_common::ids::RequestId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::CallOutcome;

use super::io::{ExecutionId, ExecutionOrder};
use crate::value::Value;
use crate::value_body::IncomingValues;

/// One call on a server.
#[derive(Debug)]
pub(super) struct CallEntry {
    /// The function.
    pub(super) function: String,
    /// Whether the outputs stay on the server.
    pub(super) retain: bool,
    /// When the client stops waiting; `None` for never.
    pub(super) deadline: Option<Instant>,
    /// When the call arrived.
    pub(super) arrived: Instant,
    /// The request to be answered, and its connection; `None` once it is answered or if the
    /// connection has ended.
    pub(super) request: Option<(u64, RequestId)>,
    /// Whether the client has the answer.
    pub(super) acknowledged: bool,
    /// The bytes that are charged to the client.
    pub(super) bytes: u64,
    /// How far the call is.
    pub(super) state: CallState,
}

/// How far a call is.
#[derive(Debug)]
pub(super) enum CallState {
    /// Its inputs arrive on a connection.
    Receiving {
        connection: u64,
        incoming: IncomingValues,
        /// The order, whose values come from the body: those of these inputs.
        order: Box<ExecutionOrder>,
        values: Vec<usize>,
    },
    /// It waits for a thread.
    Queued { order: Box<ExecutionOrder> },
    /// The function runs.
    Running { execution: ExecutionId },
    /// It has ended.
    Ended(CallEnd),
}

/// How a call has ended.
#[derive(Debug)]
pub(super) enum CallEnd {
    /// It was refused, or nobody waits for it any more.
    Refused(Refusal),
    /// It has run, or was cancelled. The values are those of the outcome's outputs.
    Outcome(CallOutcome, Vec<Value>),
}

impl CallEntry {
    /// Returns whether it has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, CallState::Ended(_))
    }

    /// Returns its execution, if it runs.
    pub(super) fn execution(&self) -> Option<ExecutionId> {
        match self.state {
            CallState::Running { execution } => Some(execution),
            _ => None,
        }
    }

    /// Returns whether it has outputs that stay on the server.
    pub(super) fn holds_outputs(&self) -> bool {
        let done = |end: &CallEnd| matches!(end, CallEnd::Outcome(CallOutcome::Done { .. }, _));
        self.retain && matches!(&self.state, CallState::Ended(end) if done(end))
    }
}
