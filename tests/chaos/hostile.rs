//! Hostile clients: they send valid messages with mutated numbers to the shards of a training cluster.
//!
//! A client connects as a reader or, in an asynchronous cluster, as a worker that the cluster lists and
//! nobody runs; one in eight names a task that the cluster may not have. Messages come in any order, with
//! bodies of any length. A client never assigns and never completes a push, so that the ledgers stay exact.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use pushpull::common::ids::{
    ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, Sequence, TokenId,
};
use pushpull::common::protocol::message::{
    Hello, Operation, PushPart, Reserve, Role, TokenRequest,
};
use pushpull::common::protocol::{Envelope, Grant, Message};
use pushpull::{ClusterSpec, ShardId};

use crate::chance::Chance;
use crate::probe::{Line, hello};
use crate::process::BLINK;
use crate::samples;
use crate::setting::{SHARDS, Setting, WORKERS};

/// Clients at a time.
const CLIENTS: u64 = 2;

/// The read timeout of a client: many of its messages have no answer.
const READ_TIMEOUT: Duration = Duration::from_millis(50);

/// The most messages of one round over a connection.
const MESSAGES_MAX: u64 = 16;

/// Limits of the protocol and of integers, and their neighbours.
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

/// Counts of what hostile clients did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Said {
    /// Connections whose hello was answered.
    pub(crate) connections: u64,
    /// Connections that were welcomed.
    pub(crate) welcomed: u64,
    /// Messages sent after the hello.
    pub(crate) messages: u64,
    /// Rooms that servers gave for pushes.
    push_slots: u64,
}

impl Said {
    pub(crate) fn add(&mut self, other: Said) {
        self.connections += other.connections;
        self.welcomed += other.welcomed;
        self.messages += other.messages;
        self.push_slots += other.push_slots;
    }

    /// Asserts that the clients got past the hello, and with pushes past the token: only then do their
    /// numbers reach the code behind.
    pub(crate) fn assert_deep(&self, synchronous: bool) {
        let welcomed = self.welcomed * 4 >= self.connections && self.messages > 0;
        assert!(
            welcomed && (synchronous || self.push_slots > 0),
            "hostile clients got nowhere: {self:?}"
        );
    }
}

/// The hostile clients of one cluster.
#[derive(Debug)]
pub(crate) struct HostileClients {
    stop: Arc<AtomicBool>,
    running: Vec<JoinHandle<Said>>,
}

impl HostileClients {
    pub(crate) fn start(setting: &Setting, chance: &mut Chance) -> HostileClients {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |seed| {
            let client = HostileClient {
                setting: setting.clone(),
                cluster: setting.cluster(),
                chance: Chance::new(seed),
                messages: samples::samples().into_iter().map(|sample| sample.message).collect(),
                said: Said::default(),
            };
            let stop = stop.clone();
            std::thread::spawn(move || client.run(&stop))
        };
        let running = (0..CLIENTS).map(|_| start(chance.below(u64::MAX))).collect();
        HostileClients { stop, running }
    }

    /// Stops the clients and returns their counts.
    pub(crate) fn finish(self) -> Said {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Said::default();
        for client in self.running {
            all.add(client.join().expect("a client does not panic"));
        }
        all
    }
}

/// One hostile client.
struct HostileClient {
    setting: Setting,
    cluster: ClusterSpec,
    chance: Chance,
    /// A sample of every message.
    messages: Vec<Message>,
    said: Said,
}

/// What a server gave to a client over one connection.
#[derive(Debug, Default)]
struct Given {
    grant: Option<Grant>,
    push_slot: u32,
    /// The sequence of the push under way.
    sequence: u64,
}

impl HostileClient {
    fn run(mut self, stop: &AtomicBool) -> Said {
        while !stop.load(Ordering::Relaxed) {
            // Servers are killed meanwhile, and break off with whoever says what makes no sense.
            if self.visit().is_err() {
                std::thread::sleep(BLINK);
            }
        }
        self.said
    }

