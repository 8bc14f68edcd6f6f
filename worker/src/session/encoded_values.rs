//! Encoded values in the answers to pulls.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::{Encoding, ScaleBlocks};
use pushpull_common::ids::{PartitionId, ShardId};
use pushpull_common::protocol::message::{PullEncoded, PullRows, PullRowsEncoded, Selection};
use pushpull_common::protocol::{Message, message};
use pushpull_common::tensor::DType;

use super::pulls::PendingPull;
use super::{OpId, OpKind, Session};
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

impl Session {
    /// Builds the request for values of a shard, with an encoding if one applies.
    pub(super) fn request_for_values(
        &self,
        link: usize,
        plan: &ShardingPlan,
        selection: Selection,
    ) -> Message {
        let pull = message::Pull { selection };
        match self.form_of_values(link, plan) {
            None => pull.into(),
            Some(form) => PullEncoded { pull, encoding: form.code() }.into(),
        }
    }

    /// Builds the request for rows of a partition, with an encoding if one applies.
    pub(super) fn request_for_rows(
        &self,
        pull: &PendingPull,
        request: usize,
        partition: PartitionId,
    ) -> Message {
        let encoding = self.encoding_of_rows(pull, request);
        let pull = PullRows { partition };
        match encoding {
            None => pull.into(),
            Some(encoding) => PullRowsEncoded { pull, encoding: encoding.code() }.into(),
        }
    }

    /// Returns the encoding of a request's rows, if any. Rows of half-precision variables always
    /// come in their own type; other rows in the chosen encoding if they are trainable.
    pub(super) fn encoding_of_rows(&self, pull: &PendingPull, request: usize) -> Option<Encoding> {
        let partition = pull.partition_of(request)?;
        let link = pull.requests.get(request)?.link;
        let chosen = || self.chosen_encoding(link).filter(|_| partition.trainable);
        partition.own_encoding.or_else(chosen)
    }

    /// Returns the encoding of a shard's values, if any: the chosen one if the shard supports it,
    /// or [`ValueEncoding::Own`] if the shard has half-precision variables.
    pub(super) fn form_of_values(&self, link: usize, plan: &ShardingPlan) -> Option<ValueEncoding> {
        let own = || plan.has_halves(self.links[link].shard).then_some(ValueEncoding::Own);
        self.chosen_encoding(link).and_then(ValueEncoding::of).or_else(own)
    }

    /// Returns the chosen encoding of values, if the shard supports it.
    fn chosen_encoding(&self, link: usize) -> Option<Encoding> {
        let encoding = self.config.values?;
        let known = self.server_settings.as_ref()?.encodings.get(&self.links[link].shard)?;
        known.contains(encoding).then_some(encoding)
    }

    /// Decodes a completely received body into the buffer of its pull.
    pub(super) fn encoded_values_received(
        &mut self,
        now: Instant,
        (id, request): (OpId, usize),
        link: usize,
        part: &EncodedValuesPart,
        last: bool,
    ) {
        let from = &mut self.links[link];
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        let plan = &pull.plan;
        let spans = &mut from.spans;
        let to = (pull.base, pull.buffer.bytes_mut());
        match part.decode(plan, from.shard, &from.encoded_body, spans, to) {
            Some(()) => self.values_received(now, (id, request), link, last),
            None => {
                self.pull_lost(id, link);
                self.reset_link(now, link, "malformed encoded values".to_owned());
            }
        }
    }
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
    fn decode(
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
