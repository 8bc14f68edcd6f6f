//! A cluster in one thread: its processes, its connections and its clock, driven by one queue of
//! events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_ps::simulation::{self as ps, Files, TICK, Worked};
use pushpull_worker::simulation as worker;

use crate::chance::Chance;
use crate::checker::Checker;
use crate::faults::{self, Fault};
use crate::network::{Arrival, Client, Connection, Item, Way};
use crate::setting::{LEASE, Setting};
use crate::trace::Trace;
use crate::trainer::{Phase, Trainer};

/// How long a run may take once the faults have stopped.
const PATIENCE: Duration = Duration::from_secs(150);

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
    /// A worker's process starts.
    Start(u32),
    Tick(u32, u64),
    Work(ShardId, u64),
    /// A shard connects to the step owner's.
    Link(ShardId, u64),
    Beat(ShardId, u64),
    Restart(u32),
    Fault(Fault),
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
}

/// A ps task's process, or what it has left.
#[derive(Debug)]
struct Task {
    shards: Vec<Host>,
    /// Which process it is.
    life: u64,
    is_up: bool,
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
    pub(crate) faults: BTreeSet<Fault>,
    pub(crate) trace: u64,
}

/// A cluster.
pub(crate) struct World {
    setting: Setting,
    chance: Chance,
    start: Instant,
    now: Instant,
    queue: BTreeMap<(Instant, u64), Event>,
    events: u64,
    next: u64,
    tasks: Vec<Task>,
    processes: Vec<Process>,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
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
    /// The cluster of a seed, with what will go wrong.
    pub(crate) fn new(seed: u64, start: Instant, trace: Trace) -> World {
        let mut chance = Chance::new(seed);
        let setting = Setting::draw(&mut chance);
        let ordered = setting.deterministic.then_some(setting.workers);
        let checker = Checker::new(&setting.catalogue, ordered);
        let mut world = World {
            chance,
            start,
            now: start,
            queue: BTreeMap::new(),
            events: 0,
            next: 0,
            tasks: Vec::new(),
            processes: Vec::new(),
            connections: BTreeMap::new(),
            next_connection: 1,
            to_owner: BTreeMap::new(),
            working: BTreeSet::new(),
            checker,
            faults: BTreeSet::new(),
            healed: false,
            trace,
            setting,
        };
        let (faults, end) = faults::plan(&world.setting, &mut world.chance);
        world.trace.note(|| format!("seed {seed}: {}", world.setting.words()));
        for (after, fault) in faults {
            world.at(start + after, Event::Fault(fault));
        }
        world.at(start + end, Event::Heal);
        for task in 0..world.setting.tasks {
            let files = (0..world.setting.shards).map(|_| Host::Down(Files::default()));
            world.tasks.push(Task { shards: files.collect(), life: 0, is_up: false });
            let delay = world.chance.millis(0, 300);
            world.at(start + delay, Event::Restart(task));
        }
        for task in 0..world.setting.workers {
            let late = task > 0 && world.chance.percent(20);
            if late {
                world.faults.insert(Fault::Late);
            }
            let delay =
                if late { world.chance.millis(800, 4000) } else { world.chance.millis(0, 300) };
            world.at(start + delay, Event::Start(task));
        }
        world
    }

