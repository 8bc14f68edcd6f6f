//! The life of simulated connections: opening, delivery, cuts.

use std::os::fd::OwnedFd;
use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_ps::testing::ClientHost;

use super::{ScheduledEvent, SimWorld};
use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::network::{Arrival, Connection, Direction, Item, LinkClient};
use crate::setting::LEASE;

impl SimWorld {
    /// Names the client of a connection. The name does not depend on other processes.
    pub(super) fn name_of(&self, client: LinkClient) -> String {
        match client {
            LinkClient::Worker { process, .. } => self.processes[process].name(),
            LinkClient::Shard(shard) => shard.to_string(),
        }
    }

    pub(super) fn open(&mut self, client: LinkClient, server: ShardId) -> u64 {
        let number = self.next_connection;
        self.next_connection += 1;
        let name = format!("{} to {server}", self.name_of(client));
        let count = self.connection_counts.entry(name.clone()).or_default();
        *count += 1;
        let mut chance = SimChance::of(self.setting.seed, &format!("{name}, {count}"));
        let delay = chance.micros(50, 5000);
        self.connections.insert(number, Connection::new(client, server, chance));
        self.after(delay, ScheduledEvent::Connect(number));
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
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.is_up = true;
        }
        let same_host = self.host_of(client) == ClientHost::Same;
        match client {
            LinkClient::Worker { process, link } => {
                self.with_process(process, |endpoint| endpoint.connected(now, link, same_host));
            }
            LinkClient::Shard(shard) => {
                self.with_shard(shard, |endpoint| endpoint.owner_connected());
                let life = self.tasks[shard.task as usize].life;
                self.after(LEASE / 5, ScheduledEvent::Beat(shard, life));
            }
        }
    }

    pub(super) fn send(&mut self, number: u64, direction: Direction, item: Item) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.pipe(direction).push(item);
        if !connection.pipe(direction).due {
            connection.pipe(direction).due = true;
            let at = connection.arrives(now);
            self.at(at, ScheduledEvent::Deliver(number, direction));
        }
    }

    pub(super) fn deliver(&mut self, number: u64, direction: Direction) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        let arrival = connection.next(direction);
        connection.pipe(direction).due = !connection.pipe(direction).is_empty();
        if connection.pipe(direction).due {
            let at = connection.arrives(now);
            self.at(at, ScheduledEvent::Deliver(number, direction));
        }
        let bytes = match arrival {
            None => return,
            Some(Arrival::End) => return self.cut_clean(number),
            Some(Arrival::Bytes(bytes)) => bytes,
        };
        self.trace.bytes(&bytes);
        let passed = self.connections.get_mut(&number).map(|c| std::mem::take(&mut c.passed));
        self.pass(client, passed.unwrap_or_default());
        self.arrive(number, direction, client, server, &bytes);
    }

    /// Hands descriptors to the client: at the latest with the frame that they belong to.
    fn pass(&mut self, client: LinkClient, passed: Vec<Vec<OwnedFd>>) {
        let LinkClient::Worker { process, link } = client else { return };
        let endpoint = &mut self.processes[process].endpoint;
        passed.into_iter().for_each(|descriptors| endpoint.descriptors_received(link, descriptors));
    }

    /// Returns the host of a client, as servers see it.
    fn host_of(&self, client: LinkClient) -> ClientHost {
        let remote = match client {
            LinkClient::Worker { process, .. } => {
                !self.processes[process].trainer.incarnation.is_multiple_of(2)
            }
            LinkClient::Shard(_) => false,
        };
        match (remote, self.setting.shares) {
            (true, _) => ClientHost::Remote,
            (false, true) => ClientHost::Same,
            (false, false) => ClientHost::Loopback,
        }
    }

    fn arrive(
        &mut self,
        number: u64,
        direction: Direction,
        client: LinkClient,
        server: ShardId,
        bytes: &[u8],
    ) {
        let now = self.now;
        let sound = match (direction, client) {
            (Direction::ToServer, _) => {
                let host = self.host_of(client);
                self.with_shard(server, |endpoint| endpoint.receive(now, number, host, bytes))
            }
            (Direction::ToClient, LinkClient::Worker { process, link }) => {
                let mut sound = true;
                if self.processes[process].links.get(&link) == Some(&number) {
                    self.with_process(process, |endpoint| {
                        sound = endpoint.receive(now, link, bytes)
                    });
                }
                Some(sound)
            }
            (Direction::ToClient, LinkClient::Shard(shard)) => {
                match self.to_owner.get_mut(&shard) {
                    Some((current, heard)) if *current == number => {
                        *heard = now;
                        // A shard that is not welcomed reconnects.
                        let sound = self
                            .with_shard(shard, |endpoint| endpoint.on_owner_message(now, bytes));
                        if sound == Some(false) {
                            self.cut_clean(number);
                        }
                        Some(true)
                    }
                    _ => Some(true),
                }
            }
        };
        assert_ne!(sound, Some(false), "{client:?} and {server} break the protocol");
    }

    /// Ends a connection and notifies both sides at once.
    fn cut_clean(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        self.at(self.now, ScheduledEvent::ServerGone(number, connection.server));
        self.client_gone(number, connection.client);
    }

    /// Ends a connection that the client has closed.
    pub(super) fn drop_connection(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        if connection.is_up {
            let delay = notice_delay(&mut connection.chance);
            self.after(delay, ScheduledEvent::ServerGone(number, connection.server));
        }
    }

    /// Cuts a connection. Some of the bytes in flight may still arrive.
    pub(super) fn cut(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let (client, server) = (connection.client, connection.server);
        for direction in [Direction::ToServer, Direction::ToClient] {
            let bytes = connection.last(direction);
            if connection.is_up && !bytes.is_empty() && self.is_reader_running(direction, client) {
                self.faults.insert(FaultKind::Half);
                self.trace.bytes(&bytes);
                self.pass(client, std::mem::take(&mut connection.passed));
                self.arrive(number, direction, client, server, &bytes);
            }
        }
        let chance = &mut connection.chance;
        let (one, other) = (notice_delay(chance), notice_delay(chance));
        self.after(one, ScheduledEvent::ServerGone(number, server));
        self.after(other, ScheduledEvent::ClientGone(number, client));
    }

    /// Whether the process that would read the bytes is running.
    fn is_reader_running(&self, direction: Direction, client: LinkClient) -> bool {
        match (direction, client) {
            (Direction::ToClient, LinkClient::Worker { process, .. }) => {
                self.processes[process].paused_until.is_none_or(|until| until <= self.now)
            }
            _ => true,
        }
    }

    pub(super) fn client_gone(&mut self, number: u64, client: LinkClient) {
        let now = self.now;
        match client {
            LinkClient::Worker { process, link } => {
                if self.processes[process].links.get(&link) == Some(&number) {
                    self.processes[process].links.remove(&link);
                    self.with_process(process, |endpoint| {
                        endpoint.disconnected(now, link, "connection lost")
                    });
                }
            }
            LinkClient::Shard(shard) => {
                if self.to_owner.get(&shard).is_some_and(|&(current, _)| current == number) {
                    self.to_owner.remove(&shard);
                    self.with_shard(shard, |endpoint| endpoint.owner_lost(now));
                    let delay = self.tasks[shard.task as usize].chance.millis(0, 300);
                    let life = self.tasks[shard.task as usize].life;
                    self.after(delay, ScheduledEvent::Link(shard, life));
                }
            }
        }
    }
}

/// Draws the time after which a side notices that a connection is gone.
fn notice_delay(chance: &mut SimChance) -> Duration {
    match chance.between(0, 9) {
        0 => chance.millis(500, 2500),
        _ => chance.micros(10, 20_000),
    }
}
