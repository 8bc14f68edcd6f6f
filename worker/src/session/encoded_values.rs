//! Values that come in a shorter form.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::{Blocks, Encoding};
use pushpull_common::ids::{PartitionId, ShardId};
use pushpull_common::protocol::message::{PullEncoded, PullRows, PullRowsEncoded, Selection};
use pushpull_common::protocol::{Message, message};
use pushpull_common::tensor::DType;

use super::pulls::Pull;
use super::{OpId, OpKind, Session};
use crate::sharding_plan::{ShardingPlan, Span};

/// A part of an answer whose body is being received: what the values are, once they are decoded.
#[derive(Debug)]
pub(super) enum EncodedValuesPart {
    /// A range of the shard's layout.
    Layout(ValueEncoding, Range<u64>),
    /// Rows of this type, here in the buffer.
    Rows(Encoding, DType, Range<usize>),
    /// Rows of the type that this is the encoding of, here in the buffer.
    Halves(Encoding, Range<usize>),
}

impl Session {
    /// The request for values of a shard, in the form in which they come.
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

    /// The request for rows of a partition, in the form in which they come.
    pub(super) fn request_for_rows(
        &self,
        pull: &Pull,
        ask: usize,
        partition: PartitionId,
    ) -> Message {
        let encoding = self.encoding_of_rows(pull, ask);
        let pull = PullRows { partition };
        match encoding {
            None => pull.into(),
            Some(encoding) => PullRowsEncoded { pull, encoding: encoding.code() }.into(),
        }
    }

    /// How the rows of a request come, if not as they are: those of plain variables do, but for halves,
    /// which come as what they are.
    pub(super) fn encoding_of_rows(&self, pull: &Pull, ask: usize) -> Option<Encoding> {
        let partition = pull.partition_of(ask)?;
        let link = pull.asks.get(ask)?.link;
        let chosen = || self.chosen_encoding(link).filter(|_| partition.trainable);
        partition.own.or_else(chosen)
    }

    /// The shorter form in which the values of a shard come: the one that was chosen, if the shard knows
    /// it, or that in which halves come, if it has some.
    pub(super) fn form_of_values(&self, link: usize, plan: &ShardingPlan) -> Option<ValueEncoding> {
        let own = || plan.has_halves(self.links[link].shard).then_some(ValueEncoding::Own);
        self.chosen_encoding(link).and_then(ValueEncoding::of).or_else(own)
    }

    /// The encoding of values that was chosen, if the shard knows it.
    fn chosen_encoding(&self, link: usize) -> Option<Encoding> {
        let encoding = self.start.values?;
        let known = self.welcomed.as_ref()?.encodings.get(&self.links[link].shard)?;
        known.contain(encoding).then_some(encoding)
    }

    /// The body of a part in a shorter form has come.
    pub(super) fn encoded_values_received(
        &mut self,
        now: Instant,
        (id, ask): (OpId, usize),
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
            Some(()) => self.values_received(now, (id, ask), link, last),
            None => {
                self.pull_lost(id, link);
                self.break_off(now, link, "values that cannot be decoded".to_owned());
            }
        }
    }
}

impl EncodedValuesPart {
    /// What a body of so many bytes is; `None` if it is not as long as its range makes it.
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

    /// The same for rows of a type that go there in the buffer.
    pub(super) fn rows(
        encoding: Encoding,
        dtype: DType,
        to: Range<usize>,
        bytes: u64,
    ) -> Option<EncodedValuesPart> {
        let sound = encoding.bytes_max(dtype, to.len() / dtype.size()) as u64 == bytes;
        sound.then_some(EncodedValuesPart::Rows(encoding, dtype, to))
    }

    /// The same for rows that come as the type they are of.
    pub(super) fn halves(own: Encoding, to: Range<usize>, bytes: u64) -> Option<EncodedValuesPart> {
        let sound = own.bytes_max(DType::F32, to.len() / 2) as u64 == bytes;
        sound.then_some(EncodedValuesPart::Halves(own, to))
    }

    /// Decodes the body into a buffer, which begins at `base` in one of all variables.
    fn decode(
        &self,
        plan: &ShardingPlan,
        shard: ShardId,
        body: &[u8],
        spans: &mut Vec<(Span, usize)>,
        (base, buffer): (usize, &mut [u8]),
    ) -> Option<()> {
        let mut rest = body;
        let (form, range) = match self {
            EncodedValuesPart::Layout(form, range) => (*form, range.clone()),
            EncodedValuesPart::Rows(encoding, dtype, to) => {
                let rows = buffer.get_mut(to.clone())?;
                return encoding.decode_into(Blocks::THROUGH, *dtype, rest, rows).ok();
            }
            EncodedValuesPart::Halves(own, to) => {
                return own.take(rest, buffer.get_mut(to.clone())?).ok();
            }
        };
        for piece in plan.catalogue().layout_of(shard)?.pieces(range) {
            let (encoded, tail) = rest.split_at_checked(piece.encoded_bytes(form))?;
            let elements = piece.range.start..piece.range.start + piece.element_bytes() as u64;
            // Elements of one partition are one stretch of the buffer, too.
            plan.spans(shard, elements, spans)?;
            let [(span, bytes)] = spans[..] else { return None };
            let target = match span.behind(base) {
                Span::Buffer(start) => start..start + bytes,
                Span::Halves(start) => start..start + bytes / 2,
                Span::Padding => return None,
            };
            piece.decode(form, encoded, buffer.get_mut(target)?).ok()?;
            rest = tail;
        }
        Some(())
    }
}
