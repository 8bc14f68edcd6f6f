//! A shard and its peers, in the hands of an adversary.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::access::{AccessRights, Principal, Roles};
use pushpull_common::ids::{ClientEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence, TokenId};
use pushpull_common::protocol::message::{
    self, Hello, Operation, PushEncoded, PushPart, PushShared, Role, Selection, SharedRange,
};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Message};
use pushpull_store::testing::test_files::TestFiles;

use super::choices::{Choices, KnownNumbers};
use super::messages::{DrawnPart, MessageDraw, framed};
use super::peer_line::PeerLine;
use super::push_records::{PushRecords, check_values};
use super::setting::{LEASE, ShardSetting};
use crate::aggregate::token_ledger::generation_of;
use crate::metrics::Counters;
use crate::shard::output::{PulledParts, ShardOutput};
use crate::shard::values::applier::WorkOutcome;
use crate::shard::{Shard, ShardInput, TICK};
use pushpull_common::peer_origin::PeerOrigin;

/// What a principal that may call functions has.
const CALLERS: Roles = Roles::of(&[Role::Client {}]);

/// More outputs than one input can cause with at most six connections.
const OUTPUTS_MAX: usize = 4096;

/// The maximum number of actions that one input plays.
const ACTIONS_MAX: usize = 400;

/// A shard and the state of its peers.
pub(super) struct Play<'a> {
    draw: MessageDraw<'a>,
    shard: Shard,
    test_files: TestFiles,
    setting: ShardSetting,
    now: Instant,
    lines: Vec<PeerLine>,
    next_connection: u64,
    next_request: u64,
    streams: Vec<PulledParts>,
    records: PushRecords,
    /// The metrics of all processes of the shard together.
    counters: Arc<Counters>,
}

impl<'a> Play<'a> {
    /// Opens the shard of an input.
    pub(super) fn new(mut choices: Choices<'a>) -> Play<'a> {
        let setting = ShardSetting::draw(&mut choices);
        let is_uniform = choices.one_in(2);
        let test_files = TestFiles::default();
        let now = Instant::now();
        let counters = Arc::<Counters>::default();
        let shard = setting.open(&test_files, &counters, now);
        Play {
            counters,
            draw: MessageDraw { choices, known: KnownNumbers::default(), is_uniform },
            shard,
            test_files,
            setting,
            now,
            lines: Vec::new(),
            next_connection: 1,
            next_request: 1,
            streams: Vec::new(),
            records: PushRecords::default(),
        }
    }

    /// Plays all choices. Returns how many gradients the shard has applied, and whether it is the
    /// step owner.
    pub(super) fn run(mut self) -> (u64, bool) {
        if self.draw.choices.one_in(8) {
            // One input in eight starts before any variable is declared.
        } else {
            self.begin();
        }
        for _ in 0..ACTIONS_MAX {
            if self.draw.choices.is_empty() {
                break;
            }
            self.act();
            self.handle_outputs();
            self.check_step();
        }
        self.settle();
        self.reopen();
        self.query_outcomes();
        if self.setting.config.rule().is_none() {
            self.records.check_count(self.counters.gradients_applied.read());
        }
        (self.counters.gradients_applied.read(), self.setting.id.shard == 0)
    }

    /// Connects an honest chief, which declares and initializes the variables.
    fn begin(&mut self) {
        let epoch = if self.setting.id.shard == 0 { 0 } else { 1 };
        let hello =
            Hello { client_epoch: ClientEpoch(epoch), ..self.setting.hello(Role::Chief {}, 0) };
        self.connect(&hello, PeerOrigin::Remote);
        let catalogue = self.setting.catalogue.clone();
        let declare = message::Declare { digest: catalogue.digest() };
        self.send(0, Envelope::default(), declare.into(), catalogue.encode());
        let initialize = message::Initialize { epoch: RestoreEpoch(1) };
        self.send(0, Envelope::default(), initialize.into(), &[]);
        self.settle();
    }

    fn act(&mut self) {
        match self.draw.choices.below(32) {
            0..3 => self.connect_any(),
            3 => self.disconnect(),
            4 => self.advance_time(),
            5..9 => self.settle(),
            9 => {
                self.shard.work(self.now);
            }
            10 => self.read(),
            11 => self.reopen(),
            12 => self.on_owner_message(),
            13 | 14 => self.continue_body(),
            15..22 => self.push(),
            _ => self.send_any_message(),
        }
    }

    /// Connects a peer with a random role and, at times, wrong fields in its hello.
    fn connect_any(&mut self) {
        let hello = self.draw.any_hello(&self.setting);
        let origin = match self.draw.choices.one_in(4) {
            true => PeerOrigin::Unix { same_user: true },
            false => PeerOrigin::Remote,
        };
        self.connect(&hello, origin);
    }

    fn connect(&mut self, hello: &Hello, origin: PeerOrigin) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let envelope = self.envelope(Envelope::default());
        let Some((header, Message::Hello(hello))) = framed(&envelope, &hello.clone().into(), 0)
        else {
            return;
        };
        let epoch = hello.client_epoch;
        let copy = hello.clone();
        self.lines.push(PeerLine { connection, hello: copy, epoch, next: 1, body: None });
        let hello = &hello;
        let header = &header;
        // The door lets in nobody in a role that its principal does not have.
        let client = if self.draw.choices.one_in(2) { Roles::default() } else { CALLERS };
        let rights = AccessRights { roles: client.with(hello.role), ..AccessRights::default() };
        let proven = Arc::new(Principal { name: "stranger".to_owned(), rights });
        let principal = Some(&proven).filter(|_| self.draw.choices.one_in(2));
        let connected = ShardInput::Connected { connection, hello, header, origin, principal };
        self.shard.handle(self.now, connected);
        self.handle_outputs();
    }

