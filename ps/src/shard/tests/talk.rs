//! Complete exchanges with a shard, one call each.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, PartitionId, RequestId, TokenId};
use pushpull_common::protocol::message::{self, Selection};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal};

use super::peers::{Push, unpack};
use super::world::{ConnectionId, Received, World};
use crate::shard::output::PulledParts;

impl World {
    /// Sends a message, does all work, and returns the answer.
    pub(super) fn ask(&mut self, line: ConnectionId, message: Message) -> Message {
        let name = message.name();
        let request = self.say(line, message);
        self.work();
        self.answer(line, request).unwrap_or_else(|| panic!("{name} is not answered"))
    }

    /// Sends a message and returns its refusal. Panics if it is not refused.
    pub(super) fn refused(&mut self, line: ConnectionId, message: Message) -> Refusal {
        let request = self.say(line, message);
        match self.answer(line, request) {
            Some(Message::Refused(refused)) => refused.refusal,
            other => panic!("not refused but {other:?}"),
        }
    }

    pub(super) fn declare(&mut self, line: ConnectionId, catalogue: &Catalogue) -> Message {
        let declare = message::Declare { digest: catalogue.digest() };
        let request = self.send(line, Envelope::default(), declare.into(), catalogue.encode());
        self.answer(line, request).expect("a declaration is answered")
    }

    /// Requests a token. Panics if none is granted at once.
    pub(super) fn token(&mut self, line: ConnectionId) -> Grant {
        self.token_after(line, TokenId(u64::MAX))
    }

    /// Requests a token as a client whose newest token is `newest`. Panics if none is granted at
    /// once.
    pub(super) fn token_after(&mut self, line: ConnectionId, newest: TokenId) -> Grant {
        let request = self.say(line, message::TokenRequest { newest }.into());
        match self.answer(line, request) {
            Some(Message::Granted(granted)) => granted.grant,
            other => panic!("not a token but {other:?}"),
        }
    }

    /// Reserves a push slot. Panics if none is free.
    pub(super) fn push_slot(&mut self, line: ConnectionId) -> u32 {
        let request = self.say(line, message::Reserve {}.into());
        match self.answer(line, request) {
            Some(Message::Reserved(push_slot)) => push_slot.push_slot,
            other => panic!("not a push slot but {other:?}"),
        }
    }

    /// Requests a token and a push slot, and returns a push of gradients that uses them.
    pub(super) fn gradient(&mut self, line: ConnectionId, sequence: u64) -> Push {
        let grant = self.token(line);
        Push::gradient(sequence, grant, self.push_slot(line))
    }

    /// Sends a push in these parts. The last part carries the length of the push.
    pub(super) fn push(
        &mut self,
        line: ConnectionId,
        push: &Push,
        parts: &[(u64, &[u8])],
    ) -> RequestId {
        let total: usize = parts.iter().map(|(_, body)| body.len()).sum();
        let mut request = RequestId(0);
        for (index, (offset, body)) in parts.iter().enumerate() {
            let whole = (index + 1 == parts.len()).then_some(total as u64);
            request = self.send(line, push.envelope(), push.part(*offset, whole), body);
        }
        request
    }

    /// Sends a push in these parts, does all work, and returns the answer.
    pub(super) fn push_answer(
        &mut self,
        line: ConnectionId,
        push: &Push,
        parts: &[(u64, &[u8])],
    ) -> Message {
        let request = self.push(line, push, parts);
        self.work();
        self.answer(line, request).expect("a push is answered")
    }

    /// Starts a pull of all values, at step `at_least` or later.
    pub(super) fn pull(&mut self, line: ConnectionId, at_least: u64) -> RequestId {
        let envelope = Envelope { step: GlobalStep(at_least), ..Envelope::default() };
        self.send(line, envelope, message::Pull { selection: Selection::All {} }.into(), &[])
    }

    /// Takes the first values received over a connection, if any. Their blocks stay pinned.
    pub(super) fn streamed(&mut self, line: ConnectionId) -> Option<PulledParts> {
        let received = self.received.entry(line).or_default();
        let index = received.iter().position(|received| matches!(received, Received::Values(_)))?;
        match received.remove(index) {
            Received::Values(parts) => Some(parts),
            Received::Message { .. } => None,
        }
    }

    /// Pulls all values of a shard, in layout order.
    pub(super) fn values(&mut self, line: ConnectionId) -> Vec<u8> {
        self.pull(line, 0);
        self.work();
        let parts = self.streamed(line).expect("a pull is answered");
        let (bytes, _) = unpack(parts);
        bytes
    }

    /// Pulls the values of some partitions.
    pub(super) fn select(
        &mut self,
        line: ConnectionId,
        partitions: &[u32],
    ) -> Result<Vec<u8>, Refusal> {
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
