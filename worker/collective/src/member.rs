//! [`Member`]: the control connection of one rank, from its first request to its leave.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::{
    BodyCrc, FeatureOffer, Heartbeat, Hello, Leave, RankAddresses, RingEnd, RingEntered, RingJoin,
    RingOver, Role,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Features, Message, Refusal, version};

use crate::formed_ring::{FormedRing, RankPlace};

/// The facts of a member that do not change.
#[derive(Clone, Debug)]
pub(crate) struct MemberFacts {
    /// The name of the job: rings of two jobs do not mix.
    pub(crate) job: String,
    /// The stable id.
    pub(crate) id: String,
    /// The index that the launcher has given; `None` if the rendezvous assigns one.
    pub(crate) index: Option<u32>,
    /// The number of members of the first ring.
    pub(crate) size: u32,
    /// The host.
    pub(crate) host: String,
    /// The addresses of the member.
    pub(crate) addresses: Vec<String>,
    /// Chosen at random at each start.
    pub(crate) incarnation: Incarnation,
    /// The facts on which all members must agree.
    pub(crate) identity: Identity,
    /// The lease, until the rendezvous names its own.
    pub(crate) lease: Duration,
}

impl MemberFacts {
    /// Returns the hello that opens each connection.
    pub(crate) fn hello(&self) -> Hello {
        let fields = self.identity.fields();
        let fields = fields.map(|(name, value)| (Text::clipped(name), Text::clipped(value)));
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Rank {},
            job: Text::clipped(&self.job),
            task: self.index.unwrap_or(0),
            shard: ShardId { task: 0, shard: 0 },
            incarnation: self.incarnation,
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_step: GlobalStep(0),
            seen_arena: 0,
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: List::of(fields).unwrap_or_default(),
            auth: None,
            features: FeatureOffer::of(Features::ALL),
        }
    }
}

/// The place of a rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where the program meets.
    Meeting,
    /// In this process.
    Own,
    /// In the process of another member.
    Member {
        /// The addresses of the member.
        addresses: Vec<String>,
    },
}

/// An input of a member.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MemberInput {
    /// The program wants to be in the next ring.
    Join,
    /// The connection to the last place stands.
    Connected,
    /// There is no connection to the last place.
    NotConnected {
        /// The cause.
        cause: String,
        /// Whether that proves that no process listens there any more.
        gone: bool,
    },
    /// A message of the rendezvous.
    Message(Message),
    /// The connection has ended.
    Closed {
        /// The cause.
        cause: String,
    },
    /// The ring is over for a reason that this rank has found.
    Report {
        /// The epoch of the ring.
        epoch: u64,
        /// The reason.
        end: RingEnd,
    },
    /// The program leaves.
    Leave,
    /// Time has passed.
    Tick,
}

/// An output of a member.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MemberOutput {
    /// Connect to a place, in place of the connection before.
    Connect(Place),
    /// Serve the rendezvous in this process, from now on.
    Serve,
    /// Send a message.
    Send(Message),
    /// Close the connection.
    Disconnect,
    /// A ring has formed.
    Formed(Arc<FormedRing>),
    /// The ring of this epoch is over.
    Over {
        /// The epoch.
        epoch: u64,
        /// The reason.
        end: RingEnd,
    },
    /// The rendezvous is lost, which is in no member.
    RendezvousLost {
        /// The cause.
        cause: String,
    },
    /// The rendezvous waits for members.
    Waits {
        /// The members that have come.
        came: u32,
        /// The members of the ring.
        size: u32,
        /// The first indices that have not come.
        missing: Vec<u32>,
    },
    /// This many members wait for the next ring.
    Joiners(u32),
    /// The rendezvous refuses this member.
    Refused(Refusal),
    /// The leave is confirmed, or nobody is there to confirm it.
    Left,
}

