//! A shard behind a public door, for the fuzz targets alone: built under `cfg(fuzzing)` only.
//!
//! The [`Door`] keeps to what the runtime promises a shard: bodies come after their messages,
//! nothing is read from a connection that is being closed, and time does not go back.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{Envelope, Header, Message};

use crate::arena::{Budget, Place};
use crate::config::{NonFinite, PsConfig};
use crate::metrics::{Counters, Metrics};
use crate::optimizer::Optimizer;
use crate::shard::durable::{Life, Parts};
use crate::shard::output::{Output, PulledParts};
use crate::shard::work::Work;
use crate::shard::{Input, Shard, TICK, Way};

/// The memory that the shard may use.
const BYTES_MAX: u64 = 4 << 20;
/// More outputs than one input can ever cause with so few connections.
const OUTPUTS_MAX: usize = 4096;

/// What the shard is configured with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The step at which training ends.
    pub last_step: Option<u64>,
    /// What happens to NaN and infinities.
    pub non_finite: NonFinite,
    /// How long a token may be held.
    pub token_timeout: Option<Duration>,
    /// How long a member may be silent.
    pub lease: Duration,
    /// Rooms of the inbox.
    pub inbox_pushes: usize,
    /// Connections.
    pub connections_max: usize,
}

/// Something the shard wanted done.
#[derive(Debug)]
pub enum Event {
    /// A frame was sent.
    Sent {
        /// Over this connection.
        connection: u64,
        /// The fields of the header.
        envelope: Envelope,
        /// The meta.
        message: Message,
        /// The body.
        body: Vec<u8>,
    },
    /// The connection is being closed: nothing more is read from it.
    Closed {
        /// Which.
        connection: u64,
    },
}

/// The values that answered a pull: offsets and bytes, in the order sent.
pub type Values = Vec<(u64, Vec<u8>)>;

/// A shard with its connections, without sockets and with a clock that is told the time.
#[derive(Debug)]
pub struct Door {
    shard: Shard,
    now: Instant,
    next_connection: u64,
    /// What is left of the body that a connection is sending: its length, and how much has come.
    bodies: BTreeMap<u64, (usize, usize)>,
    closed: BTreeSet<u64>,
    streams: Vec<(u64, PulledParts)>,
    counters: Arc<Counters>,
}

impl Door {
    /// The one shard of the one task of a cluster, in anonymous memory.
    ///
    /// # Panics
    /// If a shard cannot be built of these settings.
    pub fn new(settings: Settings, optimizer: impl Optimizer) -> Door {
        let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build();
        let cluster = cluster.expect("one task with an address is a cluster");
        let mut config = PsConfig::new(cluster, TaskId::ps(0), optimizer)
            .non_finite(settings.non_finite)
            .token_timeout(settings.token_timeout)
            .lease(settings.lease)
            .inbox_pushes(settings.inbox_pushes)
            .connections_max(settings.connections_max);
        config.last_step = settings.last_step;
        config.check().expect("the settings are sound");
        let counters = Arc::<Counters>::default();
        let id = ShardId { task: 0, shard: 0 };
        let (config, identity) = (Arc::new(config), Arc::new(Identity::new()));
        let (budget, now) = (Budget::new(BYTES_MAX), Instant::now());
        let parts = Parts { id, config, identity, budget, counters: counters.clone() };
        let life = Life { boot: [0; 16], arena: 1, epoch_base: 0 };
        Door {
            shard: Shard::open(parts, Place::Anonymous, life, now).expect("memory for a shard"),
            now,
            next_connection: 1,
            bodies: BTreeMap::new(),
            closed: BTreeSet::new(),
            streams: Vec::new(),
            counters,
        }
    }

    /// A peer says hello; the number of its connection.
    pub fn connect(&mut self, hello: &Hello, header: &Header, remote: bool) -> u64 {
        let connection = self.next_connection;
        self.next_connection += 1;
        let way = if remote { Way::Remote } else { Way::Unix { same_user: true } };
        self.shard.handle(self.now, Input::Connected { connection, hello, header, way });
        connection
    }

    /// Whether a connection may send a message: it is open, and no body is due.
    pub fn may_send(&self, connection: u64) -> bool {
        !self.closed.contains(&connection) && !self.bodies.contains_key(&connection)
    }

