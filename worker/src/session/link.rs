//! One shard's link: its status, what is unanswered on it, and its reconnects.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{RequestId, RestoreEpoch, Sequence, ShardId, TokenId};
use pushpull_common::protocol::message::Heartbeat;
use pushpull_common::protocol::{Envelope, Header, Message, Refusal};

use super::encoded_values::EncodedValuesPart;
use super::receiving::is_followed;
use super::{OpId, Output, Session};
use crate::error::Error;
use crate::parts::Body;
use crate::push_buffers::PushBufferId;
use crate::sharding_plan::Span;

/// How far a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Not connected; may be tried again at this time.
    Down { retry_at: Option<Instant> },
    /// The transport is being connected.
    Connecting,
    /// Hello is said.
    Greeting,
    /// Welcomed.
    Up,
}

/// What an unanswered request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Hello,
    Heartbeat,
    Request(OpId),
    Token,
    /// One of the requests of a pull.
    Pull(OpId, usize),
    ShareValues,
    SharePushBuffer,
    Reserve(Sequence),
    Push(Sequence),
    PushState(Sequence),
    /// The request whose parts are withdrawn: it is not answered after this.
    Withdraw(Option<RequestId>),
    /// A token that goes back.
    Return(TokenId),
}

/// What a body that is being received is for.
#[derive(Debug)]
pub(super) enum Receiving {
    /// Values for a pull.
    Values { op: OpId, ask: usize, last: bool },
    /// The same in a shorter form.
    EncodedValues { op: OpId, ask: usize, part: EncodedValuesPart, last: bool },
    /// The body of an answer.
    Answer { op: OpId, message: Message, body: Vec<u8> },
}

/// The first and the longest pause before a reconnect. The pause doubles between them, and is
/// drawn from zero to there, so that many workers do not come back in one instant.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How long a server that is connected may take to answer a hello, which it does at once if it
/// lives: one that is stopped is still connected by its system.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);

/// What a transport may take to carry what it holds: 4 MiB at 140 KB/s.
const CARRYING: Duration = Duration::from_secs(30);

/// A link to one shard.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) shard: ShardId,
    pub(super) status: Status,
    pub(super) wanted: bool,
    pub(super) pending: BTreeMap<RequestId, Pending>,
    next_request: u64,
    attempts: u32,
    /// The first request of the step owner that was sent after the shard had welcomed this session, and the
    /// first token that was granted to such a one: it is known of those from there on that they were granted
    /// while this connection stood.
    pub(super) welcomed_before: RequestId,
    pub(super) granted_since: Option<TokenId>,
    /// The push slot reserved on the shard for the next push; 0 for none.
    pub(super) push_slot: u32,
    pub(super) crc: bool,
    /// Whether the shard may lend its memory, and whether it has been asked.
    pub(super) same_host: bool,
    pub(super) asked_to_share: bool,
    /// Whether it has been asked for a tray, and what it has lent over this connection.
    pub(super) asked_for_push_buffer: bool,
    pub(super) push_buffer: Option<PushBufferId>,
    /// The restore epoch the shard lives in, by the last it said; 0 while unknown.
    pub(super) restore_epoch: RestoreEpoch,
    /// Whether its variables have values, by the last it said of them.
    pub(super) ready: bool,
    /// The shard's lease, by its last welcome: leases may differ between servers.
    pub(super) lease: Duration,
    pub(super) identity: Identity,
    pub(super) last_sent: Instant,
    pub(super) last_heard: Instant,
    pub(super) last_error: String,
    /// Why the shard cannot go on with what it was sent, by its last answer to a heartbeat; empty if it can.
    pub(super) trouble: String,
    pub(super) receiving: Option<Receiving>,
    /// Where the values that are being received go.
    pub(super) spans: Vec<(Span, usize)>,
    /// What they are received into if they come in a shorter form.
    pub(super) encoded_body: Vec<u8>,
    /// What padding is received into.
    pub(super) scratch: Vec<u8>,
}

