//! [`ClientEntry`]: the client of one task, and the part of it that survives a restart.

use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, Incarnation, TaskId};
use pushpull_common::status::Presence;

use crate::push_window::PushWindow;

/// The most tasks with an entry. If all entries are taken, a new task takes that of one which the
/// cluster does not list and which has been gone for longest.
pub(crate) const CLIENTS_MAX: usize = 16_384;

/// The limit of all epochs of clients.
pub(crate) const EPOCH_LIMIT: u64 = 1 << 63;

/// Whether a client is a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientPresence {
    /// It has joined, and its lease has not expired.
    Present,
    /// It has left.
    Left,
    /// Its lease has expired.
    Lost,
}

impl From<ClientPresence> for Presence {
    fn from(presence: ClientPresence) -> Presence {
        match presence {
            ClientPresence::Present => Presence::Present,
            ClientPresence::Left => Presence::Left,
            ClientPresence::Lost => Presence::Lost,
        }
    }
}

/// The client of one task.
#[derive(Debug)]
pub(crate) struct ClientEntry {
    pub(crate) task: TaskId,
    pub(crate) epoch: ClientEpoch,
    pub(crate) incarnation: Incarnation,
    pub(crate) presence: ClientPresence,
    pub(crate) window: PushWindow,
    /// Whether this incarnation has declared the data set.
    pub(crate) reads_data: bool,
    /// Whether pushes of this client may be under way: it was granted a token and has not said
    /// since that it is at its end.
    pub(crate) is_training: bool,
    pub(crate) connection: Option<u64>,
    pub(crate) heard_at: Instant,
    /// When its last gradient got its outcome, and how long after the one before.
    pub(crate) settled_at: Option<Instant>,
    pub(crate) step_time: Option<Duration>,
}

/// The part of a client's entry that survives a restart.
#[derive(Clone, Debug)]
pub(crate) struct DurableClient {
    pub(crate) task: TaskId,
    pub(crate) epoch: ClientEpoch,
    pub(crate) incarnation: Incarnation,
    pub(crate) presence: ClientPresence,
    pub(crate) window: PushWindow,
    pub(crate) reads_data: bool,
}

/// The incarnation of a client that has ended. No client draws it.
pub(crate) const ENDED: Incarnation = Incarnation(0);

impl ClientEntry {
    /// Returns whether the run of this entry was ended while it was away.
    pub(crate) fn has_ended(&self) -> bool {
        self.incarnation == ENDED
    }

    /// Returns the entry of a client that an earlier process knew. Its lease starts now.
    pub(crate) fn restored(client: DurableClient, now: Instant) -> ClientEntry {
        let DurableClient { task, epoch, incarnation, presence, window, reads_data } = client;
        ClientEntry {
            task,
            epoch,
            incarnation,
            presence,
            window,
            reads_data,
            // Whether it was is not durable.
            is_training: presence == ClientPresence::Present,
            connection: None,
            heard_at: now,
            settled_at: None,
            step_time: None,
        }
    }

    /// Returns how long the client has been silent.
    pub(crate) fn silent(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard_at)
    }

    /// Records that a gradient of the client has its outcome.
    pub(crate) fn gradient_settled(&mut self, now: Instant) {
        let before = self.settled_at.replace(now);
        self.step_time = before.map(|before| now.saturating_duration_since(before));
    }
}
