//! The simulated ps tasks.

use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_ps::testing::{KilledFiles, ShardEndpoint, ShardEvent, TICK, WorkState};

use super::{Host, ScheduledEvent, SimWorld};
use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::network::{Connection, Direction, Item, LinkClient, LinkServer};
use crate::process_program::ProcessProgram;
use crate::setting::LEASE;

/// A day in milliseconds.
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

impl<P: ProcessProgram> SimWorld<P> {
    fn shard(&mut self, shard: ShardId) -> Option<&mut ShardEndpoint> {
        match self.tasks.get_mut(shard.task as usize)?.shards.get_mut(shard.shard as usize)? {
            Host::Up(endpoint) => Some(endpoint),
            Host::Down(_) => None,
        }
    }

    /// Passes an input to a shard and carries out its outputs; `None` if the shard is down.
    pub(super) fn with_shard<R>(
        &mut self,
        shard: ShardId,
        act: impl FnOnce(&mut ShardEndpoint) -> R,
    ) -> Option<R> {
        let task = shard.task as usize;
        let at_once = self.tasks[task].chance.percent(60);
        let now = self.now;
        let endpoint = self.shard(shard)?;
        let result = act(endpoint);
        // The runtime does a first slice of work before it sends; a busy one may do it later.
        let work =
            if at_once && endpoint.has_work() { endpoint.work(now) } else { WorkState::More };
        let mut events = Vec::new();
        while let Some(event) = endpoint.poll() {
            events.push(event);
        }
        let has_work = endpoint.has_work();
        for event in events {
            self.carry_out(shard, event);
        }
        if has_work && self.working.insert(shard) {
            let pause = match work {
                WorkState::Blocked => self.tasks[task].chance.millis(2, 10),
                _ => self.tasks[task].chance.micros(1, 4000),
            };
            let life = self.tasks[task].life;
            self.after(pause, ScheduledEvent::Work(shard, life));
        }
        P::shard_changed(self, shard);
        Some(result)
    }

