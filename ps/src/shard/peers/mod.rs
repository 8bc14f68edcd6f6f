//! [`Peers`]: who talks to a shard. Connections and what they receive, clients with their leases,
//! and requests that wait.

pub(super) mod chief_fence;
pub(crate) mod client_registry;
pub(super) mod parked_requests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::access::Principal;
use pushpull_common::ids::{Sequence, TaskId, TokenId};
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Features, Header, Message, Refusal, message};
use pushpull_store::store::VALUES;

use super::output::{ShardOutput, ShardOutputs};
use super::request::incoming_hello::IncomingHello;
use super::request::incoming_part::IncomingPart;
use super::request::parked_request::ParkedRequest;
use super::request::{PeerRequest, unsupported};
use crate::aggregate::token_ledger::{TOKEN_LIMIT, generation_of};
use crate::client_entry::ClientPresence;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use chief_fence::ChiefFence;
use client_registry::{AdmittedClient, ClientRegistry};
use parked_requests::ParkedRequests;

/// The peers of a shard.
///
/// Invariants: the connection of a client is one of the connections, until it is closed. A parked
/// request has a connection, and its client has no other one.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) config: Arc<PsConfig>,
    pub(super) connections: BTreeMap<u64, ConnectionState>,
    pub(super) registry: ClientRegistry,
    pub(super) chief: ChiefFence,
    pub(super) parked: ParkedRequests,
    /// How many clients have ever joined, and how many are present, as last reported.
    pub(super) members: (usize, usize),
    /// The differing settings of other ps tasks that have been reported. The tasks are those of the
    /// cluster, and the settings those of this server.
    pub(super) differing: BTreeMap<(u32, String), String>,
}

/// The shard's state of one connection.
#[derive(Debug)]
pub(super) struct ConnectionState {
    pub(super) role: Role,
    pub(super) client: Option<ClientKey>,
    /// Who the peer has proved to be, and the task that it says it is.
    pub(super) principal: Option<Arc<Principal>>,
    pub(super) task: TaskId,
    /// The task of another shard; `None` for other roles.
    pub(super) peer_task: Option<u32>,
    pub(super) origin: PeerOrigin,
    /// When bytes last arrived.
    pub(super) heard_at: Instant,
    /// How many times shared memory was sent over it.
    pub(super) shared: u32,
    pub(super) crc: bool,
    /// The features that are agreed with the peer.
    pub(super) features: Features,
    pub(super) expected_body: Option<ExpectedBody>,
    /// The push that was refused. Its other parts are skipped without an answer.
    pub(super) refused: Option<(Sequence, u32)>,
}

/// The use of the body that a connection is receiving.
#[derive(Debug)]
pub(super) enum ExpectedBody {
    /// A part of a push.
    Part(IncomingPart),
    /// A catalogue.
    Catalogue { request: PeerRequest, digest: [u8; 32], bytes: Vec<u8> },
    /// A user's data, to be stored with a checkpoint.
    User { request: PeerRequest, bytes: Vec<u8> },
    /// The row numbers of a pull of rows.
    Rows(ParkedRequest),
}

impl Peers {
    pub(super) fn new(config: Arc<PsConfig>, registry: ClientRegistry) -> Peers {
        Peers {
            connections: BTreeMap::new(),
            registry,
            chief: ChiefFence::new(config.planted),
            config,
            parked: ParkedRequests::default(),
            members: (0, 0),
            differing: BTreeMap::new(),
        }
    }

    /// Returns the request of a message that has arrived, and renews the lease of its client.
    /// `None` if the connection ends.
    pub(super) fn begin_request(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        header: &Header,
    ) -> Option<PeerRequest> {
        let state = self.connections.get_mut(&connection)?;
        state.heard_at = now;
        state.expected_body = None;
        let request = PeerRequest::new(now, connection, state.role, state.client, header);
        let Some(client) = state.client else { return Some(request) };
        let current = self.registry.client(client);
        // Without a connection, its end is queued, and may wait for an image. `Fenced` would end a
        // session that is alive.
        if current.connection? != connection {
            // Another connection of the same task has replaced this one: an older incarnation, or
            // an older connection of this one.
            let (epoch, current) = (current.epoch, current.epoch);
            request.refuse(out, Refusal::Fenced { epoch, current });
            out.close(connection);
            return None;
        }
        self.registry.renew_lease(client, now);
        Some(request)
    }

