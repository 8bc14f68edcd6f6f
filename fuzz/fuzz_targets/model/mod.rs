//! The clients of the fuzzed shard, and what they know must hold.

mod catalogues;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use arbitrary::Arbitrary;
use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::codec::Codec;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, PartitionId, RequestId, RestoreEpoch, Sequence, ShardId,
    TokenId,
};
use pushpull_common::protocol::message::*;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, Envelope, Grant, Header, Message, Outcome, PushState, encode, version,
};
use pushpull_common::tensor::DType;
use pushpull_ps::fuzzing::{Door, Event, Settings, Values};
use pushpull_ps::optimizer::Optimizer;

use catalogues::{Declarable, declarables, differing, image};

/// Something a client does, or the world around it. `by` chooses a connection.
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

/// A number that a client was told, or another.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum Number {
    Known,
    Zero,
    Any(u64),
}

/// A sequence number: the next (twice, so that it is chosen more often), one before or after it,
/// or any.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum Choice {
    Next,
    Also,
    Before(u8),
    After(u8),
    Any(u64),
}

/// How a push is sent.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Plan {
    /// The partitions it covers, as bits.
    partitions: u8,
    /// The length of a part, in units of 8 bytes.
    part: u16,
    value: u8,
    backwards: bool,
    /// What goes wrong, if anything: see [`Plan::stop`], [`Plan::held`] and [`Plan::excess`].
    trouble: u8,
    next: bool,
    /// How gradients travel: see [`Plan::codec`].
    codec: u8,
}

impl Plan {
    /// The part after which it stops.
    fn stop(&self) -> Option<usize> {
        matches!(self.trouble, 1..=8).then(|| usize::from(self.trouble) - 1)
    }

    /// The bytes of the last part's body that are held back.
    fn held(&self) -> usize {
        if matches!(self.trouble, 4..=24) { 8 * usize::from(self.trouble) - 31 } else { 0 }
    }

    /// What encodes parts of gradients: of equal elements it makes equal ones, however they are cut.
    fn codec(&self) -> Option<Codec> {
        match self.codec % 16 {
            0 => Some(Codec::F16),
            1 => Some(Codec::Bf16),
            2 => Some(Codec::Int8),
            3 => Some(Codec::TopK { fraction: 1.0 }),
            _ => None,
        }
    }

    /// By how much it says to be longer than it is.
    fn excess(&self) -> u64 {
        u64::from(self.trouble == 25)
    }
}

/// A part with its body encoded; as it is, if its elements cannot be.
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

/// A push: the task and epoch of its client, and its sequence.
type Key = (u32, u64, u64);

#[derive(Debug, Default)]
struct Pushed {
    operations: BTreeSet<u8>,
    /// Its last part was sent.
    whole: bool,
    outcome: Option<Outcome>,
}

#[derive(Debug)]
struct Line {
    connection: u64,
    task: u32,
    incarnation: u64,
    is_member: bool,
    /// Once it is welcome, if it is a member.
    epoch: Option<u64>,
    /// What is left of a body that is being sent.
    rest: Vec<u8>,
}

/// What a client has been given.
#[derive(Debug, Default)]
struct Client {
    next: u64,
    grants: Vec<Grant>,
    push_slots: Vec<u32>,
}

pub(crate) struct World {
    door: Door,
    declarables: &'static [Declarable],
    layout: ShardLayout,
    lines: Vec<Line>,
    clients: BTreeMap<(u32, u64), Client>,
    /// The newest epoch of each task, and the incarnation it belongs to.
    current: BTreeMap<u32, (u64, u64)>,
    pushes: BTreeMap<Key, Pushed>,
    versions: BTreeMap<u64, Key>,
    /// Bytes that this model did not make were sent as values.
    untidy: bool,
    /// A slice of work is done after each action, as the runtime does it.
    eager: bool,
    request: u64,
}

impl World {
    pub(crate) fn new(settings: Settings, optimizer: impl Optimizer, eager: bool) -> World {
        World {
            door: Door::new(settings, optimizer),
            declarables: declarables(),
            layout: ShardLayout::default(),
            lines: Vec::new(),
            clients: BTreeMap::new(),
            current: BTreeMap::new(),
            pushes: BTreeMap::new(),
            versions: BTreeMap::new(),
            untidy: false,
            eager,
            request: 0,
        }
    }

