//! The session's links, one for each shard: connecting, sending, and keeping alive.
//!
//! This module is below the owners of the session. They send through it, and it names none of them.

mod shard_link;

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use pushpull_common::error::Chain;
use pushpull_common::ids::{RequestId, ShardId, TokenId};
use pushpull_common::protocol::message::Heartbeat;
use pushpull_common::protocol::{Envelope, Message};

use super::SessionOutput;
use crate::error::Error;
use crate::gradients::parts::FrameBody;
use shard_link::WELCOME_TIMEOUT;
pub(super) use shard_link::{
    BodyTarget, LinkFault, LinkStatus, PendingRequest, ShardLink, has_more_parts,
};

/// A frame to send: the fields of its header that the request decides, its meta and its body.
#[derive(Debug)]
pub(super) struct OutgoingFrame {
    pub(super) envelope: Envelope,
    pub(super) message: Message,
    pub(super) body: FrameBody,
}

impl OutgoingFrame {
    /// Returns a frame without a body.
    pub(super) fn new(envelope: Envelope, message: impl Into<Message>) -> OutgoingFrame {
        OutgoingFrame { envelope, message: message.into(), body: FrameBody::Empty }
    }

    /// Returns a frame without a body, sequence number, step or deadline.
    pub(super) fn of(message: impl Into<Message>) -> OutgoingFrame {
        OutgoingFrame::new(Envelope::default(), message)
    }
}

/// What a lost connection leaves unanswered.
#[derive(Debug)]
pub(super) struct LostRequests {
    pub(super) pending: BTreeMap<RequestId, PendingRequest>,
    /// The answer whose body was not received completely.
    pub(super) receiving: Option<BodyTarget>,
}

/// The links of a session, and the queue of its outputs.
///
/// Invariants: there is one link for each shard, and its index never changes. A request is pending
/// on the link that it was sent over, until its last answer or the end of the connection.
#[derive(Debug)]
pub(super) struct SessionLinks {
    links: Vec<ShardLink>,
    /// The shard of the step owner.
    owner: ShardId,
    /// Whether the step owner may reject gradients as stale, from its last welcome. Asynchronous
    /// mode only.
    pub(super) owner_first: bool,
    /// State of the generator for reconnect jitter, seeded with the incarnation: workers differ,
    /// runs do not.
    random: u64,
    /// The actions that all owners ask for, in the order in which they must be carried out.
    pub(super) outputs: VecDeque<SessionOutput>,
}

impl SessionLinks {
    pub(super) fn new(owner: ShardId, seed: u64) -> SessionLinks {
        SessionLinks {
            links: Vec::new(),
            owner,
            owner_first: false,
            random: seed,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the link to a shard, which is created on the first call.
    pub(super) fn to(&mut self, now: Instant, shard: ShardId) -> usize {
        if let Some(link) = self.links.iter().position(|link| link.shard == shard) {
            return link;
        }
        self.links.push(ShardLink::new(shard, now));
        self.links.len() - 1
    }

    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ShardLink> {
        self.links.iter()
    }

    /// Returns the link to the step owner.
    pub(super) fn owner(&self) -> Option<usize> {
        self.links.iter().position(|link| link.shard == self.owner)
    }

    pub(super) fn is_owner(&self, index: usize) -> bool {
        self.links[index].shard == self.owner
    }

    /// Returns the link to the step owner if it is up.
    pub(super) fn connected_owner(&self) -> Option<usize> {
        self.owner().filter(|&owner| self.links[owner].is_up())
    }

    /// Returns when a link needs a tick.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.links.iter().filter_map(ShardLink::wake_at).min()
    }

    /// Returns the links whose shards are not in the newest epoch among these.
    pub(super) fn outdated<'a>(
        &'a self,
        links: impl Iterator<Item = usize> + Clone + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        let newest = links.clone().map(|link| self.links[link].restore_epoch).max();
        links.filter(move |&link| Some(self.links[link].restore_epoch) != newest)
    }

    /// Connects a link in use once its pause is over. A member connects to the step owner first,
    /// which gives it the client epoch for the other shards.
    pub(super) fn connect_if_due(&mut self, now: Instant, index: usize, has_epoch: bool) {
        let link = &mut self.links[index];
        let LinkStatus::Down { retry_at } = link.status else {
            return;
        };
        let due = retry_at.is_none_or(|at| at <= now);
        if link.in_use && due && (has_epoch || link.shard == self.owner) {
            link.status = LinkStatus::Connecting;
            self.outputs.push_back(SessionOutput::Connect { link: index, shard: link.shard });
        }
    }