/// The control connection of one rank.
///
/// - **In.** Wishes of the program, events of the connection and messages of the rendezvous.
/// - **Out.** Where to connect, what to send, and what has become of the ring.
/// - **Time.** [`Member::wake_at`] is the next heartbeat, retry or end of a lease.
/// - **Never.** A ring is never reported twice, nor as over before it has formed. No ring of an
///   older epoch is reported.
///
/// If the rendezvous is lost and was in a member, the member of the lowest rank that is left serves
/// it. Members that cannot be reached are passed over in order of ranks, so all find the same one.
#[derive(Debug)]
pub(crate) struct Member {
    facts: MemberFacts,
    phase: Phase,
    is_connected: bool,
    /// Whether the program wants to be in the next ring.
    wants_ring: bool,
    /// Whether the others have declared this member lost and go on without it: then it neither joins
    /// again nor serves anybody.
    is_fenced: bool,
    lease: Duration,
    heard_at: Instant,
    heartbeat_at: Instant,
    /// Whether the last heartbeat is not answered. The next one confirms the answer, so that the
    /// rendezvous knows that this member takes it for alive.
    awaits_answer: bool,
    retry_at: Option<Instant>,
    /// The time of the last input.
    handled_at: Instant,
    place: Place,
    /// The members that may serve next, after the loss of the rendezvous.
    candidates: VecDeque<Candidate>,
    /// The indices of members of the last ring whose processes are gone.
    gone: Vec<u32>,
    ring: Option<Arc<FormedRing>>,
    /// Members of the ring that forms.
    forming: Vec<RankPlace>,
    outputs: VecDeque<MemberOutput>,
}

/// A member that may serve.
#[derive(Clone, Debug)]
struct Candidate {
    index: u32,
    place: Place,
    /// The time until which it is tried.
    until: Option<Instant>,
}

/// The phase of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It is in no ring, or its ring is over.
    Out,
    /// It tells the next rendezvous that it lives: the last one is lost, and the program has not
    /// asked for the next ring.
    Present,
    /// It has asked for a place in the next ring.
    Asked,
    /// It is in a ring.
    In,
    /// It has asked to leave.
    Leaving,
    /// It has left, or was refused.
    Ended,
}

/// The member whose connection a member has lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serving {
    /// It was silent, or breaks the protocol.
    Silent,
    /// The connection has ended. So may have the process.
    MayLive,
}

/// The pause before another attempt to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

impl Member {
    /// Creates a member that has not joined.
    pub(crate) fn new(now: Instant, facts: MemberFacts) -> Member {
        Member {
            lease: facts.lease,
            facts,
            phase: Phase::Out,
            is_connected: false,
            wants_ring: false,
            is_fenced: false,
            heard_at: now,
            heartbeat_at: now,
            awaits_answer: false,
            retry_at: None,
            handled_at: now,
            place: Place::Meeting,
            candidates: VecDeque::new(),
            gone: Vec::new(),
            ring: None,
            forming: Vec::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Returns the facts of this member.
    pub(crate) fn facts(&self) -> &MemberFacts {
        &self.facts
    }

    /// Sets the addresses of this member, before its first connection.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<String>) {
        self.facts.addresses = addresses;
    }

    /// Returns the next output.
    pub(crate) fn poll_output(&mut self) -> Option<MemberOutput> {
        self.outputs.pop_front()
    }

    /// # Panics
    /// If the member keeps more than the largest ring needs.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn check_memory(&self) {
        let kept = [self.forming.len(), self.gone.len(), self.candidates.len()];
        assert!(kept.iter().all(|&length| length <= RING_SIZE_MAX), "{kept:?}");
    }

