//! The session's state towards one shard: status, pending requests and reconnects.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{RequestId, RestoreEpoch, Sequence, ShardId, TokenId};
use pushpull_common::protocol::message::Heartbeat;
use pushpull_common::protocol::{Envelope, Header, Message, Refusal};

use super::encoded_values::EncodedValuesPart;
use super::receiving::has_more_parts;
use super::{OpId, Session, SessionOutput};
use crate::error::Error;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::parts::FrameBody;
use crate::gradients::sharding_plan::LayoutSpan;

/// The status of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkStatus {
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
pub(super) enum PendingRequest {
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
pub(super) enum BodyTarget {
    /// Values for a request of a pull.
    Values { op: OpId, request: usize, last: bool },
    /// Encoded values for a request of a pull.
    EncodedValues { op: OpId, request: usize, part: EncodedValuesPart, last: bool },
    /// The body of an answer.
    Answer { op: OpId, message: Message, body: Vec<u8> },
}

/// The shortest and the longest ceiling of a reconnect pause. The ceiling doubles with each
/// attempt, and the pause is uniform between zero and the ceiling, so that workers do not reconnect
/// in lockstep.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How long a connected server may take to answer a hello. A live server answers at once. A stopped
/// process stays connected: its kernel accepts the connection.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a transport may take to deliver what it has buffered: 4 MiB at 140 KB/s.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);

/// A link to one shard.
#[derive(Debug)]
pub(super) struct ShardLink {
    pub(super) shard: ShardId,
    pub(super) status: LinkStatus,
    pub(super) in_use: bool,
    pub(super) pending: BTreeMap<RequestId, PendingRequest>,
    next_request: u64,
    attempts: u32,
    /// The first request to the step owner sent after this shard's welcome, and the first token
    /// granted to such a request. Every token from that one on was granted while this connection
    /// was up.
    pub(super) welcomed_before: RequestId,
    pub(super) granted_since: Option<TokenId>,
    /// The push slot reserved on the shard for the next push; 0 for none.
    pub(super) push_slot: u32,
    pub(super) crc: bool,
    /// Whether the shard can share its memory over this transport, and whether it has been asked
    /// for its values.
    pub(super) same_host: bool,
    pub(super) requested_values: bool,
    /// Whether the shard has been asked for a push buffer, and the one shared over this connection.
    pub(super) requested_push_buffer: bool,
    pub(super) push_buffer: Option<PushBufferId>,
    /// The restore epoch of the shard, from its last message; 0 while unknown.
    pub(super) restore_epoch: RestoreEpoch,
    /// Whether the shard's variables have values, from its last message about them.
    pub(super) ready: bool,
    /// The shard's lease, from its last welcome. Servers may have different leases.
    pub(super) lease: Duration,
    pub(super) identity: Identity,
    pub(super) last_sent: Instant,
    pub(super) last_received: Instant,
    pub(super) last_error: String,
    /// Why the shard cannot process what it was sent, from its last heartbeat answer; empty if it
    /// can.
    pub(super) blocked_reason: String,
    pub(super) receiving: Option<BodyTarget>,
    /// The targets of the values that are being received.
    pub(super) spans: Vec<(LayoutSpan, usize)>,
    /// The receive buffer for encoded values.
    pub(super) encoded_body: Vec<u8>,
    /// The receive buffer for padding.
    pub(super) scratch: Vec<u8>,
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
            ready: false,
            lease: Duration::from_secs(5),
            identity: Identity::new(),
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

    /// Returns the number of the next request.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request)
    }

    pub(super) fn is_silent(&self) -> bool {
        self.in_use && self.status != LinkStatus::Up
    }

    /// Returns whether the link is up and a heartbeat has had no answer for longer than a lease.
    /// The server is stopped or cut off, or earlier frames have not reached it yet.
    pub(super) fn is_unresponsive(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.last_received);
        self.status == LinkStatus::Up && silence > self.lease && self.awaits_heartbeat()
    }

    fn awaits_heartbeat(&self) -> bool {
        self.pending.values().any(|pending| *pending == PendingRequest::Heartbeat)
    }

    /// The interval between heartbeats: a fifth of the lease.
    fn heartbeat_interval(&self) -> Duration {
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

    /// Takes the link out of use for good: the session has failed.
    pub(super) fn give_up(&mut self, error: &Error) {
        self.in_use = false;
        self.status = LinkStatus::Down { retry_at: None };
        self.last_error = error.to_string();
        self.pending.clear();
        self.receiving = None;
    }
}

impl Session {
    /// Returns the link to a shard, which is created on the first call.
    pub(super) fn link_to(&mut self, now: Instant, shard: ShardId) -> usize {
        if let Some(link) = self.links.iter().position(|link| link.shard == shard) {
            return link;
        }
        self.links.push(ShardLink::new(shard, now));
        self.links.len() - 1
    }

