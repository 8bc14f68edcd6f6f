//! The peers of a shard: their connections, the clients with their leases, and the requests that
//! wait.

use crate::config::PsConfig;
use std::collections::HashMap;
use std::sync::Arc;

use pushpull_common::ids::ClientEpoch;

use super::ConnectionState;
use super::client_registry::{ClientKey, ClientRegistry};
use super::parked_requests::ParkedRequests;

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
}
