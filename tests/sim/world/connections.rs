//! What becomes of connections.

use std::os::fd::OwnedFd;
use std::time::Duration;

use pushpull_common::ids::ShardId;

use super::{Event, World};
use crate::chance::Chance;
use crate::faults::Fault;
use crate::network::{Arrival, Client, Connection, Item, Way};
use crate::setting::LEASE;

impl World {
    /// Who has made a connection, in words that are the same whatever else happens.
    pub(super) fn name_of(&self, client: Client) -> String {
        match client {
            Client::Worker { process, .. } => self.processes[process].name(),
            Client::Shard(shard) => shard.to_string(),
        }
    }

    pub(super) fn open(&mut self, client: Client, server: ShardId) -> u64 {
        let number = self.next_connection;
        self.next_connection += 1;
        let name = format!("{} to {server}", self.name_of(client));
        let made = self.made.entry(name.clone()).or_default();
        *made += 1;
        let mut chance = Chance::of(self.setting.seed, &format!("{name}, {made}"));
        let delay = chance.micros(50, 5000);
        let mut connection = Connection::new(client, server, chance);
        connection.same_host = self.is_same_host(client);
        self.connections.insert(number, connection);
        self.after(delay, Event::Connect(number));
        number
    }

    pub(super) fn connect(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        if !self.tasks[server.task as usize].is_up {
            self.connections.remove(&number);
            return self.client_gone(number, client);
        }
        let mut same_host = false;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.is_up = true;
            same_host = connection.same_host;
        }
        match client {
            Client::Worker { process, link } => {
                self.with_process(process, |door| door.connected(now, link, same_host));
            }
            Client::Shard(shard) => {
                self.with_shard(shard, |door| door.owner_connected());
                let life = self.tasks[shard.task as usize].life;
                self.after(LEASE / 5, Event::Beat(shard, life));
            }
        }
    }

    pub(super) fn send(&mut self, number: u64, way: Way, item: Item) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.pipe(way).push(item);
        if !connection.pipe(way).due {
            connection.pipe(way).due = true;
            let at = connection.arrives(now);
            self.at(at, Event::Deliver(number, way));
        }
    }

    pub(super) fn deliver(&mut self, number: u64, way: Way) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        let arrival = connection.next(way);
        connection.pipe(way).due = !connection.pipe(way).is_empty();
        if connection.pipe(way).due {
            let at = connection.arrives(now);
            self.at(at, Event::Deliver(number, way));
        }
        let bytes = match arrival {
            None => return,
            Some(Arrival::End) => return self.cut_clean(number),
            Some(Arrival::Bytes(bytes)) => bytes,
        };
        self.trace.bytes(&bytes);
        let passed = self.connections.get_mut(&number).map(|c| std::mem::take(&mut c.passed));
        self.pass(client, passed.unwrap_or_default());
        self.arrive(number, way, client, server, &bytes);
    }

    /// Descriptors arrive, at the latest with the frame that they belong to.
    fn pass(&mut self, client: Client, passed: Vec<Vec<OwnedFd>>) {
        let Client::Worker { process, link } = client else { return };
        let door = &mut self.processes[process].door;
        passed.into_iter().for_each(|descriptors| door.passed(link, descriptors));
    }

    /// Whether a client is on the host of the servers.
    fn is_same_host(&self, client: Client) -> bool {
        match client {
            Client::Worker { process, .. } => {
                let incarnation = self.processes[process].trainer.incarnation;
                self.setting.shares && incarnation.is_multiple_of(2)
            }
            Client::Shard(_) => false,
        }
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
                    let sound = self.with_shard(shard, |door| door.on_owner_message(now, bytes));
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
    pub(super) fn drop_connection(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        if connection.is_up {
            let delay = learns(&mut connection.chance);
            self.after(delay, Event::ServerGone(number, connection.server));
        }
    }

    /// A connection is cut. Some of what was on its way may have arrived.
    pub(super) fn cut(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        for way in [Way::There, Way::Back] {
            let bytes = connection.last(way);
            if connection.is_up && !bytes.is_empty() && self.is_there(way, client) {
                self.faults.insert(Fault::Half);
                self.trace.bytes(&bytes);
                self.pass(client, std::mem::take(&mut connection.passed));
                self.arrive(number, way, client, server, &bytes);
            }
        }
        let chance = &mut connection.chance;
        let (one, other) = (learns(chance), learns(chance));
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

    pub(super) fn client_gone(&mut self, number: u64, client: Client) {
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
                    let delay = self.tasks[shard.task as usize].chance.millis(0, 300);
                    let life = self.tasks[shard.task as usize].life;
                    self.after(delay, Event::Link(shard, life));
                }
            }
        }
    }
}

/// After which time a side learns that a connection is gone.
fn learns(chance: &mut Chance) -> Duration {
    match chance.between(0, 9) {
        0 => chance.millis(500, 2500),
        _ => chance.micros(10, 20_000),
    }
}
