//! The state of one connection, and what its next body is used for.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::message::Role;

use super::PeerOrigin;
use super::encoded_parts::EncodedPart;
use super::parked_requests::ParkedRequest;
use crate::client_key::ClientKey;

/// The use of the body that a connection is receiving.
#[derive(Debug)]
pub(super) enum ExpectedBody {
    /// A part of a push.
    Part(IncomingPart),
    /// A catalogue.
    Catalogue { request: Envelope, digest: [u8; 32], bytes: Vec<u8> },
    /// A user's data, to be stored with a checkpoint.
    User { request: Envelope, bytes: Vec<u8> },
    /// The row numbers of a pull of rows.
    Rows(ParkedRequest),
}

/// A part of a push whose message has arrived.
#[derive(Clone, Debug)]
pub(super) struct IncomingPart {
    pub(super) connection: u64,
    pub(super) client: ClientKey,
    pub(super) push_slot: u32,
    /// The range in the shard's layout. Empty for a part without a body.
    pub(super) range: Range<u64>,
    pub(super) request: Envelope,
    /// The encoding of the body, if it is encoded.
    pub(super) encoded: Option<EncodedPart>,
    /// On the last part, the bytes of all parts.
    pub(super) whole: Option<u64>,
    pub(super) next: bool,
    /// When the client stops waiting for the answer.
    pub(super) deadline: Option<Instant>,
}

/// The shard's state of one connection.
#[derive(Debug)]
pub(super) struct ConnectionState {
    pub(super) role: Role,
    pub(super) client: Option<ClientKey>,
    pub(super) origin: PeerOrigin,
    /// How many times shared memory was sent over it.
    pub(super) shared: u32,
    pub(super) crc: bool,
    pub(super) expected_body: Option<ExpectedBody>,
    /// The push that was refused. Its other parts are skipped without an answer.
    pub(super) refused: Option<(Sequence, u32)>,
}
