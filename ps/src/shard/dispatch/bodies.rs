//! Bodies: the memory that receives each, and its use once it is complete.

use std::time::Instant;

use pushpull_common::protocol::{Header, Refusal};

use crate::shard::Shard;
use crate::shard::file_work::saver_order::SaveRequester;
use crate::shard::peers::ExpectedBody;
use crate::shard::request::PeerRequest;
use crate::shard::request::incoming_part::IncomingPart;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

impl Shard {
    /// Stores the use of the body that follows a request. A message without a body is complete.
    pub(super) fn receive(
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

    /// Receives the row numbers of a pull, or refuses it.
    pub(super) fn receive_row_numbers(
        &mut self,
        request: PeerRequest,
        header: &Header,
        wait: Result<WaitReason, Refusal>,
    ) {
        match wait {
            Ok(wait) => {
                let rows = ExpectedBody::Rows(ParkedRequest { request, wait });
                self.receive(&request, header, rows);
            }
            Err(refusal) => request.refuse(&mut self.out, refusal),
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
                    let request = request.envelope;
                    self.save(now, SaveRequester::Connection { connection, request }, bytes);
                }
            },
            Some(ExpectedBody::Rows(entry)) if self.variables.is_ready() => self.serve(entry),
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