    fn disconnect(&mut self) {
        if let Some(index) = self.line() {
            let PeerLine { connection, .. } = self.lines.swap_remove(index);
            self.shard.handle(self.now, ShardInput::Disconnected { connection });
        }
    }

    fn advance_time(&mut self) {
        let times = [TICK, TICK, LEASE / 2, LEASE, 4 * LEASE];
        let time = times[self.draw.choices.below(times.len())];
        self.now += time;
        // The clock jumps, as after a stop of the process. At times the same tick arrives twice.
        let ticks = if self.draw.choices.one_in(2) { 1 } else { 2 };
        for _ in 0..ticks {
            self.shard.handle(self.now, ShardInput::Tick);
        }
    }

    /// Does all work that is due.
    fn settle(&mut self) {
        while self.shard.has_work() {
            match self.shard.work(self.now) {
                WorkOutcome::Blocked => self.send_values(),
                WorkOutcome::Idle | WorkOutcome::More | WorkOutcome::Flushing => {}
                // The shard retries a failed growth only after some time, so this loop cannot wait.
                WorkOutcome::Growing => return self.handle_outputs(),
            }
            self.handle_outputs();
        }
    }

    /// Sends a message of the step owner to the shard, unless the shard is the step owner.
    fn on_owner_message(&mut self) {
        if self.setting.id.shard == 0 {
            return;
        }
        self.shard.handle(self.now, ShardInput::OwnerLink { up: self.draw.choices.one_in(4) });
        let message = self.draw.owner_message(self.setting.config.rule().is_some());
        let step = match self.draw.choices.one_in(3) {
            true => self.draw.number(),
            false => self.shard.step().0,
        };
        let envelope = Envelope {
            step: GlobalStep(step),
            restore_epoch: RestoreEpoch(1),
            ..Envelope::default()
        };
        if let Some((header, message)) = framed(&envelope, &message, 0) {
            self.shard.handle(self.now, ShardInput::Owner { header: &header, message });
        }
    }

