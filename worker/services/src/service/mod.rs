//! [`Service`]: the calls, executions and kept outputs of one task's server, as a state machine.

mod call_entry;
mod calls;
mod clients;
mod endings;
mod executions;
mod fetches;
#[cfg(any(test, feature = "simulation"))]
mod invariants;
mod io;
mod parked_fetches;
mod run_queue;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::access::Principal;
use pushpull_common::ids::{Incarnation, RequestId};
use pushpull_common::protocol::message::{self, BodyCrc, HeartbeatAnswer, Refused, Released, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, Header, Message, Refusal, version};
use pushpull_net::SendBody;

use self::call_entry::{CallEntry, CallState};
use self::clients::Clients;
use self::executions::Executions;
pub(crate) use self::fetches::output_awaited;
pub(crate) use self::io::{
    ExecutionId, ExecutionOrder, Failure, InputSource, OutputUser, ServiceConfig, ServiceInput,
    ServiceOutput,
};
use self::parked_fetches::{ParkedFetches, Requester};
use self::run_queue::RunQueue;
use crate::function_table::FunctionTable;
use crate::planted::ServiceBug;
use crate::value::Value;
use crate::value_body::ValueBody;

/// The worker service and master service of one task, as a state machine.
///
/// **In**: messages and ends of connections, results of functions, and the time. **Out**: messages,
/// executions to begin or to cancel, connections to close. **Time**: a call ends by its deadline,
/// and a client that is silent for a lease is forgotten with its kept outputs.
///
/// **What may never happen.** Tests cite these by their numbers.
///
/// - F-1: No number of a client is executed twice while the client is remembered.
/// - F-2: A call that is refused on arrival executes nothing, and is charged nothing.
/// - F-3: A call whose inputs have arrived ends once, by its deadline at the latest, unless its
///   client is forgotten. The last request for it gets one answer, unless the client gives the call
///   up or its connection ends first.
/// - F-4: No memory is allocated for inputs before it is charged to the client. A client is charged
///   no more than its budget, and all clients together no more than the total.
/// - F-5: Every charge is returned: that of inputs once their function has returned, that of
///   outputs once the client has them or releases them, and the rest with their client.
/// - F-6: Kept outputs stay until their client releases them or is forgotten.
/// - F-7: A fetch gets one answer, unless its requester gives it up or ends: when the call has
///   ended, at its deadline, or once the client of the call has been gone for a lease.
/// - F-8: No place of a client is taken for good: an abandoned execution does not count among those
///   that may run, up to a limit.
/// - F-9: A forgotten client leaves nothing but executions that have not returned. These are
///   cancelled.
/// - F-10: A service that drains accepts no calls but those of functions, and the calls that it has
///   accepted still end.
/// - F-11: A client has one principal while it is remembered. It calls the functions that its principal
///   may call, and uses the outputs of its principal. A server fetches those of the principal that has called it.
#[derive(Debug)]
pub(crate) struct Service {
    config: ServiceConfig,
    functions: Arc<FunctionTable>,
    connections: HashMap<u64, Connection>,
    clients: Clients,
    run_queue: RunQueue,
    executions: Executions,
    fetches: ParkedFetches,
    /// The deadlines of calls, in their order.
    deadlines: BTreeSet<(Instant, Incarnation, u64)>,
    /// The time of the next check of the clients' leases.
    leases_at: Option<Instant>,
    draining: bool,
    outputs: VecDeque<ServiceOutput>,
}

/// A connection of a client.
#[derive(Debug)]
struct Connection {
    client: Incarnation,
    crc: bool,
    /// The call whose memory receives the body that arrives; `None` discards it.
    receiving: Option<u64>,
}

