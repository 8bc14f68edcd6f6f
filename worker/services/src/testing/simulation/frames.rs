//! Frames of the endpoints of services and call sessions.

use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};
use pushpull_net::SendBody;

use crate::value_body::ValueBody;

/// Encodes a message with its body.
pub(super) fn frame_of(
    envelope: &Envelope,
    message: &Message,
    body: &ValueBody,
    crc: bool,
) -> Vec<u8> {
    let crc = (crc && body.bytes() > 0).then(|| body.crc());
    let mut frame = Vec::new();
    encode(&mut frame, envelope, message, BodyStamp { bytes: body.bytes(), crc });
    body.slices().for_each(|slice| frame.extend_from_slice(slice));
    frame
}