impl Link {
    pub(super) fn new(shard: ShardId, now: Instant) -> Link {
        Link {
            shard,
            status: Status::Down { retry_at: None },
            wanted: true,
            pending: BTreeMap::new(),
            next_request: 1,
            attempts: 0,
            welcomed_before: RequestId(0),
            granted_since: None,
            push_slot: 0,
            crc: false,
            same_host: false,
            asked_to_share: false,
            asked_for_push_buffer: false,
            push_buffer: None,
            restore_epoch: RestoreEpoch(0),
            ready: false,
            lease: Duration::from_secs(5),
            identity: Identity::new(),
            last_sent: now,
            last_heard: now,
            last_error: String::new(),
            trouble: String::new(),
            receiving: None,
            spans: Vec::new(),
            encoded_body: Vec::default(),
            scratch: Vec::new(),
        }
    }

    /// The number of the next request.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request)
    }

    pub(super) fn is_silent(&self) -> bool {
        self.wanted && self.status != Status::Up
    }

    /// Whether the connection stands and the shard does not answer: a heartbeat has had no answer for longer
    /// than a lease. It is stopped or cut off, or what was sent before has not reached it yet.
    pub(super) fn is_unresponsive(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.last_heard);
        self.status == Status::Up && silence > self.lease && self.awaits_heartbeat()
    }

    fn awaits_heartbeat(&self) -> bool {
        self.pending.values().any(|pending| *pending == Pending::Heartbeat)
    }

    /// How often the shard must hear from us: every fifth of the lease.
    fn heartbeat(&self) -> Duration {
        self.lease / 5
    }

    /// When this link has something to do by itself.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.status {
            Status::Down { retry_at } => retry_at.filter(|_| self.wanted),
            Status::Connecting => None,
            Status::Greeting => Some(self.last_sent + WELCOME_TIMEOUT),
            Status::Up => Some(self.last_sent + self.heartbeat()),
        }
    }

    /// The session has failed: the link is not used any more.
    pub(super) fn give_up(&mut self, error: &Error) {
        self.wanted = false;
        self.status = Status::Down { retry_at: None };
        self.last_error = error.to_string();
        self.pending.clear();
        self.receiving = None;
    }
}

impl Session {
    /// The link to a shard, made if need be.
    pub(super) fn link_to(&mut self, now: Instant, shard: ShardId) -> usize {
        if let Some(link) = self.links.iter().position(|link| link.shard == shard) {
            return link;
        }
        self.links.push(Link::new(shard, now));
        self.links.len() - 1
    }

    /// Connects a link that is wanted, once it is time. The step owner comes first: it says who
    /// we are to the others.
    pub(super) fn connect_if_due(&mut self, now: Instant, index: usize) {
        let known = self.epoch.0 != 0 || !self.start.role.is_member();
        let link = &mut self.links[index];
        let Status::Down { retry_at } = link.status else {
            return;
        };
        let due = retry_at.is_none_or(|at| at <= now);
        if link.wanted && due && (known || link.shard == self.start.owner) {
            link.status = Status::Connecting;
            self.outputs.push_back(Output::Connect { link: index, shard: link.shard });
        }
    }

