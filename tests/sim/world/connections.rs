//! The life of simulated connections: opening, delivery, cuts.

use std::os::fd::OwnedFd;
use std::time::Duration;

use pushpull_ps::testing::ClientHost;

use super::{CallLinkEvent, ScheduledEvent, SimWorld};
use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::network::{Arrival, Connection, Direction, Item, LinkClient, LinkServer};
use crate::process_program::ProcessProgram;
use crate::setting::LEASE;

impl<P: ProcessProgram> SimWorld<P> {
    /// Names the client of a connection. The name does not depend on other processes.
    pub(super) fn name_of(&self, client: LinkClient) -> String {
        match client {
            LinkClient::Shard(shard) => shard.to_string(),
            LinkClient::Worker { process, .. } | LinkClient::Caller { process, .. } => {
                self.processes[process].name()
            }
        }
    }

    pub(crate) fn open(&mut self, client: LinkClient, server: LinkServer) -> u64 {
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
        let client = connection.client;
        let server = connection.server;
        if !self.accepts(server) {
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
            LinkClient::Caller { process, connection } => {
                self.call_event(process, CallLinkEvent::Connected(connection));
            }
        }
    }

    /// Whether a server accepts connections now.
    fn accepts(&self, server: LinkServer) -> bool {
        let refuses = self.refused_until.get(&server).is_some_and(|&until| until > self.now);
        !refuses
            && match server {
                LinkServer::Shard(shard) => self.tasks[shard.task as usize].is_up,
                LinkServer::Functions(_) => self.process_of(server).is_some(),
            }
    }

    pub(crate) fn send(&mut self, number: u64, direction: Direction, item: Item) {
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
        let client = connection.client;
        let server = connection.server;
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
            LinkClient::Worker { process, .. } => self.processes[process].program.is_remote(),
            LinkClient::Shard(_) | LinkClient::Caller { .. } => false,
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
        server: LinkServer,
        bytes: &[u8],
    ) {
        let now = self.now;
        let sound = match (direction, client) {
            (Direction::ToServer, LinkClient::Caller { .. }) => {
                let process = self.process_of(server);
                let event = CallLinkEvent::ServerReceived(number, bytes);
                process.map(|process| self.call_event(process, event))
            }
            (Direction::ToClient, LinkClient::Caller { process, connection }) => {
                Some(self.call_event(process, CallLinkEvent::ClientReceived(connection, bytes)))
            }
            (Direction::ToServer, _) => {
                let LinkServer::Shard(server) = server else { return };
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

    /// Passes an event of a call connection to a process, unless that has ended.
    fn call_event(&mut self, process: usize, event: CallLinkEvent<'_>) -> bool {
        !self.processes[process].is_alive || P::call_event(self, process, event)
    }

    pub(super) fn server_gone(&mut self, number: u64, server: LinkServer) {
        let now = self.now;
        match server {
            LinkServer::Shard(shard) => {
                self.with_shard(shard, |endpoint| endpoint.disconnect(now, number));
            }
            LinkServer::Functions(_) => {
                if let Some(process) = self.process_of(server) {
                    self.call_event(process, CallLinkEvent::ServerLost(number));
                }
            }
        }
    }

    /// Ends a connection and notifies both sides at once.
    fn cut_clean(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        self.at(self.now, ScheduledEvent::ServerGone(number, connection.server));
        self.client_gone(number, connection.client);
    }

    /// Ends a connection that the client has closed.
    pub(crate) fn drop_connection(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        if connection.is_up {
            let delay = notice_delay(&mut connection.chance);
            self.after(delay, ScheduledEvent::ServerGone(number, connection.server));
        }
    }

    /// Cuts a connection. Some of the bytes in flight may still arrive.
    pub(super) fn cut(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let client = connection.client;
        let server = connection.server;
        for direction in [Direction::ToServer, Direction::ToClient] {
            let bytes = connection.last(direction);
            if connection.is_up
                && !bytes.is_empty()
                && self.is_reader_running(direction, client, server)
            {
                self.faults.insert(FaultKind::Half);
                self.trace.bytes(&bytes);
                self.pass(client, std::mem::take(&mut connection.passed));
                self.arrive(number, direction, client, server, &bytes);
            }
        }
        let chance = &mut connection.chance;
        let one = notice_delay(chance);
        let other = notice_delay(chance);
        self.after(one, ScheduledEvent::ServerGone(number, server));
        self.after(other, ScheduledEvent::ClientGone(number, client));
    }

    /// Whether the process that would read the bytes is running.
    fn is_reader_running(
        &self,
        direction: Direction,
        client: LinkClient,
        server: LinkServer,
    ) -> bool {
        let reader = match direction {
            Direction::ToClient => client.process(),
            Direction::ToServer => self.process_of(server),
        };
        let paused_until = reader.and_then(|process| self.processes[process].paused_until);
        paused_until.is_none_or(|until| until <= self.now)
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
            LinkClient::Caller { process, connection } => {
                self.call_event(process, CallLinkEvent::ClientLost(connection));
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
