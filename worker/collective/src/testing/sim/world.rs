//! [`RingWorld`]: the processes of a job, the network between them and the clock.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::Incarnation;

use super::chance::SimChance;
use super::checker::{RingChecker, RingFigures, RingKey};
use super::endpoint::{MEETING_ADDRESS, RankEndpoint, RankInput, RankOutput, RankSettings};
use super::setting::{LEASE, PlannedFault, RingFault, RingSetting};
use super::trainer::{Trainer, TrainerAction};
use crate::member::MemberFacts;

/// How long a rank waits for a ring.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// How long an attempt to connect takes where nothing answers, as in `Connector`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time within which every process has ended.
const LIMIT: Duration = Duration::from_secs(200);

/// The processes of one slot that are started again.
const RESTARTS_MAX: u32 = 5;

/// How long the supervisor starts processes again.
const SUPERVISED: Duration = Duration::from_secs(10);

/// A process of a slot. Each slot is a host.
struct Process {
    slot: usize,
    id: String,
    endpoint: RankEndpoint,
    trainer: Trainer,
    is_alive: bool,
    is_paused: bool,
    /// Events that wait for the end of a pause.
    inbox: VecDeque<RankInput>,
    wake: Option<Instant>,
    computation: u64,
    /// The last ring.
    ring: Option<RingKey>,
}

/// A connection between two processes.
struct Connection {
    /// The processes, and their numbers of the connection.
    ends: [(usize, u64); 2],
    is_open: bool,
    is_lost: bool,
    closed: [bool; 2],
    /// The time of the last delivery to each end: bytes keep their order.
    last: [Instant; 2],
}

#[derive(Clone, Debug)]
enum Item {
    Opened,
    Frame(Vec<u8>),
    End,
}

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    Connect {
        process: usize,
        number: u64,
        address: String,
    },
    NotConnected {
        process: usize,
        number: u64,
        gone: bool,
    },
    Arrive {
        connection: usize,
        side: usize,
        item: Item,
    },
    Wake(usize),
    Computed(usize, u64),
    Fault(PlannedFault),
    Heal(usize, usize),
    Resume(usize),
    /// Checks that all know of a loss.
    CheckLoss {
        since: Instant,
        ring: RingKey,
        lost: usize,
    },
}

/// The processes of a job, the network between them and the clock.
pub(super) struct RingWorld {
    setting: RingSetting,
    start: Instant,
    now: Instant,
    chance: SimChance,
    queue: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    processes: Vec<Process>,
    /// The process of each slot.
    slots: Vec<Option<usize>>,
    restarts: Vec<u32>,
    connections: Vec<Connection>,
    /// How often the network between two slots is cut.
    cuts: BTreeMap<(usize, usize), u32>,
    held: Vec<((usize, usize), u64, Event)>,
    folder: Option<String>,
    last_fault: Instant,
    prints: bool,
    pub(super) checker: RingChecker,
}

impl RingWorld {
    pub(super) fn new(setting: RingSetting, start: Instant, prints: bool) -> RingWorld {
        let slots = setting.size as usize;
        let mut world = RingWorld {
            chance: SimChance::new(setting.seed, 2),
            start,
            now: start,
            queue: BTreeMap::new(),
            sequence: 0,
            processes: Vec::new(),
            slots: vec![None; slots],
            restarts: vec![0; slots],
            connections: Vec::new(),
            cuts: BTreeMap::new(),
            held: Vec::new(),
            folder: None,
            last_fault: start,
            prints,
            checker: RingChecker::default(),
            setting,
        };
        for slot in 0..slots {
            let delay = world.chance.micros(0, 300_000);
            world.after(delay, Event::Start(slot));
        }
        for planned in world.setting.plan.clone() {
            world.after(planned.at, Event::Fault(planned));
        }
        world
    }