    /// A message comes, if it may.
    pub fn message(&mut self, connection: u64, header: &Header, message: Message) {
        if !self.may_send(connection) {
            return;
        }
        if header.body_bytes > 0 {
            self.bodies.insert(connection, (header.body_bytes as usize, 0));
        }
        self.shard.handle(self.now, Input::Message { connection, header, message });
    }

    /// Bytes of the body that is due come; how many of them were taken.
    ///
    /// # Panics
    /// If the shard lends memory of another length than the body's.
    pub fn body(&mut self, connection: u64, bytes: &[u8]) -> usize {
        let Some((length, taken)) = self.bodies.get_mut(&connection) else {
            return 0;
        };
        if self.closed.contains(&connection) {
            return 0;
        }
        let count = bytes.len().min(*length - *taken);
        if let Some(target) = self.shard.body_target(connection) {
            assert_eq!(target.len(), *length, "the target is as long as the body");
            target[*taken..*taken + count].copy_from_slice(&bytes[..count]);
        }
        *taken += count;
        if taken == length {
            self.bodies.remove(&connection);
            self.shard.handle(self.now, Input::Body { connection });
        } else if count > 0 {
            self.shard.handle(self.now, Input::Progress { connection });
        }
        count
    }

    /// A connection is gone, and with it what was still to be sent over it.
    pub fn disconnect(&mut self, connection: u64) {
        self.streams.retain(|(stream, _)| *stream != connection);
        self.bodies.remove(&connection);
        self.shard.handle(self.now, Input::Disconnected { connection });
    }

    /// Time passes, and the shard is told so as often as it must be.
    pub fn advance(&mut self, ticks: u32) {
        for _ in 0..ticks {
            self.pause(TICK);
        }
    }

    /// Time passes, and the shard is told so only at the end: the process was stopped.
    pub fn pause(&mut self, time: Duration) {
        self.now += time;
        self.shard.handle(self.now, Input::Tick);
    }

    /// Does a slice of the work that is due; whether there is more that can be done.
    pub fn work(&mut self) -> bool {
        self.shard.has_work() && self.shard.work(self.now) == Work::More
    }

    /// Does all work that is due, and sends all values, until neither brings anything.
    pub fn settle(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while self.shard.has_work() {
            while self.work() {}
            events.extend(self.poll());
            self.send();
        }
        events
    }

    /// What the shard has wanted done since the last call.
    ///
    /// # Panics
    /// If that does not end.
    pub fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for count in 0.. {
            assert!(count < OUTPUTS_MAX, "the outputs of one input are bounded");
            let Some(output) = self.shard.poll_output() else {
                break;
            };
            match output {
                Output::Send { connection, envelope, message, body, .. } => {
                    events.push(Event::Sent { connection, envelope, message, body: body.to_vec() });
                }
                Output::Stream { connection, parts } => self.streams.push((connection, parts)),
                Output::Close { connection } => {
                    self.closed.insert(connection);
                    events.push(Event::Closed { connection });
                }
                Output::Shared { .. } => unreachable!("this memory cannot be shared"),
                Output::ToOwner { .. }
                | Output::Order(_)
                | Output::SaveShard(_)
                | Output::Flush(_)
                | Output::RestoreShard(_) => {
                    unreachable!("the one shard owns the step, and keeps no checkpoints")
                }
                Output::Members { joined, present } => assert!(present <= joined),
                Output::Event(_) => {}
            }
        }
        events
    }

    /// Sends the values that pulls are waiting for, which unpins them.
    ///
    /// # Panics
    /// If a part is longer than a part may be.
    pub fn send(&mut self) -> Vec<(u64, Values)> {
        let mut sent = Vec::new();
        for (connection, mut parts) in std::mem::take(&mut self.streams) {
            let mut values = Vec::new();
            let mut head = Vec::new();
            while let Some(range) = parts.next_part(&mut head) {
                assert!(range.end - range.start <= PART_BYTES_MAX);
                let mut slices: Vec<IoSlice<'_>> = Vec::new();
                parts.slices(range.clone(), &mut slices);
                let mut bytes = Vec::new();
                slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
                if parts.is_short() {
                    // What is rounded is compared with nothing.
                    assert!(bytes.len() as u64 <= PART_BYTES_MAX);
                    continue;
                }
                assert_eq!(bytes.len() as u64, range.end - range.start, "a part is whole");
                values.push((range.start, bytes));
            }
            sent.push((connection, values));
        }
        sent
    }

    /// What the shard has counted.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum([&*self.counters])
    }
}
