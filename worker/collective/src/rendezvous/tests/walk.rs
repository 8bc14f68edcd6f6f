//! Random lives of members, against a model of what each of them may be told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proptest::prelude::*;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Finish, Leave, RingEnd, RingJoin, RingOver};
use pushpull_common::protocol::wire::{List, Text};

use super::{LEASE, Meeting, WINDOW, again, hello, join};

/// The ids of the walk: more than the first ring has members.
const IDS: u8 = 6;

/// The size of a ring of another rendezvous that members of the walk may have been in.
const FORMER_SIZE: u32 = 3;

/// One step of a walk.
#[derive(Clone, Debug)]
enum Step {
    /// A new process asks for a place, with an index of the launcher or without.
    Start { id: u8, index: Option<u32> },
    /// A process that was in a ring of another rendezvous asks for a place.
    Flee { id: u8, gone: Vec<u32> },
    /// An earlier process of an id connects again.
    Haunt { id: u8, which: u8 },
    /// The connection of a member breaks.
    Break { id: u8 },
    /// A member sends nothing any more.
    Mute { id: u8 },
    /// A member asks for the next ring.
    Again { id: u8 },
    /// A member ends its ring.
    Report { id: u8, end: u8 },
    /// A member leaves.
    Leave { id: u8 },
    /// A member sends what no member may.
    Babble { id: u8 },
    /// Time passes, in sixteenths of a lease.
    Pass { time: u8 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = || 0..IDS;
    let index = proptest::option::weighted(0.3, 0..5_u32);
    let gone = proptest::collection::vec(0..FORMER_SIZE, 0..2);
    let step = prop_oneof![
        6 => (id(), index).prop_map(|(id, index)| Step::Start { id, index }),
        1 => (id(), gone).prop_map(|(id, gone)| Step::Flee { id, gone }),
        1 => (id(), any::<u8>()).prop_map(|(id, which)| Step::Haunt { id, which }),
        2 => id().prop_map(|id| Step::Break { id }),
        1 => id().prop_map(|id| Step::Mute { id }),
        6 => id().prop_map(|id| Step::Again { id }),
        2 => (id(), 0..4_u8).prop_map(|(id, end)| Step::Report { id, end }),
        1 => id().prop_map(|id| Step::Leave { id }),
        1 => id().prop_map(|id| Step::Babble { id }),
        4 => (1..40_u8).prop_map(|time| Step::Pass { time }),
    ];
    proptest::collection::vec(step, 1..80)
}

/// A process that is a member, as its messages tell it.
#[derive(Clone, Debug)]
struct Process {
    id: u8,
    incarnation: u64,
    index: Option<u32>,
    state: State,
    heard: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    InRing(u64),
    Over(u64),
}

/// The walk: the members, and what was said of each epoch.
struct Walk {
    meeting: Meeting,
    members: BTreeMap<u64, Process>,
    incarnations: u64,
    /// The processes of each id that had a place, in order.
    processes: BTreeMap<u8, Vec<u64>>,
    /// The processes that a newer one has replaced.
    fenced: BTreeSet<(u8, u64)>,
    /// The index of each id that was in a ring and has not left, and its process.
    indices: BTreeMap<u8, (u32, u64)>,
    newest: u64,
    /// The newest epoch that a member has named.
    named: u64,
    ends: BTreeMap<u64, RingEnd>,
    ranks: BTreeSet<(u64, u32)>,
    rosters: BTreeMap<u64, Vec<u32>>,
}

fn name(id: u8) -> String {
    format!("m{id}")
}

impl Walk {
    fn new(size_min: u32) -> Walk {
        Walk {
            meeting: Meeting::new(size_min),
            members: BTreeMap::new(),
            incarnations: 0,
            processes: BTreeMap::new(),
            fenced: BTreeSet::new(),
            indices: BTreeMap::new(),
            newest: 0,
            named: 0,
            ends: BTreeMap::new(),
            ranks: BTreeSet::new(),
            rosters: BTreeMap::new(),
        }
    }

    fn member(&self, id: u8) -> Option<u64> {
        self.members.iter().find(|(_, process)| process.id == id).map(|(&at, _)| at)
    }