    pub(super) fn disconnected(&mut self, now: Instant, index: usize, error: String) {
        let jitter = self.next_random();
        let link = &mut self.links[index];
        if matches!(link.status, Status::Down { .. }) {
            return;
        }
        let ceiling = BACKOFF.0.saturating_mul(1 << link.attempts.min(10)).min(BACKOFF.1);
        let pause = ceiling.mul_f64(jitter);
        link.attempts = link.attempts.saturating_add(1);
        link.status = Status::Down { retry_at: Some(now + pause) };
        link.last_error = error;
        link.trouble.clear();
        // The server may be another that comes back, and its numbers may mean other rooms. Asking
        // for room tells the old one's number again, if it is the old one.
        (link.push_slot, link.push_buffer) = (0, None);
        link.granted_since = None;
        let pending = std::mem::take(&mut link.pending);
        // An answer whose body was cut off is no answer.
        match link.receiving.take() {
            Some(Receiving::Values { op, .. } | Receiving::EncodedValues { op, .. }) => {
                self.pull_lost(op, index);
            }
            Some(Receiving::Answer { op, .. }) => self.request_lost(op),
            None => {}
        }
        for pending in pending.into_values() {
            match pending {
                Pending::Request(op) => self.request_lost(op),
                Pending::Token => self.tokens.request_lost(),
                Pending::Pull(op, _) => self.pull_lost(op, index),
                Pending::Reserve(sequence) => self.push_lost(sequence, index),
                Pending::Push(sequence) => {
                    if self.links[index].shard == self.start.owner && !self.synchronous {
                        self.tokens.lost();
                    }
                    self.push_lost(sequence, index);
                }
                Pending::PushState(sequence) => self.push_lost(sequence, index),
                Pending::Return(token) => self.tokens.return_lost(token),
                // What is withdrawn is given up with its connection.
                Pending::Hello
                | Pending::Heartbeat
                | Pending::ShareValues
                | Pending::SharePushBuffer
                | Pending::Withdraw(_) => {}
            }
        }
        // Parts that were sent without an answer being due are lost as well.
        let sequences: Vec<Sequence> = self.pushes.keys().copied().collect();
        for sequence in sequences {
            self.push_lost(sequence, index);
        }
    }

    /// Closes a link whose peer broke the protocol or went silent; it is connected anew.
    pub(super) fn break_off(&mut self, now: Instant, index: usize, error: String) {
        self.outputs.push_back(Output::Disconnect { link: index });
        self.disconnected(now, index, error);
    }

    /// Sends a request and remembers what its answer is for.
    pub(super) fn send(
        &mut self,
        now: Instant,
        index: usize,
        pending: Pending,
        envelope: Envelope,
        message: impl Into<Message>,
        body: Body,
    ) -> RequestId {
        let link = &mut self.links[index];
        let request = RequestId(link.next_request);
        link.next_request += 1;
        link.pending.insert(request, pending);
        link.last_sent = now;
        let (restore_epoch, crc) = (link.restore_epoch, link.crc);
        let envelope = Envelope { request, restore_epoch, ..envelope };
        let message = message.into();
        self.outputs.push_back(Output::Send { link: index, envelope, message, body, crc });
        request
    }

    /// Sends one more frame of a request that has been sent.
    pub(super) fn send_on(
        &mut self,
        now: Instant,
        index: usize,
        envelope: Envelope,
        message: impl Into<Message>,
        body: Body,
    ) {
        let link = &mut self.links[index];
        link.last_sent = now;
        let (restore_epoch, crc) = (link.restore_epoch, link.crc);
        let envelope = Envelope { restore_epoch, ..envelope };
        let message = message.into();
        self.outputs.push_back(Output::Send { link: index, envelope, message, body, crc });
    }

    pub(super) fn keep_alive(&mut self, now: Instant, index: usize) {
        let link = &self.links[index];
        match link.status {
            Status::Greeting if now >= link.last_sent + WELCOME_TIMEOUT => {
                return self.break_off(now, index, format!("no welcome in {WELCOME_TIMEOUT:?}"));
            }
            Status::Up if now >= link.last_sent + link.heartbeat() => {}
            _ => return,
        }
        let unanswered = link.awaits_heartbeat();
        let silence = now.saturating_duration_since(link.last_heard);
        // A shard answers a heartbeat as soon as it reads it, whatever else it does. One that has not
        // for two leases is stopped or cut off, even if the transport does not say so. Behind a push
        // it reads it late: the transport may hold megabytes that a slow network has yet to carry.
        let pushing = link.pending.values().any(|pending| matches!(pending, Pending::Push(_)));
        let silence_max = link.lease * 2 + if pushing { CARRYING } else { Duration::ZERO };
        if unanswered && silence > silence_max {
            return self.break_off(now, index, format!("no answer for {silence:?}"));
        }
        if !unanswered {
            self.send(
                now,
                index,
                Pending::Heartbeat,
                Envelope::default(),
                Heartbeat {},
                Body::Empty,
            );
        } else {
            self.links[index].last_sent = now;
        }
    }

