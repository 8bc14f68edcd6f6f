//! [`IncomingPart`]: a part of a push whose message has arrived.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, Sequence};
use pushpull_common::protocol::EffectRef;
use pushpull_common::protocol::message::PushPart;

use super::PeerRequest;
use super::encoded_part::EncodedPart;
use crate::client_key::ClientKey;
use crate::inbox::{Extents, PendingAnswer, PushArrival};

/// A part of a push whose message has arrived.
#[derive(Clone, Debug)]
pub(in crate::shard) struct IncomingPart {
    pub(in crate::shard) request: PeerRequest,
    pub(in crate::shard) client: ClientKey,
    /// The fields of its message.
    pub(in crate::shard) part: PushPart,
    /// The effect that the push has, if it counts once for one.
    pub(in crate::shard) effect: Option<EffectRef>,
    /// The range in the shard's layout. Empty for a part without a body.
    pub(in crate::shard) range: Range<u64>,
    /// The encoding of the body, if it is encoded.
    pub(in crate::shard) encoded: Option<EncodedPart>,
}

impl IncomingPart {
    pub(in crate::shard) fn sequence(&self) -> Sequence {
        self.request.envelope.sequence
    }

    /// Returns the answer that its client waits for from now on, if this is the last part.
    pub(in crate::shard) fn pending_answer(&self, now: Instant) -> PendingAnswer {
        let PeerRequest { connection, envelope, deadline, .. } = self.request;
        let request = envelope.request;
        let next = self.part.next;
        let since = Some(now);
        PendingAnswer { connection, request, next, since, deadline }
    }

    /// Returns the push that begins with this part, for a shard that has applied `step` steps, if
    /// it counts them.
    pub(in crate::shard) fn new_push(&self, step: Option<u64>) -> PushArrival {
        let named = self.request.envelope.step;
        let part = &self.part;
        PushArrival {
            sequence: self.sequence(),
            operation: part.operation,
            token: part.token,
            generation: part.generation,
            effect: self.effect,
            // No client can have read a step that was not made.
            step: step.map_or(named, |step| named.min(GlobalStep(step))),
            read: part.read,
            extents: Extents::default(),
            shared: Extents::default(),
            scanning: false,
            bytes: 0,
            whole: None,
            order: 0,
            squares: None,
        }
    }
}
