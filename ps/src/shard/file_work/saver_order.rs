//! The orders of the step owner to its saver, and the events that the saver reports.

use std::sync::Arc;

use pushpull_checkpoint::CheckpointFault;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};

/// The requester of a checkpoint, which receives the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SaveRequester {
    /// A peer.
    Connection {
        /// The connection.
        connection: u64,
        /// The request.
        request: Envelope,
    },
    /// A caller in this process, identified by its ticket.
    Ticket(u64),
}

/// The ticket of periodic saves. Their results have no receiver.
pub(crate) const PERIODIC_SAVE: u64 = 0;

impl SaveRequester {
    /// Whether the save is periodic.
    pub(crate) fn is_periodic(self) -> bool {
        self == SaveRequester::Ticket(PERIODIC_SAVE)
    }
}

/// An order to the saver of the step owner. The saver waits for disks and for other tasks.
#[derive(Debug)]
pub(crate) enum SaverOrder {
    /// Find the newest sound checkpoint.
    Find {
        /// The connection of the request.
        connection: u64,
        /// The request.
        request: Envelope,
    },
    /// Save a checkpoint of all shards.
    Save {
        /// The requester.
        requester: SaveRequester,
        /// The user's data, stored with the checkpoint.
        user: Vec<u8>,
        /// The catalogue of the variables.
        catalogue: Arc<Catalogue>,
        /// The restore epoch.
        epoch: RestoreEpoch,
        /// The global step of the cut.
        step: GlobalStep,
    },
    /// Report the result of a save to the caller with this ticket.
    ReportSave {
        /// The ticket.
        ticket: u64,
        /// The checkpoint, or why there is none.
        result: Result<CheckpointId, CheckpointFault>,
    },
}

/// An event that the saver reports.
#[derive(Debug)]
pub(crate) enum SaverEvent {
    /// The result of [`SaverOrder::Find`].
    Found {
        /// The connection of the request.
        connection: u64,
        /// The request.
        request: Envelope,
        /// The checkpoint, if there is one, or why the search failed.
        result: Result<Option<CheckpointId>, CheckpointFault>,
        /// The newer checkpoints that are not sound, newest first: at most as many as an answer can
        /// name.
        passed_over: Vec<PassedOver>,
        /// The highest restore epoch that the name of a checkpoint has, sound or not.
        named: RestoreEpoch,
    },
    /// A caller in this process requests a checkpoint, or a periodic save is due.
    SaveRequested {
        /// The ticket of the request.
        ticket: u64,
        /// The user's data, stored with the checkpoint.
        user: Vec<u8>,
    },
    /// The result of [`SaverOrder::Save`].
    Saved {
        /// The requester.
        requester: SaveRequester,
        /// The checkpoint, or why there is none.
        result: Result<CheckpointId, CheckpointFault>,
    },
}