    /// Plants a bug in every shard.
    #[cfg(feature = "zoo")]
    pub(crate) fn plant(&mut self, zoo: pushpull_ps::Zoo) {
        self.setting.zoo = zoo;
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
            let late = self.healed && self.now > self.heal_time() + PATIENCE;
            if late || self.events > EVENTS_MAX {
                panic!("after {:?} the run has not ended: {}", self.now - self.start, self.waits());
            }
        }
        self.checker.finish(self.setting.last_step);
        Outcome {
            events: self.events,
            commits: self.checker.steps(),
            pulls: self.checker.pulls,
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
                    let takes_part = self.setting.catalogue.shards().any(|id| id == door.id());
                    let last = self.setting.last_step;
                    door.steps() == last || !(takes_part || door.owns_step())
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
            Event::Wake(process) | Event::Computed(process) => process,
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
            Event::Computed(process) => self.computed(process),
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
            Event::Fault(fault) => self.fault(fault),
            Event::Heal => self.heal(),
        }
    }

    // Processes of ps tasks.

    fn shard(&mut self, shard: ShardId) -> Option<&mut ps::Door> {
        match self.tasks.get_mut(shard.task as usize)?.shards.get_mut(shard.shard as usize)? {
            Host::Up(door) => Some(door),
            Host::Down(_) => None,
        }
    }

    /// Has a shard take something in, and does what it wants done.
    fn with_shard<R>(&mut self, shard: ShardId, act: impl FnOnce(&mut ps::Door) -> R) -> Option<R> {
        let at_once = self.chance.percent(60);
        let now = self.now;
        let door = self.shard(shard)?;
        let result = act(door);
        // The runtime does a first slice before it sends anything; a busy one may come to it later.
        let work = if at_once && door.has_work() { door.work(now) } else { Worked::More };
        let mut events = Vec::new();
        while let Some(event) = door.poll() {
            events.push(event);
        }
        let has_work = door.has_work();
        for event in events {
            self.carry_out(shard, event);
        }
        if has_work && self.working.insert(shard) {
            let pause = match work {
                Worked::Blocked => self.chance.millis(2, 10),
                _ => self.chance.micros(1, 4000),
            };
            let life = self.tasks[shard.task as usize].life;
            self.after(pause, Event::Work(shard, life));
        }
        Some(result)
    }

    fn carry_out(&mut self, shard: ShardId, event: ps::Event) {
        match event {
            ps::Event::Send { connection, frame } => {
                self.send(connection, Way::Back, Item::Bytes(frame.into()));
            }
            ps::Event::Values { connection, values } => {
                self.send(connection, Way::Back, Item::Values(values));
            }
            ps::Event::Close { connection } => self.send(connection, Way::Back, Item::End),
            ps::Event::ToOwner { frame } => {
                if let Some(&(connection, _)) = self.to_owner.get(&shard) {
                    self.send(connection, Way::There, Item::Bytes(frame.into()));
                }
            }
            ps::Event::Applied { step, tokens } => {
                self.trace.note(|| format!("  {shard} has applied step {step}: {tokens:?}"));
                self.checker.applied(shard, step, tokens);
            }
        }
    }

    fn work(&mut self, shard: ShardId) {
        let now = self.now;
        self.with_shard(shard, |door| {
            if door.has_work() {
                door.work(now);
            }
        });
    }

    fn tick(&mut self, task: u32, life: u64) {
        if self.tasks[task as usize].life != life {
            return;
        }
        let now = self.now;
        for shard in 0..self.setting.shards {
            self.with_shard(ShardId { task, shard }, |door| door.tick(now));
        }
        self.after(TICK, Event::Tick(task, life));
    }

    fn restart(&mut self, task: u32) {
        if self.tasks[task as usize].is_up {
            return;
        }
        let lives: u64 = self.tasks.iter().map(|task| task.life).sum();
        let life = lives + 1;
        self.tasks[task as usize].life = life;
        self.tasks[task as usize].is_up = true;
        for index in 0..self.setting.shards {
            let id = ShardId { task, shard: index };
            let host = &mut self.tasks[task as usize].shards[index as usize];
            let Host::Down(files) = std::mem::replace(host, Host::Down(Files::default())) else {
                unreachable!("it was down")
            };
            let door = ps::Door::open(self.setting.config(task), index, files, life, self.now);
            let (steps, owns) = (door.steps(), door.owns_step());
            *host = Host::Up(Box::new(door));
            if self.setting.catalogue.shards().any(|other| other == id) || owns {
                self.checker.opened(id, steps);
            }
            if !owns {
                let delay = self.chance.millis(0, 20);
                self.after(delay, Event::Link(id, life));
            }
            self.with_shard(id, |_| ());
        }
        self.after(TICK, Event::Tick(task, life));
    }

    fn kill_task(&mut self, task: u32) -> bool {
        if !self.tasks[task as usize].is_up {
            return false;
        }
        self.tasks[task as usize].is_up = false;
        self.tasks[task as usize].life += 1;
        for index in 0..self.setting.shards {
            let id = ShardId { task, shard: index };
            self.working.remove(&id);
            let host = &mut self.tasks[task as usize].shards[index as usize];
            if let Host::Up(door) = std::mem::replace(host, Host::Down(Files::default())) {
                *host = Host::Down(door.kill());
            }
            // Its own connection to the step owner's shard, and those of others to it.
            let is_of = |connection: &Connection| {
                connection.server == id || connection.client == Client::Shard(id)
            };
            let of_it = self.connections.iter().filter(|(_, connection)| is_of(connection));
            for connection in of_it.map(|(&number, _)| number).collect::<Vec<_>>() {
                self.cut(connection);
            }
            self.to_owner.remove(&id);
        }
        let delay = self.chance.millis(10, 1500);
        self.after(delay, Event::Restart(task));
        true
    }

    /// A shard connects to the step owner's.
    fn link(&mut self, shard: ShardId, life: u64) {
        if self.tasks[shard.task as usize].life != life || self.to_owner.contains_key(&shard) {
            return;
        }
        let owner = ShardId { task: 0, shard: 0 };
        let connection = self.open(Client::Shard(shard), owner);
        self.to_owner.insert(shard, (connection, self.now));
    }

    fn beat(&mut self, shard: ShardId, life: u64) {
        let Some(&(connection, heard)) = self.to_owner.get(&shard) else { return };
        if self.tasks[shard.task as usize].life != life {
            return;
        }
        if self.now.saturating_duration_since(heard) >= LEASE {
            return self.cut(connection);
        }
        self.with_shard(shard, |door| door.beat());
        self.after(LEASE / 5, Event::Beat(shard, life));
    }

    // Processes of workers.

    fn start_worker(&mut self, task: u32) {
        let number = self.processes.len();
        let incarnation = 2 * number as u64 + 1 + self.chance.between(0, 1);
        let incarnation = incarnation + 1000 * u64::from(task);
        let trainer = Trainer::new(task, task == 0, incarnation, &mut self.chance);
        let catalogue = Arc::clone(&self.setting.catalogue);
        let cluster = &self.setting.cluster;
        let door = worker::Door::new(cluster, task, task == 0, incarnation, catalogue);
        self.processes.push(Process {
            door,
            trainer,
            links: BTreeMap::new(),
            armed: None,
            paused_until: None,
            is_alive: true,
        });
        let process = &mut self.processes[number];
        process.trainer.begin(self.now, &mut process.door);
        self.settle_process(number);
    }

    fn with_process(&mut self, process: usize, act: impl FnOnce(&mut worker::Door)) {
        if self.processes[process].is_alive {
            act(&mut self.processes[process].door);
            self.settle_process(process);
        }
    }

    /// Does what a session wants done, until it wants nothing more.
    fn settle_process(&mut self, number: usize) {
        let now = self.now;
        while let Some(event) = self.processes[number].door.poll() {
            match event {
                worker::Event::Connect { link, shard } => {
                    let client = Client::Worker { process: number, link };
                    let connection = self.open(client, shard);
                    self.processes[number].links.insert(link, connection);
                }
                worker::Event::Disconnect { link } => {
                    if let Some(connection) = self.processes[number].links.remove(&link) {
                        self.drop_connection(connection);
                    }
                }
                worker::Event::Send { link, frame } => {
                    if let Some(&connection) = self.processes[number].links.get(&link) {
                        self.send(connection, Way::There, Item::Bytes(frame.into()));
                    }
                }
                worker::Event::Reply { op, reply } => {
                    self.trace.note(|| format!("  process {number} is answered {}", short(&reply)));
                    let Process { door, trainer, .. } = &mut self.processes[number];
                    let (checker, chance) = (&mut self.checker, &mut self.chance);
                    let computes = trainer.hear(now, door, op, reply, checker, chance);
                    if let Some(computes) = computes {
                        self.after(computes, Event::Computed(number));
                    }
                    if self.processes[number].trainer.is_over() {
                        self.end_process(number);
                        return;
                    }
                }
            }
        }
        if self.processes[number].trainer.is_over() {
            return self.end_process(number);
        }
        let process = &mut self.processes[number];
        let wake = process.door.wake_at(now).max(now + Duration::from_micros(1));
        if process.armed.is_none_or(|(armed, _)| wake < armed) {
            if let Some(later) = process.armed {
                self.queue.remove(&later);
            }
            let key = self.at(wake, Event::Wake(number));
            self.processes[number].armed = Some(key);
        }
    }

    fn computed(&mut self, number: usize) {
        let process = &mut self.processes[number];
        if process.is_alive {
            let Process { door, trainer, .. } = process;
            trainer.push(self.now, door, &self.setting, &mut self.checker, &mut self.chance);
            self.settle_process(number);
        }
    }

    /// A process ends by itself, or is killed.
    fn end_process(&mut self, number: usize) {
        let process = &mut self.processes[number];
        process.is_alive = false;
        let fenced = process.trainer.phase == Phase::Fenced;
        let links: Vec<u64> = std::mem::take(&mut process.links).into_values().collect();
        for connection in links {
            self.drop_connection(connection);
        }
        let task = self.processes[number].trainer.task;
        // Of two that have never been welcome, the last to say hello is the newer one.
        let of_task = self.processes.iter().filter(|other| other.trainer.task == task);
        assert!(
            !fenced || of_task.count() > 1,
            "process {number} of worker {task} is fenced by nobody"
        );
    }

    // Connections.

    fn open(&mut self, client: Client, server: ShardId) -> u64 {
        let number = self.next_connection;
        self.next_connection += 1;
        self.connections.insert(number, Connection::new(client, server));
        let delay = self.chance.micros(50, 5000);
        self.after(delay, Event::Connect(number));
        number
    }

    fn connect(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        if !self.tasks[server.task as usize].is_up {
            self.connections.remove(&number);
            return self.client_gone(number, client);
        }
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.is_up = true;
        }
        match client {
            Client::Worker { process, link } => {
                self.with_process(process, |door| door.connected(now, link));
            }
            Client::Shard(shard) => {
                self.with_shard(shard, |door| door.owner_connected());
                let life = self.tasks[shard.task as usize].life;
                self.after(LEASE / 5, Event::Beat(shard, life));
            }
        }
    }

    fn send(&mut self, number: u64, way: Way, item: Item) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.pipe(way).push(item);
        if !connection.pipe(way).due {
            connection.pipe(way).due = true;
            let at = connection.arrives(now, &mut self.chance);
            self.at(at, Event::Deliver(number, way));
        }
    }

    fn deliver(&mut self, number: u64, way: Way) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let (client, server, slow) = (connection.client, connection.server, connection.slow);
        let arrival = connection.pipe(way).next(slow, &mut self.chance);
        connection.pipe(way).due = !connection.pipe(way).is_empty();
        if connection.pipe(way).due {
            let at = connection.arrives(now, &mut self.chance);
            self.at(at, Event::Deliver(number, way));
        }
        let bytes = match arrival {
            None => return,
            Some(Arrival::End) => return self.cut_clean(number),
            Some(Arrival::Bytes(bytes)) => bytes,
        };
        self.trace.bytes(&bytes);
        self.arrive(number, way, client, server, &bytes);
    }

    fn arrive(&mut self, number: u64, way: Way, client: Client, server: ShardId, bytes: &[u8]) {
        let now = self.now;
        let sound = match (way, client) {
            (Way::There, _) => self.with_shard(server, |door| door.receive(now, number, bytes)),
            (Way::Back, Client::Worker { process, link }) => {
                let mut sound = true;
                if self.processes[process].links.get(&link) == Some(&number) {
                    self.with_process(process, |door| sound = door.receive(now, link, bytes));
                }
                Some(sound)
            }
            (Way::Back, Client::Shard(shard)) => match self.to_owner.get_mut(&shard) {
                Some((current, heard)) if *current == number => {
                    *heard = now;
                    // One that is not welcome tries again.
                    let sound = self.with_shard(shard, |door| door.hear_owner(now, bytes));
                    if sound == Some(false) {
                        self.cut_clean(number);
                    }
                    Some(true)
                }
                _ => Some(true),
            },
        };
        assert_ne!(sound, Some(false), "{client:?} and {server} break the protocol");
    }

    /// A connection ends, and both sides know it.
    fn cut_clean(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        self.at(self.now, Event::ServerGone(number, connection.server));
        self.client_gone(number, connection.client);
    }

    /// The client has given a connection up.
    fn drop_connection(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        if connection.is_up {
            let delay = self.learns();
            self.after(delay, Event::ServerGone(number, connection.server));
        }
    }

    /// After which time a side learns that a connection is gone.
    fn learns(&mut self) -> Duration {
        match self.chance.between(0, 9) {
            0 => self.chance.millis(500, 2500),
            _ => self.chance.micros(10, 20_000),
        }
    }

    /// A connection is cut. Some of what was on its way may have arrived.
    fn cut(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        for way in [Way::There, Way::Back] {
            let bytes = connection.pipe(way).cut(&mut self.chance);
            if connection.is_up && !bytes.is_empty() && self.is_there(way, client) {
                self.faults.insert(Fault::Half);
                self.trace.bytes(&bytes);
                self.arrive(number, way, client, server, &bytes);
            }
        }
        drop(connection);
        let (one, other) = (self.learns(), self.learns());
        self.after(one, Event::ServerGone(number, server));
        self.after(other, Event::ClientGone(number, client));
    }

    /// Whether who would read the bytes is not stopped.
    fn is_there(&self, way: Way, client: Client) -> bool {
        match (way, client) {
            (Way::Back, Client::Worker { process, .. }) => {
                self.processes[process].paused_until.is_none_or(|until| until <= self.now)
            }
            _ => true,
        }
    }

    fn client_gone(&mut self, number: u64, client: Client) {
        let now = self.now;
        match client {
            Client::Worker { process, link } => {
                if self.processes[process].links.get(&link) == Some(&number) {
                    self.processes[process].links.remove(&link);
                    self.with_process(process, |door| door.disconnected(now, link, "it is gone"));
                }
            }
            Client::Shard(shard) => {
                if self.to_owner.get(&shard).is_some_and(|&(current, _)| current == number) {
                    self.to_owner.remove(&shard);
                    self.with_shard(shard, |door| door.owner_lost(now));
                    let delay = self.chance.millis(0, 300);
                    let life = self.tasks[shard.task as usize].life;
                    self.after(delay, Event::Link(shard, life));
                }
            }
        }
    }

    // Faults.

    /// The living processes that this is true of.
    fn alive(&self, is: impl Fn(&Process) -> bool) -> Vec<usize> {
        let alive = self.processes.iter().enumerate().filter(|(_, process)| {
            process.is_alive && process.paused_until.is_none() && is(process)
        });
        alive.map(|(number, _)| number).collect()
    }

    fn fault(&mut self, fault: Fault) {
        let happened = match fault {
            Fault::Cut | Fault::Slow => {
                let up = self.connections.iter().filter(|(_, connection)| connection.is_up);
                let up: Vec<u64> = up.map(|(&number, _)| number).collect();
                let picked = self.chance.pick(&up).copied();
                match picked {
                    Some(number) if fault == Fault::Cut => self.cut(number),
                    Some(number) => {
                        if let Some(connection) = self.connections.get_mut(&number) {
                            connection.slow = true;
                        }
                    }
                    None => {}
                }
                picked.is_some()
            }
            Fault::KillWorker | Fault::KillChief => {
                let chief = fault == Fault::KillChief;
                let of_kind = self.alive(|process| process.trainer.chief == chief);
                let killed = self.chance.pick(&of_kind).copied();
                if let Some(number) = killed {
                    let task = self.processes[number].trainer.task;
                    self.end_process(number);
                    let delay = self.chance.millis(10, 2000);
                    self.after(delay, Event::Start(task));
                }
                killed.is_some()
            }
            Fault::KillOwner => self.kill_task(0),
            Fault::KillShards => {
                let task = self.chance.between(1, u64::from(self.setting.tasks) - 1) as u32;
                self.kill_task(task)
            }
            Fault::Pause | Fault::Ghost => {
                let alive = self.alive(|_| true);
                let paused = self.chance.pick(&alive).copied();
                if let Some(number) = paused {
                    let time = LEASE + self.chance.millis(100, 2500);
                    self.processes[number].paused_until = Some(self.now + time);
                    if fault == Fault::Ghost {
                        let task = self.processes[number].trainer.task;
                        let delay = self.chance.millis(10, 1000);
                        self.after(delay, Event::Start(task));
                    }
                }
                paused.is_some()
            }
            Fault::Leave => {
                let others = self.alive(|process| !process.trainer.chief);
                let leaves = self.chance.pick(&others).copied();
                if let Some(number) = leaves {
                    self.processes[number].trainer.leaves = true;
                }
                leaves.is_some()
            }
            Fault::Hold => {
                let alive = self.alive(|process| process.trainer.holds.is_none());
                let holds = self.chance.pick(&alive).copied();
                let timeout = self.setting.token_timeout.unwrap_or(LEASE);
                let time = timeout + self.chance.millis(50, 1000);
                if let Some(number) = holds {
                    self.processes[number].trainer.holds = Some(time);
                }
                holds.is_some()
            }
            Fault::Cancel => {
                let now = self.now;
                let alive = self.alive(|_| true);
                let cancels = self.chance.pick(&alive).copied();
                cancels.is_some_and(|number| {
                    let Process { door, trainer, .. } = &mut self.processes[number];
                    let cancelled = trainer.cancel(now, door);
                    self.settle_process(number);
                    cancelled
                })
            }
            Fault::Half | Fault::Late => false,
        };
        if happened {
            self.faults.insert(fault);
        }
    }

    fn heal(&mut self) {
        self.healed = true;
        self.connections.values_mut().for_each(|connection| connection.slow = false);
    }
}

fn short(reply: &Result<worker::Answer, pushpull_worker::Error>) -> String {
    match reply {
        Ok(worker::Answer::Pulled(_, step)) => format!("values of step {step}"),
        Ok(answer) => format!("{answer:?}"),
        Err(error) => format!("{error}"),
    }
}
