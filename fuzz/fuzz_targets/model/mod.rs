//! A model of the clients of the fuzzed shard, with the assertions that they can check.

mod catalogues;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::codec::Codec;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, PartitionId, RequestId, RestoreEpoch, Sequence, ShardId,
    TokenId,
};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::*;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, Features, FrameReader, Grant, Header, Message, Outcome, Poll,
    PushState, encode, version,
};
use pushpull_common::tensor::DType;
use pushpull_ps::PsConfig;
use pushpull_ps::testing::{ClientHost, PulledFrames, ShardEndpoint, ShardEvent, TICK, WorkState};

use catalogues::{Declarable, declarables, differing, image};

/// An action of a client or of its environment. `by` chooses a connection.
#[derive(Arbitrary, Debug)]
pub(crate) enum Action {
    Connect { task: u8, role: u8, incarnation: u8, epoch: Number, seen_epoch: u8, remote: bool },
    Disconnect { by: u8 },
    Raw { by: u8, kind: u8, meta: Vec<u8>, sequence: u8, step: u8, body: u8 },
    Declare { by: u8, which: u8, damage: Option<(u16, u8)> },
    Initialize { by: u8 },
    AwaitReady { by: u8, deadline: u8 },
    FetchCatalogue { by: u8 },
    Token { by: u8, deadline: u8, newest: Number },
    Return { by: u8, token: u8 },
    Reserve { by: u8, deadline: u8 },
    Push { by: u8, sequence: Choice, operation: u8, token: u8, push_slot: u8, plan: Plan },
    Body { by: u8, bytes: u16 },
    Withdraw { by: u8, sequence: Choice },
    Query { by: u8, sequence: Choice },
    Pull { by: u8, partitions: Option<Vec<u8>>, at_least: u8, deadline: u8 },
    Finish { by: u8 },
    Leave { by: u8 },
    Advance { ticks: u8 },
    Pause { ms: u16 },
    Train { by: u8, plan: Plan },
    Work,
    Settle,
    Send,
}

/// The number that the client knows, or another.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum Number {
    Known,
    Zero,
    Any(u64),
}

/// A choice of a sequence number: the next one (two variants, so that it is more likely), one
/// before or after it, or any.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum Choice {
    Next,
    Also,
    Before(u8),
    After(u8),
    Any(u64),
}

/// The form of a push.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Plan {
    /// The partitions that the push leaves out, as bits.
    partitions: u8,
    /// The length of a part, in units of 8 bytes.
    part: u16,
    value: u8,
    backwards: bool,
    /// The fault of the push: see [`Plan::stop`], [`Plan::withheld`] and [`Plan::excess`].
    trouble: u8,
    next: bool,
    /// The encoding of gradients: see [`Plan::codec`].
    codec: u8,
}

impl Plan {
    /// Returns the part after which the push stops, if it does.
    fn stop(&self) -> Option<usize> {
        matches!(self.trouble, 1..=8).then(|| usize::from(self.trouble) - 1)
    }

    /// Returns how many bytes at the end of the last part's body are withheld.
    fn withheld(&self) -> usize {
        if matches!(self.trouble, 4..=24) { 8 * usize::from(self.trouble) - 31 } else { 0 }
    }

    /// Returns the codec for gradients, if any. Each codec decodes equal elements to equal
    /// elements, however they are cut into parts.
    fn codec(&self) -> Option<Codec> {
        match self.codec % 16 {
            0 => Some(Codec::F16),
            1 => Some(Codec::Bf16),
            2 => Some(Codec::Int8),
            3 => Some(Codec::TopK { fraction: 1.0 }),
            _ => None,
        }
    }

    /// Returns by how many bytes the stated length of the push exceeds its real length.
    fn excess(&self) -> u64 {
        u64::from(self.trouble == 25)
    }
}

