//! An endpoint of one shard for the fuzz targets. Built only under `cfg(fuzzing)`.
//!
//! The [`FuzzEndpoint`] keeps the promises of the runtime to a shard: a body follows its message, a
//! connection that is being closed is not read, and time does not go back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{Envelope, Header, Message};
use pushpull_optim::optimizer::Optimizer;
use pushpull_store::arena::{ArenaStorage, Budget};

use crate::config::{NonFinite, PsConfig};
use crate::metrics::{Counters, Metrics};
use crate::shard::output::{PulledParts, ShardOutput};
use crate::shard::shard_files::{ServerRun, ShardSetup};
use crate::shard::work::Work;
use crate::shard::{PeerOrigin, Shard, ShardInput, TICK};

/// The maximum memory of the shard.
const BYTES_MAX: u64 = 4 << 20;
/// More outputs than one input can cause with the few connections of a fuzz input.
const OUTPUTS_MAX: usize = 4096;

/// The configuration of the shard.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The step at which training ends.
    pub last_step: Option<u64>,
    /// The policy for NaN and infinities.
    pub non_finite: NonFinite,
    /// How long a client may hold a token.
    pub token_timeout: Option<Duration>,
    /// The lease: how long a silent member stays.
    pub lease: Duration,
    /// The number of push slots.
    pub inbox_pushes: usize,
    /// The maximum number of connections.
    pub connections_max: usize,
}

/// An output of the shard.
#[derive(Debug)]
pub enum Event {
    /// A frame was sent.
    Sent {
        /// The connection.
        connection: u64,
        /// The fields of the header.
        envelope: Envelope,
        /// The meta.
        message: Message,
        /// The body.
        body: Vec<u8>,
    },
    /// A connection is being closed: nothing more is read from it.
    Closed {
        /// The connection.
        connection: u64,
    },
}

/// The values that answered a pull: offsets and bytes, in the order sent.
pub type Values = Vec<(u64, Vec<u8>)>;

/// A shard with its connections, without sockets and with a clock that the caller advances.
#[derive(Debug)]
pub struct FuzzEndpoint {
    shard: Shard,
    now: Instant,
    next_connection: u64,
    /// By connection: the length of the body that is being received, and how much has arrived.
    bodies: BTreeMap<u64, (usize, usize)>,
    closed: BTreeSet<u64>,
    streams: Vec<(u64, PulledParts)>,
    counters: Arc<Counters>,
}

impl FuzzEndpoint {
    /// Creates the only shard of a cluster with one task, in anonymous memory.
    ///
    /// # Panics
    /// If the settings are invalid.
    pub fn new(settings: Settings, optimizer: impl Optimizer) -> FuzzEndpoint {
        let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build();
        let cluster = cluster.expect("one task with an address is a cluster");
        let mut config = PsConfig::new(cluster, TaskId::ps(0), optimizer)
            .non_finite(settings.non_finite)
            .token_timeout(settings.token_timeout)
            .lease(settings.lease)
            .inbox_pushes(settings.inbox_pushes)
            .connections_max(settings.connections_max);
        config.last_step = settings.last_step;
        config.check().expect("the settings are valid");
        let counters = Arc::<Counters>::default();
        let id = ShardId { task: 0, shard: 0 };
        let (config, identity) = (Arc::new(config), Arc::new(Identity::new()));
        let (budget, now) = (Budget::new(BYTES_MAX), Instant::now());
        let parts = ShardSetup { id, config, identity, budget, counters: counters.clone() };
        let life = ServerRun { boot: [0; 16], arena: 1, epoch_base: 0 };
        FuzzEndpoint {
            shard: Shard::open(parts, ArenaStorage::Anonymous, life, now)
                .expect("memory for a shard"),
            now,
            next_connection: 1,
            bodies: BTreeMap::new(),
            closed: BTreeSet::new(),
            streams: Vec::new(),
            counters,
        }
    }

    /// Opens a connection with a hello and returns its number.
    pub fn connect(&mut self, hello: &Hello, header: &Header, remote: bool) -> u64 {
        let connection = self.next_connection;
        self.next_connection += 1;
        let origin = if remote { PeerOrigin::Remote } else { PeerOrigin::Unix { same_user: true } };
        self.shard.handle(self.now, ShardInput::Connected { connection, hello, header, origin });
        connection
    }

