//! Idempotent requests, answered once.

use std::time::Instant;

use bytes::Bytes;
use pushpull_common::protocol::message::CatalogueState;
use pushpull_common::protocol::{Envelope, Header, Message};

use super::link::{BodyTarget, LinkStatus, PendingRequest};
use super::pushes::PendingPush;
use super::{OpId, OpKind, Reply, Session};

/// An idempotent request, sent again after each reconnect until it is answered.
#[derive(Debug)]
pub(super) struct ShardRequest {
    pub(super) link: usize,
    message: Message,
    body: Bytes,
    sent: bool,
}

impl ShardRequest {
    pub(super) fn new(link: usize, message: Message, body: Bytes) -> ShardRequest {
        ShardRequest { link, message, body, sent: false }
    }

    pub(super) fn doing(&self) -> &'static str {
        match self.message {
            Message::Declare(_) => "declare the variables",
            Message::Initialize(_) => "initialize the variables",
            Message::AwaitReady(_) => "wait for the chief to initialize the variables",
            Message::FetchCatalogue(_) => "fetch the catalogue",
            Message::FindCheckpoint(_) => "look for a checkpoint",
            Message::PassedOverQuery(_) => "ask for damaged checkpoints",
            Message::Restore(_) => "restore the variables",
            Message::Save(_) => "save a checkpoint",
            Message::Finish(_) => "finish the training",
            Message::Leave(_) => "leave",
            _ => "ask",
        }
    }

    /// Returns whether to hold the request back until the shard has settled every push that another
    /// shard may have applied.
    fn must_follow_pushes(&self) -> bool {
        matches!(self.message, Message::Leave(_))
    }

    /// Returns whether the request names a new epoch, and may be refused because of that epoch.
    pub(super) fn begins_an_epoch(&self) -> bool {
        matches!(self.message, Message::Initialize(_) | Message::Restore(_))
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
                | (Message::Save(_), Message::Saved(_))
                | (Message::FetchCatalogue(_), Message::CatalogueIs(_))
                | (Message::Finish(_), Message::Finished(_))
                | (Message::Leave(_), Message::Left(_))
        )
    }
}

/// How long before a request's deadline the server stops waiting, so that its answer, which names
/// what it waited for, still arrives in time.
const ANSWER_MARGIN_MS: u128 = 50;

/// Returns the time left until a deadline, for the header of a request that waits on the server.
pub(super) fn deadline_ms(now: Instant, deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(now).as_millis();
    u32::try_from(left.saturating_sub(ANSWER_MARGIN_MS).max(1)).unwrap_or(u32::MAX)
}

impl Session {
    pub(super) fn drive_request(&mut self, now: Instant, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let OpKind::Request(request) = &mut op.kind else {
            return;
        };
        let link = request.link;
        let blocks_leaving =
            |push: &PendingPush| push.must_complete() && push.unsettled().any(|l| l == link);
        if request.must_follow_pushes() && self.pushes.values().any(blocks_leaving) {
            return;
        }
        if request.sent || self.links[request.link].status != LinkStatus::Up {
            return;
        }
        request.sent = true;
        let (link, message, body) = (request.link, request.message.clone(), request.body.clone());
        let envelope =
            Envelope { deadline_ms: deadline_ms(now, op.deadline), ..Envelope::default() };
        self.send(now, link, PendingRequest::Request(id), envelope, message, body.into());
    }

    pub(super) fn request_lost(&mut self, id: OpId) {
        if let Some(OpKind::Request(request)) = self.ops.get_mut(&id).map(|op| &mut op.kind) {
            request.sent = false;
        }
    }

    pub(super) fn request_answered(
        &mut self,
        now: Instant,
        op: OpId,
        link: usize,
        header: &Header,
        message: Message,
    ) {
        let Some(OpKind::Request(request)) = self.ops.get(&op).map(|op| &op.kind) else {
            return;
        };
        if !request.is_answered_by(&message) {
            self.request_lost(op);
            return self.unexpected(now, link, &message);
        }
        match &message {
            Message::Ready(_) => self.links[link].ready = true,
            Message::Declared(declared) => {
                self.links[link].ready = matches!(declared.state, CatalogueState::Ready { .. });
            }
            _ => {}
        }
        if header.body_bytes > 0 {
            // The length is already checked against the limit of the message kind.
            let body = vec![0; header.body_bytes as usize];
            self.links[link].receiving = Some(BodyTarget::Answer { op, message, body });
            return;
        }
        self.finish_request(now, op, link, message, Vec::new());
    }

    pub(super) fn finish_request(
        &mut self,
        now: Instant,
        id: OpId,
        link: usize,
        message: Message,
        body: Vec<u8>,
    ) {
        let Some(op) = self.ops.get(&id) else { return };
        let reply = match message {
            Message::Refused(refused) => Err(self.refused(op.doing, link, refused.refusal)),
            message => Ok(Reply::Answer { message, body }),
        };
        self.finish(id, reply);
        self.drive(now);
    }
}