/// Encodes the body of a part. Returns it unchanged if its elements cannot be encoded.
fn encoded(
    part: PushPart,
    body: Vec<u8>,
    partition: &Partition,
    codec: Codec,
) -> (Message, Vec<u8>) {
    let bytes = body.len().min((partition.offset + partition.bytes - part.offset) as usize);
    let (elements, width) = (&body[..bytes], partition.dtype.size());
    let mut out = Vec::new();
    let result = match partition.dtype {
        DType::F32 => {
            let values = elements.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            codec.encode(&values.collect::<Vec<_>>(), &mut out)
        }
        DType::F64 => {
            let values = elements.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            codec.encode(&values.collect::<Vec<_>>(), &mut out)
        }
        _ => return (part.into(), body),
    };
    match result {
        Ok(()) => {
            let (encoding, elements) = (codec.encoding().code(), (bytes / width) as u32);
            (PushEncoded { part, encoding, elements, factor: 1.0 }.into(), out)
        }
        Err(_) => (part.into(), body),
    }
}

/// The key of a push: the task and epoch of its client, and its sequence.
type Key = (u32, u64, u64);

#[derive(Debug, Default)]
struct Pushed {
    operations: BTreeSet<u8>,
    /// Whether the last part was sent.
    whole: bool,
    outcome: Option<Outcome>,
}

#[derive(Debug)]
struct ClientLine {
    connection: u64,
    host: ClientHost,
    task: u32,
    incarnation: u64,
    role: Role,
    /// The epoch from the welcome, for a member.
    epoch: Option<u64>,
    /// The withheld rest of a body.
    rest: Vec<u8>,
}

/// The sequence, tokens and push slots of a client.
#[derive(Debug, Default)]
struct Client {
    next: u64,
    grants: Vec<Grant>,
    push_slots: Vec<u32>,
}

pub(crate) struct World {
    endpoint: ShardEndpoint,
    now: Instant,
    last_connection: u64,
    /// The values that are to be sent, by connection.
    streams: Vec<(u64, Box<PulledFrames>)>,
    declarables: &'static [Declarable],
    layout: ShardLayout,
    lines: Vec<ClientLine>,
    clients: BTreeMap<(u32, u64), Client>,
    /// The newest epoch of each task, and the incarnation and the role it belongs to.
    current: BTreeMap<u32, (u64, u64, Role)>,
    /// The newest epoch of a chief. It fences older chiefs.
    newest_chief: u64,
    pushes: BTreeMap<Key, Pushed>,
    versions: BTreeMap<u64, Key>,
    /// Whether a raw push was sent, whose values need not be equal.
    has_raw_pushes: bool,
    /// Whether a slice of work is done after each action, as in the runtime.
    eager: bool,
    request: u64,
}

impl World {
    pub(crate) fn new(config: PsConfig, eager: bool) -> World {
        let now = Instant::now();
        World {
            endpoint: ShardEndpoint::in_memory(config, now),
            now,
            last_connection: 0,
            streams: Vec::new(),
            declarables: declarables(),
            layout: ShardLayout::default(),
            lines: Vec::new(),
            clients: BTreeMap::new(),
            current: BTreeMap::new(),
            newest_chief: 0,
            pushes: BTreeMap::new(),
            versions: BTreeMap::new(),
            has_raw_pushes: false,
            eager,
            request: 0,
        }
    }

    /// Lets a chief declare and initialize the variables, and two workers join.
    pub(crate) fn begin(&mut self, wide: bool) {
        self.connect(0, Role::Chief {}, 0, 0, 0, false);
        self.act(Action::Declare { by: 0, which: u8::from(wide), damage: None });
        self.act(Action::Initialize { by: 0 });
        self.settle();
        for task in 1..3 {
            self.connect(task, Role::Worker {}, 0, 0, 0, false);
            let newest = Number::Zero;
            self.act(Action::Token { by: task as u8, deadline: 0, newest });
        }
    }