    /// Connects a link in use once its pause is over. A member connects to the step owner first,
    /// which gives it the client epoch for the other shards.
    pub(super) fn connect_if_due(&mut self, now: Instant, index: usize) {
        let known = self.epoch.0 != 0 || !self.config.role.is_member();
        let link = &mut self.links[index];
        let LinkStatus::Down { retry_at } = link.status else {
            return;
        };
        let due = retry_at.is_none_or(|at| at <= now);
        if link.in_use && due && (known || link.shard == self.config.owner) {
            link.status = LinkStatus::Connecting;
            self.outputs.push_back(SessionOutput::Connect { link: index, shard: link.shard });
        }
    }

    pub(super) fn disconnected(&mut self, now: Instant, index: usize, error: String) {
        let jitter = self.next_random();
        let link = &mut self.links[index];
        if matches!(link.status, LinkStatus::Down { .. }) {
            return;
        }
        let ceiling = BACKOFF.0.saturating_mul(1 << link.attempts.min(10)).min(BACKOFF.1);
        let pause = ceiling.mul_f64(jitter);
        link.attempts = link.attempts.saturating_add(1);
        link.status = LinkStatus::Down { retry_at: Some(now + pause) };
        link.last_error = error;
        link.blocked_reason.clear();
        // Another server may answer at this address, and there the number names another push slot.
        // If it is the same server, a reservation returns the same slot.
        (link.push_slot, link.push_buffer) = (0, None);
        link.granted_since = None;
        let pending = std::mem::take(&mut link.pending);
        // An answer without its whole body does not count.
        match link.receiving.take() {
            Some(BodyTarget::Values { op, .. } | BodyTarget::EncodedValues { op, .. }) => {
                self.pull_lost(op, index);
            }
            Some(BodyTarget::Answer { op, .. }) => self.request_lost(op),
            None => {}
        }
        for pending in pending.into_values() {
            match pending {
                PendingRequest::Request(op) => self.request_lost(op),
                PendingRequest::Token => self.tokens.request_lost(),
                PendingRequest::Pull(op, _) => self.pull_lost(op, index),
                PendingRequest::Reserve(sequence) => self.push_lost(sequence, index),
                PendingRequest::Push(sequence) => {
                    if self.links[index].shard == self.config.owner && !self.synchronous {
                        self.tokens.record_lost_request();
                    }
                    self.push_lost(sequence, index);
                }
                PendingRequest::PushState(sequence) => self.push_lost(sequence, index),
                PendingRequest::Return(token) => self.tokens.return_lost(token),
                // A withdrawal ends with its connection, which drops the parts.
                PendingRequest::Hello
                | PendingRequest::Heartbeat
                | PendingRequest::ShareValues
                | PendingRequest::SharePushBuffer
                | PendingRequest::Withdraw(_) => {}
            }
        }
        // Parts that expect no answer are lost too.
        let sequences: Vec<Sequence> = self.pushes.keys().copied().collect();
        for sequence in sequences {
            self.push_lost(sequence, index);
        }
    }

    /// Closes a link whose peer broke the protocol or is silent, and schedules a reconnect.
    pub(super) fn reset_link(&mut self, now: Instant, index: usize, error: String) {
        self.outputs.push_back(SessionOutput::Disconnect { link: index });
        self.disconnected(now, index, error);
    }

    /// Sends a request and records what its answer is for.
    pub(super) fn send(
        &mut self,
        now: Instant,
        index: usize,
        pending: PendingRequest,
        envelope: Envelope,
        message: impl Into<Message>,
        body: FrameBody,
    ) -> RequestId {
        let link = &mut self.links[index];
        let request = RequestId(link.next_request);
        link.next_request += 1;
        link.pending.insert(request, pending);
        link.last_sent = now;
        let (restore_epoch, crc) = (link.restore_epoch, link.crc);
        let envelope = Envelope { request, restore_epoch, ..envelope };
        let message = message.into();
        self.outputs.push_back(SessionOutput::Send { link: index, envelope, message, body, crc });
        request
    }

    /// Sends one more frame of a request.
    pub(super) fn send_on(
        &mut self,
        now: Instant,
        index: usize,
        envelope: Envelope,
        message: impl Into<Message>,
        body: FrameBody,
    ) {
        let link = &mut self.links[index];
        link.last_sent = now;
        let (restore_epoch, crc) = (link.restore_epoch, link.crc);
        let envelope = Envelope { restore_epoch, ..envelope };
        let message = message.into();
        self.outputs.push_back(SessionOutput::Send { link: index, envelope, message, body, crc });
    }

