//! Adversary test of a member and its rendezvous.

use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::{
    Finish, HeartbeatAnswer, Left, RankAddresses, Refused, RingFormed, RingJoiners, RingMember,
    RingOver, RingWaits,
};
use pushpull_common::protocol::refusal::Refusal;
use pushpull_common::protocol::wire::{List, Text};

use super::choices::RingChoices;
use super::frames::{framed, ring_end};
use crate::member::{Member, MemberFacts, MemberInput, MemberOutput};

const LEASE: Duration = Duration::from_secs(4);

/// The most actions that one input plays.
const ACTIONS_MAX: usize = 400;

/// The most outputs of one input.
const OUTPUTS_MAX: usize = 8;

/// The state of the connection, as a runtime has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Closed,
    Opening,
    Open,
}

/// A member, its program and its rendezvous.
pub(super) struct MemberPlay<'a> {
    choices: RingChoices<'a>,
    member: Member,
    now: Instant,
    line: Line,
    /// The newest ring, and whether its end was reported.
    ring: Option<(u64, bool)>,
    is_ended: bool,
    formed: usize,
}

impl<'a> MemberPlay<'a> {
    pub(super) fn new(now: Instant, mut choices: RingChoices<'a>) -> MemberPlay<'a> {
        let facts = MemberFacts {
            job: "ring".to_owned(),
            id: "m".to_owned(),
            index: choices.one_in(2).then_some(1),
            size: 3,
            host: "host".to_owned(),
            addresses: vec!["host:1".to_owned()],
            incarnation: Incarnation(5),
            identity: Identity::new().with("dtype", "f32"),
            lease: LEASE,
        };
        MemberPlay {
            choices,
            member: Member::new(now, facts),
            now,
            line: Line::Closed,
            ring: None,
            is_ended: false,
            formed: 0,
        }
    }

    /// Plays all choices. Returns how many rings have formed.
    pub(super) fn run(mut self) -> usize {
        for _ in 0..ACTIONS_MAX {
            if self.choices.is_empty() {
                break;
            }
            self.act();
        }
        // A member that leaves has left within a lease, whatever the rendezvous does.
        self.handle(MemberInput::Leave);
        for _ in 0..64 {
            let Some(due) = self.member.wake_at().filter(|_| !self.is_ended) else { break };
            self.now = self.now.max(due);
            self.handle(MemberInput::Tick);
        }
        assert!(self.is_ended, "the member does not leave");
        self.formed
    }

    fn act(&mut self) {
        match self.choices.below(16) {
            0 => self.handle(MemberInput::Join),
            1 => {
                let rank = self.choices.below(3) as u64;
                let end = ring_end(&mut self.choices, rank);
                let epoch = self.choices.around(1);
                self.handle(MemberInput::Report { epoch, end });
            }
            2 => {
                self.now += self.choices.time(LEASE);
                self.handle(MemberInput::Tick);
            }
            3 => {
                let due = self.member.wake_at();
                self.now = self.now.max(due.unwrap_or(self.now));
                self.handle(MemberInput::Tick);
                let again = self.member.wake_at();
                assert!(again.is_none_or(|again| again > self.now), "a tick that changes nothing");
            }
            4 if self.choices.one_in(16) => self.handle(MemberInput::Leave),
            _ => match self.line {
                Line::Closed => self.handle(MemberInput::Join),
                Line::Opening if self.choices.one_in(3) => {
                    let gone = self.choices.one_in(2);
                    self.line = Line::Closed;
                    let cause = "refused".to_owned();
                    self.handle(MemberInput::NotConnected { cause, gone });
                }
                Line::Opening => {
                    self.line = Line::Open;
                    self.handle(MemberInput::Connected);
                }
                Line::Open => self.rendezvous(),
            },
        }
    }

    /// Lets the rendezvous do anything.
    fn rendezvous(&mut self) {
        let epoch = self.ring.map_or(0, |(epoch, _)| epoch);
        match self.choices.below(10) {
            0..4 => self.form(epoch),
            4..6 => {
                let rank = self.choices.below(3) as u64;
                let end = ring_end(&mut self.choices, rank);
                let epoch = self.choices.around(epoch);
                self.receive(RingOver { epoch, end });
            }
            6 => {
                self.line = Line::Closed;
                self.handle(MemberInput::Closed { cause: "reset".to_owned() });
            }
            7 => {
                let missing = List::of([self.choices.around(1) as u32]).unwrap_or_default();
                let came = self.choices.around(1) as u32;
                let size = self.choices.around(3) as u32;
                self.receive(RingWaits { came, size, missing });
            }
            8 if self.choices.one_in(4) => {
                let refusal = match self.choices.below(3) {
                    0 => Refusal::Role { role: 3, kind: 9 },
                    _ => Refusal::Stopping {},
                };
                self.receive(Refused { refusal });
            }
            8 => {
                let count = self.choices.around(1) as u32;
                self.receive(RingJoiners { count });
            }
            _ => match self.choices.below(3) {
                0 => self.receive(Left {}),
                1 => self.receive(HeartbeatAnswer {}),
                _ => self.receive(Finish {}),
            },
        }
    }

    /// Names members and forms a ring of them, with any fault.
    fn form(&mut self, epoch: u64) {
        let size = match self.choices.below(32) {
            0 => 2 * RING_SIZE_MAX as u32,
            _ => 1 + self.choices.below(4) as u32,
        };
        for rank in 0..size {
            let addresses = [Text::clipped(format!("host-{rank}:1"))];
            let mut number = || match rank {
                0..8 => self.choices.around(rank.into()) as u32,
                _ => rank,
            };
            let member = RingMember {
                rank: number(),
                index: number(),
                process: Incarnation(rank.into()),
                host: Text::clipped("host"),
                addresses: RankAddresses::of(addresses).unwrap_or_default(),
            };
            self.receive(member);
        }
        let rank = self.choices.below(size.min(200) as usize) as u64;
        let serving = self.choices.below(3) as u64;
        let formed = RingFormed {
            rendezvous: 7,
            epoch: self.choices.around(epoch.saturating_add(1)),
            rank: self.choices.around(rank) as u32,
            size: self.choices.around(size.into()) as u32,
            lease_ms: self.choices.around(LEASE.as_millis() as u64) as u32,
            serving: self.choices.one_in(2).then(|| self.choices.around(serving) as u32),
        };
        self.receive(formed);
    }

    fn receive(&mut self, message: impl Into<Message>) {
        if self.line != Line::Open {
            return;
        }
        if let Some(message) = framed(&message.into()) {
            self.handle(MemberInput::Message(message));
        }
    }

    fn handle(&mut self, input: MemberInput) {
        self.member.handle(self.now, input);
        self.member.check_memory();
        let mut outputs = 0;
        while let Some(output) = self.member.poll_output() {
            outputs += 1;
            assert!(outputs <= OUTPUTS_MAX, "{output:?} is one output too many");
            self.output(output);
        }
    }

    fn output(&mut self, output: MemberOutput) {
        match output {
            MemberOutput::Connect(_) => {
                assert!(!self.is_ended, "a member that has ended connects");
                self.line = Line::Opening;
            }
            MemberOutput::Disconnect => self.line = Line::Closed,
            MemberOutput::Send(message) => {
                assert_eq!(self.line, Line::Open, "{message:?} is sent to nobody");
                let read = framed(&message).is_some() || matches!(message, Message::Hello(_));
                assert!(read, "{message:?} cannot be read");
            }
            MemberOutput::Formed(ring) => {
                self.formed += 1;
                assert!(ring.rank < ring.size() && ring.members.len() <= RING_SIZE_MAX);
                let last = self.ring.map_or(0, |(epoch, _)| epoch);
                assert!(ring.epoch > last, "a ring of an older epoch");
                self.ring = Some((ring.epoch, false));
            }
            MemberOutput::Over { epoch, .. } => {
                assert_eq!(self.ring, Some((epoch, false)), "another ring is over, or again");
                self.ring = Some((epoch, true));
            }
            MemberOutput::Left => self.is_ended = true,
            MemberOutput::Refused(_) => self.is_ended = true,
            MemberOutput::Serve
            | MemberOutput::RendezvousLost { .. }
            | MemberOutput::Waits { .. }
            | MemberOutput::Joiners(_) => {}
        }
    }
}
