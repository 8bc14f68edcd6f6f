//! A push slot, and the push that is received in it.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RequestId, Sequence, TokenId};
use pushpull_common::protocol::CallRef;
use pushpull_common::protocol::message::Operation;

use super::Extents;
use crate::client_key::ClientKey;

/// A push that is being received, or that is whole and waits to be applied.
#[derive(Debug)]
pub(crate) struct PushArrival {
    pub(crate) sequence: Sequence,
    pub(crate) operation: Operation,
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    /// The call that makes the push, if any.
    pub(crate) call: Option<CallRef>,
    pub(crate) step: GlobalStep,
    /// The number of gradients in the values that the push was computed from, as reported by the
    /// client. Not durable.
    pub(crate) read: Option<u64>,
    pub(crate) extents: Extents,
    /// The extents that are in a push buffer: whole, dense partitions. Not durable.
    pub(crate) shared: Extents,
    /// Whether these must be scanned before the push counts. Not durable.
    pub(crate) scanning: bool,
    /// The number of bytes received.
    pub(crate) bytes: u64,
    /// The pending answer to the last request of the push; set once the push is whole.
    pub(crate) whole: Option<PendingAnswer>,
    /// The order of arrival among whole pushes; 0 until the push is whole.
    pub(crate) order: u64,
    /// The sum of the squares of its elements, once computed. Not durable.
    pub(crate) squares: Option<f64>,
}

/// The answer that a client waits for after its push is whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingAnswer {
    /// The connection of the request. A request id has no meaning on another connection.
    pub(crate) connection: u64,
    pub(crate) request: RequestId,
    pub(crate) next: bool,
    /// When the client began to wait.
    pub(crate) since: Option<Instant>,
    pub(crate) deadline: Option<Instant>,
}

impl PendingAnswer {
    /// Returns a pending answer for which no client waits.
    pub(crate) fn unawaited() -> PendingAnswer {
        let (since, deadline) = (None, None);
        PendingAnswer { connection: 0, request: RequestId(0), next: false, since, deadline }
    }
}

/// A slot that a client has, with its push.
///
/// Invariant: it has a holder or a whole push.
#[derive(Debug)]
pub(super) struct PushSlot {
    pub(super) number: u32,
    /// The client that has the slot; `None` for a whole push whose client has been replaced by a
    /// newer incarnation.
    pub(super) holder: Option<ClientKey>,
    /// Whether the holder requested the slot. A slot may also be offered with an answer.
    pub(super) requested: bool,
    /// When the holder last made progress.
    pub(super) last_progress: Instant,
    pub(super) arrival: Option<PushArrival>,
}

impl PushSlot {
    /// Returns whether the slot has a whole push.
    pub(super) fn is_whole(&self) -> bool {
        self.arrival.as_ref().is_some_and(|push| push.whole.is_some())
    }

    /// Returns whether a client has this slot without a whole push.
    pub(super) fn is_unfinished(&self, client: ClientKey) -> bool {
        self.holder == Some(client) && !self.is_whole()
    }

    /// Returns the push, if it is a gradient.
    pub(super) fn gradient(&self) -> Option<&PushArrival> {
        let is_gradient = |push: &&PushArrival| matches!(push.operation, Operation::Gradient {});
        self.arrival.as_ref().filter(is_gradient)
    }
}

/// Returns whether an operation applies to trainable partitions (true) or to plain ones (false);
/// `None` if it applies to both.
pub(crate) fn is_for_trainable(operation: Operation) -> Option<bool> {
    match operation {
        Operation::Gradient {} => Some(true),
        Operation::AssignAdd {} => Some(false),
        _ => None,
    }
}