    /// Pushes as an honest client does, except for a wrong field now and then.
    fn push(&mut self) {
        let Some(index) = self.line() else { return };
        let operations = [Operation::Gradient {}, Operation::Assign {}, Operation::AssignAdd {}];
        let operation = operations[[0, 0, 0, 0, 1, 2][self.draw.choices.below(6)]];
        if self.draw.choices.one_in(2) {
            let newest = TokenId(u64::MAX);
            self.send(index, Envelope::default(), message::TokenRequest { newest }.into(), &[]);
        }
        if !self.draw.choices.one_in(4) {
            self.send(index, Envelope::default(), message::Reserve {}.into(), &[]);
        }
        let known = self.draw.known.tokens.last().copied();
        let token = known.unwrap_or_else(|| 1 + self.draw.choices.below(16) as u64);
        let token = if self.draw.choices.one_in(6) { self.draw.number() } else { token };
        let push_slot = self.draw.known.push_slots.last().copied().unwrap_or(1);
        let push_slot =
            if self.draw.choices.one_in(6) { self.draw.number() } else { push_slot } as u32;
        let step = self.shard.step().0;
        let step = if self.draw.choices.one_in(6) { self.draw.number() } else { step };
        let sequence = self.sequence(index);
        let generation = match self.draw.choices.one_in(16) {
            true => self.draw.number() as u32,
            false => generation_of(TokenId(token), self.lines[index].epoch),
        };
        let read = self.draw.choices.one_in(3).then(|| self.draw.number());
        let next = self.draw.choices.one_in(3);
        let layout = self.setting.catalogue.layout(self.setting.id);
        let parts = self.draw.parts(&layout, operation);
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        let count = parts.len();
        let stops = self.draw.choices.one_in(6).then(|| self.draw.choices.below(count + 1));
        let shared = self.draw.choices.one_in(4);
        let effect = self.draw.choices.one_in(4).then(|| self.draw.effect());
        for (at, part) in parts.into_iter().enumerate() {
            let DrawnPart { offset, bytes, body, encoding } = part;
            if stops == Some(at) {
                return;
            }
            let last = at + 1 == count;
            let named = if self.draw.choices.one_in(12) { self.draw.number() } else { total };
            let whole = last.then_some(named);
            let offset = if self.draw.choices.one_in(12) { self.draw.number() } else { offset };
            let end = offset.wrapping_add(bytes);
            let token = TokenId(token);
            let next = last && next;
            let part =
                PushPart { operation, token, generation, push_slot, offset, whole, next, read };
            let envelope = Envelope {
                sequence: Sequence(sequence),
                step: GlobalStep(step),
                ..Envelope::default()
            };
            if shared {
                let ranges = List::new(vec![SharedRange { start: offset, end }]).expect("one");
                let PushPart { operation, token, generation, push_slot, whole, next, read, .. } =
                    part;
                let shared = PushShared {
                    operation,
                    token,
                    generation,
                    push_slot,
                    whole,
                    next,
                    read,
                    ranges,
                };
                let shared = match effect {
                    None => shared.into(),
                    Some(effect) => {
                        message::EffectShared { shared: Box::new(shared), effect }.into()
                    }
                };
                self.send(index, envelope, shared, &[]);
            } else {
                let message = match (effect, encoding) {
                    (None, None) => part.into(),
                    (Some(effect), None) => message::EffectPart { part, effect }.into(),
                    (effect, Some((encoding, elements))) => {
                        let encoded = PushEncoded { part, encoding, elements, factor: 1.0 };
                        match effect {
                            None => encoded.into(),
                            Some(effect) => message::EffectEncoded { encoded, effect }.into(),
                        }
                    }
                };
                self.send(index, envelope, message, &body);
            }
        }
    }

    /// Sends a message of any kind, with any number in any field.
    fn send_any_message(&mut self) {
        let Some(index) = self.line() else { return };
        let client = self.lines[index].epoch;
        let (message, body) = self.draw.any_message(client, &self.setting);
        let sequence = match self.draw.choices.one_in(3) {
            true => self.draw.number(),
            false => self.sequence(index),
        };
        let step = match self.draw.choices.one_in(2) {
            true => self.draw.number(),
            false => self.shard.step().0,
        };
        let epoch = if self.draw.choices.one_in(16) { self.draw.number() as u32 } else { 0 };
        let deadlines = [0, 1, 100, u32::MAX];
        let envelope = Envelope {
            sequence: Sequence(sequence),
            step: GlobalStep(step),
            restore_epoch: RestoreEpoch(epoch),
            deadline_ms: deadlines[self.draw.choices.below(deadlines.len())],
            ..Envelope::default()
        };
        self.send(index, envelope, message, &body);
    }

    /// Returns the next sequence for the pushes of a connection, or at times the last one again.
    fn sequence(&mut self, index: usize) -> u64 {
        let again = self.draw.choices.one_in(4);
        let line = &mut self.lines[index];
        line.next += u64::from(!again);
        line.next
    }

    /// Chooses a connection; `None` if there is none.
    fn line(&mut self) -> Option<usize> {
        let count = self.lines.len();
        (count > 0).then(|| self.draw.choices.below(count))
    }

    fn envelope(&mut self, envelope: Envelope) -> Envelope {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        Envelope { request, ..envelope }
    }

    /// Sends a message with its body. The second half of the body may follow later or never.
    fn send(&mut self, index: usize, envelope: Envelope, message: Message, body: &[u8]) {
        let Some(line) = self.lines.get(index).filter(|line| line.body.is_none()) else {
            return;
        };
        let connection = line.connection;
        let envelope = self.envelope(envelope);
        let Some((header, message)) = framed(&envelope, &message, body.len()) else { return };
        self.records.sent(self.lines[index].key(header.sequence), &message);
        if header.body_bytes > 0 {
            self.lines[index].body = Some((body.to_vec(), 0));
        }
        self.shard.handle(self.now, ShardInput::Message { connection, header: &header, message });
        let now = if self.draw.choices.one_in(12) { body.len() / 2 } else { body.len() };
        if header.body_bytes > 0 {
            self.receive(index, connection, now);
        }
        self.handle_outputs();
    }

    /// Sends the rest of a body that is due.
    fn continue_body(&mut self) {
        let due = self.lines.iter().position(|line| line.body.is_some());
        let Some(index) = due else { return };
        let PeerLine { connection, body, .. } = &self.lines[index];
        let rest = body.as_ref().map_or(0, |(body, taken)| body.len() - taken);
        self.receive(index, *connection, rest);
    }

