//! Hostile clients, which send valid messages with mutated numbers to the shards of a training
//! cluster.
//!
//! A client connects as a reader or, in an asynchronous cluster, as a listed worker that does not
//! run. One in eight names a task that the cluster may not have. It sends messages in any order,
//! with bodies of any length. It never assigns and never completes a push, so the ledgers stay
//! exact.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use pushpull::ClusterSpec;
use pushpull::cluster::ShardId;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, Sequence, TokenId};
use pushpull_common::protocol::message::{Hello, Operation, PushPart, Reserve, Role, TokenRequest};
use pushpull_common::protocol::{Envelope, Features, Grant, Message};

use crate::chance::Chance;
use crate::probe::{ProbeConnection, hello};
use crate::process::POLL_INTERVAL;
use crate::samples;
use crate::setting::{ChaosSetting, SHARDS, WORKERS};

/// The number of concurrent clients.
const CLIENTS: u64 = 2;

/// The read timeout of a client: short, since many of its messages have no answer.
const READ_TIMEOUT: Duration = Duration::from_millis(50);

/// The maximum number of random messages over one connection.
const MESSAGES_MAX: u64 = 16;

/// Limits of the protocol and of integers, with their neighbours.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    7,
    64,
    1 << 20,
    u32::MAX as u64,
    1 << 32,
    1 << 55,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 7,
    u64::MAX - 1,
    u64::MAX,
];

/// The figures of the hostile clients.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostileCounts {
    /// Connections whose hello was answered.
    pub(crate) connections: u64,
    /// Connections that were welcomed.
    pub(crate) welcomed: u64,
    /// Messages sent after the hello.
    pub(crate) messages: u64,
    /// Push slots that servers reserved for the clients.
    push_slots: u64,
}

impl HostileCounts {
    pub(crate) fn add(&mut self, other: HostileCounts) {
        self.connections += other.connections;
        self.welcomed += other.welcomed;
        self.messages += other.messages;
        self.push_slots += other.push_slots;
    }

    /// Asserts that a fifth of the clients were welcomed and, in asynchronous mode, that some got a
    /// push slot. Only then do their numbers reach the code behind these checks. About 27 in 100 are
    /// welcomed, so a run of a few hundred connections stays above a fifth.
    pub(crate) fn assert_deep(&self, synchronous: bool) {
        let welcomed = self.welcomed * 5 >= self.connections && self.messages > 0;
        assert!(
            welcomed && (synchronous || self.push_slots > 0),
            "hostile clients do not get past the first checks: {self:?}"
        );
    }
}

/// The hostile clients of one cluster.
#[derive(Debug)]
pub(crate) struct HostileClients {
    stop: Arc<AtomicBool>,
    running: Vec<JoinHandle<HostileCounts>>,
}

impl HostileClients {
    pub(crate) fn start(setting: &ChaosSetting, chance: &mut Chance) -> HostileClients {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |seed| {
            let client = HostileClient {
                setting: setting.clone(),
                cluster: setting.cluster(),
                chance: Chance::new(seed),
                messages: samples::samples().into_iter().map(|sample| sample.message).collect(),
                counts: HostileCounts::default(),
            };
            let stop = stop.clone();
            std::thread::spawn(move || client.run(&stop))
        };
        let running = (0..CLIENTS).map(|_| start(chance.below(u64::MAX))).collect();
        HostileClients { stop, running }
    }

    /// Stops the clients and returns their counts.
    pub(crate) fn finish(self) -> HostileCounts {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = HostileCounts::default();
        for client in self.running {
            all.add(client.join().expect("a client does not panic"));
        }
        all
    }
}

/// One hostile client.
struct HostileClient {
    setting: ChaosSetting,
    cluster: ClusterSpec,
    chance: Chance,
    /// A sample of every message.
    messages: Vec<Message>,
    counts: HostileCounts,
}

/// What one client has from its server: token and push slot.
#[derive(Debug, Default)]
struct ClientState {
    grant: Option<Grant>,
    push_slot: u32,
    /// The sequence of the current push.
    sequence: u64,
}

