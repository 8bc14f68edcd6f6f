//! A cluster in one thread: its processes, connections and clock, driven by one event queue.

mod connections;
mod mischief;
mod servers;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_ps::testing::{KilledFiles, ShardEndpoint};
use pushpull_worker::simulation as worker;

use crate::chance::SimChance;
use crate::checker::Checker;
use crate::faults::{self, FaultKind, Planned};
use crate::network::{Connection, Direction, LinkClient};
use crate::scenario::{Scenario, Sizes};
use crate::setting::Setting;
use crate::trace::Trace;
use crate::trainer::Trainer;

/// How long a run may take, in virtual time, after the faults have stopped.
const TIMEOUT: Duration = Duration::from_secs(150);

/// More events than any correct run has.
const EVENTS_MAX: u64 = 400_000;

/// A scheduled event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ScheduledEvent {
    /// A connection is accepted or refused.
    Connect(u64),
    Deliver(u64, Direction),
    /// The client of a connection notices that it is gone.
    ClientGone(u64, LinkClient),
    ServerGone(u64, ShardId),
    /// A session's timer fires.
    Wake(usize),
    /// A process has computed a gradient.
    Computed(usize),
    /// A process has computed its slow gradient.
    ComputedSlow(usize),
    /// A process reads a little more of the shared values.
    Read(usize),
    /// The pause of a process after this operation ends.
    Again(usize, u64),
    /// A worker's process starts.
    Start(u32),
    Tick(u32, u64),
    Work(ShardId, u64),
    /// A shard connects to the step owner.
    Link(ShardId, u64),
    Beat(ShardId, u64),
    Restart(u32),
    /// The fault with this index in the plan is due.
    Fault(usize),
    /// The faults end.
    Heal,
}

/// A worker's process.
#[derive(Debug)]
struct WorkerProcess {
    endpoint: worker::SessionEndpoint,
    trainer: Trainer,
    links: BTreeMap<usize, u64>,
    /// The key of its pending [`ScheduledEvent::Wake`].
    armed: Option<(Instant, u64)>,
    paused_until: Option<Instant>,
    is_alive: bool,
    /// Its number among the processes of its task, from 1.
    life: u64,
    chance: SimChance,
}

/// A ps task: its process, or the files that a killed process has left.
#[derive(Debug)]
struct PsTask {
    shards: Vec<Host>,
    /// Tells processes and the events that are meant for them apart. Rises at each start and kill.
    life: u64,
    is_up: bool,
    chance: SimChance,
}

#[derive(Debug)]
enum Host {
    Up(Box<ShardEndpoint>),
    Down(KilledFiles),
}

/// The figures of a finished run.
#[derive(Debug)]
pub(crate) struct SimOutcome {
    pub(crate) events: u64,
    pub(crate) commits: u64,
    pub(crate) pulls: u64,
    /// Pulls that read shared values.
    pub(crate) direct_pulls: u64,
    /// Frames of pushes that name a push buffer in place of a body.
    pub(crate) named: u64,
    /// Operations that failed early with an error that names stragglers.
    pub(crate) early_errors: u64,
    pub(crate) faults: BTreeSet<FaultKind>,
    pub(crate) trace: u64,
}

/// A simulated cluster.
pub(crate) struct SimWorld {
    setting: Setting,
    plan: Vec<Planned>,
    start: Instant,
    now: Instant,
    queue: BTreeMap<(Instant, u64), ScheduledEvent>,
    events: u64,
    next: u64,
    tasks: Vec<PsTask>,
    processes: Vec<WorkerProcess>,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    /// By the names of client and server: how many connections they have made.
    connection_counts: BTreeMap<String, u64>,
    /// Workers that killed processes of the servers had retired.
    retired: u64,
    /// Each shard's connection to the step owner, and when it last received something.
    to_owner: BTreeMap<ShardId, (u64, Instant)>,
    /// The shards that have an [`ScheduledEvent::Work`] in the queue.
    working: BTreeSet<ShardId>,
    checker: Checker,
    faults: BTreeSet<FaultKind>,
    healed: bool,
    trace: Trace,
}