    pub(crate) fn act(&mut self, action: Action) {
        match action {
            Action::Connect { task, role, incarnation, epoch, seen_epoch, remote } => {
                let task = u32::from(task % 3);
                let known = self.current.get(&task).map_or(0, |&(epoch, ..)| epoch);
                let role = match role % 8 {
                    0 => Role::Reader {},
                    1 => Role::Admin {},
                    2..5 => Role::Worker {},
                    _ => Role::Chief {},
                };
                let seen_epoch = u32::from(seen_epoch == 77);
                let incarnation = u64::from(incarnation % 3);
                self.connect(task, role, incarnation, number(epoch, known), seen_epoch, remote);
            }
            Action::Disconnect { by } => {
                if !self.lines.is_empty() {
                    let index = usize::from(by) % self.lines.len();
                    let line = self.lines.remove(index);
                    self.disconnect(line.connection);
                }
            }
            Action::Raw { by, kind, meta, sequence, step, body } => {
                self.raw(by, kind, &meta, (sequence, step), usize::from(body));
            }
            Action::Declare { by, which, damage } => {
                let declarable = &self.declarables[usize::from(which) % self.declarables.len()];
                let (digest, mut body) = (declarable.digest, declarable.encoded.clone());
                if let Some((at, mask)) = damage {
                    let at = usize::from(at) % body.len();
                    body[at] ^= mask;
                }
                self.send_message(by, Envelope::default(), Declare { digest }.into(), body);
            }
            Action::Initialize { by } => {
                self.send_request(by, 0, Initialize { epoch: RestoreEpoch(1) })
            }
            Action::AwaitReady { by, deadline } => self.send_request(by, deadline, AwaitReady {}),
            Action::FetchCatalogue { by } => self.send_request(by, 0, FetchCatalogue {}),
            Action::Token { by, deadline, newest } => {
                let known = self.client(by).and_then(|client| client.grants.last());
                let known = known.map_or(0, |grant| grant.token.0);
                self.send_request(
                    by,
                    deadline,
                    TokenRequest { newest: TokenId(number(newest, known)) },
                );
            }
            Action::Return { by, token } => {
                let (token, generation, _) = self.token(by, token);
                self.send_request(by, 0, ReturnToken { token, generation });
            }
            Action::Reserve { by, deadline } => self.send_request(by, deadline, Reserve {}),
            Action::Push { by, sequence, operation, token, push_slot, plan } => {
                self.push(by, sequence, operation, token, push_slot, &plan);
            }
            Action::Body { by, bytes } => self.body(by, usize::from(bytes)),
            Action::Withdraw { by, sequence } => {
                let sequence = self.sequence(by, sequence);
                self.send_message(by, envelope(sequence, 0, 0), Withdraw {}.into(), Vec::new());
            }
            Action::Query { by, sequence } => {
                let sequence = self.sequence(by, sequence);
                self.send_message(by, envelope(sequence, 0, 0), OutcomeQuery {}.into(), Vec::new());
            }
            Action::Pull { by, partitions, at_least, deadline } => {
                let selection = match partitions {
                    None => Selection::All {},
                    Some(partitions) => {
                        let ids = partitions.into_iter().map(|id| PartitionId(u32::from(id % 8)));
                        let partitions = List::new(ids.collect()).unwrap_or_default();
                        Selection::Partitions { partitions }
                    }
                };
                let envelope = envelope(0, u64::from(at_least), deadline);
                self.send_message(by, envelope, Pull { selection }.into(), Vec::new());
            }
            Action::Finish { by } => self.send_request(by, 0, Finish {}),
            Action::Leave { by } => self.send_request(by, 0, Leave {}),
            Action::Advance { ticks } => (0..ticks % 64).for_each(|_| self.pause(TICK)),
            Action::Pause { ms } => self.pause(Duration::from_millis(ms.into())),
            Action::Train { by, plan } => self.train(by, &plan),
            Action::Settle => self.settle(),
            Action::Work => {
                self.work();
            }
            Action::Send => self.send(),
        }
        if self.eager {
            self.work();
        }
        self.poll_events();
        let metrics = self.endpoint.metrics();
        assert_eq!(
            metrics.global_step, metrics.gradients_applied,
            "the only shard counts the global step"
        );
    }

