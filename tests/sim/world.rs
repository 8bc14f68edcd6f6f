//! A cluster in one thread: its processes, its connections and its clock, driven by one queue of
//! events.

mod connections;
mod mischief;
mod servers;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_ps::simulation::{self as ps, Files};
use pushpull_worker::simulation as worker;

use crate::chance::Chance;
use crate::checker::Checker;
use crate::faults::{self, Fault, Planned};
use crate::network::{Client, Connection, Way};
use crate::scenario::{Scenario, Sizes};
use crate::setting::Setting;
use crate::trace::Trace;
use crate::trainer::Trainer;

/// How long a run may take once the faults have stopped.
const TIMEOUT: Duration = Duration::from_secs(150);

/// More events than any sound run has.
const EVENTS_MAX: u64 = 400_000;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// A connection is made, or refused.
    Connect(u64),
    Deliver(u64, Way),
    /// The client of a connection learns that it is gone.
    ClientGone(u64, Client),
    ServerGone(u64, ShardId),
    /// A session wants to know the time.
    Wake(usize),
    /// A gradient is computed.
    Computed(usize),
    /// The same of one that was set aside.
    ComputedAside(usize),
    /// A worker reads a little more in lent memory.
    Read(usize),
    /// It has paused long enough after this operation.
    Again(usize, u64),
    /// A worker's process starts.
    Start(u32),
    Tick(u32, u64),
    Work(ShardId, u64),
    /// A shard connects to the step owner's.
    Link(ShardId, u64),
    Beat(ShardId, u64),
    Restart(u32),
    /// The fault of this number.
    Fault(usize),
    /// No fault comes after this.
    Heal,
}

/// A worker's process.
#[derive(Debug)]
struct Process {
    door: worker::Door,
    trainer: Trainer,
    links: BTreeMap<usize, u64>,
    /// The event that tells it the time.
    armed: Option<(Instant, u64)>,
    paused_until: Option<Instant>,
    is_alive: bool,
    /// Which of its task's.
    life: u64,
    chance: Chance,
}

/// A ps task's process, or what it has left.
#[derive(Debug)]
struct Task {
    shards: Vec<Host>,
    /// Which process it is.
    life: u64,
    is_up: bool,
    chance: Chance,
}

#[derive(Debug)]
enum Host {
    Up(Box<ps::Door>),
    Down(Files),
}

/// What came of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) events: u64,
    pub(crate) commits: u64,
    pub(crate) pulls: u64,
    /// Those of values in lent memory.
    pub(crate) direct_pulls: u64,
    /// Frames that have said where gradients lie in lent memory.
    pub(crate) named: u64,
    /// Calls that ended early, because somebody was missing.
    pub(crate) told: u64,
    pub(crate) faults: BTreeSet<Fault>,
    pub(crate) trace: u64,
}

/// A cluster.
pub(crate) struct World {
    setting: Setting,
    plan: Vec<Planned>,
    start: Instant,
    now: Instant,
    queue: BTreeMap<(Instant, u64), Event>,
    events: u64,
    next: u64,
    tasks: Vec<Task>,
    processes: Vec<Process>,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    /// How many there have been between two.
    made: BTreeMap<String, u64>,
    /// Workers that the step owner's earlier processes have given up.
    retired: u64,
    /// The connection of each shard to the step owner's, and when it was last heard.
    to_owner: BTreeMap<ShardId, (u64, Instant)>,
    /// Work that is due.
    working: BTreeSet<ShardId>,
    checker: Checker,
    faults: BTreeSet<Fault>,
    healed: bool,
    trace: Trace,
}

impl World {
    /// The cluster of a scenario, with what will go wrong.
    pub(crate) fn new(scenario: &Scenario, start: Instant, trace: Trace) -> World {
        let seed = scenario.seed;
        let setting = Setting::draw(seed, scenario.at_most);
        // The numbers of the faults are those of the whole seed.
        let (plan, end) = faults::plan(&Setting::draw(seed, Sizes::ANY));
        let checker = Checker::new(&setting);
        let mut world = World {
            start,
            now: start,
            queue: BTreeMap::new(),
            events: 0,
            next: 0,
            tasks: Vec::new(),
            processes: Vec::new(),
            connections: BTreeMap::new(),
            next_connection: 1,
            made: BTreeMap::new(),
            retired: 0,
            to_owner: BTreeMap::new(),
            working: BTreeSet::new(),
            checker,
            faults: BTreeSet::new(),
            healed: false,
            trace,
            setting,
            plan,
        };
        world.trace.note(|| format!("{scenario}: {}", world.setting.words()));
        for task in 0..world.setting.tasks {
            let files = (0..world.setting.shards).map(|_| Host::Down(Files::default()));
            let mut chance = Chance::of(seed, &format!("ps {task}"));
            let delay = chance.millis(0, 300);
            world.tasks.push(Task { shards: files.collect(), life: 0, is_up: false, chance });
            world.at(start + delay, Event::Restart(task));
        }
        let mut late = BTreeMap::new();
        for (number, planned) in world.plan.clone().into_iter().enumerate() {
            let left_out = scenario.without.contains(&number);
            let words = if left_out { ", left out" } else { "" };
            world.trace.note(|| format!("  fault {number}: {planned:?}{words}"));
            match planned.fault {
                _ if left_out => {}
                Fault::Late => _ = late.insert(planned.task, planned.at),
                _ => _ = world.at(start + planned.at, Event::Fault(number)),
            }
        }
        world.at(start + end, Event::Heal);
        for task in 0..world.setting.workers {
            let usual = Chance::of(seed, &format!("worker {task}")).millis(0, 300);
            if late.contains_key(&task) {
                world.faults.insert(Fault::Late);
            }
            let delay = late.get(&task).copied().unwrap_or(usual);
            world.at(start + delay, Event::Start(task));
        }
        world
    }