impl SimWorld {
    /// Creates the cluster of a scenario, with its faults in the queue.
    pub(crate) fn new(scenario: &Scenario, start: Instant, trace: Trace) -> SimWorld {
        let seed = scenario.seed;
        let setting = Setting::draw(seed, scenario.at_most);
        // Fault indices refer to the plan of the unbounded setting, so they do not change with it.
        let (plan, end) = faults::plan(&Setting::draw(seed, Sizes::ANY));
        let checker = Checker::new(&setting);
        let mut world = SimWorld {
            start,
            now: start,
            queue: BTreeMap::new(),
            events: 0,
            next: 0,
            tasks: Vec::new(),
            processes: Vec::new(),
            connections: BTreeMap::new(),
            next_connection: 1,
            connection_counts: BTreeMap::new(),
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
            let files = (0..world.setting.shards).map(|_| Host::Down(KilledFiles::default()));
            let mut chance = SimChance::of(seed, &format!("ps {task}"));
            let delay = chance.millis(0, 300);
            world.tasks.push(PsTask { shards: files.collect(), life: 0, is_up: false, chance });
            world.at(start + delay, ScheduledEvent::Restart(task));
        }
        let mut late_starts = BTreeMap::new();
        for (number, planned) in world.plan.clone().into_iter().enumerate() {
            let left_out = scenario.without.contains(&number);
            let words = if left_out { ", left out" } else { "" };
            world.trace.note(|| format!("  fault {number}: {planned:?}{words}"));
            match planned.fault {
                _ if left_out => {}
                FaultKind::Late => _ = late_starts.insert(planned.task, planned.at),
                _ => _ = world.at(start + planned.at, ScheduledEvent::Fault(number)),
            }
        }
        world.at(start + end, ScheduledEvent::Heal);
        for task in 0..world.setting.workers {
            let usual = SimChance::of(seed, &format!("worker {task}")).millis(0, 300);
            if late_starts.contains_key(&task) {
                world.faults.insert(FaultKind::Late);
            }
            let delay = late_starts.get(&task).copied().unwrap_or(usual);
            world.at(start + delay, ScheduledEvent::Start(task));
        }
        world
    }

    /// Plants a bug in every shard.
    #[cfg(feature = "planted")]
    pub(crate) fn plant(&mut self, planted: pushpull_ps::PlantedBugs) {
        self.setting.planted = planted;
    }

