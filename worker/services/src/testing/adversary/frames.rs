//! Messages as they arrive: encoded, and read from the bytes again.

use pushpull_common::ids::RequestId;
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::ValueIs;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Header, Message, Poll, encode};

use super::choices::ServiceChoices;

/// Returns a message with its header as it is read from a frame; `None` if it is not allowed there.
pub(super) fn framed(
    request: RequestId,
    deadline_ms: u32,
    message: &Message,
    body_bytes: u64,
) -> Option<(Header, Message)> {
    let envelope = Envelope { request, deadline_ms, ..Envelope::default() };
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, message, BodyStamp::plain(body_bytes));
    let mut reader = FrameReader::new();
    reader.open();
    match reader.poll(&mut slice_source(&frame)) {
        Ok(Poll::Frame(header, message)) => Some((header, message)),
        _ => None,
    }
}

/// Returns the type of a value: mostly a small one, sometimes any.
pub(super) fn value_type(choices: &mut ServiceChoices<'_>) -> ValueIs {
    let elements = if choices.one_in(8) { choices.byte() } else { choices.of(&[0, 1, 1, 2]) };
    let rank = if choices.one_in(16) { choices.below(9) } else { 1 };
    let extent = |choices: &mut ServiceChoices<'_>| match choices.below(8) {
        0 => choices.number(),
        1 => 300_000,
        _ => choices.below(6) as u64,
    };
    let extents = (0..rank).map(|_| extent(choices)).collect();
    ValueIs { elements, extents: List::new(extents).unwrap_or_default() }
}

/// Returns the bytes that a value takes in a body, if that is a small number.
pub(super) fn value_bytes(is: &ValueIs) -> Option<u64> {
    let size = match is.elements {
        0 => 1,
        1 => 4,
        2 | 3 => 8,
        _ => 2,
    };
    let elements = is.extents.items().iter().try_fold(1_u64, |sum, &e| sum.checked_mul(e))?;
    elements.checked_mul(size)?.checked_next_multiple_of(8).filter(|&bytes| bytes < 1 << 30)
}