    /// Disconnects all clients, finishes all work and compares the outcomes with the global step.
    pub(crate) fn finish(mut self) {
        for line in std::mem::take(&mut self.lines) {
            self.disconnect(line.connection);
        }
        self.settle();
        let asked: Vec<Key> = self.pushes.keys().copied().collect();
        for (task, (epoch, incarnation, role)) in self.current.clone() {
            if role == (Role::Chief {}) && epoch < self.newest_chief {
                continue;
            }
            self.connect(task, role, incarnation, epoch, 0, false);
            let by = (self.lines.len() - 1) as u8;
            assert_eq!(
                self.lines[usize::from(by)].epoch,
                Some(epoch),
                "no newer process has joined"
            );
            for &(_, _, sequence) in asked.iter().filter(|key| (key.0, key.1) == (task, epoch)) {
                self.send_message(by, envelope(sequence, 0, 0), OutcomeQuery {}.into(), Vec::new());
                self.poll_events();
            }
        }
        let (mut applied, mut unknown) = (0, 0);
        for push in self.pushes.values().filter(|push| push.operations.contains(&0)) {
            let sure = push.operations.len() == 1;
            match push.outcome {
                Some(Outcome::Applied { .. }) if sure => applied += 1,
                // Sent as more than one operation, or by a fenced process, whose outcomes can no
                // longer be queried.
                Some(Outcome::Applied { .. }) => unknown += 1,
                None if push.whole => unknown += 1,
                _ => {}
            }
        }
        let step = self.endpoint.metrics().global_step;
        assert!(
            (applied..=applied + unknown).contains(&step),
            "step {step} after {applied} applied and {unknown} unknown pushes"
        );
    }

