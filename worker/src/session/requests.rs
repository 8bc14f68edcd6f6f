//! Idempotent requests to one shard, answered once.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::protocol::message::CatalogueState;
use pushpull_common::protocol::{Envelope, Header, Message};

use super::OpId;
use super::links::{BodyTarget, LinkFault, OutgoingFrame, PendingRequest, SessionLinks, ShardLink};

/// An idempotent request, sent again after each reconnect until it is answered.
#[derive(Debug)]
pub(super) struct ShardRequest {
    link: usize,
    message: Message,
    body: Bytes,
    /// How long the shard may wait, if less than the operation's remaining time.
    wait_ms: Option<u32>,
    sent: bool,
}

/// The pushes that a request must follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FollowedPushes {
    /// None.
    Nothing,
    /// Those that this link's shard has not settled although another shard may have applied them.
    OfLink(usize),
    /// All.
    All,
}

impl ShardRequest {
    pub(super) fn new(
        link: usize,
        message: Message,
        body: Bytes,
        wait_ms: Option<u32>,
    ) -> ShardRequest {
        ShardRequest { link, message, body, wait_ms, sent: false }
    }

    pub(super) fn doing(&self) -> &'static str {
        match self.message {
            Message::Declare(_) => "declare the variables",
            Message::Initialize(_) => "initialize the variables",
            Message::AwaitReady(_) => "wait for the chief to initialize the variables",
            Message::FetchCatalogue(_) => "fetch the catalogue",
            Message::FindCheckpoint(_) => "look for a checkpoint",
            Message::PassedOverQuery(_) => "ask for damaged checkpoints",
            Message::PrepareRestore(_) => "check the checkpoint",
            Message::Restore(_) => "restore the variables",
            Message::Save(_) => "save a checkpoint",
            Message::Finish(_) => "finish the training",
            Message::StatusQuery(_) => "ask for the status",
            Message::Stop(_) => "stop",
            Message::AwaitEnd(_) => "wait for the end of the training",
            Message::Leave(_) => "leave",
            Message::OpenCoordinator(_) => "open a coordinator",
            Message::CoordinatorQuery(_) => "ask for settled effects",
            Message::CloseCoordinator(_) => "close a coordinator",
            _ => "ask",
        }
    }

    fn is_answered_by(&self, answer: &Message) -> bool {
        matches!(
            (&self.message, answer),
            (_, Message::Refused(_))
                | (Message::Declare(_), Message::Declared(_))
                | (
                    Message::Initialize(_) | Message::Restore(_) | Message::AwaitReady(_),
                    Message::Ready(_),
                )
                | (Message::FindCheckpoint(_), Message::CheckpointFound(_))
                | (Message::PassedOverQuery(_), Message::PassedOverAre(_))
                | (Message::PrepareRestore(_), Message::RestorePrepared(_))
                | (Message::DeclareData(_), Message::DataDeclared(_))
                | (Message::Save(_), Message::Saved(_))
                | (Message::FetchCatalogue(_), Message::CatalogueIs(_))
                | (Message::Finish(_), Message::Finished(_))
                | (Message::StatusQuery(_), Message::StatusIs(_))
                | (Message::Stop(_), Message::Stopping(_))
                | (Message::AwaitEnd(_), Message::Ended(_))
                | (Message::Leave(_), Message::Left(_))
                | (
                    Message::OpenCoordinator(_) | Message::CoordinatorQuery(_),
                    Message::CoordinatorIs(_)
                )
                | (Message::CloseCoordinator(_), Message::CoordinatorClosed(_))
        )
    }
}

/// The requests that are not answered yet, by their operations.
///
/// Invariant: a request is marked as sent exactly while the link's current connection has it.
#[derive(Debug, Default)]
pub(super) struct ShardRequests(BTreeMap<OpId, ShardRequest>);

impl ShardRequests {
    pub(super) fn add(&mut self, id: OpId, request: ShardRequest) {
        self.0.insert(id, request);
    }

    pub(super) fn remove(&mut self, id: OpId) {
        self.0.remove(&id);
    }

    pub(super) fn link_of(&self, id: OpId) -> Option<usize> {
        self.0.get(&id).map(|request| request.link)
    }

    /// Returns the pushes that must be settled before a request is sent.
    pub(super) fn followed_pushes(&self, id: OpId) -> FollowedPushes {
        match self.0.get(&id) {
            Some(ShardRequest { message: Message::Leave(_), link, .. }) => {
                FollowedPushes::OfLink(*link)
            }
            Some(ShardRequest { message: Message::AwaitEnd(_), .. }) => FollowedPushes::All,
            _ => FollowedPushes::Nothing,
        }
    }

    /// Returns whether a request names a new epoch, and may be refused because of that epoch.
    pub(super) fn begins_an_epoch(&self, id: OpId) -> bool {
        self.0.get(&id).is_some_and(|request| {
            let message = &request.message;
            matches!(
                message,
                Message::Initialize(_) | Message::PrepareRestore(_) | Message::Restore(_)
            )
        })
    }

    /// Sends a request that is not sent and whose link is up.
    pub(super) fn send(
        &mut self,
        now: Instant,
        id: OpId,
        deadline_ms: u32,
        links: &mut SessionLinks,
    ) {
        let Some(request) = self.0.get_mut(&id) else { return };
        if request.sent || !links[request.link].is_up() {
            return;
        }
        request.sent = true;
        let deadline_ms = request.wait_ms.map_or(deadline_ms, |wait| wait.min(deadline_ms));
        let envelope = Envelope { deadline_ms, ..Envelope::default() };
        let message = request.message.clone();
        let body = request.body.clone().into();
        let frame = OutgoingFrame { envelope, message, body };
        links.send(now, request.link, PendingRequest::Request(id), frame);
    }

    /// Marks a request as unsent after the loss of its connection.
    pub(super) fn lost(&mut self, id: OpId) {
        if let Some(request) = self.0.get_mut(&id) {
            request.sent = false;
        }
    }

    /// Takes an answer. Returns it if it is complete, or else prepares the link for its body.
    pub(super) fn answered(
        &mut self,
        id: OpId,
        link: &mut ShardLink,
        header: &Header,
        message: Message,
    ) -> Result<Option<Message>, LinkFault> {
        let Some(request) = self.0.get_mut(&id) else { return Ok(None) };
        if !request.is_answered_by(&message) {
            request.sent = false;
            return Err(LinkFault::unexpected(&message));
        }
        match &message {
            Message::Ready(_) => link.ready = true,
            Message::Declared(declared) => {
                link.ready = matches!(declared.state, CatalogueState::Ready { .. });
            }
            _ => {}
        }
        if header.body_bytes > 0 {
            // The length is already checked against the limit of the message kind.
            let body = vec![0; header.body_bytes as usize];
            link.receiving = Some(BodyTarget::Answer { op: id, message, body });
            return Ok(None);
        }
        Ok(Some(message))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