    fn carry_out(&mut self, shard: ShardId, event: ShardEvent) {
        match event {
            ShardEvent::Send { connection, frame } => {
                self.send(connection, Direction::ToClient, Item::Bytes(frame.into()));
            }
            ShardEvent::Shared { connection, frame, descriptors } => {
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.passed.push(descriptors);
                }
                self.send(connection, Direction::ToClient, Item::Bytes(frame.into()));
            }
            ShardEvent::Values { connection, values } => {
                self.send(connection, Direction::ToClient, Item::Values(values));
            }
            ShardEvent::Close { connection } => {
                self.send(connection, Direction::ToClient, Item::End)
            }
            ShardEvent::ToOwner { frame } => {
                if let Some(&(connection, _)) = self.to_owner.get(&shard) {
                    self.send(connection, Direction::ToServer, Item::Bytes(frame.into()));
                }
            }
            ShardEvent::Applied { step, tokens } => {
                self.trace.note(|| format!("  {shard} has applied step {step}: {tokens:?}"));
                P::applied(&mut self.checker, shard, step, tokens);
            }
            ShardEvent::PartlyApplied { token } => {
                self.trace.note(|| format!("  token {token} is applied on some shards only"));
                P::partly_applied(&mut self.checker, token);
            }
        }
    }

    /// Returns how many workers the step owner has retired, each with a push that other shards have
    /// applied.
    pub(crate) fn retired(&self) -> u64 {
        let hosts = self.tasks.iter().flat_map(|task| &task.shards);
        let now = hosts.map(|host| match host {
            Host::Up(endpoint) => endpoint.metrics().clients_retired,
            Host::Down(_) => 0,
        });
        self.retired + now.sum::<u64>()
    }

    pub(super) fn work(&mut self, shard: ShardId) {
        let now = self.now;
        self.with_shard(shard, |endpoint| {
            if endpoint.has_work() {
                endpoint.work(now);
            }
        });
    }

    pub(super) fn tick(&mut self, task: u32, life: u64) {
        if self.tasks[task as usize].life != life {
            return;
        }
        let now = self.now;
        for shard in 0..self.setting.shards {
            self.with_shard(ShardId { task, shard }, |endpoint| endpoint.tick(now));
        }
        self.after(TICK, ScheduledEvent::Tick(task, life));
    }

    pub(super) fn restart(&mut self, task: u32) {
        if self.tasks[task as usize].is_up {
            return;
        }
        // Higher than that of every earlier process.
        let life = 1 + self.tasks.iter().map(|task| task.life).max().unwrap_or(0);
        self.tasks[task as usize].life = life;
        self.tasks[task as usize].is_up = true;
        let clock = self.clock(task, life);
        for index in 0..self.setting.shards {
            let id = ShardId { task, shard: index };
            let host = &mut self.tasks[task as usize].shards[index as usize];
            let Host::Down(files) = std::mem::replace(host, Host::Down(KilledFiles::default()))
            else {
                unreachable!("the task was down")
            };
            let mut endpoint = ShardEndpoint::open(
                self.setting.config(task),
                index,
                files,
                life,
                clock,
                self.now,
                self.setting.part_bytes,
            );
            if let Some(bytes) = self.setting.spare_bytes {
                endpoint = endpoint.with_spare_memory(bytes);
            }
            if let Some(tokens) = self.setting.tokens() {
                let process = life << 16 | u64::from(index);
                endpoint = endpoint.with_tokens(tokens.of_process(process));
            }
            let steps = endpoint.steps();
            let owns = endpoint.owns_step();
            *host = Host::Up(Box::new(endpoint));
            if self.setting.catalogue.shards().any(|other| other == id) || owns {
                P::opened(&mut self.checker, id, steps);
            }
            if !owns {
                let delay = self.tasks[task as usize].chance.millis(0, 20);
                self.after(delay, ScheduledEvent::Link(id, life));
            }
            self.with_shard(id, |_| ());
        }
        self.after(TICK, ScheduledEvent::Tick(task, life));
    }

    /// Draws the time in milliseconds that the clock of a starting task shows. Some clocks are days
    /// slow or fast.
    fn clock(&mut self, task: u32, life: u64) -> u64 {
        let chance = &mut SimChance::of(self.setting.seed, &format!("clock {task} {life}"));
        let now = u64::try_from((self.now - self.start).as_millis()).unwrap_or(0);
        // A step owner that has lost its state with a slow clock is told newer epochs by other shards
        // only as they connect: a process from before the loss may be recorded there first, and
        // fences those that come after it.
        let loses_state = self.plan.iter().any(|planned| planned.fault == FaultKind::LoseState);
        let days = match chance.between(0, 9) {
            _ if loses_state => 3,
            0 => 1,
            1 => 7,
            2 => 5,
            _ => 3,
        };
        self.clock_jumps += u64::from(days != 3);
        days * DAY_MS + now
    }

    /// Kills a task and schedules its restart; false if it is down already.
    pub(super) fn kill_task(&mut self, task: u32, delay: Duration) -> bool {
        if !self.tasks[task as usize].is_up {
            return false;
        }
        self.tasks[task as usize].is_up = false;
        self.tasks[task as usize].life += 1;
        for index in 0..self.setting.shards {
            let id = ShardId { task, shard: index };
            self.working.remove(&id);
            let host = &mut self.tasks[task as usize].shards[index as usize];
            if let Host::Up(endpoint) = std::mem::replace(host, Host::Down(KilledFiles::default()))
            {
                self.retired += endpoint.metrics().clients_retired;
                *host = Host::Down(endpoint.kill());
            }
            // The shard's connection to the step owner, and the connections to this shard.
            let is_of = |connection: &Connection| {
                connection.server == LinkServer::Shard(id)
                    || connection.client == LinkClient::Shard(id)
            };
            let of_it = self.connections.iter().filter(|(_, connection)| is_of(connection));
            for connection in of_it.map(|(&number, _)| number).collect::<Vec<_>>() {
                self.cut(connection);
            }
            self.to_owner.remove(&id);
        }
        self.after(delay, ScheduledEvent::Restart(task));
        true
    }

    /// Kills all ps tasks, and loses the files that they leave.
    pub(crate) fn lose_state(&mut self, chance: &mut SimChance) {
        for task in 0..self.setting.tasks {
            self.kill_task(task, chance.millis(10, 500));
            for host in &mut self.tasks[task as usize].shards {
                *host = Host::Down(KilledFiles::default());
            }
        }
    }

    /// Opens a shard's connection to the step owner.
    pub(super) fn link(&mut self, shard: ShardId, life: u64) {
        if self.tasks[shard.task as usize].life != life || self.to_owner.contains_key(&shard) {
            return;
        }
        let owner = LinkServer::Shard(ShardId { task: 0, shard: 0 });
        let connection = self.open(LinkClient::Shard(shard), owner);
        self.to_owner.insert(shard, (connection, self.now));
    }

    pub(super) fn send_heartbeat(&mut self, shard: ShardId, life: u64) {
        let Some(&(connection, heard)) = self.to_owner.get(&shard) else { return };
        if self.tasks[shard.task as usize].life != life {
            return;
        }
        if self.now.saturating_duration_since(heard) >= LEASE {
            return self.cut(connection);
        }
        self.with_shard(shard, |endpoint| endpoint.send_heartbeat());
        self.after(LEASE / 5, ScheduledEvent::Beat(shard, life));
    }
}