    /// Returns the task of the other shard that has a connection.
    pub(super) fn peer_task(&self, connection: u64) -> Option<u32> {
        self.connections.get(&connection)?.peer_task
    }

    /// Returns whether the peer of a connection was asked who it is.
    pub(super) fn has_proved_itself(&self, connection: u64) -> bool {
        self.connections.get(&connection).is_some_and(|of| of.principal.is_some())
    }

    /// Returns whether the peer of a connection may call functions, as far as it has proved who it is.
    pub(super) fn may_call(&self, connection: u64) -> bool {
        let principal = self.connections.get(&connection).and_then(|of| of.principal.as_ref());
        principal.is_none_or(|principal| principal.rights.roles.contains(Role::Client {}))
    }

    /// Returns the refusal of a message from a chief that is fenced.
    pub(super) fn chief_refusal(&self, connection: u64) -> Option<Refusal> {
        let state = self.connections.get(&connection)?;
        let client = state.client.filter(|_| state.role == Role::Chief {})?;
        self.chief.check(self.registry.client(client).epoch).err()
    }

    /// Tells every client that understands it that the server will not come back.
    pub(super) fn say_goodbye(&self, out: &mut ShardOutputs) {
        let hears = |state: &ConnectionState| {
            state.role != Role::Peer {} && state.features.contains(Features::GOODBYE)
        };
        let clients = self.connections.iter().filter(|(_, state)| hears(state));
        for (&connection, _) in clients {
            let envelope = out.stamped(Envelope::default());
            out.send(connection, envelope, message::Goodbye {}.into());
        }
    }

    /// Checks that the client that says hello may join in its role.
    pub(super) fn check_role(
        &self,
        owns_step: bool,
        hello: &IncomingHello<'_>,
    ) -> Result<(), Refusal> {
        let IncomingHello { hello, now, .. } = *hello;
        let task = TaskId::new(hello.job.as_str(), hello.task);
        self.chief.check_hello(&self.registry, owns_step, now, hello, &task)
    }

    /// Admits the client that says hello. Its epoch and its incarnation are checked.
    ///
    /// The newest chief keeps its entry, and so do the clients in `kept`.
    pub(super) fn admit(
        &mut self,
        owns_step: bool,
        hello: &IncomingHello<'_>,
        kept: impl Iterator<Item = ClientKey>,
    ) -> Result<AdmittedClient, Refusal> {
        let IncomingHello { connection, hello, now, .. } = *hello;
        let task = TaskId::new(hello.job.as_str(), hello.task);
        self.registry.keep(kept.chain(self.chief.client).collect());
        let incarnation = hello.incarnation;
        let epoch = hello.client_epoch;
        self.registry.admit(&task, incarnation, epoch, owns_step, connection, now)
    }

    /// Returns the connections without a member that have been silent for a lease. Those of members
    /// end with the leases of their clients. If this server was paused, silence means nothing.
    pub(super) fn silent_connections(&mut self, now: Instant) -> Vec<u64> {
        if let Some(pause) = self.registry.paused() {
            let states = self.connections.values_mut();
            states.for_each(|state| state.heard_at = (state.heard_at + pause).min(now));
            return Vec::new();
        }
        let lease = self.config.lease;
        let is_member =
            |&client: &ClientKey| self.registry.client(client).presence == ClientPresence::Present;
        let silent = self.connections.iter().filter(|(_, state)| {
            let silence = now.saturating_duration_since(state.heard_at);
            silence >= lease && !state.client.as_ref().is_some_and(is_member)
        });
        silent.map(|(&connection, _)| connection).collect()
    }

    /// Returns the connection of the reader that has been silent for longest. It makes room for a
    /// member: a training does without a reader rather than without a worker.
    pub(super) fn most_silent_reader(&self) -> Option<u64> {
        let connections = self.connections.iter();
        let readers = connections.filter(|(_, state)| state.role == Role::Reader {});
        let longest = readers.min_by_key(|&(&connection, state)| (state.heard_at, connection));
        longest.map(|(&connection, _)| connection)
    }

    /// Parks a request, or refuses it if the connection has too many.
    pub(super) fn park(&mut self, out: &mut ShardOutputs, entry: ParkedRequest) {
        let request = entry.request;
        if self.parked.park(entry).is_err() {
            let limit = pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX as u64;
            let what = Detail::clipped("requests waiting on one connection");
            request.refuse(out, Refusal::Busy { what, limit });
        }
    }