    pub(super) fn message(&mut self, now: Instant, index: usize, header: Header, message: Message) {
        let link = &mut self.links[index];
        link.last_heard = now;
        let Some(pending) = link.pending.get(&header.request).copied() else {
            let error = format!("a {} nobody asked for", message.name());
            return self.break_off(now, index, error);
        };
        if pending == Pending::Hello {
            link.pending.remove(&header.request);
            return self.greeted(now, index, &header, message);
        }
        if !self.answer_epoch(now, index, pending, &header, &message) {
            return;
        }
        let link = &mut self.links[index];
        // A server that answers has earned a quick return; one that only says welcome has not.
        link.attempts = 0;
        if !is_followed(&message) {
            link.pending.remove(&header.request);
        }
        if self.links[index].shard == self.start.owner {
            self.step = self.step.max(header.step);
        }
        match (pending, message) {
            (_, Message::Refused(refused)) if Session::is_fatal(&refused.refusal) => {
                let error = self.refused("go on", index, refused.refusal);
                self.fail(error);
            }
            (Pending::Heartbeat, Message::HeartbeatAnswer(_)) => {
                self.links[index].trouble.clear();
            }
            // Nothing was refused: it says why what waits there may wait for long.
            (Pending::Heartbeat, Message::Refused(refused)) => {
                if let Refusal::Storage { detail } = refused.refusal {
                    self.links[index].trouble = detail.to_string();
                }
            }
            (Pending::Withdraw(request), Message::PushAnswer(_) | Message::Refused(_)) => {
                if let Some(request) = request {
                    self.links[index].pending.remove(&request);
                }
            }
            (Pending::Return(token), Message::Returned(_) | Message::Refused(_)) => {
                self.tokens.is_back(token);
            }
            (Pending::Hello | Pending::Heartbeat | Pending::Withdraw(_), message) => {
                self.unexpected(now, index, &message);
            }
            (Pending::Return(token), message) => {
                self.tokens.return_lost(token);
                self.unexpected(now, index, &message);
            }
            (Pending::Request(op), message) => {
                self.request_answered(now, op, index, &header, message);
            }
            (Pending::ShareValues, message) => self.share_answered(now, index, message),
            (Pending::SharePushBuffer, message) => self.push_buffer_answered(now, index, message),
            (Pending::Token, message) => {
                self.token_answered(now, index, header.request, message);
            }
            (Pending::Pull(op, ask), message) => {
                self.pull_answered(now, (op, ask), index, &header, message);
            }
            (Pending::Reserve(sequence) | Pending::Push(sequence), message) => {
                self.push_answered(now, sequence, index, header.request, message);
            }
            (Pending::PushState(sequence), message) => {
                self.push_state_answered(now, sequence, index, message);
            }
        }
    }

    /// Nothing else fits: the peer's fault.
    pub(super) fn unexpected(&mut self, now: Instant, index: usize, message: &Message) {
        let error = format!("a {} does not answer what was asked", message.name());
        self.break_off(now, index, error);
    }

    /// Whether a refusal of this kind ends the session.
    pub(super) fn is_fatal(refusal: &Refusal) -> bool {
        matches!(refusal, Refusal::Fenced { .. })
    }

    /// A number in `[0, 1)`; the SplitMix64 sequence of Steele, Lea and Flood, 2014.
    fn next_random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
