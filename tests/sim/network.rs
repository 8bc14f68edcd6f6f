//! Simulated connections with delays: each keeps its order, but there is no order between two.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pushpull_common::ids::ShardId;
use pushpull_ps::testing::PulledFrames;

use crate::chance::SimChance;

/// The side that opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkClient {
    /// A worker's process, by its number, and one of its links.
    Worker { process: usize, link: usize },
    /// A shard that connects to the step owner.
    Shard(ShardId),
    /// A process that calls functions, by its number, and its number of the connection.
    Caller { process: usize, connection: u64 },
}

impl LinkClient {
    /// Returns the number of the process; `None` for a shard.
    pub(crate) fn process(self) -> Option<usize> {
        match self {
            LinkClient::Worker { process, .. } | LinkClient::Caller { process, .. } => {
                Some(process)
            }
            LinkClient::Shard(_) => None,
        }
    }
}

/// The side that accepts a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkServer {
    /// A shard.
    Shard(ShardId),
    /// The function server of a worker task.
    Functions(u32),
}

impl fmt::Display for LinkServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkServer::Shard(shard) => shard.fmt(f),
            LinkServer::Functions(task) => write!(f, "functions of worker {task}"),
        }
    }
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// Content in flight.
#[derive(Debug)]
pub(crate) enum Item {
    Bytes(VecDeque<u8>),
    /// The values of a pull. Their frames are encoded when they reach the front of the queue.
    Values(Box<PulledFrames>),
    /// The server has closed the connection.
    End,
}

/// One delivery.
#[derive(Debug, PartialEq)]
pub(crate) enum Arrival {
    Bytes(Vec<u8>),
    End,
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    items: VecDeque<Item>,
    /// Whether a delivery is scheduled.
    pub(crate) due: bool,
}

/// A simulated connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) client: LinkClient,
    pub(crate) server: LinkServer,
    /// Whether the server has accepted the connection.
    pub(crate) is_up: bool,
    pub(crate) to_server: Pipe,
    pub(crate) to_client: Pipe,
    /// Whether deliveries are at most 200 bytes, with pauses of 20 to 250 ms.
    pub(crate) slow: bool,
    /// Descriptors in flight to the client.
    pub(crate) passed: Vec<Vec<OwnedFd>>,
    pub(crate) chance: SimChance,
}

impl Connection {
    pub(crate) fn new(client: LinkClient, server: LinkServer, chance: SimChance) -> Connection {
        let to_server = Pipe::default();
        let to_client = Pipe::default();
        let is_up = false;
        let slow = false;
        let passed = Vec::new();
        Connection { client, server, is_up, to_server, to_client, slow, passed, chance }
    }

    pub(crate) fn pipe(&mut self, direction: Direction) -> &mut Pipe {
        self.pipe_and_chance(direction).0
    }

    fn pipe_and_chance(&mut self, direction: Direction) -> (&mut Pipe, &mut SimChance) {
        match direction {
            Direction::ToServer => (&mut self.to_server, &mut self.chance),
            Direction::ToClient => (&mut self.to_client, &mut self.chance),
        }
    }

    /// Takes the next delivery: a frame, a piece of one, or several.
    pub(crate) fn next(&mut self, direction: Direction) -> Option<Arrival> {
        let slow = self.slow;
        let (pipe, chance) = self.pipe_and_chance(direction);
        pipe.next(slow, chance)
    }

    /// Empties a direction. Returns the bytes that still arrive before the connection is cut.
    pub(crate) fn last(&mut self, direction: Direction) -> Vec<u8> {
        let (pipe, chance) = self.pipe_and_chance(direction);
        pipe.cut(chance)
    }

    /// Draws the time of the next delivery.
    pub(crate) fn arrives(&mut self, now: Instant) -> Instant {
        let chance = &mut self.chance;
        match (self.slow, chance.between(0, 9)) {
            (true, _) => now + chance.millis(20, 250),
            (false, 0) => now + chance.millis(5, 60),
            (false, _) => now + chance.micros(20, 3000),
        }
    }
}

impl Pipe {
    pub(crate) fn push(&mut self, item: Item) {
        if !matches!(self.items.back(), Some(Item::End)) {
            self.items.push_back(item);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    fn next(&mut self, slow: bool, chance: &mut SimChance) -> Option<Arrival> {
        let most = match (slow, chance.between(0, 3)) {
            (true, _) => chance.between(1, 200) as usize,
            (false, 0) => chance.between(1, 300) as usize,
            (false, 1) => chance.between(1, 4) as usize * 1000,
            (false, _) => usize::MAX,
        };
        let mut bytes = Vec::new();
        while bytes.len() < most {
            match self.items.front_mut() {
                Some(Item::Bytes(rest)) => {
                    let count = rest.len().min(most - bytes.len());
                    bytes.extend(rest.drain(..count));
                    if rest.is_empty() {
                        self.items.pop_front();
                    }
                }
                Some(Item::Values(values)) => match values.next_frame() {
                    Some(frame) => self.items.push_front(Item::Bytes(frame.into())),
                    // Dropping the values releases their pin.
                    None => _ = self.items.pop_front(),
                },
                Some(Item::End) if bytes.is_empty() => {
                    self.items.pop_front();
                    return Some(Arrival::End);
                }
                Some(Item::End) | None => break,
            }
        }
        (!bytes.is_empty()).then_some(Arrival::Bytes(bytes))
    }

    fn cut(&mut self, chance: &mut SimChance) -> Vec<u8> {
        let on_the_way: usize = self
            .items
            .iter()
            .map(|item| if let Item::Bytes(bytes) = item { bytes.len() } else { 0 })
            .sum();
        let count = chance.between(0, on_the_way as u64) as usize;
        let mut bytes = Vec::new();
        for item in std::mem::take(&mut self.items) {
            let Item::Bytes(rest) = item else { break };
            bytes.extend(rest.into_iter().take(count - bytes.len()));
        }
        bytes
    }
}
