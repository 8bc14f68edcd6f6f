//! Bodies: the memory that receives each, and its use once it is complete.

use std::time::Instant;

use pushpull_common::protocol::{Header, Refusal};

use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::file_work::saver_order::SaveRequester;
use crate::shard::peers::ExpectedBody;
use crate::shard::request::PeerRequest;
use crate::shard::request::incoming_part::IncomingPart;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

impl Shard {
    /// Stores the use of the body that follows a request. A message without a body is complete.
    /// Returns what has changed.
    pub(super) fn receive(
        &mut self,
        request: &PeerRequest,
        header: &Header,
        expected_body: ExpectedBody,
    ) -> Changes {
        if let Some(state) = self.peers.connections.get_mut(&request.connection) {
            state.expected_body = Some(expected_body);
        }
        match header.body_bytes {
            0 => self.body(request.since, request.connection),
            _ => Changes::NONE,
        }
    }

    /// Receives the row numbers of a pull, or refuses it.
    pub(super) fn receive_row_numbers(
        &mut self,
        request: PeerRequest,
        header: &Header,
        wait: Result<WaitReason, Refusal>,
    ) -> Changes {
        match wait {
            Ok(wait) => {
                let rows = ExpectedBody::Rows(ParkedRequest { request, wait });
                self.receive(&request, header, rows)
            }
            Err(refusal) => {
                request.refuse(&mut self.out, refusal);
                Changes::NONE
            }
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
                self.intake.body_target(*client, part.push_slot, range.clone())
            }
        }
    }

    /// Bytes of an incomplete frame have arrived.
    pub(in crate::shard) fn progress(&mut self, now: Instant, connection: u64) {
        if let Some(push_slot) = self.peers.heard(now, connection)
            && let Some(inbox) = &mut self.intake.inbox
        {
            inbox.touch(push_slot, now);
        }
    }

    /// A body is complete: hands it to its use. Returns what that has changed.
    pub(in crate::shard) fn body(&mut self, now: Instant, connection: u64) -> Changes {
        self.progress(now, connection);
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return Changes::NONE;
        };
        match state.expected_body.take() {
            None => return Changes::NONE,
            Some(ExpectedBody::Catalogue { request, digest, bytes }) => {
                match self.body_refusal(connection) {
                    Some(refusal) => request.refuse(&mut self.out, refusal),
                    None => self.declare(&request, digest, &bytes),
                }
            }
            Some(ExpectedBody::User { request, bytes }) => match self.body_refusal(connection) {
                Some(refusal) => request.refuse(&mut self.out, refusal),
                None => {
                    let request = request.envelope;
                    self.save(now, SaveRequester::Connection { connection, request }, bytes);
                }
            },
            Some(ExpectedBody::Rows(entry)) => {
                match self.variables.is_ready() {
                    true => self.serve(entry),
                    false => entry.request.refuse(&mut self.out, Refusal::NotInitialized {}),
                }
                return Changes::NONE;
            }
            Some(ExpectedBody::Part(part)) => return self.part_received(now, part),
        }
        Changes::ALL
    }

    /// Returns the refusal of a chief's body if something happened since its message that rejects
    /// it.
    fn body_refusal(&self, connection: u64) -> Option<Refusal> {
        self.files.poisoned().or_else(|| self.peers.chief_refusal(connection))
    }
}
