//! The session's state towards one shard.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::codec::Encoding;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{RequestId, RestoreEpoch, Sequence, ShardId, TokenId};
use pushpull_common::protocol::message::{HeartbeatAnswer, PulledEncoded};
use pushpull_common::protocol::{Message, Refusal};

use crate::error::Error;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::sharding_plan::LayoutSpan;
use crate::session::OpId;
use crate::session::encoded_values::EncodedValuesPart;

/// The status of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum LinkStatus {
    /// Not connected. May be connected again at `retry_at`; at once if `None`.
    Down { retry_at: Option<Instant> },
    /// The transport is connecting.
    Connecting,
    /// The hello is sent and not answered.
    AwaitingWelcome,
    /// The shard has welcomed the session.
    Up,
}

/// The purpose of an unanswered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum PendingRequest {
    Hello,
    Heartbeat,
    Request(OpId),
    Token,
    /// One of the requests of a pull, by its index.
    Pull(OpId, usize),
    ShareValues,
    SharePushBuffer,
    Reserve(Sequence),
    Push(Sequence),
    PushState(Sequence),
    /// A withdrawal of a push. The request that sent its parts gets no answer after this one.
    Withdraw(Option<RequestId>),
    /// The return of a token.
    Return(TokenId),
}

/// The destination of a body that is being received.
#[derive(Debug)]
pub(in crate::session) enum BodyTarget {
    /// Values for a request of a pull.
    Values { op: OpId, request: usize, last: bool },
    /// Encoded values for a request of a pull.
    EncodedValues { op: OpId, request: usize, part: EncodedValuesPart, last: bool },
    /// The body of an answer.
    Answer { op: OpId, message: Message, body: Vec<u8> },
}

#[cfg(test)]
impl BodyTarget {
    /// Whether the body is for this request of a pull.
    pub(in crate::session) fn is_for(&self, id: OpId, index: usize) -> bool {
        match self {
            BodyTarget::Values { op, request, .. }
            | BodyTarget::EncodedValues { op, request, .. } => (*op, *request) == (id, index),
            BodyTarget::Answer { .. } => false,
        }
    }
}

/// Why a link cannot continue.
#[derive(Debug)]
pub(in crate::session) enum LinkFault {
    /// The connection is closed, and opened again after a pause.
    Reset(String),
    /// The session ends.
    Session(Error),
}

impl LinkFault {
    /// An answer that does not fit its request.
    pub(in crate::session) fn unexpected(message: &Message) -> LinkFault {
        LinkFault::Reset(format!("a {} does not fit the request", message.name()))
    }
}

/// The session's state towards one shard.
#[derive(Debug)]
pub(in crate::session) struct ShardLink {
    pub(in crate::session) shard: ShardId,
    pub(in crate::session) status: LinkStatus,
    pub(super) in_use: bool,
    pub(in crate::session) pending: BTreeMap<RequestId, PendingRequest>,
    pub(super) next_request: u64,
    pub(super) attempts: u32,
    /// The first request to the step owner sent after this shard's welcome, and the first token
    /// granted to such a request. Every token from that one on was granted while this connection
    /// was up.
    pub(super) welcomed_before: RequestId,
    pub(in crate::session) granted_since: Option<TokenId>,
    /// The push slot reserved on the shard for the next push; 0 for none.
    pub(in crate::session) push_slot: u32,
    pub(in crate::session) crc: bool,
    /// Whether the shard can share its memory over this transport, and whether it has been asked
    /// for its values.
    pub(in crate::session) same_host: bool,
    pub(in crate::session) requested_values: bool,
    /// Whether the shard has been asked for a push buffer, and the one shared over this connection.
    pub(in crate::session) requested_push_buffer: bool,
    pub(in crate::session) push_buffer: Option<PushBufferId>,
    /// The restore epoch of the shard, from its last message; 0 while unknown.
    pub(in crate::session) restore_epoch: RestoreEpoch,
    /// The id of the shard's state, from its last welcome; 0 before.
    pub(in crate::session) arena: u64,
    /// Whether the shard has confirmed that this client has left.
    pub(in crate::session) has_left: bool,
    /// Whether the shard's variables have values, from its last message about them.
    pub(in crate::session) ready: bool,
    /// The shard's lease, from its last welcome. Servers may have different leases.
    pub(in crate::session) lease: Duration,
    pub(in crate::session) identity: Identity,
    /// The encoding of pulled values that this session chose, if the shard supports it.
    pub(in crate::session) values: Option<Encoding>,
    pub(super) last_sent: Instant,
    pub(in crate::session) last_received: Instant,
    pub(in crate::session) last_error: String,
    /// Why the shard cannot process what it was sent, from its last heartbeat answer; empty if it
    /// can.
    pub(in crate::session) blocked_reason: String,
    pub(in crate::session) receiving: Option<BodyTarget>,
    /// The targets of the values that are being received.
    pub(in crate::session) spans: Vec<(LayoutSpan, usize)>,
    /// The receive buffer for encoded values.
    pub(in crate::session) encoded_body: Vec<u8>,
    /// The receive buffer for padding.
    pub(in crate::session) scratch: Vec<u8>,
}

