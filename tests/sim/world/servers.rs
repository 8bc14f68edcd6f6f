//! The processes of ps tasks.

use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_ps::simulation::{self as ps, Files, TICK, Worked};

use super::{Event, Host, World};
use crate::network::{Client, Connection, Item, Way};
use crate::setting::LEASE;

impl World {
    fn shard(&mut self, shard: ShardId) -> Option<&mut ps::Door> {
        match self.tasks.get_mut(shard.task as usize)?.shards.get_mut(shard.shard as usize)? {
            Host::Up(door) => Some(door),
            Host::Down(_) => None,
        }
    }

    /// Has a shard take something in, and does what it wants done.
    pub(super) fn with_shard<R>(
        &mut self,
        shard: ShardId,
        act: impl FnOnce(&mut ps::Door) -> R,
    ) -> Option<R> {
        let task = shard.task as usize;
        let at_once = self.tasks[task].chance.percent(60);
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
                Worked::Blocked => self.tasks[task].chance.millis(2, 10),
                _ => self.tasks[task].chance.micros(1, 4000),
            };
            let life = self.tasks[task].life;
            self.after(pause, Event::Work(shard, life));
        }
        Some(result)
    }

    fn carry_out(&mut self, shard: ShardId, event: ps::Event) {
        match event {
            ps::Event::Send { connection, frame } => {
                self.send(connection, Way::Back, Item::Bytes(frame.into()));
            }
            ps::Event::Shared { connection, frame, descriptors } => {
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.passed.push(descriptors);
                }
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

    /// How many workers the step owner has given up, each with a push that other shards have applied.
    pub(super) fn retired(&self) -> u64 {
        let hosts = self.tasks.iter().flat_map(|task| &task.shards);
        let now = hosts.map(|host| match host {
            Host::Up(door) => door.metrics().clients_retired,
            Host::Down(_) => 0,
        });
        self.retired + now.sum::<u64>()
    }

    pub(super) fn work(&mut self, shard: ShardId) {
        let now = self.now;
        self.with_shard(shard, |door| {
            if door.has_work() {
                door.work(now);
            }
        });
    }

    pub(super) fn tick(&mut self, task: u32, life: u64) {
        if self.tasks[task as usize].life != life {
            return;
        }
        let now = self.now;
        for shard in 0..self.setting.shards {
            self.with_shard(ShardId { task, shard }, |door| door.tick(now));
        }
        self.after(TICK, Event::Tick(task, life));
    }

    pub(super) fn restart(&mut self, task: u32) {
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
            let door = ps::Door::open(
                self.setting.config(task),
                index,
                files,
                life,
                self.now,
                self.setting.part_bytes,
                self.setting.shares,
            );
            let (steps, owns) = (door.steps(), door.owns_step());
            *host = Host::Up(Box::new(door));
            if self.setting.catalogue.shards().any(|other| other == id) || owns {
                self.checker.opened(id, steps);
            }
            if !owns {
                let delay = self.tasks[task as usize].chance.millis(0, 20);
                self.after(delay, Event::Link(id, life));
            }
            self.with_shard(id, |_| ());
        }
        self.after(TICK, Event::Tick(task, life));
    }

    /// Kills a task, and starts it again after a while; false if it is down.
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
            if let Host::Up(door) = std::mem::replace(host, Host::Down(Files::default())) {
                self.retired += door.metrics().clients_retired;
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
        self.after(delay, Event::Restart(task));
        true
    }

    /// A shard connects to the step owner's.
    pub(super) fn link(&mut self, shard: ShardId, life: u64) {
        if self.tasks[shard.task as usize].life != life || self.to_owner.contains_key(&shard) {
            return;
        }
        let owner = ShardId { task: 0, shard: 0 };
        let connection = self.open(Client::Shard(shard), owner);
        self.to_owner.insert(shard, (connection, self.now));
    }

    pub(super) fn beat(&mut self, shard: ShardId, life: u64) {
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
}