    /// Takes a link down after the loss of its connection, and returns what was unanswered; `None`
    /// if it was down.
    pub(super) fn lose(
        &mut self,
        now: Instant,
        index: usize,
        error: String,
    ) -> Option<LostRequests> {
        let jitter = self.next_random();
        let link = &mut self.links[index];
        if matches!(link.status, LinkStatus::Down { .. }) {
            return None;
        }
        let ceiling = BACKOFF.0.saturating_mul(1 << link.attempts.min(10)).min(BACKOFF.1);
        let pause = ceiling.mul_f64(jitter);
        link.attempts = link.attempts.saturating_add(1);
        link.status = LinkStatus::Down { retry_at: Some(now + pause) };
        link.last_error = error;
        link.blocked_reason.clear();
        // Another server may answer at this address, and there the number names another push slot.
        // If it is the same server, a reservation returns the same slot.
        link.push_slot = 0;
        link.push_buffer = None;
        link.granted_since = None;
        let pending = std::mem::take(&mut link.pending);
        Some(LostRequests { pending, receiving: link.receiving.take() })
    }

    /// Sends a request and records what its answer is for.
    pub(super) fn send(
        &mut self,
        now: Instant,
        index: usize,
        pending: PendingRequest,
        frame: OutgoingFrame,
    ) -> RequestId {
        let link = &mut self.links[index];
        let request = RequestId(link.next_request);
        link.next_request += 1;
        link.pending.insert(request, pending);
        self.send_more(now, index, request, frame);
        request
    }

    /// Sends one more frame of a request.
    pub(super) fn send_more(
        &mut self,
        now: Instant,
        index: usize,
        request: RequestId,
        frame: OutgoingFrame,
    ) {
        let link = &mut self.links[index];
        link.last_sent = now;
        let restore_epoch = link.restore_epoch;
        let crc = link.crc;
        let OutgoingFrame { envelope, message, body } = frame;
        let envelope = Envelope { request, restore_epoch, ..envelope };
        self.outputs.push_back(SessionOutput::Send { link: index, envelope, message, body, crc });
    }

    /// Sends a heartbeat if one is due. Fails if the shard has been silent for too long.
    pub(super) fn keep_alive(&mut self, now: Instant, index: usize) -> Result<(), LinkFault> {
        let link = &mut self.links[index];
        match link.status {
            LinkStatus::AwaitingWelcome if now >= link.last_sent + WELCOME_TIMEOUT => {
                return Err(LinkFault::Reset(format!("no welcome in {WELCOME_TIMEOUT:?}")));
            }
            LinkStatus::Up if now >= link.last_sent + link.heartbeat_interval() => {}
            _ => return Ok(()),
        }
        let unanswered = link.awaits(PendingRequest::Heartbeat);
        let silence = now.saturating_duration_since(link.last_received);
        // A shard answers a heartbeat as soon as it reads it. No answer for two leases means that
        // the server is stopped or cut off, even if the transport reports no error. Behind a push
        // the heartbeat arrives later: the transport may buffer megabytes on a slow network.
        let pushing =
            link.pending.values().any(|pending| matches!(pending, PendingRequest::Push(_)));
        let silence_max = link.lease * 2 + if pushing { DRAIN_TIME_MAX } else { Duration::ZERO };
        if unanswered && silence > silence_max {
            return Err(LinkFault::Reset(format!("no answer for {silence:?}")));
        }
        if unanswered {
            link.last_sent = now;
        } else {
            let heartbeat = OutgoingFrame::of(Heartbeat {});
            self.send(now, index, PendingRequest::Heartbeat, heartbeat);
        }
        Ok(())
    }

    /// Records the token granted in answer to this request of the step owner.
    pub(super) fn granted(&mut self, request: RequestId, token: TokenId) {
        let unknown = |link: &&mut ShardLink| link.granted_since.is_none() && link.is_up();
        for link in self.links.iter_mut().filter(unknown) {
            // Tokens are numbered in the order of their grants.
            link.granted_since = (request >= link.welcomed_before).then_some(token);
        }
    }

    /// Marks a shard as welcomed: tokens requested from now on are granted after its welcome.
    pub(super) fn welcomed(&mut self, index: usize, token_was_requested: bool) {
        let next = self.owner().map(|owner| RequestId(self.links[owner].next_request));
        let link = &mut self.links[index];
        link.status = LinkStatus::Up;
        link.welcomed_before = next.unwrap_or_default();
        link.granted_since = (!token_was_requested).then_some(TokenId(0));
    }

