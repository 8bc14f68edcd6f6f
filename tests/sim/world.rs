//! A cluster in one thread: its processes, connections and clock, driven by one event queue.

mod connections;
mod mischief;
mod servers;
mod sessions;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_ps::testing::{KilledFiles, ShardEndpoint};
use pushpull_worker::simulation as worker;

use crate::chance::SimChance;
use crate::faults::{FaultKind, Planned};
use crate::network::{Connection, Direction, LinkClient, LinkServer};
use crate::process_program::{CallLinkEvent, ProcessProgram};
use crate::scenario::Scenario;
use crate::setting::Setting;
use crate::trace::Trace;

/// How long a run may take, in virtual time, after the faults have stopped.
const TIMEOUT: Duration = Duration::from_secs(150);

/// More events than any correct run has.
const EVENTS_MAX: u64 = 400_000;

/// A scheduled event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScheduledEvent<T> {
    /// A connection is accepted or refused.
    Connect(u64),
    Deliver(u64, Direction),
    /// The client of a connection notices that it is gone.
    ClientGone(u64, LinkClient),
    ServerGone(u64, LinkServer),
    /// A session's timer fires.
    Wake(usize),
    /// A program has scheduled this for itself.
    Timer(T),
    /// A process reads a little more of the shared values.
    Read(usize),
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

/// A process with a session.
#[derive(Debug)]
pub(crate) struct SimProcess<P> {
    pub(crate) endpoint: worker::SessionEndpoint,
    pub(crate) program: P,
    links: BTreeMap<usize, u64>,
    /// The key of its pending [`ScheduledEvent::Wake`].
    armed: Option<(Instant, u64)>,
    pub(crate) paused_until: Option<Instant>,
    pub(crate) is_alive: bool,
    /// Its number among the processes of its task, from 1.
    pub(crate) life: u64,
    pub(crate) chance: SimChance,
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
    pub(crate) faults: BTreeSet<FaultKind>,
    pub(crate) trace: u64,
    /// The figures of the family, by their names in the report.
    pub(crate) figures: BTreeMap<&'static str, u64>,
}

/// A simulated cluster.
pub(crate) struct SimWorld<P: ProcessProgram> {
    pub(crate) setting: Setting,
    plan: Vec<Planned>,
    pub(crate) start: Instant,
    pub(crate) now: Instant,
    queue: BTreeMap<(Instant, u64), ScheduledEvent<P::Timer>>,
    events: u64,
    next: u64,
    tasks: Vec<PsTask>,
    pub(crate) processes: Vec<SimProcess<P>>,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    /// By the names of client and server: how many connections they have made.
    connection_counts: BTreeMap<String, u64>,
    /// Workers that killed processes of the servers had retired.
    retired: u64,
    /// The number of ps tasks that were started with a wrong clock.
    clock_jumps: u64,
    /// Each shard's connection to the step owner, and when it last received something.
    to_owner: BTreeMap<ShardId, (u64, Instant)>,
    /// The shards that have an [`ScheduledEvent::Work`] in the queue.
    working: BTreeSet<ShardId>,
    /// Until when connections to a server are refused.
    refused_until: BTreeMap<LinkServer, Instant>,
    pub(crate) checker: P::Checker,
    faults: BTreeSet<FaultKind>,
    pub(crate) healed: bool,
    pub(crate) trace: Trace,
}

impl<P: ProcessProgram> SimWorld<P> {
    /// Creates a cluster with this setting, with its faults in the queue. `plan` has the
    /// faults, and `end` is the time at which they end.
    pub(crate) fn new(
        scenario: &Scenario,
        setting: Setting,
        plan: Vec<Planned>,
        end: Duration,
        checker: P::Checker,
        start: Instant,
        trace: Trace,
    ) -> SimWorld<P> {
        let seed = scenario.seed;
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
            clock_jumps: 0,
            to_owner: BTreeMap::new(),
            working: BTreeSet::new(),
            refused_until: BTreeMap::new(),
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

    /// Runs until the program of the family is over.
    ///
    /// # Panics
    /// If the run breaks a rule of the checker, or does not end.
    pub(crate) fn run_to_end(&mut self) {
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
            if self.healed && P::is_over(self) {
                break;
            }
            let is_overdue = self.healed && self.now > self.heal_time() + TIMEOUT;
            if is_overdue || self.events > EVENTS_MAX {
                panic!("no end after {:?}: {}", self.now - self.start, self.waits());
            }
        }
    }

