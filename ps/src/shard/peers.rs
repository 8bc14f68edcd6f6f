//! [`Peers`]: who talks to a shard. Connections and what they receive, clients with their leases,
//! and requests that wait.

pub(super) mod chief_fence;
pub(crate) mod client_registry;
pub(super) mod handshake;
pub(super) mod parked_requests;
pub(super) mod peer_request;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{Sequence, TaskId, TokenId};
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{Envelope, Features, Header, Message, Refusal, message};
use pushpull_store::store::VALUES;

use super::checkpoints::saver_order::SaveRequester;
use super::intake::incoming_push::IncomingPart;
use super::output::{ShardOutput, ShardOutputs};
use super::shard_files::ShardFiles;
use super::variables::Variables;
use super::{Detail, Shard};
use crate::aggregate::token_ledger::{TOKEN_LIMIT, generation_of};
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use chief_fence::ChiefFence;
use client_registry::{AdmittedClient, ClientPresence, ClientRegistry};
use handshake::IncomingHello;
use parked_requests::{ParkedRequest, ParkedRequests, WaitReason};
use peer_request::PeerRequest;

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

/// Returns the refusal of shared memory. The client continues over its connection.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
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
        let request = PeerRequest::new(now, connection, state, header);
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

    /// Returns the refusal of a message from a chief that is fenced.
    pub(super) fn chief_refusal(&self, connection: u64) -> Option<Refusal> {
        let state = self.connections.get(&connection)?;
        let client = state.client.filter(|_| state.role == Role::Chief {})?;
        self.chief.check(self.registry.client(client).epoch).err()
    }

    /// Sends the epoch of the newest chief to another shard.
    pub(super) fn send_chief(&self, out: &mut ShardOutputs, connection: u64) {
        let chief = message::ChiefIs { client: self.chief.epoch };
        out.send(connection, Envelope::default(), chief.into());
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
        files: &mut ShardFiles,
        owns_step: bool,
        hello: &IncomingHello<'_>,
        kept: impl Iterator<Item = ClientKey>,
    ) -> Result<AdmittedClient, Refusal> {
        let IncomingHello { connection, hello, now, .. } = *hello;
        let task = TaskId::new(hello.job.as_str(), hello.task);
        files
            .reserve_client(self)
            .map_err(|error| Refusal::Storage { detail: Detail::clipped(error.to_string()) })?;
        self.registry.keep(kept.chain(self.chief.client).collect());
        let (incarnation, epoch) = (hello.incarnation, hello.client_epoch);
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

    /// Answers once all variables have values.
    pub(super) fn await_ready(
        &mut self,
        variables: &Variables,
        out: &mut ShardOutputs,
        request: PeerRequest,
    ) {
        match variables.is_ready() {
            true => variables.answer_ready(out, request.connection, request.envelope),
            false => self.park(out, ParkedRequest { request, wait: WaitReason::Ready }),
        }
    }

    /// Answers the requests that wait for values of all variables.
    pub(super) fn announce_ready(
        &mut self,
        variables: &Variables,
        out: &mut ShardOutputs,
        connection: u64,
        request: Envelope,
    ) {
        variables.answer_ready(out, connection, request);
        let ready = self.parked.take(|entry| matches!(entry.wait, WaitReason::Ready));
        for ParkedRequest { request, .. } in ready {
            variables.answer_ready(out, request.connection, request.envelope);
        }
    }
}

impl Shard {
    /// Stores the use of the body that follows a request. A message without a body is complete.
    pub(super) fn receive(
        &mut self,
        request: &PeerRequest,
        header: &Header,
        expected_body: ExpectedBody,
    ) {
        if let Some(state) = self.peers.connections.get_mut(&request.connection) {
            state.expected_body = Some(expected_body);
        }
        if header.body_bytes == 0 {
            self.body(request.since, request.connection);
        }
    }

    /// Returns the memory that receives the body of the connection's last message. The body fills
    /// all of it. `None` if the body is to be read and discarded.
    pub(crate) fn body_target(&mut self, connection: u64) -> Option<&mut [u8]> {
        match self.peers.connections.get_mut(&connection)?.expected_body.as_mut()? {
            ExpectedBody::Catalogue { bytes, .. } | ExpectedBody::User { bytes, .. } => Some(bytes),
            ExpectedBody::Rows(ParkedRequest {
                wait: WaitReason::Rows { numbers, .. }, ..
            }) => Some(numbers),
            ExpectedBody::Rows(_) => None,
            ExpectedBody::Part(IncomingPart { encoded: Some(encoded), .. }) => {
                Some(&mut encoded.bytes)
            }
            ExpectedBody::Part(IncomingPart { client, part, range, .. }) => {
                let inbox = self.intake.inbox.as_mut();
                let inbox = inbox.filter(|inbox| inbox.holds(*client, part.push_slot))?;
                inbox.bytes_mut(part.push_slot, range.clone())
            }
        }
    }

    /// Bytes of an incomplete frame have arrived.
    pub(super) fn progress(&mut self, now: Instant, connection: u64) {
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return;
        };
        state.heard_at = now;
        if let Some(client) = state.client
            && self.peers.registry.client(client).connection == Some(connection)
        {
            self.peers.registry.renew_lease(client, now);
        }
        if let Some(ExpectedBody::Part(IncomingPart { part, .. })) = &state.expected_body
            && let Some(inbox) = &mut self.intake.inbox
        {
            inbox.touch(part.push_slot, now);
        }
    }

    /// A body is complete: hands it to its use.
    pub(super) fn body(&mut self, now: Instant, connection: u64) {
        self.progress(now, connection);
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return;
        };
        match state.expected_body.take() {
            None => {}
            Some(ExpectedBody::Catalogue { request, digest, bytes }) => {
                match self.body_refusal(connection) {
                    Some(refusal) => request.refuse(&mut self.out, refusal),
                    None => self.declare(&request, digest, &bytes),
                }
            }
            Some(ExpectedBody::User { request, bytes }) => match self.body_refusal(connection) {
                Some(refusal) => request.refuse(&mut self.out, refusal),
                None => {
                    let requester =
                        SaveRequester::Connection { connection, request: request.envelope };
                    let Shard { variables, steps, checkpoints, out, .. } = self;
                    checkpoints.save(variables, steps, out, now, requester, bytes);
                }
            },
            Some(ExpectedBody::Rows(entry)) if self.variables.is_ready() => {
                let Shard { variables, files, peers, steps, pulls, out, .. } = self;
                pulls.serve(variables, files, peers, steps, out, entry);
            }
            Some(ExpectedBody::Rows(entry)) => {
                entry.request.refuse(&mut self.out, Refusal::NotInitialized {});
            }
            Some(ExpectedBody::Part(part)) => self.part_received(now, part),
        }
    }

    /// Returns the refusal of a chief's body if something happened since its message that rejects
    /// it.
    fn body_refusal(&self, connection: u64) -> Option<Refusal> {
        self.files.poisoned().or_else(|| self.peers.chief_refusal(connection))
    }
}