    fn connect(
        &mut self,
        task: u32,
        role: Role,
        incarnation: u64,
        epoch: u64,
        seen_epoch: u32,
        remote: bool,
    ) {
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role,
            // A peer is a ps task.
            job: Text::clipped(if role == (Role::Peer {}) { "ps" } else { "worker" }),
            task,
            shard: ShardId::default(),
            incarnation: Incarnation(incarnation),
            client_epoch: ClientEpoch(epoch),
            seen_epoch: RestoreEpoch(seen_epoch),
            seen_arena: 1,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: List::default(),
            auth: List::default(),
            features: Default::default(),
        };
        let Some(frame) = framed(&Envelope::default(), &hello.into(), 0) else {
            return;
        };
        self.last_connection += 1;
        let connection = self.last_connection;
        let host = if remote { ClientHost::Remote } else { ClientHost::Same };
        self.receive(connection, host, &frame);
        let (epoch, rest) = (None, Vec::new());
        self.lines.push(ClientLine { connection, host, task, incarnation, role, epoch, rest });
        self.poll_events();
    }

    fn raw(&mut self, by: u8, kind: u8, meta: &[u8], numbers: (u8, u8), body: usize) {
        let kind = Message::KINDS[usize::from(kind) % Message::KINDS.len()];
        let Ok(message) = Message::take(kind, Features::NONE, meta) else {
            return;
        };
        let body = body.min(Message::body_limit(kind).unwrap_or(0) as usize);
        let (sequence, step) = (u64::from(numbers.0), u64::from(numbers.1));
        self.has_raw_pushes |= matches!(
            message,
            Message::PushPart(_) | Message::PushEncoded(_) | Message::PushShared(_)
        );
        self.send_message(by, envelope(sequence, step, 0), message, vec![0x40; body]);
    }

    fn push(
        &mut self,
        by: u8,
        sequence: Choice,
        operation: u8,
        token: u8,
        push_slot: u8,
        plan: &Plan,
    ) {
        let sequence = self.sequence(by, sequence);
        let Some(line) = self.line(by).filter(|line| line.rest.is_empty()) else {
            return;
        };
        let (connection, host) = (line.connection, line.host);
        let (token, generation, step) = self.token(by, token);
        let push_slot = self.client(by).and_then(|client| {
            client.push_slots.iter().rev().nth(usize::from(push_slot % 64) / 16).copied()
        });
        let operation = match operation % 8 {
            0 => Operation::Assign {},
            1 => Operation::AssignAdd {},
            _ => Operation::Gradient {},
        };
        let wanted = |trainable: bool| match operation {
            Operation::Gradient {} => trainable,
            Operation::AssignAdd {} => !trainable,
            _ => true,
        };
        let image = image(&self.layout, plan.value);
        // At most about 64 parts: bodies of one word each would take too long.
        let shortest = (self.layout.bytes() / 64).next_multiple_of(8);
        let part_bytes = (8 * (u64::from(plan.part) + 1)).clamp(shortest.max(8), 1 << 16);
        let mut ranges = Vec::new();
        for partition in self.layout.partitions() {
            let chosen = plan.partitions >> (partition.id.0 % 8) & 1 == 0;
            let mut start = partition.offset;
            while chosen && wanted(partition.trainable) && start < partition.end() {
                let end = partition.end().min(start + part_bytes);
                ranges.push(start..end);
                start = end;
            }
        }
        if plan.backwards {
            ranges.reverse();
        }
        if ranges.is_empty() {
            ranges.push(0..0);
        }
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let count = ranges.len();
        for (index, range) in ranges.into_iter().enumerate() {
            let last = index + 1 == count;
            let stops = plan.stop() == Some(index);
            let part = PushPart {
                operation,
                token,
                generation,
                push_slot: push_slot.unwrap_or(0),
                offset: range.start,
                whole: last.then_some(total + plan.excess()),
                next: last && plan.next,
                // True only if `step` is.
                read: (step % 2 == 1).then_some(step),
            };
            let body = image[range.start as usize..range.end as usize].to_vec();
            let (message, mut body) = match (plan.codec(), operation) {
                (Some(codec), Operation::Gradient {}) if !range.is_empty() => {
                    encoded(part, body, self.layout.at(range.start), codec)
                }
                _ => (part.into(), body),
            };
            let withheld = if last || stops { plan.withheld().min(body.len()) } else { 0 };
            let withheld = body.split_off(body.len() - withheld);
            let length = body.len() + withheld.len();
            if self.announce(by, envelope(sequence, step, 0), message, length) {
                self.receive(connection, host, &body);
                if let Some(line) = self.line(by) {
                    line.rest = withheld;
                }
            }
            self.poll_events();
            if stops || !self.endpoint.is_between_frames(connection) {
                break;
            }
        }
    }

    /// Makes a step as an honest client does, with the faults of the plan.
    fn train(&mut self, by: u8, plan: &Plan) {
        let newest = Number::Known;
        self.act(Action::Token { by, deadline: 0, newest });
        self.act(Action::Reserve { by, deadline: 0 });
        self.push(by, Choice::Next, 2, 0, 0, plan);
    }

    fn body(&mut self, by: u8, bytes: usize) {
        let Some(line) = self.line(by) else { return };
        let (connection, host) = (line.connection, line.host);
        let count = bytes.min(line.rest.len());
        let now: Vec<u8> = line.rest.drain(..count).collect();
        self.receive(connection, host, &now);
    }

    fn send_request(&mut self, by: u8, deadline: u8, message: impl Into<Message>) {
        self.send_message(by, envelope(0, 0, deadline), message.into(), Vec::new());
    }

    /// Sends a message with its whole body.
    fn send_message(&mut self, by: u8, envelope: Envelope, message: Message, body: Vec<u8>) {
        let Some(line) = self.line(by) else { return };
        let (connection, host) = (line.connection, line.host);
        if self.announce(by, envelope, message, body.len()) {
            self.receive(connection, host, &body);
        }
    }

    /// Sends a message and records the push that it belongs to. Returns whether it is sent: its
    /// body is due next.
    fn announce(&mut self, by: u8, mut envelope: Envelope, message: Message, body: usize) -> bool {
        self.request += 1;
        envelope.request = RequestId(self.request);
        let Some(line) = self.line(by) else { return false };
        let (connection, host) = (line.connection, line.host);
        let client = line.epoch.map(|epoch| (line.task, epoch));
        let Some(frame) = framed(&envelope, &message, body)
            .filter(|_| self.endpoint.is_between_frames(connection))
        else {
            return false;
        };
        let part = match &message {
            Message::PushPart(part) => Some(part),
            Message::PushEncoded(encoded) => Some(&encoded.part),
            _ => None,
        };
        if let (Some(part), Some((task, epoch))) = (part, client) {
            let push = self.pushes.entry((task, epoch, envelope.sequence.0)).or_default();
            push.operations.insert(match part.operation {
                Operation::Gradient {} => 0,
                Operation::Assign {} => 1,
                Operation::AssignAdd {} => 2,
            });
            push.whole |= part.whole.is_some();
        }
        self.receive(connection, host, &frame);
        true
    }

    /// Delivers bytes, which are valid frames.
    fn receive(&mut self, connection: u64, host: ClientHost, bytes: &[u8]) {
        let sound = self.endpoint.receive(self.now, connection, host, bytes);
        assert!(sound, "the shard refuses a valid frame");
    }

    fn disconnect(&mut self, connection: u64) {
        self.streams.retain(|(stream, _)| *stream != connection);
        self.endpoint.disconnect(self.now, connection);
    }

    /// Advances time with one tick at its end, as for a process that was stopped.
    fn pause(&mut self, time: Duration) {
        self.now += time;
        self.endpoint.tick(self.now);
    }

    /// Does one slice of the work that is due. Returns whether more can be done at once.
    fn work(&mut self) -> bool {
        self.endpoint.has_work() && self.endpoint.work(self.now) == WorkState::More
    }

    /// Does all work that is due and sends all values, until no work is left.
    fn settle(&mut self) {
        while self.endpoint.has_work() {
            while self.work() {}
            self.poll_events();
            self.send();
        }
        self.poll_events();
    }

    /// Sends the values that pulls wait for, which unpins them.
    fn send(&mut self) {
        for (_, mut frames) in std::mem::take(&mut self.streams) {
            let mut values = Vec::new();
            while let Some(frame) = frames.next_frame() {
                let (_, message, body) = parsed(&frame);
                assert!(body.len() as u64 <= PART_BYTES_MAX);
                match message {
                    Message::Pulled(part) => values.push((part.offset, body)),
                    // Encoded values are rounded, so they are not compared.
                    Message::PulledEncoded(encoded) => assert!(encoded.bytes <= PART_BYTES_MAX),
                    other => panic!("{} does not answer a pull", other.name()),
                }
            }
            self.check_values(&values);
        }
    }

    /// Checks that all elements of a partition are equal; otherwise a pull was torn.
    fn check_values(&self, values: &[(u64, Vec<u8>)]) {
        if self.has_raw_pushes {
            return;
        }
        let (mut whole, mut ranges) = (vec![0; self.layout.bytes() as usize], Vec::new());
        for (offset, bytes) in values {
            let range = *offset as usize..*offset as usize + bytes.len();
            // The layout was replaced since this pull.
            let Some(place) = whole.get_mut(range.clone()) else {
                return;
            };
            place.copy_from_slice(bytes);
            ranges.push(range);
        }
        for partition in self.layout.partitions() {
            let range = partition.offset as usize..(partition.offset + partition.bytes) as usize;
            // These layouts are shorter than a part, so a partition is sent in one part.
            if ranges.iter().any(|sent| sent.start <= range.start && range.end <= sent.end) {
                let torn = differing(partition.dtype, &whole[range]);
                assert_eq!(torn, None, "all elements of partition {} are equal", partition.id);
            }
        }
    }

    fn poll_events(&mut self) {
        while let Some(event) = self.endpoint.poll() {
            let (connection, frame) = match event {
                ShardEvent::Send { connection, frame } => (connection, frame),
                ShardEvent::Values { connection, values } => {
                    self.streams.push((connection, values));
                    continue;
                }
                ShardEvent::Close { .. }
                | ShardEvent::Applied { .. }
                | ShardEvent::PartlyApplied { .. } => continue,
                ShardEvent::Shared { .. } => unreachable!("anonymous memory cannot be shared"),
                ShardEvent::ToOwner { .. } => unreachable!("the only shard is the step owner"),
            };
            // Every message of a server is valid.
            let (header, message, _) = parsed(&frame);
            let Some(line) = self.lines.iter_mut().find(|line| line.connection == connection)
            else {
                continue;
            };
            if let Message::Welcome(welcome) = &message {
                if !line.role.is_member() {
                    continue;
                }
                let epoch = welcome.client_epoch.0;
                line.epoch = Some(epoch);
                let (task, incarnation, role) = (line.task, line.incarnation, line.role);
                self.clients.entry((task, epoch)).or_default();
                self.update_layout(&welcome.catalogue);
                self.current.insert(task, (epoch, incarnation, role));
                if role == (Role::Chief {}) {
                    self.newest_chief = self.newest_chief.max(epoch);
                }
                continue;
            }
            let Some((task, epoch)) = line.epoch.map(|epoch| (line.task, epoch)) else {
                continue;
            };
            let client = self.clients.entry((task, epoch)).or_default();
            let key = (task, epoch, header.sequence.0);
            match message {
                Message::Granted(granted) => {
                    client.grants.push(granted.grant);
                    client.push_slots.push(granted.grant.push_slot);
                }
                Message::Reserved(push_slot) => client.push_slots.push(push_slot.push_slot),
                Message::PushAnswer(answer) => {
                    client.push_slots.push(answer.push_slot);
                    client.grants.extend(answer.next);
                    self.settled(key, answer.outcome);
                }
                Message::OutcomeIs(OutcomeIs { state: PushState::Settled { outcome } }) => {
                    self.settled(key, outcome);
                }
                Message::Declared(declared) => self.update_layout(&declared.state),
                _ => {}
            }
        }
    }

    /// Checks that a push has one outcome and that a version belongs to one push.
    fn settled(&mut self, key: Key, outcome: Outcome) {
        let push = self.pushes.entry(key).or_default();
        let before = *push.outcome.get_or_insert(outcome);
        assert_eq!(before, outcome, "push {key:?} has one outcome");
        if let Outcome::Applied { version, .. } = outcome {
            let of = *self.versions.entry(version).or_insert(key);
            assert_eq!(of, key, "version {version} belongs to one push");
        }
    }

    fn update_layout(&mut self, state: &CatalogueState) {
        let digest = match state {
            CatalogueState::Absent {} => None,
            CatalogueState::Declared { digest } | CatalogueState::Ready { digest } => Some(digest),
        };
        let known = self.declarables.iter().find(|known| Some(&known.digest) == digest);
        self.layout = known.map(|known| known.layout.clone()).unwrap_or_default();
    }

    fn line(&mut self, by: u8) -> Option<&mut ClientLine> {
        let count = self.lines.len().max(1);
        self.lines.get_mut(usize::from(by) % count)
    }

    fn client(&mut self, by: u8) -> Option<&mut Client> {
        let line = self.line(by)?;
        let key = (line.task, line.epoch?);
        self.clients.get_mut(&key)
    }

    fn sequence(&mut self, by: u8, choice: Choice) -> u64 {
        let Some(client) = self.client(by) else {
            return 1;
        };
        match choice {
            Choice::Next | Choice::Also => {
                client.next += 1;
                client.next
            }
            Choice::Before(back) => client.next.saturating_sub(back.into()),
            Choice::After(ahead) => {
                client.next = client.next.saturating_add(ahead.into());
                client.next
            }
            Choice::Any(sequence) => sequence,
        }
    }

    /// Chooses one of the client's tokens, the newest first, or a token that it does not have.
    fn token(&mut self, by: u8, back: u8) -> (TokenId, u32, u64) {
        let grants = self.client(by).map(|client| client.grants.as_slice()).unwrap_or_default();
        match grants.iter().rev().nth(usize::from(back % 64) / 16) {
            Some(grant) => (grant.token, grant.generation, grant.step.0),
            None => (TokenId(u64::from(back)), 1, 0),
        }
    }
}