    /// Treats every token as granted while all connections were up. Planted bug of the simulator.
    #[cfg(feature = "simulation")]
    pub(super) fn trust_connections(&mut self) {
        self.links.iter_mut().for_each(|link| link.granted_since = Some(TokenId(0)));
    }

    /// Takes all links out of use for good: the session has failed.
    pub(super) fn give_up(&mut self, error: &Error) {
        for (index, link) in self.links.iter_mut().enumerate() {
            link.in_use = false;
            link.status = LinkStatus::Down { retry_at: None };
            link.last_error = Chain(error).to_string();
            link.pending.clear();
            link.receiving = None;
            self.outputs.push_back(SessionOutput::Disconnect { link: index });
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        for (index, link) in self.links.iter().enumerate() {
            let same = self.links.iter().filter(|other| other.shard == link.shard);
            assert_eq!(same.count(), 1, "one link for each shard");
            assert!(link.pending.keys().all(|request| request.0 < link.next_request));
            let is_down = matches!(link.status, LinkStatus::Down { .. } | LinkStatus::Connecting);
            assert!(!is_down || link.pending.is_empty(), "link {index} is down: {link:?}");
        }
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

impl Index<usize> for SessionLinks {
    type Output = ShardLink;

    fn index(&self, index: usize) -> &ShardLink {
        &self.links[index]
    }
}

impl IndexMut<usize> for SessionLinks {
    fn index_mut(&mut self, index: usize) -> &mut ShardLink {
        &mut self.links[index]
    }
}

/// The shortest and the longest ceiling of a reconnect pause. The ceiling doubles with each
/// attempt, and the pause is uniform between zero and the ceiling, so that workers do not reconnect
/// in lockstep.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How long a transport may take to deliver what it has buffered: 4 MiB at 140 KB/s.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const OWNER: ShardId = ShardId { task: 0, shard: 0 };
    const OTHER: ShardId = ShardId { task: 1, shard: 0 };

    #[test]
    fn a_member_connects_to_the_step_owner_first() {
        let now = Instant::now();
        let mut links = SessionLinks::new(OWNER, 1);
        let [other, owner] = [OTHER, OWNER].map(|shard| links.to(now, shard));
        assert_eq!((links.to(now, OTHER), links.owner()), (other, Some(owner)));
        (0..2).for_each(|link| links.connect_if_due(now, link, false));
        assert!(matches!(links.outputs.pop_front(), Some(SessionOutput::Connect { link: 1, .. })));
        assert!(links.outputs.is_empty());
        (0..2).for_each(|link| links.connect_if_due(now, link, true));
        assert!(matches!(links.outputs.pop_front(), Some(SessionOutput::Connect { link: 0, .. })));
        assert!(links.outputs.is_empty(), "the owner's link is connecting already");
    }

    #[test]
    fn pauses_between_attempts_are_random_and_bounded() {
        let now = Instant::now();
        let mut links = SessionLinks::new(OWNER, 7);
        let link = links.to(now, OWNER);
        let mut pauses = BTreeSet::new();
        for attempt in 0..100 {
            let later = now + Duration::from_secs(attempt);
            links.connect_if_due(later, link, true);
            links.lose(later, link, "refused".to_owned()).expect("the link was connecting");
            let LinkStatus::Down { retry_at: Some(at) } = links[link].status else { panic!() };
            assert!(at - later <= BACKOFF.1.min(BACKOFF.0 * (1 << attempt.min(10))));
            pauses.insert(at - later);
        }
        assert!(pauses.len() > 90);
        assert!(links.lose(now, link, "again".to_owned()).is_none(), "the link is down");
    }

    #[test]
    fn only_tokens_requested_after_a_welcome_were_granted_over_its_connection() {
        let now = Instant::now();
        let mut links = SessionLinks::new(OWNER, 1);
        let [owner, other] = [OWNER, OTHER].map(|shard| links.to(now, shard));
        links.welcomed(owner, false);
        assert_eq!(links[owner].granted_since, Some(TokenId(0)), "no token was requested before");
        let ask = |links: &mut SessionLinks| {
            let frame = OutgoingFrame::of(Heartbeat {});
            links.send(now, owner, PendingRequest::Token, frame)
        };
        let before = ask(&mut links);
        links.welcomed(other, true);
        links.granted(before, TokenId(4));
        assert_eq!(links[other].granted_since, None);
        let after = ask(&mut links);
        links.granted(after, TokenId(5));
        links.granted(after, TokenId(6));
        assert_eq!(links[other].granted_since, Some(TokenId(5)));
    }
}
