//! From a message to the bytes that go before its body.

use super::header::{FLAG_BODY_CRC, Header};
use super::message::Message;
use super::version;
use crate::ids::{ConfigEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence};

/// The fields of a header that the sender chooses. The rest follows from the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Envelope {
    /// Correlates a response with its request.
    pub request: RequestId,
    /// The restore epoch the sender lives in.
    pub restore_epoch: RestoreEpoch,
    /// The global step the message belongs to.
    pub step: GlobalStep,
    /// The push the message belongs to.
    pub sequence: Sequence,
    /// How long the requester will still wait, in milliseconds; 0 means no deadline.
    pub deadline_ms: u32,
}

/// What the header says of a body that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyStamp {
    /// Its length in bytes.
    pub bytes: u64,
    /// Its CRC-32C, where checksums were agreed.
    pub crc: Option<u32>,
}

impl BodyStamp {
    /// No body.
    pub const NONE: BodyStamp = BodyStamp { bytes: 0, crc: None };

    /// A body of so many bytes without a checksum.
    pub fn plain(bytes: u64) -> BodyStamp {
        BodyStamp { bytes, crc: None }
    }
}

/// Appends header and meta of a frame to `out`. The body, if any, is sent right behind them.
pub fn encode(out: &mut Vec<u8>, envelope: &Envelope, message: &Message, body: BodyStamp) {
    let start = out.len();
    out.resize(start + Header::BYTES, 0);
    message.put(out);
    let meta = &out[start + Header::BYTES..];
    let header = Header {
        version: version::of(message),
        kind: message.kind(),
        // Every message is bounded by its types, far below 4 GiB.
        meta_bytes: meta.len() as u32,
        flags: if body.crc.is_some() { FLAG_BODY_CRC } else { 0 },
        body_bytes: body.bytes,
        request: envelope.request,
        restore_epoch: envelope.restore_epoch,
        config_epoch: ConfigEpoch(0),
        step: envelope.step,
        sequence: envelope.sequence,
        deadline_ms: envelope.deadline_ms,
        body_crc: body.crc.unwrap_or(0),
        auth: 0,
        meta_crc: crc32c::crc32c(meta),
    };
    // Behind the meta, whose length and checksum it has, and from there to its place: a list of its own
    // would be made for every frame.
    let end = out.len();
    header.put(out);
    out.copy_within(end.., start);
    out.truncate(end);
}