fn number(number: Number, known: u64) -> u64 {
    match number {
        Number::Known => known,
        Number::Zero => 0,
        Number::Any(any) => any,
    }
}

fn envelope(sequence: u64, step: u64, deadline: u8) -> Envelope {
    Envelope {
        sequence: Sequence(sequence),
        step: GlobalStep(step),
        deadline_ms: 30 * u32::from(deadline),
        ..Envelope::default()
    }
}

/// Encodes the header and the meta of a frame; `None` if the message is invalid.
fn framed(envelope: &Envelope, message: &Message, body: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    encode(&mut bytes, envelope, message, BodyStamp::plain(body as u64));
    let header = Header::take(bytes.first_chunk()?).ok()?;
    Message::take(header.kind, Features::NONE, &bytes[Header::BYTES..]).ok()?;
    Some(bytes)
}

/// Parses a frame of the shard, which is valid.
fn parsed(frame: &[u8]) -> (Header, Message, Vec<u8>) {
    let mut reader = FrameReader::new();
    reader.open();
    let mut source = slice_source(frame);
    let Ok(Poll::Frame(header, message)) = reader.poll(&mut source) else {
        panic!("the shard sends an invalid frame: {frame:?}")
    };
    let mut body = vec![0; header.body_bytes as usize];
    if !body.is_empty() {
        let polled = reader.poll_body(&mut source, &mut body);
        assert!(matches!(polled, Ok(BodyPoll::Done)), "a body is whole");
    }
    assert!(matches!(reader.poll(&mut source), Ok(Poll::Pending)) && !reader.has_begun());
    (header, message, body)
}
