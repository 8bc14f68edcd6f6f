//! A connection of a peer, from the side of the peer.

use pushpull_common::ids::{ClientEpoch, Sequence};
use pushpull_common::protocol::message::Hello;

use super::push_records::PushKey;

/// The peer's side of a connection.
#[derive(Clone, Debug)]
pub(super) struct PeerLine {
    pub(super) connection: u64,
    pub(super) hello: Hello,
    /// The epoch of the client, from its hello or its welcome.
    pub(super) epoch: ClientEpoch,
    /// The sequence of the newest push.
    pub(super) next: u64,
    /// The body that is due, and how much of it has been sent.
    pub(super) body: Option<(Vec<u8>, usize)>,
}

impl PeerLine {
    /// Returns the key of the push that this peer has given a sequence.
    pub(super) fn key(&self, sequence: Sequence) -> PushKey {
        PushKey { task: self.hello.task, epoch: self.epoch, sequence }
    }
}