    /// A chief declares and initializes the variables, and two workers join.
    pub(crate) fn begin(&mut self, wide: bool) {
        self.connect(0, Role::Chief {}, 0, 0, 0, false);
        self.act(Action::Declare { by: 0, which: u8::from(wide), damage: None });
        self.act(Action::Initialize { by: 0 });
        let events = self.door.settle();
        self.hear(events);
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
                let known = self.current.get(&task).map_or(0, |&(epoch, _)| epoch);
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
                    self.door.disconnect(line.connection);
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
                self.say(by, Envelope::default(), Declare { digest }.into(), body);
            }
            Action::Initialize { by } => self.ask(by, 0, Initialize { epoch: RestoreEpoch(1) }),
            Action::AwaitReady { by, deadline } => self.ask(by, deadline, AwaitReady {}),
            Action::FetchCatalogue { by } => self.ask(by, 0, FetchCatalogue {}),
            Action::Token { by, deadline, newest } => {
                let known = self.client(by).and_then(|client| client.grants.last());
                let known = known.map_or(0, |grant| grant.token.0);
                self.ask(by, deadline, TokenRequest { newest: TokenId(number(newest, known)) });
            }
            Action::Return { by, token } => {
                let (token, generation, _) = self.token(by, token);
                self.ask(by, 0, ReturnToken { token, generation });
            }
            Action::Reserve { by, deadline } => self.ask(by, deadline, Reserve {}),
            Action::Push { by, sequence, operation, token, push_slot, plan } => {
                self.push(by, sequence, operation, token, push_slot, &plan);
            }
            Action::Body { by, bytes } => self.body(by, usize::from(bytes)),
            Action::Withdraw { by, sequence } => {
                let sequence = self.sequence(by, sequence);
                self.say(by, envelope(sequence, 0, 0), Withdraw {}.into(), Vec::new());
            }
            Action::Query { by, sequence } => {
                let sequence = self.sequence(by, sequence);
                self.say(by, envelope(sequence, 0, 0), OutcomeQuery {}.into(), Vec::new());
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
                self.say(by, envelope, Pull { selection }.into(), Vec::new());
            }
            Action::Finish { by } => self.ask(by, 0, Finish {}),
            Action::Leave { by } => self.ask(by, 0, Leave {}),
            Action::Advance { ticks } => self.door.advance(u32::from(ticks % 64)),
            Action::Pause { ms } => self.door.pause(Duration::from_millis(ms.into())),
            Action::Train { by, plan } => self.train(by, &plan),
            Action::Settle => {
                let events = self.door.settle();
                self.hear(events);
            }
            Action::Work => {
                self.door.work();
            }
            Action::Send => self.send(),
        }
        if self.eager {
            self.door.work();
        }
        self.listen();
        let metrics = self.door.metrics();
        assert_eq!(metrics.global_step, metrics.gradients_applied, "one owner, one shard");
    }

    /// Ends the world: whatever was whole is applied, and the books must balance.
    pub(crate) fn finish(mut self) {
        for line in std::mem::take(&mut self.lines) {
            self.door.disconnect(line.connection);
        }
        let events = self.door.settle();
        self.hear(events);
        let asked: Vec<Key> = self.pushes.keys().copied().collect();
        for (task, (epoch, incarnation)) in self.current.clone() {
            self.connect(task, Role::Worker {}, incarnation, epoch, 0, false);
            let by = (self.lines.len() - 1) as u8;
            assert_eq!(self.lines[usize::from(by)].epoch, Some(epoch), "nobody came after it");
            for &(_, _, sequence) in asked.iter().filter(|key| (key.0, key.1) == (task, epoch)) {
                self.say(by, envelope(sequence, 0, 0), OutcomeQuery {}.into(), Vec::new());
                self.listen();
            }
        }
        let (mut applied, mut unknown) = (0, 0);
        for push in self.pushes.values().filter(|push| push.operations.contains(&0)) {
            let sure = push.operations.len() == 1;
            match push.outcome {
                Some(Outcome::Applied { .. }) if sure => applied += 1,
                // Sent as more than one operation, or by a self that nobody can ask for any more.
                Some(Outcome::Applied { .. }) => unknown += 1,
                None if push.whole => unknown += 1,
                _ => {}
            }
        }
        let step = self.door.metrics().global_step;
        assert!((applied..=applied + unknown).contains(&step), "{applied} + {unknown}, not {step}");
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
            // A peer is a task of the servers.
            job: Text::clipped(if role == (Role::Peer {}) { "ps" } else { "worker" }),
            task,
            shard: ShardId::default(),
            incarnation: Incarnation(incarnation),
            client_epoch: ClientEpoch(epoch),
            seen_epoch: RestoreEpoch(seen_epoch),
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: List::default(),
            auth: List::default(),
        };
        let message = Message::from(hello.clone());
        let Some((header, _)) = framed(&Envelope::default(), &message, 0) else {
            return;
        };
        let connection = self.door.connect(&hello, &header, remote);
        let (is_member, rest) = (role.is_member(), Vec::new());
        self.lines.push(Line { connection, task, incarnation, epoch: None, is_member, rest });
        self.listen();
    }

    fn raw(&mut self, by: u8, kind: u8, meta: &[u8], numbers: (u8, u8), body: usize) {
        let kind = Message::KINDS[usize::from(kind) % Message::KINDS.len()];
        let Ok(message) = Message::take(kind, meta) else {
            return;
        };
        let body = body.min(Message::body_limit(kind).unwrap_or(0) as usize);
        let (sequence, step) = (u64::from(numbers.0), u64::from(numbers.1));
        self.untidy |= matches!(
            message,
            Message::PushPart(_) | Message::PushEncoded(_) | Message::PushShared(_)
        );
        self.say(by, envelope(sequence, step, 0), message, vec![0x40; body]);
    }

    fn push(&mut self, by: u8, sequence: Choice, operation: u8, token: u8, push_slot: u8, plan: &Plan) {
        let sequence = self.sequence(by, sequence);
        let Some(line) = self.line(by).filter(|line| line.rest.is_empty()) else {
            return;
        };
        let connection = line.connection;
        let (token, generation, step) = self.token(by, token);
        let push_slot = self
            .client(by)
            .and_then(|client| client.push_slots.iter().rev().nth(usize::from(push_slot % 64) / 16).copied());
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
        // A few parts each, or a body of one word after the other would take all the time.
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
                // As honest as the step is.
                read: (step % 2 == 1).then_some(step),
            };
            let body = image[range.start as usize..range.end as usize].to_vec();
            let (message, mut body) = match (plan.codec(), operation) {
                (Some(codec), Operation::Gradient {}) if !range.is_empty() => {
                    encoded(part, body, self.layout.at(range.start), codec)
                }
                _ => (part.into(), body),
            };
            let held = if last || stops { plan.held().min(body.len()) } else { 0 };
            let held = body.split_off(body.len() - held);
            let length = body.len() + held.len();
            self.announce(by, envelope(sequence, step, 0), message, length);
            self.door.body(connection, &body);
            if let Some(line) = self.line(by) {
                line.rest = held;
            }
            self.listen();
            if stops || !self.door.may_send(connection) {
                break;
            }
        }
    }

    /// A step as an honest client makes it, but for the plan.
    fn train(&mut self, by: u8, plan: &Plan) {
        let newest = Number::Known;
        self.act(Action::Token { by, deadline: 0, newest });
        self.act(Action::Reserve { by, deadline: 0 });
        self.push(by, Choice::Next, 2, 0, 0, plan);
    }

    fn body(&mut self, by: u8, bytes: usize) {
        let Some(line) = self.line(by) else { return };
        let connection = line.connection;
        let count = bytes.min(line.rest.len());
        let now: Vec<u8> = line.rest.drain(..count).collect();
        self.door.body(connection, &now);
    }

    fn ask(&mut self, by: u8, deadline: u8, message: impl Into<Message>) {
        self.say(by, envelope(0, 0, deadline), message.into(), Vec::new());
    }

    /// Sends a message with its whole body.
    fn say(&mut self, by: u8, envelope: Envelope, message: Message, body: Vec<u8>) {
        let Some(line) = self.line(by) else { return };
        let connection = line.connection;
        if self.door.may_send(connection) {
            self.announce(by, envelope, message, body.len());
            self.door.body(connection, &body);
        }
    }

    /// Sends a message; its body is due.
    fn announce(&mut self, by: u8, mut envelope: Envelope, message: Message, body: usize) {
        self.request += 1;
        envelope.request = RequestId(self.request);
        let Some(line) = self.line(by) else { return };
        let (connection, client) = (line.connection, line.epoch.map(|epoch| (line.task, epoch)));
        let Some((header, message)) = framed(&envelope, &message, body) else {
            return;
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
        self.door.message(connection, &header, message);
    }

    fn send(&mut self) {
        for (_, values) in self.door.send() {
            self.check_values(&values);
        }
    }

    /// All elements of a partition are equal, or a pull was torn.
    fn check_values(&self, values: &Values) {
        if self.untidy {
            return;
        }
        let (mut whole, mut ranges) = (vec![0; self.layout.bytes() as usize], Vec::new());
        for (offset, bytes) in values {
            let range = *offset as usize..*offset as usize + bytes.len();
            // A layout that was replaced since is of no interest.
            let Some(place) = whole.get_mut(range.clone()) else {
                return;
            };
            place.copy_from_slice(bytes);
            ranges.push(range);
        }
        for partition in self.layout.partitions() {
            let range = partition.offset as usize..(partition.offset + partition.bytes) as usize;
            // No part is longer than these layouts, so a partition is sent in one.
            if ranges.iter().any(|sent| sent.start <= range.start && range.end <= sent.end) {
                let torn = differing(partition.dtype, &whole[range]);
                assert_eq!(torn, None, "all elements of partition {} are equal", partition.id);
            }
        }
    }

    fn listen(&mut self) {
        let events = self.door.poll();
        self.hear(events);
    }

    fn hear(&mut self, events: Vec<Event>) {
        for event in events {
            let Event::Sent { connection, envelope, message, body } = event else {
                continue;
            };
            // Whatever a server says can be said.
            assert!(framed(&envelope, &message, body.len()).is_some(), "{message:?}");
            let Some(line) = self.lines.iter_mut().find(|line| line.connection == connection)
            else {
                continue;
            };
            if let Message::Welcome(welcome) = &message {
                if !line.is_member {
                    continue;
                }
                let epoch = welcome.client_epoch.0;
                line.epoch = Some(epoch);
                let (task, incarnation) = (line.task, line.incarnation);
                self.clients.entry((task, epoch)).or_default();
                self.see(&welcome.catalogue);
                self.current.insert(task, (epoch, incarnation));
                continue;
            }
            let Some((task, epoch)) = line.epoch.map(|epoch| (line.task, epoch)) else {
                continue;
            };
            let client = self.clients.entry((task, epoch)).or_default();
            let key = (task, epoch, envelope.sequence.0);
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
                Message::Declared(declared) => self.see(&declared.state),
                _ => {}
            }
        }
    }

    /// A push has one outcome, and a version belongs to one push.
    fn settled(&mut self, key: Key, outcome: Outcome) {
        let push = self.pushes.entry(key).or_default();
        let before = *push.outcome.get_or_insert(outcome);
        assert_eq!(before, outcome, "push {key:?} has one outcome");
        if let Outcome::Applied { version, .. } = outcome {
            let of = *self.versions.entry(version).or_insert(key);
            assert_eq!(of, key, "version {version} belongs to one push");
        }
    }

    fn see(&mut self, state: &CatalogueState) {
        let digest = match state {
            CatalogueState::Absent {} => None,
            CatalogueState::Declared { digest } | CatalogueState::Ready { digest } => Some(digest),
        };
        let known = self.declarables.iter().find(|known| Some(&known.digest) == digest);
        self.layout = known.map(|known| known.layout.clone()).unwrap_or_default();
    }

    fn line(&mut self, by: u8) -> Option<&mut Line> {
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

    /// A token that the client has been given, the newest first, or one that it has not.
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

/// A message as it arrives: encoded and decoded.
fn framed(envelope: &Envelope, message: &Message, body: usize) -> Option<(Header, Message)> {
    let mut bytes = Vec::new();
    encode(&mut bytes, envelope, message, BodyStamp::plain(body as u64));
    let header = Header::take(bytes.first_chunk()?).ok()?;
    let message = Message::take(header.kind, &bytes[Header::BYTES..]).ok()?;
    Some((header, message))
}
