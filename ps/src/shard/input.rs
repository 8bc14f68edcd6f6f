//! The inputs of a shard.

use std::sync::Arc;
use std::time::Duration;

use pushpull_checkpoint::CheckpointFault;
use pushpull_common::access::Principal;
use pushpull_common::ids::ClientEpoch;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{Envelope, FrameEvent, Header, Message};

use super::file_work::restore_work::RestoreResult;
use super::file_work::saver_order::SaverEvent;

/// An input of a shard.
#[derive(Debug)]
pub(crate) enum ShardInput<'a> {
    /// A peer has said hello. Its connection has a new number.
    Connected {
        /// The number of the connection.
        connection: u64,
        /// The hello.
        hello: &'a Hello,
        /// The header of the hello.
        header: &'a Header,
        /// Where the peer connects from.
        origin: PeerOrigin,
        /// Who it has proved to be, if it was asked.
        principal: Option<&'a Arc<Principal>>,
    },
    /// A message has arrived. Its body follows, if it has one.
    Message {
        /// The connection.
        connection: u64,
        /// The header of the message.
        header: &'a Header,
        /// The meta of the message.
        message: Message,
    },
    /// Bytes of an incomplete frame have arrived.
    Progress {
        /// The connection.
        connection: u64,
    },
    /// The body of the last message is complete in
    /// [`Shard::body_target`](super::Shard::body_target).
    Body {
        /// The connection.
        connection: u64,
    },
    /// A connection has ended.
    Disconnected {
        /// The connection.
        connection: u64,
    },
    /// The saver reports an event.
    SaverEvent(SaverEvent),
    /// The result of [`ShardOutput::SaveShard`](super::output::ShardOutput::SaveShard).
    ShardSaved {
        /// The connection of the request.
        connection: u64,
        /// The request.
        request: Envelope,
        /// The shard's entry for the manifest, or why the shard is not saved.
        result: Result<Vec<u8>, CheckpointFault>,
    },
    /// The server ends the training: no client gets another token.
    Finish,
    /// The server stops and will not come back.
    Goodbye,
    /// The step owner has welcomed this shard, and assigns client epochs from this one on.
    OwnerTime {
        /// The epoch.
        epoch: ClientEpoch,
    },
    /// The connection to the step owner's shard is up or down.
    OwnerLink {
        /// Whether it is up.
        up: bool,
    },
    /// The step owner has sent a message over that connection.
    Owner {
        /// The header of the message.
        header: &'a Header,
        /// The meta of the message.
        message: Message,
    },
    /// The result of [`ShardOutput::Flush`](super::output::ShardOutput::Flush).
    Flushed(Result<(), String>),
    /// The result of [`ShardOutput::RestoreShard`](super::output::ShardOutput::RestoreShard).
    RestoreAdvanced(Box<RestoreResult>),
    /// The time has advanced. This input comes at least every [`TICK`].
    Tick,
}

impl<'a> ShardInput<'a> {
    /// Returns the input for an event of a connection.
    pub(crate) fn of_frame(connection: u64, event: FrameEvent<'a>) -> ShardInput<'a> {
        match event {
            FrameEvent::Message(header, message) => {
                ShardInput::Message { connection, header, message }
            }
            FrameEvent::Progress => ShardInput::Progress { connection },
            FrameEvent::Body => ShardInput::Body { connection },
        }
    }
}

/// The longest time between two [`ShardInput::Tick`].
pub(crate) const TICK: Duration = Duration::from_millis(50);