    fn start(&mut self, id: u8, incarnation: u64, request: RingJoin) {
        let connection = self.meeting.arrive(hello(incarnation));
        let index = request.index;
        let named = request.epoch;
        let holder = self.member(id).map(|at| self.members[&at].incarnation);
        let settled = self.indices.get(&id).map(|&(_, process)| process);
        let heard = self.meeting.now;
        let process = Process { id, incarnation, index, state: State::Waiting, heard };
        self.members.insert(connection, process);
        self.meeting.send(connection, request);
        if self.meeting.open.contains(&connection) {
            self.named = self.named.max(named);
            //
            assert!(!self.fenced.contains(&(id, incarnation)), "a fenced process has a place");
            let older = holder.into_iter().chain(settled).filter(|&older| older != incarnation);
            self.fenced.extend(older.map(|older| (id, older)));
            self.processes.entry(id).or_default().push(incarnation);
            if let Some(index) = index {
                self.indices.retain(|of, (reserved, _)| *of == id || *reserved != index);
            }
        }
        self.observe();
    }

    /// Compares what the members were told with the model.
    fn observe(&mut self) {
        let received = std::mem::take(&mut self.meeting.received);
        let mut formed = BTreeMap::new();
        for (connection, messages) in received {
            let Some(process) = self.members.get_mut(&connection) else { continue };
            let mut roster = Vec::new();
            for message in messages {
                process.heard = self.meeting.now;
                match message {
                    Message::RingMember(member) => roster.push(member.index),
                    Message::RingFormed(ring) => {
                        // a member of a ring that runs is in no other.
                        assert_eq!(process.state, State::Waiting, "{process:?}");
                        //
                        assert!(self.ranks.insert((ring.epoch, ring.rank)), "{ring:?}");
                        assert!(roster.is_sorted_by(|a, b| a < b), "{roster:?}");
                        assert_eq!(roster.len(), ring.size as usize);
                        //
                        let is_new = ring.epoch > self.newest.max(self.named);
                        assert!(is_new || self.rosters.contains_key(&ring.epoch), "{ring:?}");
                        self.newest = self.newest.max(ring.epoch);
                        let same = self.rosters.entry(ring.epoch).or_insert_with(|| roster.clone());
                        assert_eq!(*same, roster);
                        process.state = State::InRing(ring.epoch);
                        let index = roster[ring.rank as usize];
                        formed.insert(process.id, (index, process.clone()));
                    }
                    Message::RingOver(over) => {
                        //
                        assert_eq!(process.state, State::InRing(over.epoch), "{process:?}");
                        let end = self.ends.entry(over.epoch).or_insert_with(|| over.end.clone());
                        assert_eq!(*end, over.end);
                        process.state = State::Over(over.epoch);
                    }
                    _ => {}
                }
            }
        }
        for (id, (index, process)) in &formed {
            //
            let own = process.index.or(self.indices.get(id).map(|&(index, _)| index));
            assert_eq!(own.unwrap_or(*index), *index, "{process:?}");
        }
        for (id, (index, process)) in formed {
            self.indices.insert(id, (index, process.incarnation));
        }
        self.members.retain(|connection, _| self.meeting.open.contains(connection));
        for process in self.members.values() {
            //
            let silent = self.meeting.now - process.heard;
            assert!(process.state != State::Waiting || silent <= LEASE / 4, "{process:?}");
            // the end of a ring reaches all of its members.
            if let State::InRing(epoch) = process.state {
                assert!(!self.ends.contains_key(&epoch), "{process:?} has not heard");
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Start { id, index } => {
                self.incarnations += 1;
                self.start(id, self.incarnations, RingJoin { index, ..join(&name(id)) });
            }
            Step::Flee { id, gone } => {
                self.incarnations += 1;
                let gone = List::new(gone).unwrap();
                let index = Some(u32::from(id));
                let request = RingJoin { size: FORMER_SIZE, index, gone, ..again(&name(id), 9) };
                self.start(id, self.incarnations, request);
            }
            Step::Haunt { id, which } => {
                let processes = self.processes.get(&id).cloned().unwrap_or_default();
                if let Some(&process) = processes.get(usize::from(which) % processes.len().max(1)) {
                    self.start(id, process, join(&name(id)));
                }
            }
            Step::Pass { time } => {
                // In pieces, so that each wait is measured.
                for _ in 0..time {
                    self.meeting.pass(LEASE / 16);
                    self.observe();
                }
            }
            Step::Break { id }
            | Step::Mute { id }
            | Step::Again { id }
            | Step::Report { id, .. }
            | Step::Leave { id }
            | Step::Babble { id } => {
                if let Some(connection) = self.member(id) {
                    self.act(connection, &step);
                    self.observe();
                }
            }
        }
    }

    /// Has a member do its step.
    fn act(&mut self, connection: u64, step: &Step) {
        let process = self.members[&connection].clone();
        match step {
            Step::Break { .. } => self.meeting.close(connection),
            Step::Mute { .. } => {
                self.meeting.mute.insert(connection);
            }
            Step::Leave { id } => {
                self.indices.remove(id);
                self.meeting.send(connection, Leave {});
            }
            Step::Babble { .. } => self.meeting.send(connection, Finish {}),
            Step::Again { .. } => self.ask(connection),
            Step::Report { end, .. } => {
                let State::InRing(epoch) = process.state else { return };
                let detail = Text::clipped("given up");
                let end = match end {
                    0 => RingEnd::Regrouped {},
                    rank => RingEnd::GivenUp { rank: u32::from(*rank) - 1, detail },
                };
                self.meeting.send(connection, RingOver { epoch, end });
            }
            other => panic!("{other:?} is no step of a member"),
        }
    }

    /// Has a member of a ring ask for the next.
    fn ask(&mut self, connection: u64) {
        let process = self.members.get_mut(&connection).expect("a member");
        let epoch = match process.state {
            State::Waiting => return,
            State::Over(epoch) => {
                process.state = State::Waiting;
                process.heard = self.meeting.now;
                epoch
            }
            // The rendezvous ends the ring first, and the member waits once it has heard that.
            State::InRing(epoch) => epoch,
        };
        let is_early = process.state == State::InRing(epoch);
        let request = RingJoin { index: process.index, ..again(&name(process.id), epoch) };
        self.meeting.send(connection, request);
        self.settle_early(connection, is_early);
    }

    /// Takes a member as waiting that has asked before the end of its ring.
    fn settle_early(&mut self, connection: u64, is_early: bool) {
        if !is_early {
            return;
        }
        let state = self.members[&connection].state;
        let State::InRing(epoch) = state else { return };
        // The end comes before all else that the request brings about.
        let messages = self.meeting.received.entry(connection).or_default();
        let at = messages.iter().position(|message| matches!(message, Message::RingOver(_)));
        let Some(at) = at else { panic!("ring {epoch} is not over") };
        let later = messages.split_off(at + 1);
        self.observe();
        if let Some(process) = self.members.get_mut(&connection) {
            process.state = State::Waiting;
        }
        self.meeting.received.entry(connection).or_default().extend(later);
    }

    /// Lets every member behave, and checks that all of them meet in one ring.
    fn end_well(&mut self) {
        for connection in std::mem::take(&mut self.meeting.mute) {
            if self.meeting.open.contains(&connection) {
                self.meeting.close(connection);
            }
        }
        self.observe();
        let settle = u8::try_from(16 * 5 * WINDOW.as_secs() / LEASE.as_secs()).unwrap();
        for _ in 0..4 {
            let absent = (0..IDS).filter(|&id| self.member(id).is_none());
            let needed = 4_usize.saturating_sub(self.members.len());
            for id in absent.take(needed).collect::<Vec<u8>>() {
                self.step(Step::Start { id, index: None });
            }
            let is_split = self.members.values().any(|of| of.state == State::Waiting)
                && self.members.values().any(|of| matches!(of.state, State::InRing(_)));
            for connection in self.members.keys().copied().collect::<Vec<u64>>() {
                let state = self.members.get(&connection).map(|process| process.state);
                if matches!(state, Some(State::Over(_))) || is_split && state.is_some() {
                    self.ask(connection);
                    self.observe();
                }
            }
            self.step(Step::Pass { time: settle });
        }
        let states: BTreeSet<String> =
            self.members.values().map(|process| format!("{:?}", process.state)).collect();
        assert_eq!(states.len(), 1, "{:?}", self.members);
        assert!(states.iter().all(|state| state.starts_with("InRing")), "{states:?}");
        assert!(self.members.len() >= 4);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    //
    #[test]
    fn members_that_come_go_and_fail_meet_in_the_end(steps in steps(), size_min in 1..=4_u32) {
        let mut walk = Walk::new(size_min);
        for step in steps {
            walk.step(step);
        }
        walk.end_well();
    }
}
