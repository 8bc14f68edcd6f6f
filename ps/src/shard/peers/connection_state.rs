//! The state of one connection, and what its next body is used for.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{Header, Refusal};

use super::parked_requests::{ParkedRequest, WaitReason};
use super::peer_request::PeerRequest;
use crate::client_key::ClientKey;
use crate::shard::checkpoints::saver_order::SaveRequester;
use crate::shard::intake::incoming_part::IncomingPart;
use crate::shard::{PeerOrigin, Shard};

/// The shard's state of one connection.
#[derive(Debug)]
pub(in crate::shard) struct ConnectionState {
    pub(in crate::shard) role: Role,
    pub(in crate::shard) client: Option<ClientKey>,
    pub(in crate::shard) origin: PeerOrigin,
    /// How many times shared memory was sent over it.
    pub(in crate::shard) shared: u32,
    pub(in crate::shard) crc: bool,
    pub(in crate::shard) expected_body: Option<ExpectedBody>,
    /// The push that was refused. Its other parts are skipped without an answer.
    pub(in crate::shard) refused: Option<(Sequence, u32)>,
}

/// The use of the body that a connection is receiving.
#[derive(Debug)]
pub(in crate::shard) enum ExpectedBody {
    /// A part of a push.
    Part(IncomingPart),
    /// A catalogue.
    Catalogue { request: PeerRequest, digest: [u8; 32], bytes: Vec<u8> },
    /// A user's data, to be stored with a checkpoint.
    User { request: PeerRequest, bytes: Vec<u8> },
    /// The row numbers of a pull of rows.
    Rows(ParkedRequest),
}

impl Shard {
    /// Stores the use of the body that follows a request. A message without a body is complete.
    pub(in crate::shard) fn receive(
        &mut self,
        request: &PeerRequest,
        header: &Header,
        expected_body: ExpectedBody,
    ) {
        if let Some(state) = self.peers.connections.get_mut(&request.connection) {
            state.expected_body = Some(expected_body);
        }
        if header.body_bytes == 0 {
            self.body(request.since, request.connection);
        }
    }

    /// Returns the memory that receives the body of the connection's last message. The body fills
    /// all of it. `None` if the body is to be read and discarded.
    pub(crate) fn body_target(&mut self, connection: u64) -> Option<&mut [u8]> {
        match self.peers.connections.get_mut(&connection)?.expected_body.as_mut()? {
            ExpectedBody::Catalogue { bytes, .. } | ExpectedBody::User { bytes, .. } => Some(bytes),
            ExpectedBody::Rows(ParkedRequest {
                wait: WaitReason::Rows { numbers, .. }, ..
            }) => Some(numbers),
            ExpectedBody::Rows(_) => None,
            ExpectedBody::Part(IncomingPart { encoded: Some(encoded), .. }) => {
                Some(&mut encoded.bytes)
            }
            ExpectedBody::Part(IncomingPart { client, part, range, .. }) => {
                let inbox = self.intake.inbox.as_mut();
                let inbox = inbox.filter(|inbox| inbox.holds(*client, part.push_slot))?;
                inbox.bytes_mut(part.push_slot, range.clone())
            }
        }
    }

    /// Bytes of an incomplete frame have arrived.
    pub(in crate::shard) fn progress(&mut self, now: Instant, connection: u64) {
        let Some(state) = self.peers.connections.get(&connection) else {
            return;
        };
        if let Some(client) = state.client
            && self.peers.registry.client(client).connection == Some(connection)
        {
            self.peers.registry.renew_lease(client, now);
        }
        if let Some(ExpectedBody::Part(IncomingPart { part, .. })) = &state.expected_body
            && let Some(inbox) = &mut self.intake.inbox
        {
            inbox.touch(part.push_slot, now);
        }
    }

    /// A body is complete: hands it to its use.
    pub(in crate::shard) fn body(&mut self, now: Instant, connection: u64) {
        self.progress(now, connection);
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return;
        };
        match state.expected_body.take() {
            None => {}
            Some(ExpectedBody::Catalogue { request, digest, bytes }) => {
                match self.body_refusal(connection) {
                    Some(refusal) => request.refuse(&mut self.out, refusal),
                    None => self.declare(&request, digest, &bytes),
                }
            }
            Some(ExpectedBody::User { request, bytes }) => match self.body_refusal(connection) {
                Some(refusal) => request.refuse(&mut self.out, refusal),
                None => {
                    let requester =
                        SaveRequester::Connection { connection, request: request.envelope };
                    let Shard { variables, steps, checkpoints, out, .. } = self;
                    checkpoints.save(variables, steps, out, now, requester, bytes);
                }
            },
            Some(ExpectedBody::Rows(entry)) if self.variables.is_ready() => {
                let Shard { variables, files, peers, steps, pulls, out, .. } = self;
                pulls.serve(variables, files, peers, steps, out, entry);
            }
            Some(ExpectedBody::Rows(entry)) => {
                entry.request.refuse(&mut self.out, Refusal::NotInitialized {});
            }
            Some(ExpectedBody::Part(part)) => self.part_received(now, part),
        }
    }

    /// Returns the refusal of a chief's body if something happened since its message that rejects
    /// it.
    fn body_refusal(&self, connection: u64) -> Option<Refusal> {
        self.files.poisoned().or_else(|| self.peers.chief_refusal(connection))
    }
}