impl HostileClient {
    fn run(mut self, stop: &AtomicBool) -> HostileCounts {
        while !stop.load(Ordering::Relaxed) {
            // Errors are expected: servers are killed, and close connections with senseless
            // messages.
            if self.attack().is_err() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        self.counts
    }

    /// Connects to a shard and sends it some messages.
    fn attack(&mut self) -> io::Result<()> {
        let shard = self.setting.shard(self.chance.below(SHARDS as u64) as usize);
        let hello = self.hello(shard);
        let line = ProbeConnection::greet(&self.cluster, &hello, READ_TIMEOUT)?;
        self.counts.connections += 1;
        let Some(mut line) = line else { return Ok(()) };
        self.counts.welcomed += 1;
        let mut state = ClientState { sequence: 1, ..ClientState::default() };
        let is_worker = hello.role == (Role::Worker {});
        if is_worker && !self.chance.once_in(4) {
            // A push gets past the first checks only with a token and a push slot.
            line.send(TokenRequest { newest: TokenId(0) }.into(), &[])?;
            line.send(Reserve {}.into(), &[])?;
            self.counts.messages += 2;
            // Only the step owner grants a token; the other shards reserve only a push slot.
            self.receive(&mut line, &mut state)?;
            self.receive(&mut line, &mut state)?;
        }
        for _ in 0..1 + self.chance.below(MESSAGES_MAX) {
            let message = self.message(&state);
            let body = match Message::body_limit(message.kind()) {
                Some(0) => Vec::new(),
                _ => self.body(),
            };
            line.send_in(self.envelope(&state), &message, &body)?;
            self.counts.messages += 1;
            if state.push_slot != 0 && self.chance.once_in(4) {
                // Start another push in another push slot.
                state.sequence += 1;
                line.send(Reserve {}.into(), &[])?;
                self.counts.messages += 1;
            }
            if self.chance.once_in(2) {
                self.receive(&mut line, &mut state)?;
            }
        }
        Ok(())
    }

    fn receive(&mut self, line: &mut ProbeConnection, state: &mut ClientState) -> io::Result<()> {
        match line.next()? {
            Message::Granted(granted) => state.grant = Some(granted.grant),
            Message::Reserved(push_slot) => {
                state.push_slot = push_slot.push_slot;
                self.counts.push_slots += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// Draws a hello. In the worker role it never names one of the tasks that train.
    fn hello(&mut self, shard: ShardId) -> Hello {
        let may_join = !self.setting.synchronous;
        let is_worker = may_join && !self.chance.once_in(4);
        let role = if is_worker { Role::Worker {} } else { Role::Reader {} };
        let task = if self.chance.once_in(8) { self.number() as u32 } else { WORKERS };
        let mut hello = Hello { role, task, ..hello(&self.cluster, shard) };
        hello.incarnation = Incarnation(self.number());
        if self.chance.once_in(4) {
            hello.client_epoch = ClientEpoch(self.number());
            hello.seen_epoch = RestoreEpoch(self.number() as u32);
            hello.seen_step = GlobalStep(self.number());
        }
        if self.chance.once_in(8)
            && let Message::Hello(mutated) = self.mutated(&hello.clone().into())
            && mutated.role == hello.role
            && mutated.shard.task == shard.task
        {
            hello = mutated;
        }
        if is_worker && hello.task < WORKERS {
            hello.task = WORKERS;
        }
        hello
    }

    /// Draws any message; with a push slot, mostly a part of a push.
    fn message(&mut self, state: &ClientState) -> Message {
        let any = self.chance.below(self.messages.len() as u64) as usize;
        let mut message = self.messages[any].clone();
        if state.push_slot != 0 && !self.chance.once_in(4) {
            let is_push = |message: &&Message| {
                matches!(
                    message,
                    Message::PushPart(_) | Message::PushEncoded(_) | Message::PushShared(_)
                )
            };
            let pushes = self.messages.iter().filter(is_push);
            let pushes: Vec<Message> = pushes.cloned().collect();
            message = pushes[self.chance.below(pushes.len() as u64) as usize].clone();
        }
        let mut message = self.mutated(&message);
        let held = (!self.chance.once_in(8)).then_some(state);
        let offset = self.chance.once_in(2).then(|| self.number());
        match &mut message {
            Message::PushPart(part) => {
                make_harmless(part, held);
                part.offset = offset.unwrap_or(part.offset);
            }
            Message::PushEncoded(encoded) => make_harmless(&mut encoded.part, held),
            Message::PushShared(shared) => {
                shared.operation = Operation::Gradient {};
                shared.whole = None;
            }
            _ => {}
        }
        message
    }

    /// Returns a message of the same kind with up to three numbers mutated.
    fn mutated(&mut self, message: &Message) -> Message {
        let mut meta = Vec::new();
        message.put(Features::NONE, &mut meta);
        for _ in 0..self.chance.below(4) {
            let width = [1, 2, 4, 8][self.chance.below(4) as usize];
            if meta.len() < width {
                continue;
            }
            let at = self.chance.below((meta.len() - width + 1) as u64) as usize;
            let number = self.number().to_le_bytes();
            let before = meta.clone();
            meta[at..at + width].copy_from_slice(&number[..width]);
            if Message::take(message.kind(), Features::NONE, &meta).is_err() {
                meta = before;
            }
        }
        Message::take(message.kind(), Features::NONE, &meta).expect("the message stays valid")
    }

    fn envelope(&mut self, state: &ClientState) -> Envelope {
        let mut envelope = Envelope { sequence: Sequence(state.sequence), ..Envelope::default() };
        match self.chance.below(8) {
            0 => envelope.sequence = Sequence(self.number()),
            1 => envelope.step = GlobalStep(self.number()),
            2 => envelope.restore_epoch = RestoreEpoch(self.number() as u32),
            3 => envelope.deadline_ms = self.number() as u32,
            _ => {}
        }
        envelope
    }

    fn body(&mut self) -> Vec<u8> {
        let lengths = [0, 4, 8, 12, 16, 600, 4096, 64 << 10];
        let length = lengths[self.chance.below(lengths.len() as u64) as usize];
        let word = self.number().to_le_bytes();
        word.iter().copied().cycle().take(length).collect()
    }

    fn number(&mut self) -> u64 {
        match self.chance.below(4) {
            0 => self.chance.below(u64::MAX),
            1 => self.chance.below(256),
            _ => EDGES[self.chance.below(EDGES.len() as u64) as usize],
        }
    }
}

/// Makes a part harmless: a gradient that is never whole. With `held`, it names the token and push
/// slot of its sender.
fn make_harmless(part: &mut PushPart, held: Option<&ClientState>) {
    part.operation = Operation::Gradient {};
    part.whole = None;
    let Some(state) = held else { return };
    if let Some(grant) = state.grant {
        part.token = grant.token;
        part.generation = grant.generation;
    }
    if state.push_slot != 0 {
        part.push_slot = state.push_slot;
    }
}