    /// Whether a connection may send a message: it is open and no body is due.
    pub fn may_send(&self, connection: u64) -> bool {
        !self.closed.contains(&connection) && !self.bodies.contains_key(&connection)
    }

    /// Delivers a message, unless [`FuzzEndpoint::may_send`] is false.
    pub fn message(&mut self, connection: u64, header: &Header, message: Message) {
        if !self.may_send(connection) {
            return;
        }
        if header.body_bytes > 0 {
            self.bodies.insert(connection, (header.body_bytes as usize, 0));
        }
        self.shard.handle(self.now, ShardInput::Message { connection, header, message });
    }

    /// Delivers bytes of the body that is due. Returns how many were taken.
    ///
    /// # Panics
    /// If the shard's target memory has another length than the body.
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
            self.shard.handle(self.now, ShardInput::Body { connection });
        } else if count > 0 {
            self.shard.handle(self.now, ShardInput::Progress { connection });
        }
        count
    }

    /// Ends a connection and drops the values that were to be sent over it.
    pub fn disconnect(&mut self, connection: u64) {
        self.streams.retain(|(stream, _)| *stream != connection);
        self.bodies.remove(&connection);
        self.shard.handle(self.now, ShardInput::Disconnected { connection });
    }

    /// Advances time tick by tick, with an input for each tick.
    pub fn advance(&mut self, ticks: u32) {
        for _ in 0..ticks {
            self.pause(TICK);
        }
    }

    /// Advances time with one input at its end, as for a process that was stopped.
    pub fn pause(&mut self, time: Duration) {
        self.now += time;
        self.shard.handle(self.now, ShardInput::Tick);
    }

    /// Does one slice of the work that is due. Returns true if more can be done at once.
    pub fn work(&mut self) -> bool {
        self.shard.has_work() && self.shard.work(self.now) == Work::More
    }

    /// Does all work that is due and sends all values, until no work is left.
    pub fn settle(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while self.shard.has_work() {
            while self.work() {}
            events.extend(self.poll());
            self.send();
        }
        events
    }

    /// Returns the shard's outputs since the last call.
    ///
    /// # Panics
    /// If there are more than `OUTPUTS_MAX`.
    pub fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for count in 0.. {
            assert!(count < OUTPUTS_MAX, "the outputs of one input are bounded");
            let Some(output) = self.shard.poll_output() else {
                break;
            };
            match output {
                ShardOutput::Send { connection, envelope, message, body, .. } => {
                    events.push(Event::Sent { connection, envelope, message, body: body.to_vec() });
                }
                ShardOutput::Stream { connection, parts } => self.streams.push((connection, parts)),
                ShardOutput::Close { connection } => {
                    self.closed.insert(connection);
                    events.push(Event::Closed { connection });
                }
                ShardOutput::Shared { .. } => unreachable!("anonymous memory cannot be shared"),
                ShardOutput::ToOwner { .. }
                | ShardOutput::SaverOrder(_)
                | ShardOutput::SaveShard(_)
                | ShardOutput::Flush(_)
                | ShardOutput::RestoreShard(_) => {
                    unreachable!("the only shard is the step owner and has no checkpoints")
                }
                ShardOutput::Members { joined, present } => assert!(present <= joined),
                ShardOutput::Event(_) => {}
            }
        }
        events
    }

    /// Sends the values that pulls wait for, which unpins them.
    ///
    /// # Panics
    /// If a part is longer than 1 MiB.
    pub fn send(&mut self) -> Vec<(u64, Values)> {
        let mut sent = Vec::new();
        for (connection, mut parts) in std::mem::take(&mut self.streams) {
            let mut values = Vec::new();
            let mut head = Vec::new();
            while let Some(range) = parts.next_part(&mut head) {
                assert!(range.end - range.start <= PART_BYTES_MAX);
                let mut bytes = Vec::new();
                parts.slices(range.clone()).for_each(|slice| bytes.extend_from_slice(slice));
                if parts.is_encoded() {
                    // Encoded values are rounded, so they are not compared.
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

    /// Returns the shard's metrics.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum([&*self.counters])
    }
}
