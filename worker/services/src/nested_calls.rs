//! The calls that functions make, and the clients that make them.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use pushpull_common::protocol::limits::CALL_DEPTH_MAX;

use super::call_session::CallOp;
use super::execution_waits::ExecutionWaits;
use super::runtime::client_core::ClientCore;

/// The clients by which the functions of a server call other functions, one for each depth of
/// calls.
///
/// A client has few places for calls on each server. A call waits only for calls of greater depth,
/// so calls never wait for each other's places in a circle.
pub(crate) struct NestedClients {
    clients: [OnceLock<ClientCore>; CALL_DEPTH_MAX as usize + 1],
    start: Box<dyn Fn() -> ClientCore + Send + Sync>,
    is_ended: AtomicBool,
}

impl NestedClients {
    /// Creates the clients. `start` starts one when a function of its depth first needs it.
    pub(crate) fn new(start: impl Fn() -> ClientCore + Send + Sync + 'static) -> NestedClients {
        let clients = Default::default();
        let is_ended = AtomicBool::new(false);
        NestedClients { clients, start: Box::new(start), is_ended }
    }

    /// Returns the client of functions whose call has this depth.
    pub(crate) fn of_depth(&self, depth: u8) -> ClientCore {
        let client = self.clients[usize::from(depth.min(CALL_DEPTH_MAX))].get_or_init(&self.start);
        if self.is_ended.load(Ordering::SeqCst) {
            client.end();
        }
        client.clone()
    }

    /// Ends the clients: their calls fail, now and later.
    pub(crate) fn end(&self) {
        self.is_ended.store(true, Ordering::SeqCst);
        self.clients.iter().filter_map(OnceLock::get).for_each(ClientCore::end);
    }
}

impl fmt::Debug for NestedClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let started = self.clients.iter().filter(|client| client.get().is_some()).count();
        f.debug_struct("NestedClients").field("started", &started).finish_non_exhaustive()
    }
}

/// The calls that one execution of a function makes. They end with it.
#[derive(Debug)]
pub(crate) struct NestedCalls {
    /// The client of the execution's depth.
    core: ClientCore,
    /// The number of calls that the calls of this execution are nested in.
    pub(crate) depth: u8,
    /// The deadline of the execution.
    pub(crate) deadline: Option<Instant>,
    /// The operations under way; `None` once the execution has ended.
    open: Mutex<Option<HashSet<CallOp>>>,
    /// The waits of the execution.
    pub(crate) waits: Arc<ExecutionWaits>,
}

impl NestedCalls {
    pub(crate) fn new(
        core: ClientCore,
        depth: u8,
        deadline: Option<Instant>,
        waits: Arc<ExecutionWaits>,
    ) -> NestedCalls {
        let depth = depth.saturating_add(1);
        let open = Mutex::new(Some(HashSet::new()));
        NestedCalls { core, depth, deadline, open, waits }
    }

    fn open(&self) -> MutexGuard<'_, Option<HashSet<CallOp>>> {
        // A set has no invariants over two of its changes.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the client, for operations that outlive the execution.
    pub(crate) fn core(&self) -> &ClientCore {
        &self.core
    }

    /// Records the begin of an operation. Returns whether the operation may begin.
    pub(crate) fn begin(&self, op: CallOp) -> bool {
        let mut open = self.open();
        open.as_mut().is_some_and(|open| open.insert(op))
    }

    /// Records the end of an operation, with a reply or without.
    pub(crate) fn ended(&self, op: CallOp) {
        if let Some(open) = &mut *self.open() {
            open.remove(&op);
        }
    }

    /// Whether the execution has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.open().is_none()
    }

    /// Cancels the operations under way, because the execution has ended or was cancelled.
    pub(crate) fn end(&self) {
        let open = self.open().take();
        open.into_iter().flatten().for_each(|op| self.core.cancel(op));
    }
}
