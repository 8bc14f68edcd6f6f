//! Connections whose bytes take their time: in order on each, in any order between them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pushpull_common::ids::ShardId;
use pushpull_ps::simulation::Values;

use crate::chance::Chance;

/// Who has made a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    /// A worker's process, by its number, over one of its links.
    Worker { process: usize, link: usize },
    /// A shard, to the step owner's.
    Shard(ShardId),
}

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From whoever has connected.
    There,
    Back,
}

/// Something on its way.
#[derive(Debug)]
pub(crate) enum Item {
    Bytes(VecDeque<u8>),
    /// Made when it is its turn.
    Values(Box<Values>),
    /// The server has closed the connection.
    End,
}

/// What arrives at a time.
#[derive(Debug, PartialEq)]
pub(crate) enum Arrival {
    Bytes(Vec<u8>),
    End,
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    items: VecDeque<Item>,
    /// Whether a delivery is due.
    pub(crate) due: bool,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    pub(crate) server: ShardId,
    /// The server's end is there.
    pub(crate) is_up: bool,
    pub(crate) there: Pipe,
    pub(crate) back: Pipe,
    /// Carries so few bytes at a time, with such pauses.
    pub(crate) slow: bool,
    /// It passes descriptors.
    pub(crate) same_host: bool,
    /// Those on their way to the client.
    pub(crate) passed: Vec<Vec<OwnedFd>>,
    pub(crate) chance: Chance,
}

impl Connection {
    pub(crate) fn new(client: Client, server: ShardId, chance: Chance) -> Connection {
        let (there, back) = (Pipe::default(), Pipe::default());
        let (same_host, passed) = (false, Vec::new());
        let (is_up, slow) = (false, false);
        Connection { client, server, is_up, there, back, slow, same_host, passed, chance }
    }

    pub(crate) fn pipe(&mut self, way: Way) -> &mut Pipe {
        self.pipe_and_chance(way).0
    }

    fn pipe_and_chance(&mut self, way: Way) -> (&mut Pipe, &mut Chance) {
        match way {
            Way::There => (&mut self.there, &mut self.chance),
            Way::Back => (&mut self.back, &mut self.chance),
        }
    }

    /// What arrives now: a frame, a piece of one, or several.
    pub(crate) fn next(&mut self, way: Way) -> Option<Arrival> {
        let slow = self.slow;
        let (pipe, chance) = self.pipe_and_chance(way);
        pipe.next(slow, chance)
    }

    /// Some of the bytes on their way, which arrive before the connection is cut.
    pub(crate) fn last(&mut self, way: Way) -> Vec<u8> {
        let (pipe, chance) = self.pipe_and_chance(way);
        pipe.cut(chance)
    }

    /// When the next bytes arrive.
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

    fn next(&mut self, slow: bool, chance: &mut Chance) -> Option<Arrival> {
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
                    // What it was of is free.
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

    fn cut(&mut self, chance: &mut Chance) -> Vec<u8> {
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