    /// Returns the figures of the run so far.
    pub(crate) fn outcome(self, mut figures: BTreeMap<&'static str, u64>) -> SimOutcome {
        figures.insert("clock_jumps", self.clock_jumps);
        figures.insert("with_tokens", u64::from(self.setting.tokens().is_some()));
        let events = self.events;
        let faults = self.faults;
        let trace = self.trace.sum();
        SimOutcome { events, faults, trace, figures }
    }

    /// The time at which the faults have ended.
    pub(crate) fn heal_time(&self) -> Instant {
        self.start + Duration::from_secs(6)
    }

    /// Yields the shards; `None` for one whose process is down.
    pub(crate) fn shards(&self) -> impl Iterator<Item = Option<&ShardEndpoint>> {
        let hosts = self.tasks.iter().flat_map(|task| &task.shards);
        hosts.map(|host| match host {
            Host::Up(endpoint) => Some(&**endpoint),
            Host::Down(_) => None,
        })
    }

    /// Returns the checker, and the shards whose processes are up.
    pub(crate) fn checker_and_shards(
        &mut self,
    ) -> (&mut P::Checker, impl Iterator<Item = &ShardEndpoint>) {
        let hosts = self.tasks.iter().flat_map(|task| &task.shards);
        let up = hosts.filter_map(|host| match host {
            Host::Up(endpoint) => Some(&**endpoint),
            Host::Down(_) => None,
        });
        (&mut self.checker, up)
    }

    /// Returns how many processes are about to start.
    pub(crate) fn next_starts(&self) -> usize {
        self.queue.values().filter(|event| matches!(event, ScheduledEvent::Start(_))).count()
    }

    /// Whether a process of this worker task is about to start.
    pub(crate) fn starts(&self, task: u32) -> bool {
        self.queue.values().any(|event| *event == ScheduledEvent::Start(task))
    }

    /// Describes what each live worker and each shard waits for.
    fn waits(&self) -> String {
        let mut text = String::new();
        for (number, process) in self.processes.iter().enumerate() {
            if let Some(waits) = process.program.waits().filter(|_| process.is_alive) {
                text += &format!("\n  process {number} of {} {waits}", process.program.task_name());
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

    fn at(&mut self, at: Instant, event: ScheduledEvent<P::Timer>) -> (Instant, u64) {
        self.next += 1;
        let key = (at, self.next);
        self.queue.insert(key, event);
        key
    }

    pub(crate) fn after(&mut self, after: Duration, event: ScheduledEvent<P::Timer>) {
        self.at(self.now + after, event);
    }

    /// Returns until when the process that an event is meant for is stopped.
    fn pause_of(&self, event: ScheduledEvent<P::Timer>) -> Option<Instant> {
        let process = match event {
            ScheduledEvent::Wake(process) | ScheduledEvent::Read(process) => process,
            ScheduledEvent::Timer(timer) => P::process_of(timer),
            ScheduledEvent::ClientGone(_, client) => client.process()?,
            ScheduledEvent::ServerGone(_, server) => self.process_of(server)?,
            ScheduledEvent::Deliver(connection, Direction::ToServer) => {
                self.process_of(self.connections.get(&connection)?.server)?
            }
            ScheduledEvent::Deliver(connection, Direction::ToClient)
            | ScheduledEvent::Connect(connection) => {
                self.connections.get(&connection)?.client.process()?
            }
            _ => return None,
        };
        self.processes[process].paused_until.filter(|&until| until > self.now)
    }

    /// Returns the running process that is a function server.
    fn process_of(&self, server: LinkServer) -> Option<usize> {
        let LinkServer::Functions(task) = server else { return None };
        let serves =
            |process: &SimProcess<P>| process.is_alive && process.program.serves() == Some(task);
        self.processes.iter().position(serves)
    }

    fn happen(&mut self, event: ScheduledEvent<P::Timer>) {
        match event {
            ScheduledEvent::Connect(connection) => self.connect(connection),
            ScheduledEvent::Deliver(connection, direction) => self.deliver(connection, direction),
            ScheduledEvent::ClientGone(connection, client) => self.client_gone(connection, client),
            ScheduledEvent::ServerGone(connection, server) => self.server_gone(connection, server),
            ScheduledEvent::Wake(process) => {
                let now = self.now;
                self.processes[process].armed = None;
                if self.processes[process].is_alive {
                    P::tick(self, process);
                }
                self.with_process(process, |endpoint| endpoint.tick(now));
            }
            ScheduledEvent::Timer(timer) => P::timer(self, timer),
            ScheduledEvent::Read(process) => {
                let now = self.now;
                self.with_process(process, |endpoint| endpoint.continue_read(now));
            }
            ScheduledEvent::Start(task) => P::start(self, task),
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
