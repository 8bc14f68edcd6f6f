//! The peers of a shard: their connections, the clients with their leases, and the requests that
//! wait.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, TaskId, TokenId};
use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_store::store::VALUES;

use super::client_registry::{ClientPresence, ClientRegistry};
use super::output::{Outputs, ShardOutput};
use super::parked_requests::{ParkedRequest, ParkedRequests, WaitReason};
use super::shared_values::unsupported;
use super::variables::Variables;
use super::{ConnectionState, Detail, PeerOrigin};
use crate::aggregate::token_ledger::{TOKEN_LIMIT, generation_of};
use crate::client_key::ClientKey;
use crate::config::PsConfig;

/// The peers of a shard.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) config: Arc<PsConfig>,
    pub(super) connections: HashMap<u64, ConnectionState>,
    pub(super) registry: ClientRegistry,
    pub(super) chief: ChiefFence,
    pub(super) parked: ParkedRequests,
    /// How many clients have ever joined, and how many are present, as last reported.
    pub(super) members: (usize, usize),
}

/// The newest chief. Older chiefs are fenced.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChiefFence {
    /// The fencing epoch.
    pub(super) epoch: ClientEpoch,
    /// `None` if the client is unknown, as in an arena of an earlier version.
    pub(super) client: Option<ClientKey>,
    /// On another shard than the step owner's: the epoch of the last `ChiefIs` on the current
    /// connection to the step owner.
    pub(super) announced: Option<ClientEpoch>,
}

impl Peers {
    pub(super) fn new(config: Arc<PsConfig>, registry: ClientRegistry) -> Peers {
        Peers {
            config,
            connections: HashMap::new(),
            registry,
            chief: ChiefFence::default(),
            parked: ParkedRequests::default(),
            members: (0, 0),
        }
    }

    pub(super) fn task_of(&self, client: ClientKey) -> &TaskId {
        &self.registry.client(client).task
    }

    /// Describes a replica, and when it was last heard from.
    pub(super) fn describe_client(&self, now: Instant, client: ClientKey) -> String {
        let entry = self.registry.client(client);
        let silent = now.saturating_duration_since(self.registry.last_heard_at(client));
        let state = match entry.presence {
            ClientPresence::Lost => "lost, heard from",
            ClientPresence::Left => "left, heard from",
            ClientPresence::Present => "heard from",
        };
        format!("{} ({state} {} ms ago)", entry.task, silent.as_millis())
    }

    /// Parks a request, or refuses it if the connection has too many.
    pub(super) fn park(&mut self, out: &mut Outputs, entry: ParkedRequest) {
        let (connection, request) = (entry.connection, entry.request);
        if self.parked.park(entry).is_err() {
            let limit = pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX as u64;
            let what = Detail::clipped("requests waiting on one connection");
            out.refuse(connection, request, Refusal::Busy { what, limit });
        }
    }

    pub(super) fn report_members(&mut self, out: &mut Outputs) {
        let members = self.registry.counts();
        if members != self.members {
            self.members = members;
            let (joined, present) = members;
            out.push(ShardOutput::Members { joined, present });
        }
    }

    /// Checks that the peer of a connection may have shared memory of any kind.
    pub(super) fn check_shareable(&self, connection: u64, kind: u16) -> Result<(), Refusal> {
        let unsupported = |why| Err(unsupported(kind, why));
        let state = self.connections.get(&connection);
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

    /// Sends descriptors of shared memory with the answer that describes it.
    pub(super) fn send_shared(
        &mut self,
        out: &mut Outputs,
        connection: u64,
        request: Envelope,
        message: Message,
        descriptors: Vec<OwnedFd>,
    ) {
        if let Some(state) = self.connections.get_mut(&connection) {
            state.shared += 1;
        }
        let envelope = out.stamped(request);
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
        connection: u64,
        kind: u16,
        wants: u64,
    ) -> Result<(), Refusal> {
        self.check_shareable(connection, kind)?;
        match wants & VALUES {
            0 => Err(unsupported(kind, "none of the requested memory is shared")),
            _ => Ok(()),
        }
    }

    pub(super) fn await_ready(
        &mut self,
        variables: &Variables,
        out: &mut Outputs,
        entry: ParkedRequest,
    ) {
        match variables.is_ready() {
            true => variables.answer_ready(out, entry.connection, entry.request),
            false => self.park(out, entry),
        }
    }

    /// Answers the requests that wait for values of all variables.
    pub(super) fn announce_ready(
        &mut self,
        variables: &Variables,
        out: &mut Outputs,
        connection: u64,
        request: Envelope,
    ) {
        variables.answer_ready(out, connection, request);
        for entry in self.parked.take(|entry| matches!(entry.wait, WaitReason::Ready)) {
            variables.answer_ready(out, entry.connection, entry.request);
        }
    }
}