    /// Delivers this many bytes of the body that is due, as the runtime does.
    fn receive(&mut self, index: usize, connection: u64, bytes: usize) {
        let line = self.lines.get_mut(index).filter(|line| line.connection == connection);
        let Some(PeerLine { body: Some((body, taken)), .. }) = line else { return };
        let range = *taken..*taken + bytes;
        if let Some(target) = self.shard.body_target(connection) {
            assert_eq!(target.len(), body.len(), "the target is as long as the body");
            target[range.clone()].copy_from_slice(&body[range]);
        }
        *taken += bytes;
        if *taken == body.len() {
            self.lines[index].body = None;
            self.shard.handle(self.now, ShardInput::Body { connection });
        } else if bytes > 0 {
            self.shard.handle(self.now, ShardInput::Progress { connection });
        }
    }

    /// Pulls all values of the shard, at times twice at once.
    fn read(&mut self) {
        while let Some(index) = self.line() {
            let pull = message::Pull { selection: Selection::All {} };
            self.send(index, Envelope::default(), pull.into(), &[]);
            if !self.draw.choices.one_in(4) {
                break;
            }
        }
        self.send_values();
    }

    /// Sends the values that pulls wait for, which unpins them.
    fn send_values(&mut self) {
        let layout = self.setting.catalogue.layout(self.setting.id);
        for parts in std::mem::take(&mut self.streams) {
            check_values(parts, &layout, self.draw.is_uniform);
        }
    }

    /// Checks that the only shard counts each gradient as a step.
    fn check_step(&self) {
        let config = &self.setting.config;
        if config.rule().is_none() && config.shards == 1 {
            let applied = self.counters.gradients_applied.read();
            assert_eq!(self.shard.step().0, applied, "the only shard counts the steps");
        }
    }

    /// Asks for the outcome of every push of the newest process of each task.
    fn query_outcomes(&mut self) {
        for (hello, sequences) in self.records.end() {
            self.connect(&hello, PeerOrigin::Remote);
            let index = self.lines.len().saturating_sub(1);
            for sequence in sequences {
                let envelope = Envelope { sequence, ..Envelope::default() };
                self.send(index, envelope, message::OutcomeQuery {}.into(), &[]);
            }
            self.lines.clear();
        }
    }

    /// Handles the shard's outputs.
    fn handle_outputs(&mut self) {
        for count in 0.. {
            assert!(count < OUTPUTS_MAX, "the outputs of one input are bounded");
            let Some(output) = self.shard.poll_output() else { break };
            match output {
                ShardOutput::Send { connection, envelope, message, body, .. } => {
                    let sent = framed(&envelope, &message, body.len());
                    assert!(sent.is_some(), "the server sends an invalid message: {message:?}");
                    self.draw.known.learn(&message);
                    let line = self.lines.iter_mut().find(|line| line.connection == connection);
                    let Some(line) = line else { continue };
                    if let Message::Welcome(welcome) = &message {
                        line.epoch = welcome.client_epoch;
                        line.hello.client_epoch = welcome.client_epoch;
                        self.records.welcomed(&line.hello);
                    }
                    self.records.answered(line.key(envelope.sequence), &message);
                }
                ShardOutput::Stream { parts, .. } => self.streams.push(parts),
                ShardOutput::Close { connection } => {
                    if let Some(at) = self.lines.iter().position(|l| l.connection == connection) {
                        self.lines.swap_remove(at);
                        self.shard.handle(self.now, ShardInput::Disconnected { connection });
                    }
                }
                ShardOutput::Shared { message, .. } => self.draw.known.learn(&message),
                ShardOutput::Members { joined, present } => assert!(present <= joined),
                ShardOutput::RestoreShard(_)
                | ShardOutput::SaveShard(_)
                | ShardOutput::Flush(_) => {
                    unreachable!("there is no checkpoint directory and no disk")
                }
                ShardOutput::ToOwner { .. }
                | ShardOutput::SaverOrder(_)
                | ShardOutput::Stop
                | ShardOutput::Event(_) => {}
            }
        }
    }

    /// Kills the process and opens the shard again from its files.
    fn reopen(&mut self) {
        let settles = self.draw.choices.one_in(2);
        if settles {
            self.settle();
        }
        // While work is due, the state in memory may differ from the durable state.
        let before = (!self.shard.has_work()).then(|| self.shard.durable_state());
        self.streams.clear();
        self.lines.clear();
        self.test_files = TestFiles::with(self.test_files.contents());
        self.shard = self.setting.open(&self.test_files, &self.counters, self.now);
        if let Some(before) = before {
            let after = self.shard.durable_state();
            assert!(before == after, "the state changed from {before:?} to {after:?}");
        }
        self.shard.check_invariants();
        self.handle_outputs();
    }
}