    /// Comes to a shard, and says something.
    fn visit(&mut self) -> io::Result<()> {
        let shard = self.setting.shard(self.chance.below(SHARDS as u64) as usize);
        let hello = self.hello(shard);
        let line = Line::greet(&self.cluster, &hello, READ_TIMEOUT)?;
        self.said.connections += 1;
        let Some(mut line) = line else { return Ok(()) };
        self.said.welcomed += 1;
        let mut given = Given { sequence: 1, ..Given::default() };
        let is_worker = hello.role == (Role::Worker {});
        if is_worker && !self.chance.once_in(4) {
            // Only who has a token and a room comes far with a push.
            line.send(TokenRequest { newest: TokenId(0) }.into(), &[])?;
            line.send(Reserve {}.into(), &[])?;
            self.said.messages += 2;
            // A shard that does not own the step has no tokens, and takes a room alone.
            self.hear(&mut line, &mut given)?;
            self.hear(&mut line, &mut given)?;
        }
        for _ in 0..1 + self.chance.below(MESSAGES_MAX) {
            let message = self.message(&given);
            let body = match Message::body_limit(message.kind()) {
                Some(0) => Vec::new(),
                _ => self.body(),
            };
            line.send_in(self.envelope(&given), &message, &body)?;
            self.said.messages += 1;
            if given.push_slot != 0 && self.chance.once_in(4) {
                // Another push in another room.
                given.sequence += 1;
                line.send(Reserve {}.into(), &[])?;
                self.said.messages += 1;
            }
            if self.chance.once_in(2) {
                self.hear(&mut line, &mut given)?;
            }
        }
        Ok(())
    }

    fn hear(&mut self, line: &mut Line, given: &mut Given) -> io::Result<()> {
        match line.next()? {
            Message::Granted(granted) => given.grant = Some(granted.grant),
            Message::Reserved(push_slot) => {
                given.push_slot = push_slot.push_slot;
                self.said.push_slots += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// Of a task that may come, or else that the cluster does not have. The names of those that train are
    /// theirs.
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
            && let Message::Hello(changed) = self.changed(&hello.clone().into())
            && changed.role == hello.role
            && changed.shard.task == shard.task
        {
            hello = changed;
        }
        if is_worker && hello.task < WORKERS {
            hello.task = WORKERS;
        }
        hello
    }

    /// Any message, or with a room rather a part of a push.
    fn message(&mut self, given: &Given) -> Message {
        let any = self.chance.below(self.messages.len() as u64) as usize;
        let mut message = self.messages[any].clone();
        if given.push_slot != 0 && !self.chance.once_in(4) {
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
        let mut message = self.changed(&message);
        let held = (!self.chance.once_in(8)).then_some(given);
        let offset = self.chance.once_in(2).then(|| self.number());
        match &mut message {
            Message::PushPart(part) => {
                tame(part, held);
                part.offset = offset.unwrap_or(part.offset);
            }
            Message::PushEncoded(encoded) => tame(&mut encoded.part, held),
            Message::PushShared(shared) => {
                (shared.operation, shared.whole) = (Operation::Gradient {}, None);
            }
            _ => {}
        }
        message
    }

    /// The same kind of message with other numbers in it.
    fn changed(&mut self, message: &Message) -> Message {
        let mut meta = Vec::new();
        message.put(&mut meta);
        for _ in 0..self.chance.below(4) {
            let width = [1, 2, 4, 8][self.chance.below(4) as usize];
            if meta.len() < width {
                continue;
            }
            let at = self.chance.below((meta.len() - width + 1) as u64) as usize;
            let number = self.number().to_le_bytes();
            let before = meta.clone();
            meta[at..at + width].copy_from_slice(&number[..width]);
            if Message::take(message.kind(), &meta).is_err() {
                meta = before;
            }
        }
        Message::take(message.kind(), &meta).expect("it is valid as it was")
    }

    fn envelope(&mut self, given: &Given) -> Envelope {
        let mut envelope = Envelope { sequence: Sequence(given.sequence), ..Envelope::default() };
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

/// A part of a gradient that is never whole, under what its sender was given.
fn tame(part: &mut PushPart, held: Option<&Given>) {
    (part.operation, part.whole) = (Operation::Gradient {}, None);
    let Some(given) = held else { return };
    if let Some(grant) = given.grant {
        (part.token, part.generation) = (grant.token, grant.generation);
    }
    if given.push_slot != 0 {
        part.push_slot = given.push_slot;
    }
}