    /// Plants a bug in every shard.
    #[cfg(feature = "planted")]
    pub(crate) fn plant(&mut self, planted: pushpull_ps::PlantedBugs) {
        self.setting.planted = planted;
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Outcome {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            if let Some(until) = self.pause_of(event) {
                let key = self.at(until, event);
                if let Event::Wake(process) = event {
                    self.processes[process].armed = Some(key);
                }
                continue;
            }
            if !matches!(event, Event::Tick(..)) {
                self.events += 1;
                let since = self.now - self.start;
                self.trace.note(|| format!("{since:?} {event:?}"));
            }
            self.happen(event);
            if self.healed && self.is_over() {
                break;
            }
            let late = self.healed && self.now > self.heal_time() + TIMEOUT;
            if late || self.events > EVENTS_MAX {
                panic!("after {:?} the run has not ended: {}", self.now - self.start, self.waits());
            }
        }
        self.checker.finish(self.setting.last_step);
        Outcome {
            events: self.events,
            commits: self.checker.steps(),
            pulls: self.checker.pulls(),
            named: self.processes.iter().map(|process| process.door.named()).sum(),
            direct_pulls: self.processes.iter().map(|process| process.door.direct_pulls()).sum(),
            told: self.checker.told_count(),
            faults: self.faults,
            trace: self.trace.sum(),
        }
    }

    fn heal_time(&self) -> Instant {
        self.start + Duration::from_secs(6)
    }

    /// Everybody has seen the end, and every shard has made it.
    fn is_over(&self) -> bool {
        let over = |process: &Process| !process.is_alive || process.trainer.is_over();
        let all = self.processes.iter().all(over) && self.next_starts() == 0;
        all && self.tasks.iter().all(|task| {
            task.shards.iter().all(|host| match host {
                Host::Up(door) => {
                    let counts = !self.setting.asynchronous
                        && self.setting.catalogue.shards().any(|id| id == door.id());
                    let last = self.setting.last_step;
                    door.steps() == last || !(counts || door.owns_step())
                }
                Host::Down(_) => false,
            })
        })
    }

    fn next_starts(&self) -> usize {
        self.queue.values().filter(|event| matches!(event, Event::Start(_))).count()
    }

    /// For whom everybody waits.
    fn waits(&self) -> String {
        let mut text = String::new();
        for (number, process) in self.processes.iter().enumerate() {
            if process.is_alive && !process.trainer.is_over() {
                let (task, phase) = (process.trainer.task, &process.trainer.phase);
                text += &format!("\n  process {number} of worker {task} in {phase:?}");
            }
        }
        for task in &self.tasks {
            for host in &task.shards {
                text += "\n  ";
                match host {
                    Host::Up(door) => text += &door.waits(self.now),
                    Host::Down(_) => text += "a shard is down",
                }
            }
        }
        text
    }

    fn at(&mut self, at: Instant, event: Event) -> (Instant, u64) {
        self.next += 1;
        let key = (at, self.next);
        self.queue.insert(key, event);
        key
    }

    fn after(&mut self, after: Duration, event: Event) {
        self.at(self.now + after, event);
    }

    /// Until when the process that an event is for is stopped.
    fn pause_of(&self, event: Event) -> Option<Instant> {
        let process = match event {
            Event::Wake(process)
            | Event::Computed(process)
            | Event::ComputedAside(process)
            | Event::Read(process)
            | Event::Again(process, _) => process,
            Event::ClientGone(_, Client::Worker { process, .. }) => process,
            Event::Deliver(connection, Way::Back) | Event::Connect(connection) => {
                match self.connections.get(&connection)?.client {
                    Client::Worker { process, .. } => process,
                    Client::Shard(_) => return None,
                }
            }
            _ => return None,
        };
        self.processes[process].paused_until.filter(|&until| until > self.now)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Connect(connection) => self.connect(connection),
            Event::Deliver(connection, way) => self.deliver(connection, way),
            Event::ClientGone(connection, client) => self.client_gone(connection, client),
            Event::ServerGone(connection, shard) => {
                let now = self.now;
                self.with_shard(shard, |door| door.disconnect(now, connection));
            }
            Event::Wake(process) => {
                let now = self.now;
                self.processes[process].armed = None;
                self.with_process(process, |door| door.tick(now));
            }
            Event::Computed(process) => self.computed(process, false),
            Event::ComputedAside(process) => self.computed(process, true),
            Event::Read(process) => {
                let now = self.now;
                self.with_process(process, |door| door.read_on(now));
            }
            Event::Again(process, op) => self.again(process, op),
            Event::Start(task) => self.start_worker(task),
            Event::Tick(task, life) => self.tick(task, life),
            Event::Work(shard, life) => {
                self.working.remove(&shard);
                if self.tasks[shard.task as usize].life == life {
                    self.work(shard);
                }
            }
            Event::Link(shard, life) => self.link(shard, life),
            Event::Beat(shard, life) => self.beat(shard, life),
            Event::Restart(task) => self.restart(task),
            Event::Fault(number) => self.fault(number),
            Event::Heal => self.heal(),
        }
    }
}