    /// Runs until the training is over.
    ///
    /// # Panics
    /// If the run breaks a rule of the checker, or does not end.
    pub(crate) fn run(mut self) -> SimOutcome {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            if let Some(until) = self.pause_of(event) {
                let key = self.at(until, event);
                if let ScheduledEvent::Wake(process) = event {
                    self.processes[process].armed = Some(key);
                }
                continue;
            }
            if !matches!(event, ScheduledEvent::Tick(..)) {
                self.events += 1;
                let since = self.now - self.start;
                self.trace.note(|| format!("{since:?} {event:?}"));
            }
            self.happen(event);
            if self.healed && self.is_over() {
                break;
            }
            let is_overdue = self.healed && self.now > self.heal_time() + TIMEOUT;
            if is_overdue || self.events > EVENTS_MAX {
                panic!("no end after {:?}: {}", self.now - self.start, self.waits());
            }
        }
        self.checker.finish(&self.setting);
        SimOutcome {
            events: self.events,
            commits: self.checker.steps(),
            pulls: self.checker.pulls(),
            named: self.processes.iter().map(|process| process.endpoint.shared_push_frames()).sum(),
            direct_pulls: self
                .processes
                .iter()
                .map(|process| process.endpoint.direct_pulls())
                .sum(),
            early_errors: self.checker.early_errors(),
            faults: self.faults,
            trace: self.trace.sum(),
        }
    }

    fn heal_time(&self) -> Instant {
        self.start + Duration::from_secs(6)
    }

    /// Whether all workers have ended and all shards have made the last step.
    fn is_over(&self) -> bool {
        let over = |process: &WorkerProcess| !process.is_alive || process.trainer.is_over();
        let all = self.processes.iter().all(over) && self.next_starts() == 0;
        let hosts = self.tasks.iter().flat_map(|task| &task.shards);
        let mut owner_steps = hosts.filter_map(|host| match host {
            Host::Up(endpoint) if endpoint.owns_step() => Some(endpoint.steps()),
            _ => None,
        });
        let last = match self.setting.data {
            Some(_) => owner_steps.next(),
            None => Some(self.setting.last_step),
        };
        all && self.tasks.iter().all(|task| {
            task.shards.iter().all(|host| match host {
                Host::Up(endpoint) => {
                    let counts = !self.setting.asynchronous
                        && self.setting.catalogue.shards().any(|id| id == endpoint.id());
                    Some(endpoint.steps()) == last || !(counts || endpoint.owns_step())
                }
                Host::Down(_) => false,
            })
        })
    }

    fn next_starts(&self) -> usize {
        self.queue.values().filter(|event| matches!(event, ScheduledEvent::Start(_))).count()
    }

    /// Describes what each live worker and each shard waits for.
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
                    Host::Up(endpoint) => text += &endpoint.waits(self.now),
                    Host::Down(_) => text += "a shard is down",
                }
            }
        }
        text
    }

    fn at(&mut self, at: Instant, event: ScheduledEvent) -> (Instant, u64) {
        self.next += 1;
        let key = (at, self.next);
        self.queue.insert(key, event);
        key
    }

    fn after(&mut self, after: Duration, event: ScheduledEvent) {
        self.at(self.now + after, event);
    }

    /// Returns until when the process that an event is meant for is stopped.
    fn pause_of(&self, event: ScheduledEvent) -> Option<Instant> {
        let process = match event {
            ScheduledEvent::Wake(process)
            | ScheduledEvent::Computed(process)
            | ScheduledEvent::ComputedSlow(process)
            | ScheduledEvent::Read(process)
            | ScheduledEvent::Again(process, _) => process,
            ScheduledEvent::ClientGone(_, LinkClient::Worker { process, .. }) => process,
            ScheduledEvent::Deliver(connection, Direction::ToClient)
            | ScheduledEvent::Connect(connection) => {
                match self.connections.get(&connection)?.client {
                    LinkClient::Worker { process, .. } => process,
                    LinkClient::Shard(_) => return None,
                }
            }
            _ => return None,
        };
        self.processes[process].paused_until.filter(|&until| until > self.now)
    }

    fn happen(&mut self, event: ScheduledEvent) {
        match event {
            ScheduledEvent::Connect(connection) => self.connect(connection),
            ScheduledEvent::Deliver(connection, direction) => self.deliver(connection, direction),
            ScheduledEvent::ClientGone(connection, client) => self.client_gone(connection, client),
            ScheduledEvent::ServerGone(connection, shard) => {
                let now = self.now;
                self.with_shard(shard, |endpoint| endpoint.disconnect(now, connection));
            }
            ScheduledEvent::Wake(process) => {
                let now = self.now;
                self.processes[process].armed = None;
                self.with_process(process, |endpoint| endpoint.tick(now));
            }
            ScheduledEvent::Computed(process) => self.computed(process, false),
            ScheduledEvent::ComputedSlow(process) => self.computed(process, true),
            ScheduledEvent::Read(process) => {
                let now = self.now;
                self.with_process(process, |endpoint| endpoint.continue_read(now));
            }
            ScheduledEvent::Again(process, op) => self.again(process, op),
            ScheduledEvent::Start(task) => self.start_worker(task),
            ScheduledEvent::Tick(task, life) => self.tick(task, life),
            ScheduledEvent::Work(shard, life) => {
                self.working.remove(&shard);
                if self.tasks[shard.task as usize].life == life {
                    self.work(shard);
                }
            }
            ScheduledEvent::Link(shard, life) => self.link(shard, life),
            ScheduledEvent::Beat(shard, life) => self.send_heartbeat(shard, life),
            ScheduledEvent::Restart(task) => self.restart(task),
            ScheduledEvent::Fault(number) => self.fault(number),
            ScheduledEvent::Heal => self.heal(),
        }
    }
}
