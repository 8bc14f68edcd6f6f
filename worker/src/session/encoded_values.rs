//! Encoded values in the answers to pulls.

use std::ops::Range;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::{Encoding, ScaleBlocks};
use pushpull_common::ids::ShardId;
use pushpull_common::tensor::DType;

use crate::gradients::sharding_plan::{LayoutSpan, ShardingPlan};

/// The values in an encoded body that is being received.
#[derive(Debug)]
pub(super) enum EncodedValuesPart {
    /// A range of the shard's layout.
    Layout(ValueEncoding, Range<u64>),
    /// Rows of this type, and their range in the buffer.
    Rows(Encoding, DType, Range<usize>),
    /// Rows of half-precision variables, sent in this encoding, and their range in the buffer.
    Halves(Encoding, Range<usize>),
}

impl EncodedValuesPart {
    /// Describes a body of `bytes` bytes with a range of a layout. `None` if the length does not
    /// match the range.
    pub(super) fn new(
        form: ValueEncoding,
        plan: &ShardingPlan,
        shard: ShardId,
        range: Range<u64>,
        bytes: u64,
    ) -> Option<EncodedValuesPart> {
        let layout = plan.catalogue().layout_of(shard)?;
        let sound = range.start.is_multiple_of(8)
            && range.end.is_multiple_of(8)
            && layout.encoded_bytes(form, range.clone()) == bytes;
        sound.then_some(EncodedValuesPart::Layout(form, range))
    }

    /// Describes a body with rows for range `to` of the buffer. `None` if the length does not
    /// match.
    pub(super) fn rows(
        encoding: Encoding,
        dtype: DType,
        to: Range<usize>,
        bytes: u64,
    ) -> Option<EncodedValuesPart> {
        let sound = encoding.bytes_max(dtype, to.len() / dtype.size()) as u64 == bytes;
        sound.then_some(EncodedValuesPart::Rows(encoding, dtype, to))
    }

    /// Describes a body with half-precision rows for range `to` of the buffer. `None` if the length
    /// does not match.
    pub(super) fn halves(own: Encoding, to: Range<usize>, bytes: u64) -> Option<EncodedValuesPart> {
        let sound = own.bytes_max(DType::F32, to.len() / 2) as u64 == bytes;
        sound.then_some(EncodedValuesPart::Halves(own, to))
    }

    /// Decodes a body into a buffer that starts at offset `base` in a buffer of all variables.
    /// `None` if the body is malformed.
    pub(super) fn decode(
        &self,
        plan: &ShardingPlan,
        shard: ShardId,
        body: &[u8],
        spans: &mut Vec<(LayoutSpan, usize)>,
        (base, buffer): (usize, &mut [u8]),
    ) -> Option<()> {
        let mut rest = body;
        let (form, range) = match self {
            EncodedValuesPart::Layout(form, range) => (*form, range.clone()),
            EncodedValuesPart::Rows(encoding, dtype, to) => {
                let rows = buffer.get_mut(to.clone())?;
                return encoding.decode_into(ScaleBlocks::THROUGH, *dtype, rest, rows).ok();
            }
            EncodedValuesPart::Halves(own, to) => {
                return own.take(rest, buffer.get_mut(to.clone())?).ok();
            }
        };
        for piece in plan.catalogue().layout_of(shard)?.pieces(range) {
            let (encoded, tail) = rest.split_at_checked(piece.encoded_bytes(form))?;
            let elements = piece.range.start..piece.range.start + piece.element_bytes() as u64;
            // The elements of a partition are contiguous in the buffer too.
            plan.spans(shard, elements, spans)?;
            let [(span, bytes)] = spans[..] else { return None };
            let target = match span.behind(base) {
                LayoutSpan::Buffer(start) => start..start + bytes,
                LayoutSpan::Halves(start) => start..start + bytes / 2,
                LayoutSpan::Padding => return None,
            };
            piece.decode(form, encoded, buffer.get_mut(target)?).ok()?;
            rest = tail;
        }
        Some(())
    }
}
