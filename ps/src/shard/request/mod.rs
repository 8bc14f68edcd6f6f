//! What a peer asks of a shard: a request, the wait for its answer, a part of a push. The owners of
//! the shard's state pass these on, and name no type of each other.

pub(super) mod buffer_pool;
pub(super) mod encoded_part;
pub(super) mod incoming_hello;
pub(super) mod incoming_part;
pub(super) mod parked_request;

use std::time::{Duration, Instant};

use pushpull_common::error::Chain;
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Header, Message, Refusal};

use super::output::ShardOutputs;
use crate::client_key::ClientKey;
use crate::error::StorageError;

/// A request of a peer, with everything that its answer needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerRequest {
    /// The connection. A request id has no meaning on another one.
    pub(crate) connection: u64,
    pub(crate) role: Role,
    /// The client, if the peer is one.
    pub(crate) client: Option<ClientKey>,
    /// The code of the message.
    pub(crate) kind: u16,
    /// The envelope of the answer.
    pub(crate) envelope: Envelope,
    /// When it arrived.
    pub(crate) since: Instant,
    /// When the peer stops waiting for the answer.
    pub(crate) deadline: Option<Instant>,
}

impl PeerRequest {
    /// Returns the request of a message that has just arrived.
    pub(in crate::shard) fn new(
        now: Instant,
        connection: u64,
        role: Role,
        client: Option<ClientKey>,
        header: &Header,
    ) -> PeerRequest {
        let wait = Duration::from_millis(header.deadline_ms.into());
        PeerRequest {
            connection,
            role,
            client,
            kind: header.kind,
            envelope: answer_to(header),
            since: now,
            deadline: (header.deadline_ms > 0).then(|| now + wait),
        }
    }

    pub(in crate::shard) fn answer(&self, out: &mut ShardOutputs, message: Message) {
        out.answer(self.connection, self.envelope, message);
    }

    pub(in crate::shard) fn refuse(&self, out: &mut ShardOutputs, refusal: Refusal) {
        out.refuse(self.connection, self.envelope, refusal);
    }

    pub(in crate::shard) fn refuse_storage(&self, out: &mut ShardOutputs, error: &str) {
        out.refuse_storage(self.connection, self.envelope, error);
    }
}

/// Returns the envelope of the answer to this request.
pub(in crate::shard) fn answer_to(header: &Header) -> Envelope {
    Envelope {
        request: header.request,
        restore_epoch: header.restore_epoch,
        step: header.step,
        sequence: header.sequence,
        deadline_ms: 0,
    }
}

/// Returns the refusal of something that this shard does not do, to be answered by other means.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
}

/// Returns the refusal of a request that the storage cannot serve.
pub(super) fn storage_refusal(error: StorageError) -> Refusal {
    match error {
        StorageError::DoesNotFit { need, limit } => {
            Refusal::DoesNotFit { need, limit, made_of: Detail::default() }
        }
        StorageError::DirectoryTooSmall { ref path, need, limit } => {
            let made_of = format!(
                "the file system of {} has no more; put the state directory on a larger one",
                path.display()
            );
            Refusal::DoesNotFit { need, limit, made_of: Detail::clipped(made_of) }
        }
        StorageError::ModelDoesNotFit { need, limit, made_of } => {
            Refusal::DoesNotFit { need, limit, made_of: Detail::clipped(made_of) }
        }
        error => Refusal::Storage { detail: Detail::clipped(Chain(&error).to_string()) },
    }
}
