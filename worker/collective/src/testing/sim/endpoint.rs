//! [`RankEndpoint`]: one rank in virtual time, as `Ring` and `runtime` drive it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, Sequence};
use pushpull_common::protocol::message::{
    Collective, Hello, RankAddresses, Refused, RingEnd, RingLink, RingLinked, RingMoved, RingPart,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Header, Message, Poll, Refusal, encode,
};

use crate::element::ElementKind;
use crate::error::RingError;
use crate::formed_ring::FormedRing;
use crate::gathered::Gathered;
use crate::member::{Member, MemberFacts, MemberInput, MemberOutput, Place};
use crate::planted::PlantedRingBugs;
use crate::reduction::Reduction;
use crate::rendezvous::{Rendezvous, RendezvousConfig, RendezvousInput, RendezvousOutput};
use crate::running::{Fault, Operand, Running, Target, Task};
use crate::schedule::ScheduleKind;
use crate::waiting_links::WaitingLinks;

/// The bytes of a part: few, so that a chunk has several.
const PART_BYTES: usize = 8;

/// How long an operation goes on without a byte after a rank has left, as in `Ring`.
const LEFT_GRACE: Duration = Duration::from_millis(200);

/// Where the ranks of a simulated job meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimulatedMeeting {
    /// At the address of index 0.
    Address,
    /// In a folder that all see.
    Folder,
}

/// The address of the meeting, which belongs to the process of index 0.
pub(super) const MEETING_ADDRESS: &str = "meeting";

/// The settings of a rank.
#[derive(Clone, Debug)]
pub(super) struct RankSettings {
    /// The facts of the member, with one address.
    pub(super) facts: MemberFacts,
    pub(super) meeting: SimulatedMeeting,
    /// Whether the meeting's address belongs to this process.
    pub(super) serves_meeting: bool,
    pub(super) rendezvous: u64,
    pub(super) size_min: u32,
    pub(super) join_timeout: Duration,
    pub(super) operation_timeout: Duration,
    pub(super) planted: PlantedRingBugs,
}

/// An event of the simulated network.
#[derive(Clone, Debug)]
pub(super) enum RankInput {
    Connected(u64),
    NotConnected { connection: u64, gone: bool },
    Frame(u64, Vec<u8>),
    Closed(u64),
    Tick,
}

/// An action of a rank, or an event for its program or the checker.
#[derive(Clone, Debug)]
pub(super) enum RankOutput {
    Connect {
        connection: u64,
        address: String,
    },
    Send(u64, Vec<u8>),
    Close(u64),
    /// The program is in a ring.
    Entered(Arc<FormedRing>),
    /// An operation is done.
    Performed {
        number: u64,
        tensor: Vec<u8>,
    },
    /// The program's call has failed.
    Stopped(RingError),
    Left,
    /// The member has heard the end of its ring from its rendezvous.
    Heard {
        rendezvous: u64,
        epoch: u64,
        end: RingEnd,
    },
    /// A ring has taken the link of its predecessor.
    Linked {
        wanted: RingLink,
        taken: RingLink,
    },
}

/// The part that a connection has.
#[derive(Debug)]
enum Part {
    Control,
    Successor,
    Unknown,
    Greeted(Box<Hello>),
    Served,
    Early,
    Predecessor,
    Probe(Incarnation),
}

/// The stage of the ring, as `runtime::Control` has it.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Forming,
    Formed,
    Over(RingError),
    Failed(RingError),
    Left,
}

/// The links that are being opened.
#[derive(Debug)]
struct Setup {
    ring: Arc<FormedRing>,
    until: Instant,
    to: u64,
    is_linked: bool,
    from: Option<u64>,
}

#[derive(Debug)]
struct Operation {
    running: Running,
    tensor: Vec<u8>,
    /// The length of one contribution, if they are gathered and reduced by each rank.
    gathered: Option<(usize, ElementKind, Reduction)>,
    moved_at: Instant,
}

/// What a call of the program waits for.
#[derive(Debug, PartialEq)]
enum Waiting {
    Nothing,
    Join,
    Over,
    Verdict(Instant, RingEnd),
}