    /// Returns the time of the next tick; `None` once the member has ended.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        if self.phase == Phase::Ended {
            return None;
        }
        let beats = (self.is_connected && !self.awaits_answer).then_some(self.heartbeat_at);
        let silence = self.is_connected.then(|| self.heard_at + self.lease);
        // It also runs to notice that it was stopped.
        let pulse = self.is_connected.then(|| self.handled_at + self.lease / 4);
        [beats, silence, self.retry_at, pulse].into_iter().flatten().min()
    }

    /// Handles an input.
    pub(crate) fn handle(&mut self, now: Instant, input: MemberInput) {
        if self.phase == Phase::Ended {
            return;
        }
        match input {
            MemberInput::Join => {
                self.wants_ring = true;
                self.go_on(now);
            }
            MemberInput::Connected => {
                self.is_connected = true;
                self.awaits_answer = false;
                self.heard_at = now;
                self.heartbeat_at = now + self.lease / 4;
                self.send(self.facts.hello());
                match (self.phase, &self.ring) {
                    (Phase::Present, Some(ring)) => {
                        let epoch = ring.epoch;
                        self.send(RingEntered { epoch });
                    }
                    _ => self.ask(),
                }
            }
            MemberInput::NotConnected { cause, gone } => self.not_connected(now, cause, gone),
            MemberInput::Closed { cause } => self.disconnected(now, cause, Serving::MayLive),
            MemberInput::Message(message) => {
                self.heard_at = now;
                self.message(now, message);
            }
            MemberInput::Report { epoch, end } => self.report(epoch, end),
            MemberInput::Leave => self.leave(),
            MemberInput::Tick => self.tick(now),
        }
        self.handled_at = now;
    }

    /// Connects or asks, as far as the program wants a ring.
    fn go_on(&mut self, now: Instant) {
        if !self.wants_ring || self.is_fenced {
            return;
        }
        match (self.phase, self.is_connected) {
            (Phase::Out | Phase::Present, true) => self.ask(),
            (Phase::Out, false) => self.connect(now),
            // It connects already.
            (Phase::Present, false) => self.phase = Phase::Asked,
            _ => {}
        }
    }

    /// Returns the phase of a member that looks for the rendezvous.
    fn seeking(&self) -> Phase {
        if self.wants_ring { Phase::Asked } else { Phase::Present }
    }

    fn connect(&mut self, now: Instant) {
        self.retry_at = None;
        self.phase = self.seeking();
        if let Some(candidate) = self.candidates.front_mut() {
            candidate.until.get_or_insert(now + self.lease);
            self.place = candidate.place.clone();
        }
        self.outputs.push_back(MemberOutput::Connect(self.place.clone()));
    }

    fn ask(&mut self) {
        self.phase = Phase::Asked;
        self.forming.clear();
        let ring = self.ring.as_deref();
        let facts = &self.facts;
        let addresses = facts.addresses.iter().map(Text::clipped);
        let join = RingJoin {
            id: Text::clipped(&facts.id),
            index: ring.map_or(facts.index, |ring| ring.place(ring.rank).map(|own| own.index)),
            size: ring.map_or(facts.size, FormedRing::size),
            host: Text::clipped(&facts.host),
            addresses: RankAddresses::of(addresses).unwrap_or_default(),
            epoch: ring.map_or(0, |ring| ring.epoch),
            gone: List::of(self.gone.iter().copied()).unwrap_or_default(),
        };
        self.send(join);
    }

    fn send(&mut self, message: impl Into<Message>) {
        self.outputs.push_back(MemberOutput::Send(message.into()));
    }

    fn not_connected(&mut self, now: Instant, cause: String, gone: bool) {
        if self.phase == Phase::Leaving {
            return self.left();
        }
        if !matches!(self.phase, Phase::Present | Phase::Asked) {
            return;
        }
        self.outputs.push_back(MemberOutput::RendezvousLost { cause });
        self.try_again(now, gone);
    }

    /// Tries the same place again after a pause, or the next one if this has had its time.
    fn try_again(&mut self, now: Instant, gone: bool) {
        if let Some(candidate) = self.candidates.front() {
            let is_over = candidate.until.is_some_and(|until| until <= now);
            if gone && !self.gone.contains(&candidate.index) {
                self.gone.push(candidate.index);
            }
            if gone || is_over {
                self.next_candidate();
            }
        } else {
            // A rendezvous that has moved may move again.
            self.place = Place::Meeting;
        }
        self.phase = self.seeking();
        self.retry_at = Some(now + RETRY_PAUSE);
    }

    /// Passes over the first candidate. After the last one the first is tried again: it may be
    /// reachable then.
    fn next_candidate(&mut self) {
        if let Some(mut candidate) = self.candidates.pop_front() {
            candidate.until = None;
            if !self.gone.contains(&candidate.index) {
                self.candidates.push_back(candidate);
            }
        }
        self.serve_if_next();
    }

    fn serve_if_next(&mut self) {
        let is_next = self.candidates.front().is_some_and(|next| next.place == Place::Own);
        if is_next && self.place != Place::Own {
            self.place = Place::Own;
            self.outputs.push_back(MemberOutput::Serve);
        }
    }

    fn disconnected(&mut self, now: Instant, cause: String, serving: Serving) {
        if !std::mem::take(&mut self.is_connected) {
            return;
        }
        match self.phase {
            Phase::Leaving => self.left(),
            Phase::Present | Phase::Asked => {
                self.succeed(serving);
                self.outputs.push_back(MemberOutput::RendezvousLost { cause });
                self.try_again(now, false);
            }
            Phase::In => {
                self.phase = Phase::Out;
                let silent = now.saturating_duration_since(self.heard_at);
                self.succeed(serving);
                self.rendezvous_lost(cause, silent);
                self.seek(now);
            }
            Phase::Out => {
                self.succeed(serving);
                self.seek(now);
            }
            Phase::Ended => {}
        }
    }

    /// Connects to the member that may serve next, even if the program still computes: a successor
    /// waits for those that it knows to live.
    fn seek(&mut self, now: Instant) {
        if !self.is_fenced && (self.wants_ring || !self.candidates.is_empty()) {
            self.connect(now);
        }
    }

    /// Reports a ring whose rendezvous is lost.
    fn rendezvous_lost(&mut self, cause: String, silent: Duration) {
        let Some(ring) = &self.ring else { return };
        let epoch = ring.epoch;
        let server = ring.serving.and_then(|rank| Some((rank, ring.place(rank)?)));
        let output = match server {
            Some((rank, place)) => {
                let host = Text::clipped(&place.host);
                let silent_ms = silent.as_millis() as u64;
                let detail = Detail::shortened(cause);
                MemberOutput::Over { epoch, end: RingEnd::Lost { rank, host, silent_ms, detail } }
            }
            None => MemberOutput::RendezvousLost { cause },
        };
        self.outputs.push_back(output);
    }

    /// Lists who may serve after the loss of the rendezvous: the members of the last ring, in
    /// order of ranks. A member whose connection has ended comes first. Only its port can tell
    /// whether its process has ended as well, and it may serve on.
    fn succeed(&mut self, state: Serving) {
        let Some(ring) = self.ring.clone() else { return };
        let serving = match (&self.place, ring.serving) {
            (Place::Meeting, Some(rank)) => ring.place(rank).map(|place| place.index),
            // The rendezvous is no member, or it is a candidate that was lost in its turn.
            (Place::Meeting, None) => return,
            _ => self.candidates.front().map(|candidate| candidate.index),
        };
        let tried = self.candidates.front().filter(|candidate| Some(candidate.index) == serving);
        let until = tried.and_then(|candidate| candidate.until);
        let own = ring.rank as usize;
        let members = ring.members.iter().enumerate();
        let members = members.filter(|(_, member)| !self.gone.contains(&member.index));
        let candidates = members.map(|(rank, member)| Candidate {
            index: member.index,
            place: match rank == own {
                true => Place::Own,
                false => Place::Member { addresses: member.addresses.clone() },
            },
            until: None,
        });
        let (of_serving, others): (Vec<_>, Vec<_>) =
            candidates.partition(|candidate| Some(candidate.index) == serving);
        self.candidates = others.into();
        if state == Serving::MayLive {
            let first = of_serving.into_iter().next();
            first.into_iter().for_each(|first| {
                self.candidates.push_front(Candidate { until, ..first });
            });
        }
        self.serve_if_next();
    }

    fn message(&mut self, now: Instant, message: Message) {
        match message {
            Message::RingWaits(waits) => self.outputs.push_back(MemberOutput::Waits {
                came: waits.came,
                size: waits.size,
                missing: waits.missing.items().to_vec(),
            }),
            Message::RingMember(member) if self.phase == Phase::Asked => {
                // The rendezvous names the ranks in order; a repeated list begins again.
                if member.rank == 0 {
                    self.forming.clear();
                }
                let is_next = member.rank as usize == self.forming.len();
                if is_next && self.forming.len() < RING_SIZE_MAX {
                    let addresses = member.addresses.items().iter();
                    self.forming.push(RankPlace {
                        index: member.index,
                        process: member.process,
                        host: member.host.as_str().to_owned(),
                        addresses: addresses.map(|text| text.as_str().to_owned()).collect(),
                    });
                }
            }
            Message::RingFormed(formed) if self.phase == Phase::Asked => {
                let known = self.ring.as_ref().map_or(0, |ring| ring.epoch);
                let members = std::mem::take(&mut self.forming);
                let is_whole = members.len() == formed.size as usize && formed.rank < formed.size;
                if !is_whole || formed.epoch <= known {
                    let cause = format!("the ring of epoch {} is incomplete", formed.epoch);
                    self.outputs.push_back(MemberOutput::Disconnect);
                    return self.disconnected(now, cause, Serving::Silent);
                }
                self.lease = Duration::from_millis(formed.lease_ms.max(1).into());
                self.heartbeat_at = self.heartbeat_at.min(now + self.lease / 4);
                let ring = Arc::new(FormedRing {
                    rendezvous: formed.rendezvous,
                    epoch: formed.epoch,
                    rank: formed.rank,
                    members,
                    lease: self.lease,
                    serving: formed.serving,
                });
                self.phase = Phase::In;
                self.wants_ring = false;
                // From now on the loss of this place is the loss of the serving rank.
                self.place = Place::Meeting;
                self.candidates.clear();
                self.gone.clear();
                self.ring = Some(ring.clone());
                self.send(RingEntered { epoch: ring.epoch });
                self.outputs.push_back(MemberOutput::Formed(ring));
            }
            Message::RingOver(RingOver { epoch, end })
                if self.phase == Phase::In
                    && self.ring.as_ref().is_some_and(|ring| ring.epoch == epoch) =>
            {
                let own = self.ring.as_ref().map(|ring| ring.rank);
                let is_fenced = matches!(end, RingEnd::Lost { rank, .. } if Some(rank) == own);
                self.phase = Phase::Out;
                self.outputs.push_back(MemberOutput::Over { epoch, end });
                if is_fenced {
                    self.is_fenced = true;
                    self.is_connected = false;
                    self.outputs.push_back(MemberOutput::Disconnect);
                }
                // The program may have asked for the next ring before it heard of the end.
                self.go_on(now);
            }
            Message::RingJoiners(joiners) => {
                self.outputs.push_back(MemberOutput::Joiners(joiners.count));
            }
            Message::RingMoved(moved) if matches!(self.phase, Phase::Present | Phase::Asked) => {
                let addresses = moved.addresses.items().iter();
                let addresses = addresses.map(|text| text.as_str().to_owned()).collect();
                self.outputs.push_back(MemberOutput::Disconnect);
                self.is_connected = false;
                self.try_again(now, false);
                if self.candidates.is_empty() {
                    self.place = Place::Member { addresses };
                }
            }
            Message::HeartbeatAnswer(_) => self.awaits_answer = false,
            Message::Refused(refused) => self.refused(now, refused.refusal),
            Message::Left(_) if self.phase == Phase::Leaving => self.left(),
            // Messages of a ring that is over.
            _ => {}
        }
    }

    fn refused(&mut self, now: Instant, refusal: Refusal) {
        if matches!(refusal, Refusal::Stopping {}) {
            // The serving member has left: another one serves the next ring.
            let serving = self.ring.as_ref().and_then(|ring| ring.place(ring.serving?));
            let serving = serving.map(|place| place.index);
            if let Some(index) = serving.filter(|_| self.candidates.is_empty()) {
                self.gone.push(index);
                self.succeed(Serving::Silent);
            }
            // A member that does not serve yet may do so as soon as it has noticed the loss. A new
            // member tries again where the program meets.
            self.outputs.push_back(MemberOutput::Disconnect);
            self.is_connected = false;
            return self.try_again(now, false);
        }
        self.phase = Phase::Ended;
        self.outputs.push_back(MemberOutput::Refused(refusal));
        self.outputs.push_back(MemberOutput::Disconnect);
    }

    /// Reports the end of a ring, unless that is over: another one has nothing to do with it.
    fn report(&mut self, epoch: u64, end: RingEnd) {
        let is_in =
            self.phase == Phase::In && self.ring.as_ref().is_some_and(|ring| ring.epoch == epoch);
        if is_in {
            self.send(RingOver { epoch, end });
        }
    }

    fn leave(&mut self) {
        match self.is_connected {
            true => {
                self.phase = Phase::Leaving;
                self.send(Leave {});
            }
            false => self.left(),
        }
    }

    fn left(&mut self) {
        self.phase = Phase::Ended;
        self.outputs.push_back(MemberOutput::Left);
        self.outputs.push_back(MemberOutput::Disconnect);
    }

    fn tick(&mut self, now: Instant) {
        // After a stop of this process, messages may lie in buffers that it has not read.
        let late = self.wake_at().map_or(Duration::ZERO, |due| now.saturating_duration_since(due));
        if late >= self.lease / 8
            && let Some(heard) = now.checked_sub(self.lease / 2)
        {
            self.heard_at = self.heard_at.max(heard);
        }
        if self.is_connected && now >= self.heard_at + self.lease {
            let cause = format!("the rendezvous has been silent for {:?}", self.lease);
            self.outputs.push_back(MemberOutput::Disconnect);
            self.disconnected(now, cause, Serving::Silent);
        }
        if self.is_connected && !self.awaits_answer && now >= self.heartbeat_at {
            self.heartbeat_at = now + self.lease / 4;
            self.awaits_answer = true;
            self.send(Heartbeat {});
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.connect(now);
        }
    }
}

#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod tests;