impl Service {
    pub(crate) fn new(config: ServiceConfig, functions: Arc<FunctionTable>) -> Service {
        Service {
            config,
            functions,
            connections: HashMap::new(),
            clients: Clients::default(),
            run_queue: RunQueue::default(),
            executions: Executions::default(),
            fetches: ParkedFetches::default(),
            deadlines: BTreeSet::new(),
            leases_at: None,
            draining: false,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next action.
    pub(crate) fn poll_output(&mut self) -> Option<ServiceOutput> {
        self.outputs.pop_front()
    }

    /// Returns when a [`ServiceInput::Tick`] is due; `None` while nothing depends on the time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|&(at, _, _)| at);
        [deadline, self.fetches.deadline(), self.leases_at].into_iter().flatten().min()
    }

    /// Returns the time for which a silent client is remembered.
    pub(crate) fn lease(&self) -> Duration {
        self.config.lease
    }

    /// Returns the number of blocking functions of one client that run at once.
    pub(crate) fn threads(&self) -> usize {
        self.config.threads
    }

    /// Returns whether a service that drains has nothing left to do.
    pub(crate) fn is_drained(&self) -> bool {
        let waits = |client: &clients::ClientState| client.calls.values().any(|c| !c.has_ended());
        self.draining && !self.clients.iter().any(|(_, client)| waits(client))
    }

    /// Handles an input and queues the outputs that follow from it.
    pub(crate) fn handle(&mut self, now: Instant, input: ServiceInput<'_>) {
        match input {
            ServiceInput::Connected { connection, request, client, body_crc, principal } => {
                self.connected(now, connection, request, client, body_crc, principal);
            }
            ServiceInput::Message { connection, header, message } => {
                self.heard(now, connection);
                self.on_message(now, connection, header, message);
            }
            ServiceInput::Body { connection } => {
                self.heard(now, connection);
                self.body_received(connection);
            }
            ServiceInput::Progress { connection } => self.heard(now, connection),
            ServiceInput::Disconnected { connection } => self.disconnected(connection),
            ServiceInput::LocalFetch { fetch, execution, client, user, of, deadline } => {
                let requester = Requester::Local(fetch, execution);
                self.on_local_fetch(now, requester, client, user, of, deadline);
            }
            ServiceInput::Waits { execution, awaited } => {
                self.executions.set_awaited(execution, awaited);
            }
            ServiceInput::Returned { execution, result } => self.returned(execution, result),
            ServiceInput::Drain => self.draining = true,
            ServiceInput::Tick => {}
        }
        self.pass_time(now);
        self.run_queued();
    }

    /// Calls `receive` with the memory for the body that arrives on a connection, or with `None` if
    /// the body is to be discarded.
    pub(crate) fn with_body<R>(
        &mut self,
        connection: u64,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        let target =
            self.connections.get(&connection).and_then(|at| Some((at.client, at.receiving?)));
        let entry = target.and_then(|(client, call)| {
            self.clients.get_mut(client).and_then(|client| client.calls.get_mut(&call))
        });
        match entry.map(|entry| &mut entry.state) {
            Some(CallState::Receiving { incoming, .. }) => receive(Some(&mut [incoming.target()])),
            _ => receive(None),
        }
    }

    /// Returns whether a client that is remembered belongs to another principal: its incarnation is
    /// passed on with its outputs, and proves nothing.
    fn is_of_another(&self, client: Incarnation, principal: Option<&Principal>) -> bool {
        let name = |principal: &Principal| principal.name.clone();
        let known = self.clients.get(client);
        known.is_some_and(|known| known.principal.as_deref().map(name) != principal.map(name))
    }

    /// Returns whether an owner that is known has outputs that a client may not use.
    fn is_of_others(&self, client: Incarnation, owner: Incarnation) -> bool {
        let principal = self.clients.get(client).and_then(|state| state.principal.as_deref());
        let user = OutputUser::of(client, principal, owner);
        self.clients.get(owner).is_some_and(|owner| !user.may_use(owner.principal.as_deref()))
    }

    fn connected(
        &mut self,
        now: Instant,
        connection: u64,
        request: RequestId,
        client: Incarnation,
        body_crc: BodyCrc,
        principal: Option<Arc<Principal>>,
    ) {
        let known = self.clients.get(client).is_some();
        let crc = body_crc == BodyCrc::On {};
        self.connections.insert(connection, Connection { client, crc, receiving: None });
        if self.is_of_another(client, principal.as_deref()) {
            self.refuse(connection, request, Refusal::Denied {});
            self.outputs.push_back(ServiceOutput::Close { connection });
            self.connections.remove(&connection);
            return;
        }
        if !known && self.clients.len() >= self.config.clients_max {
            // One that has nothing here loses nothing: it connects again when it calls.
            self.clients.idle().into_iter().for_each(|idle| self.forget(idle));
        }
        if !known && self.clients.len() >= self.config.clients_max {
            let limit = self.config.clients_max as u64;
            self.refuse(connection, request, Refusal::Busy { what: detail("clients"), limit });
            self.outputs.push_back(ServiceOutput::Close { connection });
            self.connections.remove(&connection);
            return;
        }
        let state = self.clients.remember(client, now);
        state.heard = now;
        state.principal = principal;
        if let Some(older) = state.connection.replace(connection) {
            self.outputs.push_back(ServiceOutput::Close { connection: older });
            self.disconnected(older);
        }
        let config = &self.config;
        let accepted = message::ServerIs {
            version: version::NEWEST,
            job: Text::clipped(&*config.task.job),
            task: config.task.index,
            incarnation: config.incarnation,
            known,
            lease_ms: u32::try_from(config.lease.as_millis()).unwrap_or(u32::MAX),
            calls_max: config.calls_max as u32,
            bytes_max: config.bytes_max,
            body_crc,
            features: Features::ALL,
        };
        let check_in = lease_check(config.lease);
        self.send(connection, request, accepted, ValueBody::default());
        self.leases_at.get_or_insert(now + check_in);
    }

    fn heard(&mut self, now: Instant, connection: u64) {
        let client = self.connections.get(&connection).map(|connection| connection.client);
        if let Some(client) = client.and_then(|client| self.clients.get_mut(client)) {
            client.heard = now;
        }
    }

    fn disconnected(&mut self, connection: u64) {
        let Some(Connection { client, .. }) = self.connections.remove(&connection) else { return };
        self.fetches.drop_connection(connection);
        let Some(state) = self.clients.get_mut(client) else { return };
        if state.connection == Some(connection) {
            state.connection = None;
        }
        // The client sends incomplete calls again, from their first byte.
        let is_half = |entry: &CallEntry| matches!(entry.state, CallState::Receiving { connection: from, .. } if from == connection);
        let half: Vec<u64> =
            state.calls.iter().filter(|(_, entry)| is_half(entry)).map(|(&call, _)| call).collect();
        for entry in state.calls.values_mut() {
            entry.request = entry.request.filter(|&(from, _)| from != connection);
        }
        for call in half {
            self.drop_call(client, call);
        }
    }

    fn on_message(&mut self, now: Instant, connection: u64, header: &Header, message: Message) {
        let Some(at) = self.connections.get_mut(&connection) else { return };
        at.receiving = None;
        let client = at.client;
        let request = header.request;
        match message {
            Message::Heartbeat(_) => {
                self.send(connection, request, HeartbeatAnswer {}, ValueBody::default());
            }
            Message::Describe(_) => {
                let description = self.config.description.clone();
                let bytes = description.value_type().bytes();
                let described = message::Described { bytes };
                self.send_values(connection, request, described, [&description]);
            }
            Message::Call(call) => self.on_call(now, connection, header, call),
            Message::InputPart(part) => self.on_part(connection, client, header, &part),
            Message::CancelCall(cancel) => {
                self.fetches.cancel(connection, request);
                self.cancel(client, cancel.call);
            }
            Message::FetchOutput(fetch) => self.on_fetch(now, connection, header, fetch),
            Message::Release(release) => {
                self.release(client, release.calls.items());
                self.send(connection, request, Released {}, ValueBody::default());
            }
            other => {
                let role = Role::Client {}.code();
                self.refuse(connection, request, Refusal::Role { role, kind: other.kind() });
            }
        }
    }

    /// Ends the calls whose deadlines have passed, and forgets silent clients.
    fn pass_time(&mut self, now: Instant) {
        while let Some(&(at, client, call)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            self.deadline_passed(now, client, call);
        }
        self.fetches_time_out(now);
        if self.leases_at.is_some_and(|at| at <= now) {
            for client in self.clients.silent(now, self.config.lease) {
                if !self.is_leased_for_ever(client) {
                    self.forget(client);
                }
            }
            self.fetches_lose_clients(now);
            let check_in = lease_check(self.config.lease);
            let is_needed = self.clients.len() > 0 || !self.fetches.is_empty();
            self.leases_at = is_needed.then(|| now + check_in);
        }
    }

    /// Returns whether the planted bug remembers a client with kept outputs for ever.
    fn is_leased_for_ever(&self, client: Incarnation) -> bool {
        let of_client = self.clients.get(client).into_iter().flat_map(|of| of.calls.values());
        self.config.planted.has(ServiceBug::LeaseOutputsForEver)
            && of_client.into_iter().any(CallEntry::holds_outputs)
    }

    /// Forgets a client with its calls and its kept outputs.
    fn forget(&mut self, client: Incarnation) {
        let Some(state) = self.clients.forget(client) else { return };
        self.run_queue.remove(client);
        for (&call, entry) in &state.calls {
            if let Some(deadline) = entry.deadline {
                self.deadlines.remove(&(deadline, client, call));
            }
            self.abandon(entry.execution(), entry.deadline, entry.bytes);
        }
        if let Some(connection) = state.connection {
            self.outputs.push_back(ServiceOutput::Close { connection });
            self.connections.remove(&connection);
            self.fetches.drop_connection(connection);
        }
        self.owner_forgotten(client);
    }

    /// Drops a call that has not begun to run, without an answer.
    fn drop_call(&mut self, client: Incarnation, call: u64) {
        let entry = self.clients.get_mut(client).and_then(|state| state.remove(call));
        if let Some(deadline) = entry.and_then(|entry| entry.deadline) {
            self.deadlines.remove(&(deadline, client, call));
        }
    }

    fn send(
        &mut self,
        connection: u64,
        request: RequestId,
        message: impl Into<Message>,
        body: ValueBody,
    ) {
        let Some(at) = self.connections.get(&connection) else { return };
        let message = message.into();
        let crc = at.crc && body.bytes() > 0;
        self.outputs.push_back(ServiceOutput::Send { connection, request, message, body, crc });
    }

    /// Sends a message with values: the first part is its body, and the others follow.
    fn send_values<'a>(
        &mut self,
        connection: u64,
        request: RequestId,
        message: impl Into<Message>,
        values: impl IntoIterator<Item = &'a Value>,
    ) {
        let mut parts = ValueBody::parts(values).into_iter();
        let body = parts.next().unwrap_or_default();
        let mut offset = body.bytes();
        self.send(connection, request, message, body);
        for body in parts {
            let bytes = body.bytes();
            self.send(connection, request, message::OutputPart { offset }, body);
            offset += bytes;
        }
    }

    fn refuse(&mut self, connection: u64, request: RequestId, refusal: Refusal) {
        self.send(connection, request, Refused { refusal }, ValueBody::default());
    }
}

/// Returns the interval of the lease checks: an eighth of a lease, at least 1 ms and at most a day.
/// A silent client is remembered for a lease, and an eighth more at most.
fn lease_check(lease: Duration) -> Duration {
    (lease / 8).clamp(Duration::from_millis(1), Duration::from_secs(86_400))
}

fn detail(text: impl Into<String>) -> Detail {
    Detail::shortened(text)
}