    pub(super) fn report_members(&mut self, out: &mut ShardOutputs) {
        let members = self.registry.counts();
        if members != self.members {
            self.members = members;
            let (joined, present) = members;
            out.push(ShardOutput::Members { joined, present });
        }
    }

    /// Checks that the peer of a connection may have shared memory of any kind.
    pub(super) fn check_shareable(&self, request: &PeerRequest) -> Result<(), Refusal> {
        let unsupported = |why| Err(unsupported(request.kind, why));
        let state = self.connections.get(&request.connection);
        match state.map(|state| state.origin) {
            Some(PeerOrigin::Unix { same_user: true }) => {}
            Some(PeerOrigin::Unix { same_user: false }) => return Err(Refusal::Denied {}),
            _ => return unsupported("memory is shared over Unix sockets only"),
        }
        if let Some(why) = self.config.sharing_obstacle() {
            return unsupported(why);
        }
        // Each answer has descriptors, and a process and its user have few of them.
        match state.is_some_and(|state| state.shared >= SHARE_REQUESTS_MAX) {
            true => unsupported("this connection has requested shared memory too often"),
            false => Ok(()),
        }
    }

    /// Sends descriptors of shared memory with the answer that describes it, or its refusal.
    pub(super) fn send_shared(
        &mut self,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        shared: Result<(Message, Vec<OwnedFd>), Refusal>,
    ) {
        let (message, descriptors) = match shared {
            Ok(shared) => shared,
            Err(refusal) => return request.refuse(out, refusal),
        };
        let connection = request.connection;
        if let Some(state) = self.connections.get_mut(&connection) {
            state.shared += 1;
        }
        let envelope = out.stamped(request.envelope);
        out.push(ShardOutput::Shared { connection, envelope, message, descriptors });
    }

    /// Whether a client could hold a token, as far as a shard can tell that does not own the step:
    /// the token was generated for this client, and no other push has been applied under it.
    pub(super) fn could_hold_token(
        &self,
        client: ClientKey,
        token: TokenId,
        generation: u32,
    ) -> bool {
        let client = self.registry.client(client);
        token.0 < TOKEN_LIMIT
            && generation == generation_of(token, client.epoch)
            && !client.window.has_applied(token)
    }

    pub(super) fn check_share_request(
        &self,
        request: &PeerRequest,
        wants: u64,
    ) -> Result<(), Refusal> {
        self.check_shareable(request)?;
        match wants & VALUES {
            0 => Err(unsupported(request.kind, "none of the requested memory is shared")),
            _ => Ok(()),
        }
    }

    /// A connection of a client has ended or was replaced: drops its parked requests, and discards
    /// the body under way. A token granted to a closed connection would be lost.
    pub(super) fn drop_requests(&mut self, connection: u64) {
        self.parked.drop_connection(connection);
        if let Some(state) = self.connections.get_mut(&connection) {
            state.expected_body = None;
        }
    }

    /// A push is refused for this part. Its other parts are skipped.
    pub(super) fn skip_rest(&mut self, incoming: &IncomingPart) {
        let part = &incoming.part;
        if let Some(state) = self.connections.get_mut(&incoming.request.connection) {
            let rest = (incoming.sequence(), part.push_slot);
            state.refused = part.whole.is_none().then_some(rest);
        }
    }

    /// Returns whether a part belongs to a push that was refused, or its connection has ended.
    pub(super) fn skips(&mut self, incoming: &IncomingPart) -> bool {
        let part = &incoming.part;
        let Some(state) = self.connections.get_mut(&incoming.request.connection) else {
            return true;
        };
        let skips = state.refused == Some((incoming.sequence(), part.push_slot));
        if skips && part.whole.is_some() {
            state.refused = None;
        }
        skips
    }

    /// Bytes have arrived over a connection: renews the lease of its client. Returns the push slot
    /// of the part whose body they belong to.
    pub(super) fn heard(&mut self, now: Instant, connection: u64) -> Option<u32> {
        let state = self.connections.get_mut(&connection)?;
        state.heard_at = now;
        if let Some(client) = state.client
            && self.registry.client(client).connection == Some(connection)
        {
            self.registry.renew_lease(client, now);
        }
        match &state.expected_body {
            Some(ExpectedBody::Part(incoming)) => Some(incoming.part.push_slot),
            _ => None,
        }
    }

    /// Returns whether a client is a member.
    pub(super) fn is_present(&self, client: ClientKey) -> bool {
        self.registry.client(client).presence == ClientPresence::Present
    }
}
