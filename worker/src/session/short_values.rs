//! Values that come in a shorter form.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ShortForm;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Pull, PullEncoded, Selection};

use super::{OpId, OpKind, Session};
use crate::fanout::{Plan, Span};

/// A part of an answer whose body is being received.
#[derive(Debug)]
pub(super) struct ShortPart {
    pub(super) form: ShortForm,
    /// What it is of the shard's layout.
    pub(super) range: Range<u64>,
    pub(super) body: Vec<u8>,
}

impl Session {
    /// The request for values of a shard, in the form in which they come.
    pub(super) fn request_for_values(
        &self,
        link: usize,
        plan: &Plan,
        selection: Selection,
    ) -> Message {
        let pull = Pull { selection };
        match self.form_of_values(link, plan) {
            None => pull.into(),
            Some(form) => PullEncoded { pull, encoding: form.code() }.into(),
        }
    }

    /// The shorter form in which the values of a shard come: the one that was chosen, if the shard knows
    /// it, or that in which halves come, if it has some.
    pub(super) fn form_of_values(&self, link: usize, plan: &Plan) -> Option<ShortForm> {
        let shard = self.links[link].shard;
        let known = self.welcomed.as_ref().and_then(|welcomed| welcomed.encodings.get(&shard));
        let chosen = self.start.values.filter(|&chosen| known.is_some_and(|k| k.contain(chosen)));
        chosen.and_then(ShortForm::of).or(plan.has_halves(shard).then_some(ShortForm::Own))
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
        form: ShortForm,
        plan: &Plan,
        shard: ShardId,
        range: Range<u64>,
        bytes: u64,
    ) -> Option<ShortPart> {
        let layout = plan.catalogue().layout_of(shard)?;
        let sound = range.start.is_multiple_of(8)
            && range.end.is_multiple_of(8)
            && layout.encoded_bytes(form, range.clone()) == bytes;
        sound.then(|| ShortPart { form, range, body: vec![0; bytes as usize] })
    }

    fn decode(&self, plan: &Plan, shard: ShardId, buffer: &mut [u8]) -> Option<()> {
        let mut rest = &self.body[..];
        for piece in plan.catalogue().layout_of(shard)?.pieces(self.range.clone()) {
            let (encoded, tail) = rest.split_at_checked(piece.encoded_bytes(self.form))?;
            let elements = piece.range.start..piece.range.start + piece.element_bytes() as u64;
            // Elements of one partition are one stretch of the buffer, too.
            let target = match plan.spans(shard, elements)?[..] {
                [(Span::Buffer(start), bytes)] => start..start + bytes,
                [(Span::Halves(start), bytes)] => start..start + bytes / 2,
                _ => return None,
            };
            piece.decode(self.form, encoded, buffer.get_mut(target)?).ok()?;
            rest = tail;
        }
        Some(())
    }
}