    /// Runs until every process has ended.
    pub(super) fn run(mut self) -> RingFigures {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = self.now.max(at);
            self.checker.figures.events += 1;
            assert!(self.checker.figures.events < 1_000_000, "the run does not end");
            if self.now > self.start + LIMIT {
                let waiting: Vec<_> = self.living().map(|at| &self.processes[at].trainer).collect();
                assert!(waiting.is_empty(), "processes wait for ever: {waiting:?}");
                break;
            }
            self.handle(event);
        }
        let waiting: Vec<_> = self.living().map(|at| &self.processes[at].trainer).collect();
        assert!(waiting.is_empty(), "processes wait for nothing: {waiting:?}");
        let steps = self.setting.steps;
        let finished = self.processes.iter().filter(|of| of.trainer.step >= steps);
        let finished = finished.filter(|of| of.trainer.ended.is_none()).count() as u64;
        self.checker.figures.finished = u64::from(finished > 0);
        self.checker.figures.unfinished = u64::from(finished == 0);
        if finished == 0 {
            let ends: Vec<_> = self.processes.iter().map(|of| &of.trainer.ended).collect();
            assert!(self.may_be_unfinished(), "nobody has finished: {ends:?}");
        }
        self.checker.figures
    }

    /// Returns whether the faults explain that nobody has finished: they may take a majority away
    /// or end the whole job.
    fn may_be_unfinished(&self) -> bool {
        let faults = self.setting.plan.iter().map(|planned| planned.fault);
        let leaves = faults.clone().filter(|fault| *fault == RingFault::Leave).count();
        let heavy = [
            RingFault::Partition,
            RingFault::Isolate,
            RingFault::Kill,
            RingFault::Pause,
            RingFault::Differ,
        ];
        // One that leaves while another does may be missing in a majority.
        leaves >= 2 || faults.clone().any(|fault| heavy.contains(&fault))
    }

    fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.processes.len()).filter(|at| self.processes[*at].is_alive)
    }

    fn note(&self, words: impl FnOnce() -> String) {
        if self.prints {
            println!("{:>12.6} {}", (self.now - self.start).as_secs_f64(), words());
        }
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    fn at(&mut self, at: Instant, event: Event) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), event);
    }

    fn latency(&mut self, from: usize, to: usize) -> Duration {
        let most = if from == to { 50 } else { self.setting.latency_max_micros };
        self.chance.micros(10, most)
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cuts.contains_key(&(from.min(to), from.max(to)))
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(slot) => self.start_process(slot),
            Event::Connect { process, number, address } => self.connect(process, number, &address),
            Event::NotConnected { process, number, gone } => {
                self.deliver(process, RankInput::NotConnected { connection: number, gone });
            }
            Event::Arrive { connection, side, item } => self.arrive(connection, side, item),
            Event::Wake(process) => {
                let of = &mut self.processes[process];
                if of.is_alive && !of.is_paused && of.wake.is_some_and(|at| at <= self.now) {
                    of.wake = None;
                    self.deliver(process, RankInput::Tick);
                }
            }
            Event::Computed(process, computation) => self.computed(process, computation),
            Event::Fault(planned) => self.fault(planned),
            Event::Heal(one, other) => self.heal(one, other),
            Event::Resume(process) => self.resume(process),
            Event::CheckLoss { since, ring, lost } => self.check_loss(since, ring, lost),
        }
    }

    fn start_process(&mut self, slot: usize) {
        if self.slots[slot].is_some() {
            return;
        }
        let process = self.processes.len();
        let is_late = slot >= self.setting.size as usize;
        let id = format!("member {slot}");
        let incarnation = Incarnation(self.chance.next());
        let settings = RankSettings {
            facts: MemberFacts {
                job: "simulated".to_owned(),
                id: id.clone(),
                index: (self.setting.has_index && !is_late).then_some(slot as u32),
                size: self.setting.size,
                host: format!("host {slot}"),
                addresses: vec![format!("process {process}")],
                incarnation,
                identity: Identity::new(),
                lease: LEASE,
            },
            meeting: self.setting.meeting,
            // Without indices of a launcher, the first slot serves all the same.
            serves_meeting: slot == 0,
            rendezvous: self.chance.next(),
            size_min: 1,
            join_timeout: JOIN_TIMEOUT,
            operation_timeout: 5 * LEASE,
            planted: self.setting.planted,
        };
        self.note(|| format!("{id} starts as process {process}"));
        self.processes.push(Process {
            slot,
            id,
            endpoint: RankEndpoint::new(self.now, settings),
            trainer: Trainer::new(self.setting.elements),
            is_alive: true,
            is_paused: false,
            inbox: VecDeque::new(),
            wake: None,
            computation: 0,
            ring: None,
        });
        self.slots[slot] = Some(process);
        self.act(process, TrainerAction::Join);
        self.pump(process);
    }

    fn connect(&mut self, process: usize, number: u64, address: &str) {
        let target = match address {
            MEETING_ADDRESS => self.slots[0],
            address => address.strip_prefix("process ").and_then(|text| text.parse::<usize>().ok()),
        };
        let from = self.processes[process].slot;
        let host = target.map_or(0, |target| self.processes[target].slot);
        if self.is_cut(from, host) {
            let event = Event::NotConnected { process, number, gone: false };
            return self.after(CONNECT_TIMEOUT, event);
        }
        let delay = self.latency(from, host);
        let Some(target) = target.filter(|target| self.processes[*target].is_alive) else {
            return self.after(delay, Event::NotConnected { process, number, gone: true });
        };
        if !self.processes[process].is_alive {
            return;
        }
        let accepted = self.processes[target].endpoint.accept();
        let connection = self.connections.len();
        self.connections.push(Connection {
            ends: [(process, number), (target, accepted)],
            is_open: false,
            is_lost: false,
            closed: [false; 2],
            last: [self.now; 2],
        });
        self.transmit(connection, 0, Item::Opened);
    }

    /// Sends an item to one side of a connection.
    fn transmit(&mut self, connection: usize, side: usize, item: Item) {
        let [one, other] = self.connections[connection].ends;
        let from = self.processes[one.0].slot;
        let to = self.processes[other.0].slot;
        let latency = self.latency(from, to);
        let of = &mut self.connections[connection];
        let at = (self.now + latency).max(of.last[side]);
        of.last[side] = at;
        self.at(at, Event::Arrive { connection, side, item });
    }

    fn arrive(&mut self, connection: usize, side: usize, item: Item) {
        let of = &self.connections[connection];
        if of.is_lost || of.closed[side] {
            return;
        }
        let [one, other] = of.ends;
        let from = self.processes[one.0].slot;
        let to = self.processes[other.0].slot;
        if self.is_cut(from, to) {
            self.sequence += 1;
            let event = Event::Arrive { connection, side, item };
            return self.held.push(((from.min(to), from.max(to)), self.sequence, event));
        }
        let (process, number) = of.ends[side];
        let input = match item {
            Item::Opened => {
                self.connections[connection].is_open = true;
                RankInput::Connected(number)
            }
            Item::Frame(frame) => RankInput::Frame(number, frame),
            Item::End => {
                self.connections[connection].closed[side] = true;
                RankInput::Closed(number)
            }
        };
        self.deliver(process, input);
    }

    fn deliver(&mut self, process: usize, input: RankInput) {
        let of = &mut self.processes[process];
        if !of.is_alive {
            return;
        }
        if of.is_paused {
            return of.inbox.push_back(input);
        }
        of.endpoint.handle(self.now, &mut self.folder, input);
        self.pump(process);
    }

    /// Carries out what a process asks for.
    fn pump(&mut self, process: usize) {
        while self.processes[process].is_alive
            && let Some(output) = self.processes[process].endpoint.poll_output()
        {
            self.output(process, output);
        }
        let of = &mut self.processes[process];
        if !of.is_alive {
            return;
        }
        if let Some(at) = of.endpoint.wake_at()
            && of.wake.is_none_or(|known| at < known)
        {
            let at = at.max(self.now);
            of.wake = Some(at);
            self.at(at, Event::Wake(process));
        }
    }

    fn output(&mut self, process: usize, output: RankOutput) {
        match output {
            RankOutput::Connect { connection, address } => {
                let delay = self.chance.micros(10, 100);
                self.after(delay, Event::Connect { process, number: connection, address });
            }
            RankOutput::Send(number, frame) => {
                if let Some((connection, side)) = self.find(process, number) {
                    self.transmit(connection, 1 - side, Item::Frame(frame));
                }
            }
            RankOutput::Close(number) => {
                if let Some((connection, side)) = self.find(process, number) {
                    self.connections[connection].closed[side] = true;
                    self.transmit(connection, 1 - side, Item::End);
                }
            }
            RankOutput::Entered(ring) => {
                let of = &mut self.processes[process];
                self.checker.entered(self.now, &ring, &of.id, of.ring);
                of.ring = Some((ring.rendezvous, ring.epoch));
                if of.slot >= self.setting.size as usize {
                    self.checker.figures.late_joins += 1;
                } else if self.restarts[of.slot] > 0 && of.trainer.step == 0 {
                    self.checker.figures.returns += 1;
                }
                let action = of.trainer.entered(&self.setting, &ring);
                self.note(|| {
                    let key = (ring.rendezvous % 1000, ring.epoch);
                    format!(
                        "process {process} enters {key:?}, rank {} of {}",
                        ring.rank,
                        ring.size()
                    )
                });
                self.act(process, action);
            }
            RankOutput::Performed { number, tensor } => {
                let of = &mut self.processes[process];
                let Some(ring) = of.endpoint.ring().cloned() else { return };
                self.checker.performed(self.now, &ring, number, &tensor);
                let joiners = of.endpoint.joiners();
                let action = of.trainer.performed(&self.setting, &ring, &tensor, joiners);
                if matches!(action, TrainerAction::Compute | TrainerAction::Leave) {
                    self.checker.stepped(&ring, of.trainer.step, &of.trainer.values);
                }
                self.act(process, action);
            }
            RankOutput::Stopped(error) => {
                self.note(|| format!("process {process}: {error}"));
                let of = &mut self.processes[process];
                let action = of.trainer.stopped(&error);
                if matches!(action, TrainerAction::Join) {
                    self.checker.figures.shrinks += 1;
                }
                self.act(process, action);
            }
            RankOutput::Left => {
                let id = self.processes[process].id.clone();
                self.checker.left(&id);
                self.note(|| format!("process {process} has left"));
                self.kill(process);
            }
            RankOutput::Heard { rendezvous, epoch, end } => {
                let rank = self.processes[process].endpoint.ring().map_or(0, |ring| ring.rank);
                self.checker.heard((rendezvous, epoch), &end, rank);
            }
            RankOutput::Linked { wanted, taken } => {
                assert_eq!(wanted, taken, "a ring takes the link of another");
            }
        }
    }

    fn act(&mut self, process: usize, action: TrainerAction) {
        let of = &mut self.processes[process];
        match action {
            TrainerAction::Perform(operation) => {
                let Some(ring) = of.endpoint.ring().cloned() else { return };
                if !of.endpoint.is_over() {
                    let number = of.endpoint.number() + 1;
                    self.checker.began(self.now, &ring, number, operation.clone());
                }
                of.endpoint.perform(self.now, &mut self.folder, operation);
            }
            TrainerAction::Join => of.endpoint.join(self.now, &mut self.folder),
            TrainerAction::End(end) => of.endpoint.end(self.now, &mut self.folder, end),
            TrainerAction::Leave => of.endpoint.leave(self.now, &mut self.folder),
            TrainerAction::Compute => {
                of.computation += 1;
                let computation = of.computation;
                let delay = self.chance.micros(1_000, 150_000);
                self.after(delay, Event::Computed(process, computation));
            }
            TrainerAction::Exit => self.exit(process),
        }
    }

    /// A process ends by an error. The supervisor starts it again.
    fn exit(&mut self, process: usize) {
        self.kill(process);
        let slot = self.processes[process].slot;
        let delay = self.chance.micros(200_000, 1_500_000);
        self.restart(slot, delay);
    }

    fn restart(&mut self, slot: usize, delay: Duration) {
        if self.restarts[slot] < RESTARTS_MAX && self.now < self.start + SUPERVISED {
            self.restarts[slot] += 1;
            self.after(delay, Event::Start(slot));
        }
    }

    fn computed(&mut self, process: usize, computation: u64) {
        let of = &mut self.processes[process];
        if !of.is_alive || of.computation != computation || !of.trainer.is_computing() {
            return;
        }
        if of.is_paused {
            return self.after(LEASE / 10, Event::Computed(process, computation));
        }
        let Some(ring) = of.endpoint.ring().cloned() else { return };
        let joiners = of.endpoint.joiners();
        let action = of.trainer.computed(&self.setting, &ring, joiners);
        self.act(process, action);
        self.pump(process);
    }

    fn find(&self, process: usize, number: u64) -> Option<(usize, usize)> {
        let found = self.connections.iter().enumerate().rev().find_map(|(at, connection)| {
            let side = connection.ends.iter().position(|end| *end == (process, number))?;
            Some((at, side))
        });
        found.filter(|(at, side)| {
            !self.connections[*at].is_lost && !self.connections[*at].closed[*side]
        })
    }

    /// Ends a process: the system closes its connections.
    fn kill(&mut self, process: usize) {
        let of = &mut self.processes[process];
        if !std::mem::replace(&mut of.is_alive, false) {
            return;
        }
        let slot = of.slot;
        if self.slots[slot] == Some(process) {
            self.slots[slot] = None;
        }
        for connection in 0..self.connections.len() {
            let of = &mut self.connections[connection];
            let side = of.ends.iter().position(|end| end.0 == process);
            let Some(side) = side.filter(|side| !of.is_lost && !of.closed[*side]) else { continue };
            of.closed[side] = true;
            self.transmit(connection, 1 - side, Item::End);
        }
    }

    fn fault(&mut self, planned: PlannedFault) {
        let PlannedFault { fault, draw, .. } = planned;
        let mut chance = SimChance::new(draw, 3);
        let living: Vec<usize> =
            self.living().filter(|at| !self.processes[*at].is_paused).collect();
        if living.is_empty() {
            return;
        }
        self.last_fault = self.now;
        let process = living[chance.between(0, living.len() as u64 - 1) as usize];
        let slot = self.processes[process].slot;
        self.note(|| format!("{fault:?} of process {process}"));
        match fault {
            RingFault::Partition | RingFault::Isolate => {
                let long = chance.micros(100_000, 4_000_000);
                let others: Vec<usize> = (0..self.slots.len()).filter(|at| *at != slot).collect();
                let one = others[chance.between(0, others.len() as u64 - 1) as usize];
                for other in others {
                    if fault == RingFault::Isolate || other == one {
                        *self.cuts.entry((slot.min(other), slot.max(other))).or_default() += 1;
                        self.after(long, Event::Heal(slot, other));
                    }
                }
            }
            RingFault::Loss => {
                let open: Vec<usize> = (0..self.connections.len())
                    .filter(|at| {
                        let of = &self.connections[*at];
                        let between = of.ends[0].0 != of.ends[1].0;
                        between && of.is_open && !of.is_lost && of.closed == [false; 2]
                    })
                    .collect();
                if open.is_empty() {
                    return;
                }
                let connection = open[chance.between(0, open.len() as u64 - 1) as usize];
                self.connections[connection].is_lost = true;
                for (process, number) in self.connections[connection].ends {
                    self.deliver(process, RankInput::Closed(number));
                }
            }
            RingFault::Kill => {
                self.watch_loss(process, None);
                self.kill(process);
                let delay = chance.micros(50_000, 3_000_000);
                if chance.percent(70) {
                    self.restart(slot, delay);
                }
            }
            RingFault::Pause => {
                let long = chance.micros(100_000, 4_000_000);
                self.watch_loss(process, Some(long));
                self.processes[process].is_paused = true;
                self.after(long, Event::Resume(process));
            }
            RingFault::Leave => self.processes[process].trainer.leaves = true,
            RingFault::Differ => self.processes[process].trainer.differs = true,
            RingFault::Drop => {
                if self.processes[process].endpoint.has_operation() {
                    let of = &mut self.processes[process];
                    of.endpoint.drop_operation(self.now, &mut self.folder);
                    of.trainer.dropped();
                    self.act(process, TrainerAction::Join);
                    self.pump(process);
                }
            }
            RingFault::Late => {
                let has_formed = self.checker.figures.rings > 0;
                if has_formed && self.slots.len() < self.setting.size as usize + 2 {
                    self.slots.push(None);
                    self.restarts.push(RESTARTS_MAX);
                    self.start_process(self.slots.len() - 1);
                }
            }
        }
    }

    /// Has it checked that the others are told of a loss in time, if nothing else happens.
    fn watch_loss(&mut self, process: usize, pause: Option<Duration>) {
        let Some(ring) = self.processes[process].endpoint.present_ring() else { return };
        let slack = LEASE / 2 + Duration::from_micros(8 * self.setting.latency_max_micros);
        let within = LEASE + slack;
        if self.cuts.is_empty() && pause.is_none_or(|long| long > within) {
            let since = self.now;
            self.after(within, Event::CheckLoss { since, ring, lost: process });
        }
    }

    fn check_loss(&self, since: Instant, ring: RingKey, lost: usize) {
        if self.last_fault != since {
            return;
        }
        for at in self.living().filter(|at| *at != lost && !self.processes[*at].is_paused) {
            let known = self.processes[at].endpoint.present_ring();
            assert!(known != Some(ring), "process {at} does not know that {lost} is lost");
        }
    }

    fn heal(&mut self, one: usize, other: usize) {
        let pair = (one.min(other), one.max(other));
        let Some(count) = self.cuts.get_mut(&pair) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.cuts.remove(&pair);
        self.last_fault = self.now;
        let held = std::mem::take(&mut self.held);
        let (due, held) = held.into_iter().partition(|(of, ..)| *of == pair);
        self.held = held;
        let due: Vec<((usize, usize), u64, Event)> = due;
        for (_, sequence, event) in due {
            self.queue.insert((self.now, sequence), event);
        }
    }

    fn resume(&mut self, process: usize) {
        self.last_fault = self.now;
        self.processes[process].is_paused = false;
        // After a stop, either the clock or what has arrived comes first.
        let ticks_first = self.chance.percent(50);
        if ticks_first {
            self.deliver(process, RankInput::Tick);
        }
        while let Some(input) = self.processes[process].inbox.pop_front() {
            self.deliver(process, input);
        }
        self.processes[process].wake = None;
        self.deliver(process, RankInput::Tick);
    }
}
