//! Encodes the header and meta of a frame.

use super::feature::Features;
use super::header::{FLAG_BODY_CRC, Header};
use super::message::Message;
use super::version;
use crate::ids::{ConfigEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence};

/// The fields of a header that the sender chooses; the message determines the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Envelope {
    /// Correlates a response with its request.
    pub request: RequestId,
    /// The restore epoch of the sender.
    pub restore_epoch: RestoreEpoch,
    /// The global step that the message belongs to.
    pub step: GlobalStep,
    /// The push that the message belongs to.
    pub sequence: Sequence,
    /// The time in milliseconds that the requester will still wait; 0 means no deadline.
    pub deadline_ms: u32,
}

/// The header's description of the body that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyStamp {
    /// The length in bytes.
    pub bytes: u64,
    /// The CRC-32C, if checksums were agreed.
    pub crc: Option<u32>,
}

impl BodyStamp {
    /// No body.
    pub const NONE: BodyStamp = BodyStamp { bytes: 0, crc: None };

    /// Describes a body of `bytes` bytes without a checksum.
    pub fn plain(bytes: u64) -> BodyStamp {
        BodyStamp { bytes, crc: None }
    }
}

/// Appends the header and meta of a frame to `out`, for a peer with which no features are agreed,
/// such as the frames of a handshake. The body, if any, must be sent right after them.
pub fn encode(out: &mut Vec<u8>, envelope: &Envelope, message: &Message, body: BodyStamp) {
    encode_for(Features::NONE, out, envelope, message, body);
}

/// Appends the header and meta of a frame to `out`, for a peer with which these features are
/// agreed. The body, if any, must be sent right after them.
pub fn encode_for(
    features: Features,
    out: &mut Vec<u8>,
    envelope: &Envelope,
    message: &Message,
    body: BodyStamp,
) {
    let start = out.len();
    out.resize(start + Header::BYTES, 0);
    message.put(features, out);
    let meta = &out[start + Header::BYTES..];
    let header = Header {
        version: version::of(message),
        kind: message.kind(),
        // Fits: the types of every message bound it far below 4 GiB.
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
    // The header holds the meta's length and checksum, so it is appended behind the meta and then
    // moved to the front. A separate buffer would be an allocation for every frame.
    let end = out.len();
    header.put(out);
    out.copy_within(end.., start);
    out.truncate(end);
}
