//! The inputs and outputs of a rendezvous, and its settings.

use std::time::Duration;

use pushpull_common::identity::Identity;
use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Hello, RankAddresses};

/// The settings of a rendezvous.
#[derive(Clone, Debug)]
pub(crate) struct RendezvousConfig {
    /// The random id of this rendezvous, drawn at its start.
    pub(crate) rendezvous: u64,
    /// The job whose members meet here.
    pub(crate) job: String,
    /// The facts that members must agree on. A rendezvous in no member may know fewer of them: there
    /// the first member of a run has them all.
    pub(crate) identity: Identity,
    /// The lease: a member that is silent for this long is lost.
    pub(crate) lease: Duration,
    /// The time since the last arrival after which an elastic first ring forms without more
    /// members.
    pub(crate) join_window: Duration,
    /// The time since the last arrival after which a successor forms a ring without the rest of
    /// the last one. Members that still compute have not noticed its end yet.
    pub(crate) succession_window: Duration,
    /// The least number of members of the first ring. If it is below the first size, the ring is
    /// elastic.
    pub(crate) first_size_min: u32,
    /// The least number of members of a later ring.
    pub(crate) size_min: u32,
    /// The incarnation of the member in whose process the rendezvous is, if it is in one.
    pub(crate) serving: Option<Incarnation>,
}

/// An event for a rendezvous.
#[derive(Debug)]
pub(crate) enum RendezvousInput {
    /// A peer has connected and said hello.
    Arrived {
        /// The number of the connection, never used before.
        connection: u64,
        /// The hello of the peer.
        hello: Box<Hello>,
    },
    /// A message has arrived.
    Message {
        /// The number of the connection.
        connection: u64,
        /// The message, decoded and checked by itself.
        message: Message,
    },
    /// A connection has ended, by the peer or by a fault.
    Closed {
        /// The number of the connection.
        connection: u64,
        /// The fault, in words.
        reason: String,
    },
    /// The answer to a [`RendezvousOutput::Probe`].
    Probed {
        /// The process.
        incarnation: Incarnation,
        /// Whether its addresses refuse connections, which proves that it has ended.
        gone: bool,
    },
    /// The time that [`super::Rendezvous::wake_at`] has asked for has come.
    Tick,
}

/// An action of a rendezvous.
#[derive(Debug, PartialEq)]
pub(crate) enum RendezvousOutput {
    /// Send a message.
    Send {
        /// The number of the connection.
        connection: u64,
        /// The message to send.
        message: Message,
    },
    /// Close a connection once everything is sent. No output names the connection again.
    Close {
        /// The number of the connection.
        connection: u64,
    },
    /// Connect to a process, and close the connection: does it still run?
    Probe {
        /// The process.
        incarnation: Incarnation,
        /// The addresses of the process.
        addresses: RankAddresses,
    },
}
