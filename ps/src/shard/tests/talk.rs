//! Whole exchanges with a shard, in one call each.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, PartitionId, RequestId, TokenId};
use pushpull_common::protocol::message::{self, Selection};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal};

use super::peers::{Push, unpack};
use super::world::{Heard, Line, World};
use crate::shard::output::PulledParts;

impl World {
    /// Says something, does all the work there is, and returns the answer.
    pub(super) fn ask(&mut self, line: Line, message: Message) -> Message {
        let name = message.name();
        let request = self.say(line, message);
        self.work();
        self.answer(line, request).unwrap_or_else(|| panic!("{name} is not answered"))
    }

    /// Says something that is refused.
    pub(super) fn refused(&mut self, line: Line, message: Message) -> Refusal {
        let request = self.say(line, message);
        match self.answer(line, request) {
            Some(Message::Refused(refused)) => refused.refusal,
            other => panic!("not refused but {other:?}"),
        }
    }

    pub(super) fn declare(&mut self, line: Line, catalogue: &Catalogue) -> Message {
        let declare = message::Declare { digest: catalogue.digest() };
        let request = self.send(line, Envelope::default(), declare.into(), catalogue.encode());
        self.answer(line, request).expect("a declaration is answered")
    }

    /// Asks for a token that is there.
    pub(super) fn token(&mut self, line: Line) -> Grant {
        self.token_after(line, TokenId(u64::MAX))
    }

    /// The same, for a client whose newest token is this one.
    pub(super) fn token_after(&mut self, line: Line, newest: TokenId) -> Grant {
        let request = self.say(line, message::TokenRequest { newest }.into());
        match self.answer(line, request) {
            Some(Message::Granted(granted)) => granted.grant,
            other => panic!("not a token but {other:?}"),
        }
    }

    /// Asks for a room that is there.
    pub(super) fn push_slot(&mut self, line: Line) -> u32 {
        let request = self.say(line, message::Reserve {}.into());
        match self.answer(line, request) {
            Some(Message::Reserved(push_slot)) => push_slot.push_slot,
            other => panic!("not a push slot but {other:?}"),
        }
    }

    /// A push of gradients, under a token and in a room that are asked for.
    pub(super) fn gradient(&mut self, line: Line, sequence: u64) -> Push {
        let grant = self.token(line);
        Push::gradient(sequence, grant, self.push_slot(line))
    }

    /// Sends a push in these parts, the last of which says that it is whole.
    pub(super) fn push(&mut self, line: Line, push: &Push, parts: &[(u64, &[u8])]) -> RequestId {
        let total: usize = parts.iter().map(|(_, body)| body.len()).sum();
        let mut request = RequestId(0);
        for (index, (offset, body)) in parts.iter().enumerate() {
            let whole = (index + 1 == parts.len()).then_some(total as u64);
            request = self.send(line, push.envelope(), push.part(*offset, whole), body);
        }
        request
    }

    /// The same, until it is answered.
    pub(super) fn push_answer(
        &mut self,
        line: Line,
        push: &Push,
        parts: &[(u64, &[u8])],
    ) -> Message {
        let request = self.push(line, push, parts);
        self.work();
        self.answer(line, request).expect("a push is answered")
    }

    /// Starts a pull of everything.
    pub(super) fn pull(&mut self, line: Line, at_least: u64) -> RequestId {
        let envelope = Envelope { step: GlobalStep(at_least), ..Envelope::default() };
        self.send(line, envelope, message::Pull { selection: Selection::All {} }.into(), &[])
    }

    /// The values that have come over a line, if they have, still pinned.
    pub(super) fn streamed(&mut self, line: Line) -> Option<PulledParts> {
        let heard = self.heard.entry(line).or_default();
        let index = heard.iter().position(|heard| matches!(heard, Heard::Values(_)))?;
        match heard.remove(index) {
            Heard::Values(parts) => Some(parts),
            Heard::Message { .. } => None,
        }
    }

    /// All values of a shard, in the order of its layout.
    pub(super) fn values(&mut self, line: Line) -> Vec<u8> {
        self.pull(line, 0);
        self.work();
        let parts = self.streamed(line).expect("a pull is answered");
        let (bytes, _) = unpack(parts);
        bytes
    }

    /// The values of some partitions.
    pub(super) fn select(&mut self, line: Line, partitions: &[u32]) -> Result<Vec<u8>, Refusal> {
        let ids = partitions.iter().map(|&id| PartitionId(id)).collect();
        let selection = Selection::Partitions { partitions: List::new(ids).unwrap() };
        let request = self.say(line, message::Pull { selection }.into());
        match self.answer(line, request) {
            Some(Message::Refused(refused)) => Err(refused.refusal),
            None => Ok(unpack(self.streamed(line).expect("a pull is answered")).0),
            other => panic!("a pull is answered {other:?}"),
        }
    }
}