/// An operation of the simulated program.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SimOperation {
    pub(super) collective: Collective,
    pub(super) kind: ElementKind,
    pub(super) reduction: Reduction,
    /// Whether the contributions are gathered, as those of small tensors.
    pub(super) is_gathered: bool,
    pub(super) tensor: Vec<u8>,
}

/// One rank: its member, its links and, if it serves, its rendezvous.
#[derive(Debug)]
pub(super) struct RankEndpoint {
    settings: RankSettings,
    member: Member,
    rendezvous: Option<Rendezvous>,
    connections: BTreeMap<u64, Part>,
    next_connection: u64,
    control: Option<u64>,
    place: Place,
    /// The address of the last attempt to meet.
    tried: String,
    early: WaitingLinks<u64>,
    /// Frames of the predecessor that no operation has read.
    frames: BTreeMap<u64, VecDeque<Vec<u8>>>,
    closed: BTreeSet<u64>,
    setup: Option<Setup>,
    ring: Option<Arc<FormedRing>>,
    /// The connections from the predecessor and to the successor.
    links: Option<(u64, u64)>,
    in_ring: bool,
    rank: u32,
    /// The rendezvous of the ring that has formed last, whether or not its links have opened.
    rendezvous_of_ring: u64,
    epoch_of_ring: u64,
    /// The epoch of the last ring that the program is done with.
    done_epoch: u64,
    stage: Stage,
    over: Option<RingError>,
    deadline: Option<Instant>,
    number: u64,
    operation: Option<Operation>,
    waiting: Waiting,
    joiners: u32,
    leaving: Option<Instant>,
    outputs: VecDeque<RankOutput>,
}

impl RankEndpoint {
    pub(super) fn new(now: Instant, settings: RankSettings) -> RankEndpoint {
        let serves = settings.meeting == SimulatedMeeting::Address && settings.serves_meeting;
        let mut endpoint = RankEndpoint {
            member: Member::new(now, settings.facts.clone()),
            rendezvous: None,
            connections: BTreeMap::new(),
            next_connection: 1,
            control: None,
            place: Place::Meeting,
            tried: String::new(),
            early: WaitingLinks::with_planted(settings.planted),
            frames: BTreeMap::new(),
            closed: BTreeSet::new(),
            setup: None,
            ring: None,
            links: None,
            in_ring: false,
            rank: 0,
            rendezvous_of_ring: 0,
            epoch_of_ring: 0,
            done_epoch: 0,
            stage: Stage::Forming,
            over: None,
            deadline: None,
            number: 0,
            operation: None,
            waiting: Waiting::Nothing,
            joiners: 0,
            leaving: None,
            outputs: VecDeque::new(),
            settings,
        };
        if serves {
            endpoint.serve();
        }
        endpoint
    }

    pub(super) fn poll_output(&mut self) -> Option<RankOutput> {
        self.outputs.pop_front()
    }

    pub(super) fn joiners(&self) -> u32 {
        self.joiners
    }

    pub(super) fn ring(&self) -> Option<&Arc<FormedRing>> {
        self.ring.as_ref()
    }

    /// Returns the ring that this rank is in, unless it is over.
    pub(super) fn present_ring(&self) -> Option<(u64, u64)> {
        let ring = self.setup.as_ref().map(|setup| &setup.ring).or(self.ring.as_ref());
        ring.filter(|_| self.in_ring).map(|ring| (ring.rendezvous, ring.epoch))
    }

    /// Returns whether operations fail at once.
    pub(super) fn is_over(&self) -> bool {
        let is_one = self.ring.as_ref().is_some_and(|ring| ring.size() == 1);
        let has_ended = matches!(self.stage, Stage::Over(_) | Stage::Failed(_));
        self.over.is_some() || (is_one && has_ended)
    }

