//! The intake of pushes: push slots, parts on their way into them, and buffers for bodies.

use std::sync::Arc;

use pushpull_common::ids::TokenId;

use super::buffer_pool::BufferPool;
use super::peers::Peers;
use crate::aggregate::step_coordinator::PerPush;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::inbox::Inbox;
use crate::metrics::Counters;

/// The pushes that a shard is receiving or holds.
#[derive(Debug)]
pub(super) struct Intake {
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    /// `None` while no variables are declared.
    pub(super) inbox: Option<Inbox>,
    /// The number of the first push slot of the next inbox.
    pub(super) next_push_slot: u32,
    /// Pooled buffers for bodies.
    pub(super) buffer_pool: BufferPool,
}

impl Intake {
    pub(super) fn new(config: Arc<PsConfig>, counters: Arc<Counters>) -> Intake {
        Intake {
            config,
            counters,
            inbox: None,
            next_push_slot: 1,
            buffer_pool: BufferPool::default(),
        }
    }

    /// Returns the squared norm on this shard of the gradient in a push slot. `None` while it is
    /// being computed or scanned. 0 without clipping.
    pub(super) fn squares_of(&self, push_slot: u32) -> Option<f64> {
        let push = self.inbox.as_ref()?.arrival(push_slot)?;
        match self.config.mode.clip_by_global_norm() {
            None => (!push.scanning).then_some(0.0),
            Some(_) => push.squares,
        }
    }

    /// Returns whether the push of a token is complete in the inbox. Then it belongs to the server.
    pub(super) fn is_whole(&self, token: TokenId) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.whole_tokens().any(|other| other == token))
    }

    /// Returns the tokens whose pushes are complete in the inbox.
    pub(super) fn whole_tokens(&self) -> PerPush<TokenId> {
        self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect()
    }

    /// Counts a complete push if parts of it are in a push buffer.
    pub(super) fn count_direct_push(&self, push_slot: u32) {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        if push.is_some_and(|push| !push.shared.ranges().is_empty()) {
            self.counters.direct_pushes.add(1);
        }
    }

    pub(super) fn release(&mut self, push_slot: u32) {
        if let Some(inbox) = &mut self.inbox {
            inbox.release(push_slot);
        }
    }

    /// Drops everything that depends on a client's connection that has ended or was replaced:
    /// incomplete pushes, and parked requests. A token granted to a closed connection would be
    /// lost.
    pub(super) fn drop_client_connection(
        &mut self,
        peers: &mut Peers,
        connection: u64,
        client: ClientKey,
    ) {
        peers.parked.drop_connection(connection);
        if let Some(state) = peers.connections.get_mut(&connection) {
            state.expected_body = None;
        }
        if let Some(inbox) = &mut self.inbox {
            self.counters.pushes_dropped.add(inbox.discard_incomplete(client) as u64);
        }
    }
}
