//! Memory that is lent to clients of the same host and user: they read values by themselves.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::shared_values::Counts;

use super::handshake::Way;
use super::output::Output;
use super::{Detail, Shard, Variables};
use crate::error::StorageError;
use crate::store::VALUES;

impl Shard {
    /// What the values are of, as those are told who read them without a request.
    pub(super) fn counts(&self) -> Counts {
        Counts {
            version: self.version,
            gradients: self.gradients,
            step: self.step().0,
            serves: self.serves(),
            epoch: self.epoch.0.into(),
        }
    }

    /// A client asks for memory.
    pub(super) fn share(&mut self, connection: u64, request: Envelope, kind: u16, wants: u64) {
        if let Err(refusal) = self.may_share(connection, kind, wants) {
            return self.refuse(connection, request, refusal);
        }
        let counts = self.counts();
        let Variables::Ready(store) = &mut self.variables else {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        };
        match store.share(connection, counts, &self.budget) {
            Ok((shared, descriptors)) => {
                self.send_shared(connection, request, shared.into(), descriptors);
            }
            Err(StorageError::DoesNotFit { need, limit }) => {
                self.refuse(connection, request, Refusal::DoesNotFit { need, limit });
            }
            Err(error) => {
                // Where memory cannot be lent, or there are no descriptors left: either way the client
                // goes on over its connection.
                let detail = Detail::clipped(error.to_string());
                self.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
    }

    fn may_share(&self, connection: u64, kind: u16, wants: u64) -> Result<(), Refusal> {
        self.may_be_shared(connection, kind)?;
        match wants & VALUES {
            0 => Err(unsupported(kind, "nothing that is asked for is shared")),
            _ => Ok(()),
        }
    }

    /// Whether whoever has come over a connection may be lent memory of any kind.
    pub(super) fn may_be_shared(&self, connection: u64, kind: u16) -> Result<(), Refusal> {
        let unsupported = |why| Err(unsupported(kind, why));
        let conversation = self.conversations.get(&connection);
        match conversation.map(|conversation| conversation.way) {
            Some(Way::Unix { same_user: true }) => {}
            Some(Way::Unix { same_user: false }) => return Err(Refusal::Denied {}),
            _ => return unsupported("memory is shared over Unix sockets only"),
        }
        if let Some(why) = self.config.shares_nothing() {
            return unsupported(why);
        }
        // Each answer has descriptors, of which a process and its user have few.
        match conversation.is_some_and(|conversation| conversation.shared >= SHARE_REQUESTS_MAX) {
            true => unsupported("this connection has been given shared memory often enough"),
            false => Ok(()),
        }
    }

    /// A connection is lent memory: what it is told of it goes with the descriptors.
    pub(super) fn send_shared(
        &mut self,
        connection: u64,
        request: Envelope,
        message: Message,
        descriptors: Vec<OwnedFd>,
    ) {
        if let Some(conversation) = self.conversations.get_mut(&connection) {
            conversation.shared += 1;
        }
        let (step, restore_epoch) = (self.step(), self.epoch);
        let envelope = Envelope { step, restore_epoch, ..request };
        self.outputs.push_back(Output::Shared { connection, envelope, message, descriptors });
    }

    /// A connection is gone: what it has been lent is not looked at any more.
    pub(super) fn take_back(&mut self, connection: u64) {
        if let Variables::Ready(store) = &mut self.variables
            && store.is_shared()
        {
            let counted = store.take_back(connection);
            self.count_pulls(counted);
        }
    }

    pub(super) fn count_direct_pulls(&mut self) {
        if let Variables::Ready(store) = &mut self.variables {
            let counted = store.direct_pulls();
            self.count_pulls(counted);
        }
    }

    fn count_pulls(&self, (pulls, bytes): (u64, u64)) {
        self.counters.direct_pulls.add(pulls);
        self.counters.direct_pull_bytes.add(bytes);
    }

    /// Whether somebody reads values without a request: nobody tells when memory is free again that work
    /// waits for.
    pub(crate) fn is_shared(&self) -> bool {
        self.store().is_some_and(|store| store.is_shared())
    }

    /// Takes back what those have been lent who have been at one pull for so long; their connections,
    /// which are to be cut.
    pub(crate) fn take_back_from_stalled_readers(
        &mut self,
        now: Instant,
        stall_timeout: Duration,
    ) -> Vec<u64> {
        let Variables::Ready(store) = &mut self.variables else { return Vec::new() };
        let stalled = store.stalled_readers(now, stall_timeout);
        stalled.iter().for_each(|&connection| self.take_back(connection));
        stalled
    }

    /// Takes back what those have been lent who hold memory that is to be written; their connections,
    /// which are to be cut: they have read for too long.
    pub(crate) fn take_back_from_slow_readers(&mut self) -> Vec<u64> {
        let Variables::Ready(store) = &self.variables else { return Vec::new() };
        let slow = store.holding_readers();
        slow.iter().for_each(|&connection| self.take_back(connection));
        slow
    }
}

/// Why a client goes on over its connection.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
}
