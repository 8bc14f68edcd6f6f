//! Shares values with clients of the same host and user, which read them without requests.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::shared_values::ValueCounts;

use super::handshake::PeerOrigin;
use super::output::ShardOutput;
use super::{Detail, Shard, VariablesState};
use crate::error::StorageError;
use crate::store::VALUES;

impl Shard {
    /// Returns the counts that clients read beside shared values.
    pub(super) fn counts(&self) -> ValueCounts {
        ValueCounts {
            version: self.variables.version,
            gradients: self.variables.gradients,
            step: self.step().0,
            serves: self.served_step(),
            epoch: self.variables.epoch.0.into(),
        }
    }

    /// Handles a client's request for shared values.
    pub(super) fn share(&mut self, connection: u64, request: Envelope, kind: u16, wants: u64) {
        if let Err(refusal) = self.check_share_request(connection, kind, wants) {
            return self.out.refuse(connection, request, refusal);
        }
        let counts = self.counts();
        let VariablesState::Ready(store) = &mut self.variables.state else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        match store.share(connection, counts, &self.files.budget) {
            Ok((shared, descriptors)) => {
                self.send_shared(connection, request, shared.into(), descriptors);
            }
            Err(StorageError::DoesNotFit { need, limit }) => {
                self.out.refuse(connection, request, Refusal::DoesNotFit { need, limit });
            }
            Err(error) => {
                // The memory cannot be shared, or no descriptors are left. The client continues
                // with pulls over its connection.
                let detail = Detail::clipped(error.to_string());
                self.out.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
    }

    fn check_share_request(&self, connection: u64, kind: u16, wants: u64) -> Result<(), Refusal> {
        self.check_shareable(connection, kind)?;
        match wants & VALUES {
            0 => Err(unsupported(kind, "none of the requested memory is shared")),
            _ => Ok(()),
        }
    }

    /// Checks that the peer of a connection may have shared memory of any kind.
    pub(super) fn check_shareable(&self, connection: u64, kind: u16) -> Result<(), Refusal> {
        let unsupported = |why| Err(unsupported(kind, why));
        let state = self.peers.connections.get(&connection);
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
        connection: u64,
        request: Envelope,
        message: Message,
        descriptors: Vec<OwnedFd>,
    ) {
        if let Some(state) = self.peers.connections.get_mut(&connection) {
            state.shared += 1;
        }
        let (step, restore_epoch) = (self.step(), self.variables.epoch);
        let envelope = Envelope { step, restore_epoch, ..request };
        self.out.push(ShardOutput::Shared { connection, envelope, message, descriptors });
    }

    /// Revokes the values shared over a connection that has ended. Its pins no longer count.
    pub(super) fn revoke_shared(&mut self, connection: u64) {
        if let VariablesState::Ready(store) = &mut self.variables.state
            && store.is_shared()
        {
            let counted = store.revoke_reader(connection);
            self.count_pulls(counted);
        }
    }

    pub(super) fn count_direct_pulls(&mut self) {
        if let VariablesState::Ready(store) = &mut self.variables.state {
            let counted = store.direct_pulls();
            self.count_pulls(counted);
        }
    }

    fn count_pulls(&self, (pulls, bytes): (u64, u64)) {
        self.counters.direct_pulls.add(pulls);
        self.counters.direct_pull_bytes.add(bytes);
    }

    /// Returns whether a client reads shared values. Such a reader does not report that it has
    /// unpinned a block, which work may be waiting for.
    pub(crate) fn is_shared(&self) -> bool {
        self.store().is_some_and(|store| store.is_shared())
    }

    /// Revokes the shared values of readers that have been in one pull for `stall_timeout`. Returns
    /// their connections, which must be closed.
    pub(crate) fn revoke_stalled_readers(
        &mut self,
        now: Instant,
        stall_timeout: Duration,
    ) -> Vec<u64> {
        let VariablesState::Ready(store) = &mut self.variables.state else { return Vec::new() };
        let stalled = store.stalled_readers(now, stall_timeout);
        stalled.iter().for_each(|&connection| self.revoke_shared(connection));
        stalled
    }

    /// Revokes the shared values of readers that pin blocks an update needs, because they have read
    /// for too long. Returns their connections, which must be closed.
    pub(crate) fn revoke_slow_readers(&mut self) -> Vec<u64> {
        let VariablesState::Ready(store) = &self.variables.state else { return Vec::new() };
        let slow = store.readers_of_retired_blocks();
        slow.iter().for_each(|&connection| self.revoke_shared(connection));
        slow
    }
}

/// Returns the refusal of shared memory. The client continues over its connection.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
}