impl ShardLink {
    pub(super) fn new(shard: ShardId, now: Instant) -> ShardLink {
        ShardLink {
            shard,
            status: LinkStatus::Down { retry_at: None },
            in_use: true,
            pending: BTreeMap::new(),
            next_request: 1,
            attempts: 0,
            welcomed_before: RequestId(0),
            granted_since: None,
            push_slot: 0,
            crc: false,
            same_host: false,
            requested_values: false,
            requested_push_buffer: false,
            push_buffer: None,
            restore_epoch: RestoreEpoch(0),
            arena: 0,
            has_left: false,
            ready: false,
            lease: Duration::from_secs(5),
            identity: Identity::new(),
            values: None,
            last_sent: now,
            last_received: now,
            last_error: String::new(),
            blocked_reason: String::new(),
            receiving: None,
            spans: Vec::new(),
            encoded_body: Vec::default(),
            scratch: Vec::new(),
        }
    }

    pub(in crate::session) fn is_up(&self) -> bool {
        self.status == LinkStatus::Up
    }

    /// Returns whether the shard has lost the state that this link knows, as it now has this one.
    pub(in crate::session) fn has_lost(&self, arena: u64) -> bool {
        self.arena != 0 && self.arena != arena
    }

    /// Records that the transport is connected.
    pub(in crate::session) fn connected(&mut self, same_host: bool) {
        self.status = LinkStatus::AwaitingWelcome;
        self.same_host = same_host;
        self.requested_values = false;
        self.requested_push_buffer = false;
        self.crc = false;
    }

    /// Returns whether operations may have to wait for the shard: it is not connected, does not
    /// answer, or cannot process what it was sent.
    pub(in crate::session) fn holds_up(&self, now: Instant) -> bool {
        let is_silent = self.in_use && !self.is_up();
        is_silent || self.is_unresponsive(now) || !self.blocked_reason.is_empty()
    }

    /// Returns whether the link is up and a heartbeat has had no answer for longer than a lease.
    /// The server is stopped or cut off, or earlier frames have not reached it yet.
    pub(in crate::session) fn is_unresponsive(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.last_received);
        self.is_up() && silence > self.lease && self.awaits(PendingRequest::Heartbeat)
    }

    /// Returns whether such a request is unanswered.
    pub(in crate::session) fn awaits(&self, request: PendingRequest) -> bool {
        self.pending.values().any(|pending| *pending == request)
    }

    /// Removes an answered request, unless more parts of the answer follow.
    pub(in crate::session) fn answered(&mut self, request: RequestId, message: &Message) {
        // An answer resets the back-off. A welcome alone does not.
        self.attempts = 0;
        self.has_left |= matches!(message, Message::Left(_));
        if !has_more_parts(message) {
            self.pending.remove(&request);
        }
    }

    /// Records what a shard answers to a heartbeat. A refusal is not one of the heartbeat: it says
    /// what blocks the requests on this shard.
    pub(in crate::session) fn heartbeat_answered(
        &mut self,
        message: &Message,
    ) -> Result<(), LinkFault> {
        match message {
            Message::HeartbeatAnswer(HeartbeatAnswer {}) => self.blocked_reason.clear(),
            Message::Refused(refused) => {
                if let Refusal::Storage { detail } = &refused.refusal {
                    self.blocked_reason = detail.to_string();
                }
            }
            message => return Err(LinkFault::unexpected(message)),
        }
        Ok(())
    }

    /// Handles the answer to the withdrawal of a push. The request that sent its parts gets none.
    pub(in crate::session) fn withdrawal_answered(
        &mut self,
        parts: Option<RequestId>,
        message: &Message,
    ) -> Result<(), LinkFault> {
        if !matches!(message, Message::PushAnswer(_) | Message::Refused(_)) {
            return Err(LinkFault::unexpected(message));
        }
        parts.and_then(|parts| self.pending.remove(&parts));
        Ok(())
    }

    /// The interval between heartbeats: a fifth of the lease.
    pub(super) fn heartbeat_interval(&self) -> Duration {
        self.lease / 5
    }

    /// Returns when this link needs a tick.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.status {
            LinkStatus::Down { retry_at } => retry_at.filter(|_| self.in_use),
            LinkStatus::Connecting => None,
            LinkStatus::AwaitingWelcome => Some(self.last_sent + WELCOME_TIMEOUT),
            LinkStatus::Up => Some(self.last_sent + self.heartbeat_interval()),
        }
    }
}

/// Returns whether more parts of the same answer follow this one.
pub(in crate::session) fn has_more_parts(message: &Message) -> bool {
    match message {
        Message::Pulled(part) | Message::PulledEncoded(PulledEncoded { part, .. }) => !part.last,
        _ => false,
    }
}

/// How long a connected server may take to answer a hello. A live server answers at once. A stopped
/// process stays connected: its kernel accepts the connection.
pub(super) const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);