    /// Returns the number of the last operation.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn has_operation(&self) -> bool {
        self.operation.is_some()
    }

    /// Takes a connection of another rank. Returns its number.
    pub(super) fn accept(&mut self) -> u64 {
        let connection = self.next_connection;
        self.next_connection += 1;
        self.connections.insert(connection, Part::Unknown);
        connection
    }

    /// Joins, or shrinks.
    pub(super) fn join(&mut self, now: Instant, folder: &mut Option<String>) {
        self.forget_links();
        self.done_epoch = self.epoch_of_ring;
        self.stage = Stage::Forming;
        self.waiting = Waiting::Join;
        self.deadline = Some(now + self.settings.join_timeout);
        self.member.handle(now, MemberInput::Join);
        self.settle(now, folder);
    }

    /// Ends the ring, and waits until it is over.
    pub(super) fn end(&mut self, now: Instant, folder: &mut Option<String>, end: RingEnd) {
        self.report_end(now, end);
        self.waiting = Waiting::Over;
        self.settle(now, folder);
    }

    /// Drops the operation under way.
    pub(super) fn drop_operation(&mut self, now: Instant, folder: &mut Option<String>) {
        if self.operation.take().is_none() {
            return;
        }
        let detail = Detail::clipped("the future of its operation was dropped");
        let rank = self.ring.as_ref().map_or(0, |ring| ring.rank);
        let end = RingEnd::GivenUp { rank, detail };
        self.over = Some(RingError::of_end(&end, u32::MAX, self.epoch_of_ring));
        self.waiting = Waiting::Nothing;
        self.report_end(now, end);
        self.settle(now, folder);
    }

    pub(super) fn leave(&mut self, now: Instant, folder: &mut Option<String>) {
        self.forget_links();
        self.operation = None;
        self.waiting = Waiting::Nothing;
        self.leaving = Some(now + self.settings.facts.lease);
        self.member.handle(now, MemberInput::Leave);
        self.settle(now, folder);
    }

    /// Begins an operation.
    pub(super) fn perform(
        &mut self,
        now: Instant,
        folder: &mut Option<String>,
        operation: SimOperation,
    ) {
        if let Some(error) = &self.over {
            return self.outputs.push_back(RankOutput::Stopped(error.clone()));
        }
        let Some(ring) = self.ring.clone() else { return };
        let ranks = ring.size();
        self.number += 1;
        if ranks == 1 {
            if let Stage::Over(_) | Stage::Failed(_) = self.stage {
                self.waiting = Waiting::Over;
                return self.settle(now, folder);
            }
            let number = self.number;
            let performed = RankOutput::Performed { number, tensor: operation.tensor };
            return self.outputs.push_back(performed);
        }
        let SimOperation { collective, kind, reduction, is_gathered, mut tensor } = operation;
        let count = tensor.len() / kind.size();
        let mut schedule = match collective {
            Collective::Broadcast { root } => ScheduleKind::Broadcast { root },
            _ => ScheduleKind::AllReduce,
        };
        let mut gathered = None;
        if is_gathered {
            let own = std::mem::take(&mut tensor);
            tensor.resize(own.len() * ranks as usize, 0);
            tensor[own.len() * ring.rank as usize..][..own.len()].copy_from_slice(&own);
            schedule = ScheduleKind::Gather;
            gathered = Some((own.len(), kind, reduction));
        }
        let elements = tensor.len() / kind.size();
        let task = Task {
            collective,
            schedule,
            kind,
            reduction,
            count,
            elements,
            encoded: None,
            name: "",
        };
        let running = Running::new(Sequence(self.number), &task, ring.rank, ranks);
        let running = running.with_planted(self.settings.planted);
        self.operation = Some(Operation { running, tensor, gathered, moved_at: now });
        self.settle(now, folder);
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        let verdict = match &self.waiting {
            Waiting::Verdict(until, _) => Some(*until),
            _ => None,
        };
        let operation = self.operation.as_ref().map(|of| of.moved_at + self.patience());
        let deadline = self.deadline.filter(|_| self.stage == Stage::Forming);
        let leaving = self.leaving.filter(|_| self.stage != Stage::Left);
        let rendezvous = self.rendezvous.as_ref().and_then(Rendezvous::wake_at);
        let setup = self.setup.as_ref().map(|setup| setup.until);
        [verdict, operation, deadline, leaving, self.member.wake_at(), rendezvous, setup]
            .into_iter()
            .flatten()
            .min()
    }

    pub(super) fn handle(&mut self, now: Instant, folder: &mut Option<String>, input: RankInput) {
        match input {
            RankInput::Connected(connection) => self.connected(now, connection),
            RankInput::NotConnected { connection, gone } => {
                self.not_connected(now, folder, connection, gone);
            }
            RankInput::Frame(connection, frame) => self.frame(now, connection, frame),
            RankInput::Closed(connection) => self.connection_closed(now, connection),
            RankInput::Tick => {
                self.member.handle(now, MemberInput::Tick);
                if let Some(rendezvous) = &mut self.rendezvous {
                    rendezvous.handle(now, RendezvousInput::Tick);
                }
            }
        }
        self.settle(now, folder);
    }

    fn connected(&mut self, now: Instant, connection: u64) {
        match self.connections.get(&connection) {
            Some(Part::Control) => self.member.handle(now, MemberInput::Connected),
            Some(Part::Successor) => {
                let Some(setup) = &self.setup else { return };
                let link = setup.ring.own_link();
                let hello = self.member.facts().hello();
                self.send(connection, hello);
                self.send(connection, link);
            }
            Some(&Part::Probe(incarnation)) => {
                self.close(connection);
                self.probed(now, incarnation, false);
            }
            _ => {}
        }
    }

    fn probed(&mut self, now: Instant, incarnation: Incarnation, gone: bool) {
        if let Some(rendezvous) = &mut self.rendezvous {
            rendezvous.handle(now, RendezvousInput::Probed { incarnation, gone });
        }
    }

    fn not_connected(
        &mut self,
        now: Instant,
        folder: &mut Option<String>,
        connection: u64,
        gone: bool,
    ) {
        let cause = "not reached".to_owned();
        match self.connections.remove(&connection) {
            Some(Part::Control) => {
                self.control = None;
                let meets = self.settings.meeting == SimulatedMeeting::Folder
                    && self.place == Place::Meeting;
                if meets && gone && folder.as_ref() == Some(&self.tried) {
                    *folder = Some(self.own_address());
                    self.serve();
                    let own = self.own_address();
                    return self.open_control(own);
                }
                self.member.handle(now, MemberInput::NotConnected { cause, gone });
            }
            Some(Part::Successor) => self.setup_failed(now, "cannot connect to its successor"),
            Some(Part::Probe(incarnation)) => self.probed(now, incarnation, gone),
            _ => {}
        }
    }

    fn frame(&mut self, now: Instant, connection: u64, frame: Vec<u8>) {
        let Some(part) = self.connections.get_mut(&connection) else { return };
        if let Part::Predecessor | Part::Early = part {
            self.frames.entry(connection).or_default().push_back(frame);
            return;
        }
        let (_, message, _) = decode(&frame);
        match (part, message) {
            (Part::Control, message) => self.member.handle(now, MemberInput::Message(message)),
            (Part::Served, message) => {
                if let Some(rendezvous) = &mut self.rendezvous {
                    rendezvous.handle(now, RendezvousInput::Message { connection, message });
                }
            }
            (part @ Part::Unknown, Message::Hello(hello)) => {
                *part = Part::Greeted(Box::new(hello));
            }
            (
                part @ Part::Greeted(_),
                message @ (Message::RingJoin(_) | Message::RingEntered(_)),
            ) => match &mut self.rendezvous {
                Some(rendezvous) => {
                    let greeted = std::mem::replace(part, Part::Served);
                    let Part::Greeted(hello) = greeted else { return };
                    rendezvous.handle(now, RendezvousInput::Arrived { connection, hello });
                    rendezvous.handle(now, RendezvousInput::Message { connection, message });
                }
                None => {
                    match self.serving_addresses() {
                        Some(addresses) => self.send(connection, RingMoved { addresses }),
                        None => self.send(connection, Refused { refusal: Refusal::Stopping {} }),
                    }
                    self.close(connection);
                }
            },
            (Part::Greeted(_), Message::RingLink(link))
                if link.to != self.settings.facts.incarnation =>
            {
                self.close(connection);
            }
            (part @ Part::Greeted(_), Message::RingLink(link)) => {
                *part = Part::Early;
                self.early.add(link, connection);
            }
            (Part::Successor, Message::RingLinked(_)) => {
                if let Some(setup) = self.setup.as_mut().filter(|setup| setup.to == connection) {
                    setup.is_linked = true;
                }
            }
            (part, message) => panic!("a {} for {part:?}", message.name()),
        }
    }

    /// Returns the addresses of the rank that serves the ring that this rank is in.
    fn serving_addresses(&self) -> Option<RankAddresses> {
        let ring = self.setup.as_ref().map(|setup| &setup.ring).or(self.ring.as_ref());
        let ring = ring.filter(|_| self.in_ring)?;
        let serving = ring.place(ring.serving.filter(|serving| *serving != ring.rank)?)?;
        RankAddresses::of(serving.addresses.iter().map(Text::clipped))
    }

    fn connection_closed(&mut self, now: Instant, connection: u64) {
        match self.connections.get(&connection) {
            Some(Part::Control) => {
                self.connections.remove(&connection);
                self.control = None;
                self.member.handle(now, MemberInput::Closed { cause: "closed".to_owned() });
            }
            Some(Part::Served) => {
                self.connections.remove(&connection);
                if let Some(rendezvous) = &mut self.rendezvous {
                    let reason = "closed".to_owned();
                    rendezvous.handle(now, RendezvousInput::Closed { connection, reason });
                }
            }
            Some(Part::Successor) if self.setup.is_some() => {
                self.connections.remove(&connection);
                self.setup_failed(now, "its successor has closed the connection");
            }
            Some(Part::Successor | Part::Predecessor | Part::Early) => {
                self.closed.insert(connection);
            }
            Some(Part::Unknown | Part::Greeted(_)) => _ = self.connections.remove(&connection),
            Some(&Part::Probe(incarnation)) => {
                self.connections.remove(&connection);
                self.probed(now, incarnation, false);
            }
            None => {}
        }
    }

    fn setup_failed(&mut self, now: Instant, detail: &str) {
        let Some(setup) = self.setup.take() else { return };
        self.close(setup.to);
        if let Some(from) = setup.from {
            self.close(from);
        }
        let end = RingEnd::GivenUp { rank: setup.ring.rank, detail: Detail::clipped(detail) };
        self.member.handle(now, MemberInput::Report { epoch: setup.ring.epoch, end });
    }

    /// Carries out what the machines ask for, until nothing changes.
    fn settle(&mut self, now: Instant, folder: &mut Option<String>) {
        loop {
            while let Some(output) = self.member.poll_output() {
                self.carry_out(now, folder, output);
            }
            while let Some(output) = self.rendezvous.as_mut().and_then(Rendezvous::poll_output) {
                match output {
                    RendezvousOutput::Send { connection, message } => {
                        self.send(connection, message);
                    }
                    RendezvousOutput::Close { connection } => self.close(connection),
                    RendezvousOutput::Probe { incarnation, addresses } => {
                        let address = addresses.items()[0].as_str().to_owned();
                        self.open(address, Part::Probe(incarnation));
                    }
                }
            }
            if !self.advance(now, folder) {
                break;
            }
        }
    }

    /// Moves what depends on the stage, the links or the time. Returns whether the machines may
    /// have outputs.
    fn advance(&mut self, now: Instant, folder: &mut Option<String>) -> bool {
        if let Some(setup) = &mut self.setup {
            let ring = setup.ring.clone();
            let wanted = ring.awaited_link();
            if setup.from.is_none()
                && let Some((taken, from)) = self.early.take(&wanted)
            {
                setup.from = Some(from);
                self.connections.insert(from, Part::Predecessor);
                self.outputs.push_back(RankOutput::Linked { wanted, taken });
                self.send(from, RingLinked { memory: 0 });
                return true;
            }
            if let (true, Some(from)) = (setup.is_linked, setup.from) {
                self.links = Some((from, setup.to));
                self.setup = None;
                self.formed(ring);
            } else if setup.until <= now {
                self.setup_failed(now, "its links have not opened");
                return true;
            }
        }
        if self.stage == Stage::Forming && self.deadline.is_some_and(|at| at <= now) {
            self.deadline = None;
            let error = RingError::NotFormed {
                came: 0,
                size: 0,
                missing: Vec::new(),
                within: self.settings.join_timeout,
            };
            self.stage = Stage::Failed(error);
        }
        if let Stage::Over(error) | Stage::Failed(error) = self.stage.clone()
            && self.operation.is_none()
            && self.waiting != Waiting::Nothing
        {
            self.waiting = Waiting::Nothing;
            self.over = Some(error.clone());
            self.outputs.push_back(RankOutput::Stopped(error));
        }
        if let Waiting::Verdict(until, end) = &self.waiting
            && *until <= now
        {
            let end = end.clone();
            self.waiting = Waiting::Over;
            self.report_end(now, end);
            return true;
        }
        if let Some(until) = self.leaving.filter(|_| self.stage != Stage::Left) {
            let serves = self.connections.values().any(|part| matches!(part, Part::Served));
            if until <= now || (self.control.is_none() && !serves) {
                if folder.as_ref() == Some(&self.own_address()) {
                    *folder = None;
                }
                self.stage = Stage::Left;
                self.outputs.push_back(RankOutput::Left);
            }
        }
        self.turn(now)
    }

    /// Performs a turn of the operation under way, as `Ring` does.
    fn turn(&mut self, now: Instant) -> bool {
        let Some(mut operation) = self.operation.take() else { return false };
        let patience = self.patience();
        let stop = match self.exchange(now, &mut operation) {
            Ok(true) => {
                let Operation { mut tensor, gathered, .. } = operation;
                if let (Some((length, kind, reduction)), Some(ring)) = (gathered, &self.ring) {
                    let mut values = vec![0; length];
                    let gathered = Gathered {
                        blocks: &mut tensor,
                        kind,
                        ranks: ring.size(),
                        rank: ring.rank,
                        planted: self.settings.planted,
                    };
                    gathered.reduce(reduction, &mut values);
                    tensor = values;
                }
                let number = self.number;
                self.outputs.push_back(RankOutput::Performed { number, tensor });
                return true;
            }
            Ok(false) => {
                let is_over = match &self.stage {
                    Stage::Over(RingError::Left { .. }) => operation.moved_at + LEFT_GRACE <= now,
                    Stage::Over(_) | Stage::Failed(_) => true,
                    _ => false,
                };
                let is_stalled = operation.moved_at + patience <= now;
                if !is_over && !is_stalled {
                    self.operation = Some(operation);
                    return false;
                }
                match is_over {
                    true => Waiting::Over,
                    false => return self.report(now, self.given_up("it has waited for too long")),
                }
            }
            Err(LinkStop::Broken(detail)) => {
                let lease = self.settings.facts.lease;
                Waiting::Verdict(now + lease + lease / 4, self.given_up(&detail))
            }
            Err(LinkStop::Difference(other)) => {
                let Some(ring) = &self.ring else { return false };
                let end = RingEnd::Difference {
                    number: self.number,
                    rank: ring.predecessor(),
                    operation: other,
                    other_rank: ring.rank,
                    other: operation.running.operation().clone(),
                };
                return self.report(now, end);
            }
        };
        self.waiting = stop;
        true
    }

    fn patience(&self) -> Duration {
        match &self.stage {
            Stage::Over(RingError::Left { .. }) => LEFT_GRACE,
            _ => self.settings.operation_timeout,
        }
    }

    fn given_up(&self, detail: &str) -> RingEnd {
        let rank = self.ring.as_ref().map_or(0, |ring| ring.rank);
        RingEnd::GivenUp { rank, detail: Detail::clipped(detail) }
    }

    /// Reports the end of the ring that the program is in.
    fn report_end(&mut self, now: Instant, end: RingEnd) {
        let epoch = self.ring.as_ref().map_or(0, |ring| ring.epoch);
        self.member.handle(now, MemberInput::Report { epoch, end });
    }

    fn report(&mut self, now: Instant, end: RingEnd) -> bool {
        self.waiting = Waiting::Over;
        self.report_end(now, end);
        true
    }

    /// Sends and receives what is due, as `Links` does. Returns whether the operation is done.
    fn exchange(&mut self, now: Instant, operation: &mut Operation) -> Result<bool, LinkStop> {
        let Some((from, to)) = self.links else { return Ok(false) };
        let Operation { running, tensor, moved_at, .. } = operation;
        let envelope = Envelope { sequence: running.number(), ..Envelope::default() };
        loop {
            let mut frames = Vec::new();
            if let Some(announcement) = running.announcement() {
                frames.push(frame_of(&envelope, &announcement.into(), &[]));
            }
            while let Some(part) = running.next_part(PART_BYTES) {
                let message = RingPart { pass: part.pass, offset: part.offset as u64 };
                frames.push(frame_of(&envelope, &message.into(), &tensor[part.bytes.clone()]));
                running.sent(part.bytes.len());
            }
            if !frames.is_empty() {
                if self.closed.contains(&to) {
                    return Err(LinkStop::Broken("its link to its successor broke".to_owned()));
                }
                *moved_at = now;
                self.outputs.extend(frames.into_iter().map(|frame| RankOutput::Send(to, frame)));
            }
            if running.is_done() {
                return Ok(true);
            }
            if !running.expects() {
                return Ok(false);
            }
            let Some(frame) = self.frames.entry(from).or_default().pop_front() else {
                return match self.closed.contains(&from) {
                    true => Err(LinkStop::Broken("its predecessor has closed".to_owned())),
                    false => Ok(false),
                };
            };
            *moved_at = now;
            let (header, message, body) = decode(&frame);
            let fault = |fault| match fault {
                Fault::Difference(other) => LinkStop::Difference(other),
                Fault::Protocol(detail) => LinkStop::Broken(detail),
                Fault::Overflow { .. } => LinkStop::Broken("overflow".to_owned()),
            };
            let Some(target) = running.message(&header, &message).map_err(fault)? else {
                continue;
            };
            if let Target::Store(range) = &target {
                tensor[range.clone()].copy_from_slice(&body);
            }
            running.arrived(&target, &mut Operand::elements(tensor), &body).map_err(fault)?;
        }
    }

    fn carry_out(&mut self, now: Instant, folder: &mut Option<String>, output: MemberOutput) {
        match output {
            MemberOutput::Connect(place) => {
                self.place = place.clone();
                let address = match (place, self.settings.meeting) {
                    (Place::Meeting, SimulatedMeeting::Address) => MEETING_ADDRESS.to_owned(),
                    (Place::Meeting, SimulatedMeeting::Folder) => match folder {
                        Some(address) => address.clone(),
                        None => {
                            *folder = Some(self.own_address());
                            self.serve();
                            self.own_address()
                        }
                    },
                    (Place::Own, _) => self.own_address(),
                    (Place::Member { addresses }, _) => addresses[0].clone(),
                };
                self.open_control(address);
            }
            MemberOutput::Serve => {
                if self.settings.meeting == SimulatedMeeting::Folder {
                    *folder = Some(self.own_address());
                }
                self.serve();
            }
            MemberOutput::Send(message) => {
                if let Some(control) = self.control {
                    self.send(control, message);
                }
            }
            MemberOutput::Disconnect => self.close_control(),
            MemberOutput::Formed(ring) => {
                self.in_ring = true;
                self.rank = ring.rank;
                self.rendezvous_of_ring = ring.rendezvous;
                self.epoch_of_ring = ring.epoch;
                self.joiners = 0;
                if ring.size() == 1 {
                    return self.formed(ring);
                }
                let successor = &ring.members[ring.successor() as usize];
                let address = successor.addresses[0].clone();
                let to = self.open(address, Part::Successor);
                let until = now + 2 * ring.lease;
                self.setup = Some(Setup { ring, until, to, is_linked: false, from: None });
            }
            MemberOutput::Over { epoch, end } => {
                let rendezvous = self.rendezvous_of_ring;
                let error = RingError::of_end(&end, self.rank, epoch);
                self.outputs.push_back(RankOutput::Heard { rendezvous, epoch, end });
                self.ring_over(error);
            }
            MemberOutput::RendezvousLost { cause } if self.in_ring => {
                let address = String::new();
                self.ring_over(RingError::NoRendezvous { address, within: Duration::ZERO, cause });
            }
            MemberOutput::RendezvousLost { .. } | MemberOutput::Waits { .. } => {}
            MemberOutput::Joiners(count) => self.joiners = count,
            MemberOutput::Refused(refusal) => {
                self.in_ring = false;
                self.stage = Stage::Failed(RingError::Refused { refusal: refusal.to_string() });
            }
            MemberOutput::Left => self.close_control(),
        }
    }

    fn ring_over(&mut self, error: RingError) {
        self.in_ring = false;
        if let Some(setup) = self.setup.take() {
            self.close(setup.to);
            if let Some(from) = setup.from {
                self.close(from);
            }
        }
        if self.epoch_of_ring > self.done_epoch || matches!(error, RingError::Fenced { .. }) {
            self.stage = Stage::Over(error);
        }
    }

    fn formed(&mut self, ring: Arc<FormedRing>) {
        self.stage = Stage::Formed;
        self.ring = Some(ring.clone());
        self.number = 0;
        self.over = None;
        self.waiting = Waiting::Nothing;
        self.outputs.push_back(RankOutput::Entered(ring));
    }

    fn serve(&mut self) {
        if self.rendezvous.is_some() {
            return;
        }
        let RankSettings { facts, rendezvous, size_min, .. } = &self.settings;
        self.rendezvous = Some(Rendezvous::new(RendezvousConfig {
            rendezvous: *rendezvous,
            job: facts.job.clone(),
            identity: facts.identity.clone(),
            lease: facts.lease,
            join_window: facts.lease,
            succession_window: 3 * facts.lease,
            first_size_min: facts.size,
            size_min: *size_min,
            serving: Some(facts.incarnation),
        }));
    }

    fn own_address(&self) -> String {
        self.settings.facts.addresses[0].clone()
    }

    fn open(&mut self, address: String, part: Part) -> u64 {
        let connection = self.next_connection;
        self.next_connection += 1;
        self.connections.insert(connection, part);
        self.outputs.push_back(RankOutput::Connect { connection, address });
        connection
    }

    fn open_control(&mut self, address: String) {
        self.close_control();
        self.tried = address.clone();
        self.control = Some(self.open(address, Part::Control));
    }

    fn close_control(&mut self) {
        if let Some(control) = self.control.take() {
            self.close(control);
        }
    }

    fn forget_links(&mut self) {
        if let Some((from, to)) = self.links.take() {
            self.close(from);
            self.close(to);
        }
    }

    fn close(&mut self, connection: u64) {
        self.frames.remove(&connection);
        self.closed.remove(&connection);
        if self.connections.remove(&connection).is_some() {
            self.outputs.push_back(RankOutput::Close(connection));
        }
    }

    fn send(&mut self, connection: u64, message: impl Into<Message>) {
        if self.connections.contains_key(&connection) {
            let frame = frame_of(&Envelope::default(), &message.into(), &[]);
            self.outputs.push_back(RankOutput::Send(connection, frame));
        }
    }
}

/// Why an operation cannot go on.
enum LinkStop {
    Broken(String),
    Difference(pushpull_common::protocol::message::RingOperation),
}

fn frame_of(envelope: &Envelope, message: &Message, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame, envelope, message, BodyStamp { bytes: body.len() as u64, crc: None });
    frame.extend_from_slice(body);
    frame
}

fn decode(frame: &[u8]) -> (Header, Message, Vec<u8>) {
    let mut rest = frame;
    let mut source =
        |slices: &mut [std::io::IoSliceMut<'_>]| std::io::Read::read_vectored(&mut rest, slices);
    let mut reader = FrameReader::new();
    reader.open();
    match reader.poll(&mut source) {
        Ok(Poll::Frame(header, message)) => {
            let mut body = vec![0; header.body_bytes as usize];
            if !body.is_empty() {
                let polled = reader.poll_body(&mut source, &mut body);
                assert!(matches!(polled, Ok(BodyPoll::Done)), "a frame without its body");
            }
            (header, message, body)
        }
        other => panic!("a rank sends what cannot be decoded: {other:?}"),
    }
}
