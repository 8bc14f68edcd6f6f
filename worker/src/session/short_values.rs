//! Values that come in a shorter form.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::codec::Encoding;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Pull, PullEncoded, Selection};

use super::{OpId, OpKind, Session};
use crate::fanout::{Plan, Span};

/// A part of an answer whose body is being received.
#[derive(Debug)]
pub(super) struct ShortPart {
    pub(super) encoding: Encoding,
    /// What it is of the shard's layout.
    pub(super) range: Range<u64>,
    pub(super) body: Vec<u8>,
}

impl Session {
    /// The request for values of a shard: in the shorter form that was chosen, if the shard knows it.
    pub(super) fn request_for_values(&self, link: usize, selection: Selection) -> Message {
        let pull = Pull { selection };
        match self.encoding_of_values(link) {
            None => pull.into(),
            Some(encoding) => PullEncoded { pull, encoding: encoding.code() }.into(),
        }
    }

    /// How the values of a shard come, if not as they are.
    pub(super) fn encoding_of_values(&self, link: usize) -> Option<Encoding> {
        let encoding = self.start.values?;
        let known = self.welcomed.as_ref()?.encodings.get(&self.links[link].shard)?;
        known.contain(encoding).then_some(encoding)
    }

    /// The body of a part in a shorter form has come.
    pub(super) fn short_values_received(
        &mut self,
        now: Instant,
        (id, ask): (OpId, usize),
        link: usize,
        part: &ShortPart,
        last: bool,
    ) {
        let shard = self.links[link].shard;
        let Some(OpKind::Pull(pull)) = self.ops.get_mut(&id).map(|op| &mut op.kind) else {
            return;
        };
        match part.decode(&pull.plan, shard, pull.buffer.bytes_mut()) {
            Some(()) => self.values_received(now, (id, ask), link, last),
            None => {
                self.pull_lost(id, link);
                self.break_off(now, link, "values that cannot be decoded".to_owned());
            }
        }
    }
}

impl ShortPart {
    /// What a body of so many bytes is to be; `None` if it is not as long as its range makes it.
    pub(super) fn new(
        encoding: Encoding,
        plan: &Plan,
        shard: ShardId,
        range: Range<u64>,
        bytes: u64,
    ) -> Option<ShortPart> {
        let layout = plan.catalogue().layout_of(shard)?;
        let sound = range.start.is_multiple_of(8)
            && range.end.is_multiple_of(8)
            && layout.encoded_bytes(encoding, range.clone()) == bytes;
        sound.then(|| ShortPart { encoding, range, body: vec![0; bytes as usize] })
    }

    fn decode(&self, plan: &Plan, shard: ShardId, buffer: &mut [u8]) -> Option<()> {
        let mut rest = &self.body[..];
        for piece in plan.catalogue().layout_of(shard)?.pieces(self.range.clone()) {
            let (encoded, tail) = rest.split_at_checked(piece.encoded_bytes(self.encoding))?;
            let elements = piece.range.start..piece.range.start + piece.element_bytes() as u64;
            // Elements of one partition are one stretch of the buffer, too.
            if let [(Span::Buffer(start), bytes)] = plan.spans(shard, elements)?[..] {
                let target = buffer.get_mut(start..start + bytes)?;
                piece.decode(self.encoding, encoded, target).ok()?;
            }
            rest = tail;
        }
        Some(())
    }
}