    pub(super) fn keep_alive(&mut self, now: Instant, index: usize) {
        let link = &self.links[index];
        match link.status {
            LinkStatus::AwaitingWelcome if now >= link.last_sent + WELCOME_TIMEOUT => {
                return self.reset_link(now, index, format!("no welcome in {WELCOME_TIMEOUT:?}"));
            }
            LinkStatus::Up if now >= link.last_sent + link.heartbeat_interval() => {}
            _ => return,
        }
        let unanswered = link.awaits_heartbeat();
        let silence = now.saturating_duration_since(link.last_received);
        // A shard answers a heartbeat as soon as it reads it. No answer for two leases means that
        // the server is stopped or cut off, even if the transport reports no error. Behind a push
        // the heartbeat arrives later: the transport may buffer megabytes on a slow network.
        let pushing =
            link.pending.values().any(|pending| matches!(pending, PendingRequest::Push(_)));
        let silence_max = link.lease * 2 + if pushing { DRAIN_TIME_MAX } else { Duration::ZERO };
        if unanswered && silence > silence_max {
            return self.reset_link(now, index, format!("no answer for {silence:?}"));
        }
        if !unanswered {
            self.send(
                now,
                index,
                PendingRequest::Heartbeat,
                Envelope::default(),
                Heartbeat {},
                FrameBody::Empty,
            );
        } else {
            self.links[index].last_sent = now;
        }
    }

    pub(super) fn message(&mut self, now: Instant, index: usize, header: Header, message: Message) {
        let link = &mut self.links[index];
        link.last_received = now;
        let Some(pending) = link.pending.get(&header.request).copied() else {
            let error = format!("unexpected {}", message.name());
            return self.reset_link(now, index, error);
        };
        if pending == PendingRequest::Hello {
            link.pending.remove(&header.request);
            return self.hello_answered(now, index, &header, message);
        }
        if !self.answer_epoch(now, index, pending, &header, &message) {
            return;
        }
        let link = &mut self.links[index];
        // An answer resets the back-off. A welcome alone does not.
        link.attempts = 0;
        if !has_more_parts(&message) {
            link.pending.remove(&header.request);
        }
        if self.links[index].shard == self.config.owner {
            self.step = self.step.max(header.step);
        }
        match (pending, message) {
            (_, Message::Refused(refused)) if Session::is_fatal(&refused.refusal) => {
                let error = self.refused("continue", index, refused.refusal);
                self.fail(error);
            }
            (PendingRequest::Heartbeat, Message::HeartbeatAnswer(_)) => {
                self.links[index].blocked_reason.clear();
            }
            // Not a refusal of the heartbeat: it says what blocks the requests on this shard.
            (PendingRequest::Heartbeat, Message::Refused(refused)) => {
                if let Refusal::Storage { detail } = refused.refusal {
                    self.links[index].blocked_reason = detail.to_string();
                }
            }
            (PendingRequest::Withdraw(request), Message::PushAnswer(_) | Message::Refused(_)) => {
                if let Some(request) = request {
                    self.links[index].pending.remove(&request);
                }
            }
            (PendingRequest::Return(token), Message::Returned(_) | Message::Refused(_)) => {
                self.tokens.remove_returned(token);
            }
            (
                PendingRequest::Hello | PendingRequest::Heartbeat | PendingRequest::Withdraw(_),
                message,
            ) => {
                self.unexpected(now, index, &message);
            }
            (PendingRequest::Return(token), message) => {
                self.tokens.return_lost(token);
                self.unexpected(now, index, &message);
            }
            (PendingRequest::Request(op), message) => {
                self.request_answered(now, op, index, &header, message);
            }
            (PendingRequest::ShareValues, message) => self.share_answered(now, index, message),
            (PendingRequest::SharePushBuffer, message) => {
                self.push_buffer_answered(now, index, message)
            }
            (PendingRequest::Token, message) => {
                self.token_answered(now, index, header.request, message);
            }
            (PendingRequest::Pull(op, request), message) => {
                self.pull_answered(now, (op, request), index, &header, message);
            }
            (PendingRequest::Reserve(sequence) | PendingRequest::Push(sequence), message) => {
                self.push_answered(now, sequence, index, header.request, message);
            }
            (PendingRequest::PushState(sequence), message) => {
                self.push_state_answered(now, sequence, index, message);
            }
        }
    }

    /// Resets the link after an answer that does not fit its request.
    pub(super) fn unexpected(&mut self, now: Instant, index: usize, message: &Message) {
        let error = format!("a {} does not fit the request", message.name());
        self.reset_link(now, index, error);
    }

    /// Returns whether a refusal ends the session.
    pub(super) fn is_fatal(refusal: &Refusal) -> bool {
        matches!(refusal, Refusal::Fenced { .. })
    }

    /// Returns a number in `[0, 1)`. SplitMix64 (Steele, Lea and Flood, 2014).
    fn next_random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
