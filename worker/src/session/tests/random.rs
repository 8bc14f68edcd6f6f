//! Random tests of a session and a few shards: lost connections, cancelled operations and short
//! timeouts.
//!
//! The properties:
//!
//! - Every operation is answered once, by its deadline.
//! - A push counts once, and on all of its shards or on none.
//! - No token is lost.
//! - Once the network heals, everything ends.
//! - After a restore, all pending operations fail, and nothing from before counts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, Sequence, VariableId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Grant, Message, Outcome};

use super::model::{FillByte, RESTORED_STEP, ShardModel};
use super::world::{OWNER, SentFrame, SessionWorld, header, ms, order, plan, shard};
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::gradient_buffer::{GradientBuffer, GradientSlot, PushBufferId, SlotMemory};
use crate::gradients::scatter::Scatter;
use crate::gradients::scatter::ScatteredGradients;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, PushOrder, Reply, SessionCommand, SessionInput, SessionOutput};
use crate::testing::seeded_random::SeededRandom;

/// The connection to one shard.
#[derive(Default)]
struct TestConnection {
    /// The session has requested a connection.
    requested: bool,
    connected: bool,
    to_shard: VecDeque<SentFrame>,
    /// The body that follows the last delivered message.
    body: Option<Vec<u8>>,
}

/// The result that a caller waits for.
enum AwaitedResult {
    Token,
    Pull,
    PullOne(VariableId),
    /// A push; every byte has this value.
    Push(u8),
    Begin(u8),
    Nothing,
}

/// A slot of a push buffer, as the shard and the worker share it: its bytes, and whether a gradient
/// of the worker uses it.
#[derive(Clone, Debug)]
struct SlotView {
    number: u32,
    fill: FillByte,
    taken: Arc<AtomicBool>,
}

/// A slot in use by the worker.
#[derive(Debug)]
struct TakenSlot {
    bytes: AlignedBuffer,
    view: SlotView,
}

impl SlotMemory for TakenSlot {
    fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.bytes_mut()
    }
}

impl Drop for TakenSlot {
    fn drop(&mut self) {
        self.view.taken.store(false, Ordering::Relaxed);
    }
}

struct RandomTest {
    random: SeededRandom,
    plan: Arc<ShardingPlan>,
    world: SessionWorld,
    shards: Vec<ShardModel>,
    connections: Vec<TestConnection>,
    waits: BTreeMap<OpId, (AwaitedResult, Instant)>,
    tokens: Vec<Grant>,
    /// A push that was begun, the value of its bytes, and how many variables have been sent.
    begun: Option<(Sequence, u8, u32)>,
    next_fill: u8,
    /// On how many shards each push has bytes.
    shards_with_bytes: BTreeMap<u8, usize>,
    /// Pushes reported to their callers as applied.
    reported_applied: Vec<u8>,
    /// Pushes reported to their callers as stale.
    reported_stale: Vec<u8>,
    synchronous: bool,
    /// Whether transports pass descriptors, and the push buffers received over them.
    same_host: bool,
    push_buffers: BTreeMap<usize, (PushBufferId, Vec<SlotView>)>,
    /// How many shares of pushes were written into push slots.
    written: usize,
    next_op: u64,
    /// The shards still to be restored, once a restore has begun.
    restoring: Option<Vec<usize>>,
}

impl RandomTest {
    fn new(seed: u64) -> RandomTest {
        RandomTest::of(seed, false, false)
    }

    fn of(seed: u64, synchronous: bool, owner_first: bool) -> RandomTest {
        let mut random = SeededRandom(seed);
        let shards = 1 + random.below(3) as u32;
        let plan = Arc::into_inner(plan(shards, 1 + random.below(9))).unwrap();
        let plan = Arc::new(plan.with_parts_of(8 + 8 * random.below(4)));
        let push_slots = 1 + random.below(3) as usize;
        let bytes = |task| plan.catalogue().layout(shard(task)).bytes();
        let same_host = random.below(2) == 0;
        let mut test = RandomTest {
            shards: (0..shards)
                .map(|task| ShardModel::new(task == 0, bytes(task), push_slots))
                .collect(),
            connections: (0..shards).map(|_| TestConnection::default()).collect(),
            random,
            world: SessionWorld::with(|config| config.incarnation.0 = seed),
            waits: BTreeMap::new(),
            tokens: Vec::new(),
            begun: None,
            next_fill: 1,
            shards_with_bytes: BTreeMap::new(),
            reported_applied: Vec::new(),
            reported_stale: Vec::new(),
            synchronous,
            same_host,
            push_buffers: BTreeMap::new(),
            written: 0,
            next_op: 1,
            restoring: None,
            plan,
        };
        for shard in &mut test.shards {
            shard.synchronous = synchronous;
            shard.owner_first = owner_first;
        }
        let shards = test.plan.shards().to_vec();
        test.call(SessionCommand::Open { shards }, AwaitedResult::Nothing, 60_000);
        test.run_network(200);
        test.call(SessionCommand::Join { plan: test.plan.clone() }, AwaitedResult::Nothing, 60_000);
        assert!(test.waits.is_empty());
        test
    }

    fn call(&mut self, command: SessionCommand, waits: AwaitedResult, timeout_ms: u64) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let deadline = self.world.now + ms(timeout_ms);
        self.waits.insert(op, (waits, deadline));
        self.input(SessionInput::Command { op, command, deadline });
    }

    fn input(&mut self, input: SessionInput) {
        let now = self.world.now;
        self.world.session.handle(now, input);
        self.world.session.check_invariants();
        while let Some(output) = self.world.session.poll_output() {
            match output {
                SessionOutput::Connect { link, .. } => {
                    assert!(!self.connections[link].requested && !self.connections[link].connected);
                    self.connections[link].requested = true;
                }
                SessionOutput::Disconnect { link } => {
                    self.push_buffers.remove(&link);
                    self.connections[link] = TestConnection::default();
                    self.shards[link].disconnected();
                }
                SessionOutput::Send { link, envelope, message, body, .. } => {
                    assert!(self.connections[link].connected);
                    let frame = SentFrame { link, envelope, message, body: body.concat() };
                    self.connections[link].to_shard.push_back(frame);
                }
                SessionOutput::Reply { op, reply } => self.replied(op, reply),
                SessionOutput::Progress { .. } => {}
                SessionOutput::SharedValues { .. } => unreachable!("no shard shares its values"),
                SessionOutput::SharedPushBuffer { link, push_buffer, shared, .. } => {
                    let view = |&number: &u32| {
                        let fill = self.shards[link].shared[&number].clone();
                        let taken = Arc::default();
                        SlotView { number, fill, taken }
                    };
                    let push_slots = shared.push_slots.items().iter().map(view).collect();
                    self.push_buffers.insert(link, (push_buffer, push_slots));
                }
            }
        }
    }

    fn replied(&mut self, op: OpId, reply: Result<Reply, Error>) {
        let (waits, deadline) = self.waits.remove(&op).expect("an operation is answered once");
        assert!(self.world.now <= deadline, "an operation is answered by its deadline");
        match (waits, reply) {
            (_, Err(Error::Timeout { .. } | Error::Window { .. })) => {}
            (_, Err(Error::RolledBack { to_step, .. })) if self.restoring.is_some() => {
                assert_eq!(GlobalStep(to_step), RESTORED_STEP);
            }
            (AwaitedResult::Token, Ok(Reply::Token(Some(grant)))) => self.tokens.push(grant),
            (AwaitedResult::Pull, Ok(Reply::Pulled { buffer, .. })) => {
                let first = buffer.bytes()[0];
                for id in 0..self.shards.len() as u32 {
                    let values = &buffer.bytes()[self.plan.range(VariableId(id))];
                    let all = if self.synchronous { first } else { values[0] };
                    assert!(
                        values.iter().all(|byte| *byte == all),
                        "the values are of one version"
                    );
                }
            }
            (AwaitedResult::PullOne(variable), Ok(Reply::Pulled { buffer, .. })) => {
                let values = &buffer.bytes()[..self.plan.range(variable).len()];
                assert!(
                    values.iter().all(|byte| *byte == values[0]),
                    "the values are of one version"
                );
            }
            (AwaitedResult::Push(fill), Ok(Reply::Pushed { outcome })) => match outcome {
                Outcome::Stale { .. } => self.reported_stale.push(fill),
                _ => self.reported_applied.push(fill),
            },
            (AwaitedResult::Begin(fill), Ok(Reply::Begun { sequence })) => {
                self.begun = Some((sequence, fill, 0));
            }
            (AwaitedResult::Nothing, Ok(_)) => {}
            (_, reply) => panic!("{reply:?}"),
        }
    }

    /// One caller does something.
    fn act(&mut self) {
        let timeout = [50, 500, 5_000, 30_000][self.random.below(4) as usize];
        let token = self.tokens.len().checked_sub(1);
        match (self.random.below(14), token, self.begun) {
            (10, _, _) => self.tokens.extend(self.world.session.unclaimed().claim()),
            (11, Some(_), _) if self.next_fill < 250 => self.push_scattered(timeout),
            (13, _, _) => {
                let variable = VariableId(self.random.below(self.shards.len() as u64) as u32);
                let plan = self.plan.clone();
                let buffer = AlignedBuffer::of_bytes(plan.range(variable).len());
                let pull = SessionCommand::PullVariable { plan, variable, buffer, token: None };
                self.call(pull, AwaitedResult::PullOne(variable), timeout);
            }
            (0 | 1, _, _) => self.call(SessionCommand::Token, AwaitedResult::Token, timeout),
            (2, _, _) => {
                let (plan, buffer) =
                    (self.plan.clone(), AlignedBuffer::of_bytes(self.plan.bytes()));
                self.call(
                    SessionCommand::Pull { plan, buffer, token: None },
                    AwaitedResult::Pull,
                    timeout,
                );
            }
            (3..=5, Some(_), _) if self.next_fill < 250 && self.same_host => {
                self.push_written(timeout)
            }
            (3..=5, Some(_), _) if self.next_fill < 250 => {
                let grant = self.tokens.pop();
                let fill = self.fill();
                let mut order = order(&self.plan, grant, fill);
                if self.random.below(4) == 0 {
                    let keep = self.random.below(self.shards.len() as u64) as u32;
                    order.parts.retain(|(to, _)| to.task == keep);
                }
                self.shards_with_bytes.insert(fill, order.parts.len());
                self.call(SessionCommand::Push { order }, AwaitedResult::Push(fill), timeout);
            }
            (6, Some(_), None) if self.next_fill < 250 => {
                let grant = self.tokens.pop().unwrap();
                let fill = self.fill();
                let mut order = order(&self.plan, Some(grant), fill);
                order.parts.clear();
                self.call(SessionCommand::Begin { order }, AwaitedResult::Begin(fill), timeout);
            }
            (6 | 7, _, Some((sequence, fill, sent))) => {
                self.continue_push(sequence, fill, sent, timeout)
            }
            (8, Some(_), _) => {
                let grant = self.tokens.pop().unwrap();
                self.input(SessionInput::TokenDropped { grant });
            }
            (9, _, _) if !self.waits.is_empty() => {
                let at = self.random.below(self.waits.len() as u64) as usize;
                let op = *self.waits.keys().nth(at).unwrap();
                self.waits.remove(&op);
                self.input(SessionInput::Cancelled { op });
            }
            _ => {}
        }
    }

    fn fill(&mut self) -> u8 {
        self.next_fill += 1;
        self.next_fill - 1
    }

    /// Pushes all variables, from push slots where they are available.
    fn push_written(&mut self, timeout: u64) {
        let grant = self.tokens.pop();
        let fill = self.fill();
        let mut buffer = GradientBuffer::new(self.plan.bytes(), self.plan.runs(|_| true).into());
        let bytes = self.plan.bytes();
        let take = |of| {
            let link = self.plan.shards().iter().position(|&shard| shard == of)?;
            let (push_buffer, push_slots) = self.push_buffers.get(&link)?;
            let view = push_slots
                .iter()
                .find(|push_slot| !push_slot.taken.swap(true, Ordering::Relaxed))?
                .clone();
            view.fill.store(fill, Ordering::Relaxed);
            let number = view.number;
            let bytes = AlignedBuffer::of_bytes(bytes);
            Some(GradientSlot {
                shard: of,
                push_buffer: *push_buffer,
                number,
                memory: Box::new(TakenSlot { bytes, view }),
            })
        };
        buffer.renew(|_| true, take);
        self.written += buffer.slot_count();
        for id in (0..self.shards.len() as u32).map(VariableId) {
            let range = self.plan.range(id);
            buffer.slice_mut(range.start..range.end.next_multiple_of(8)).fill(fill);
        }
        let all = (0..self.shards.len() as u32).map(VariableId);
        let scatter = Arc::new(Scatter::new(&self.plan, all));
        let factors = BTreeMap::new();
        let scattered = ScatteredGradients { scatter, buffer: Arc::new(buffer), factors };
        let order = order(&self.plan, grant, fill);
        let order = PushOrder { scattered: Some(scattered), parts: Vec::new(), ..order };
        self.shards_with_bytes.insert(fill, self.shards.len());
        self.call(SessionCommand::Push { order }, AwaitedResult::Push(fill), timeout);
    }

    /// Pushes all variables from private memory.
    fn push_scattered(&mut self, timeout: u64) {
        let grant = self.tokens.pop();
        let fill = self.fill();
        let all = (0..self.shards.len() as u32).map(VariableId);
        let scatter = Arc::new(Scatter::new(&self.plan, all));
        let mut buffer = GradientBuffer::new(self.plan.bytes(), Arc::default());
        buffer.slice_mut(0..self.plan.bytes()).fill(fill);
        let scattered =
            ScatteredGradients { scatter, buffer: Arc::new(buffer), factors: BTreeMap::new() };
        let order = order(&self.plan, grant, fill);
        let order = PushOrder { scattered: Some(scattered), parts: Vec::new(), ..order };
        self.shards_with_bytes.insert(fill, self.shards.len());
        self.call(SessionCommand::Push { order }, AwaitedResult::Push(fill), timeout);
    }

    /// Continues a push that was begun: one more variable, its end, or its abandonment.
    fn continue_push(&mut self, sequence: Sequence, fill: u8, sent: u32, timeout: u64) {
        match self.random.below(4) {
            0 => {
                self.begun = None;
                self.input(SessionInput::Abandoned { sequence });
            }
            1 if sent > 0 => {
                self.begun = None;
                self.call(SessionCommand::End { sequence }, AwaitedResult::Push(fill), timeout);
            }
            _ if (sent as usize) < self.shards.len() => {
                let body = |range: std::ops::Range<usize>| Bytes::from(vec![fill; range.len()]);
                let parts = Scatter::new(&self.plan, [VariableId(sent)].into_iter()).parts(body);
                self.begun = Some((sequence, fill, sent + 1));
                self.shards_with_bytes.insert(fill, sent as usize + 1);
                self.call(
                    SessionCommand::AddParts { sequence, staged: None, parts },
                    AwaitedResult::Nothing,
                    timeout,
                );
            }
            _ => {}
        }
    }

    /// One event on a connection or in a shard.
    fn network(&mut self) {
        let link = self.random.below(self.connections.len() as u64) as usize;
        let connection = &mut self.connections[link];
        if connection.requested {
            connection.requested = false;
            connection.connected = true;
            let same_host = self.same_host;
            return self.input(SessionInput::Connected { link, same_host });
        }
        if let Some(body) = connection.body.take() {
            self.world.session.with_targets(link, |targets| {
                let mut rest = &body[..];
                for target in targets.into_iter().flatten() {
                    let (head, tail) = rest.split_at(target.len());
                    target.copy_from_slice(head);
                    rest = tail;
                }
                assert!(rest.is_empty() || rest.len() == body.len());
            });
            return self.input(SessionInput::Body { link });
        }
        match self.random.below(4) {
            0 if self.synchronous => ShardModel::accept_one(&mut self.shards),
            0 => self.shards[link].work(),
            1 if link == OWNER => {
                self.shards.iter_mut().for_each(ShardModel::apply_accepted);
                self.shards[link].grant_waiting();
            }
            2 if connection.connected => {
                if let Some(frame) = connection.to_shard.pop_front() {
                    if matches!(frame.message, Message::TokenRequest(_)) {
                        // A token's step begins once the previous one is applied.
                        self.shards.iter_mut().for_each(ShardModel::apply_accepted);
                    }
                    self.shards[link].handle(&frame);
                }
            }
            _ => {
                let Some((request, step, message, body)) = self.shards[link].answers.pop_front()
                else {
                    return;
                };
                let header = header(request, self.shards[link].epoch, step, &message, body.len());
                connection.body = (!body.is_empty()).then_some(body);
                self.input(SessionInput::Message { link, header, message });
            }
        }
    }

    /// Loses a connection at any point, sometimes by a crash of the server, or a push slot.
    fn inject_fault(&mut self) {
        let link = self.random.below(self.connections.len() as u64) as usize;
        if self.random.below(3) == 0 {
            return self.shards[link].steal_push_slots();
        }
        let connection = std::mem::take(&mut self.connections[link]);
        self.push_buffers.remove(&link);
        if connection.connected || connection.requested {
            match self.random.below(2) {
                0 => self.shards[link].disconnected(),
                _ => self.shards[link].restart(),
            }
            self.input(SessionInput::Disconnected { link, error: "reset".into() });
        }
    }

    /// Restores the next shard, which closes its connections.
    fn restore_one(&mut self) {
        let Some(link) = self.restoring.as_mut().and_then(Vec::pop) else { return };
        self.shards[link].begin_epoch();
        let connection = std::mem::take(&mut self.connections[link]);
        self.push_buffers.remove(&link);
        if connection.connected || connection.requested {
            self.input(SessionInput::Disconnected { link, error: "restored".into() });
        }
    }

    /// Runs 400 random events; a restore of all shards begins at one of them.
    fn run_with_restore(mut self) -> usize {
        let begins = self.random.below(350);
        for turn in 0..400 {
            if turn == begins {
                self.restoring = Some((0..self.shards.len()).rev().collect());
            }
            if self.random.below(10) == 0 {
                self.restore_one();
            }
            self.random_event();
        }
        while self.restoring.as_ref().is_some_and(|left| !left.is_empty()) {
            self.restore_one();
        }
        self.run_network(1_500);
        assert!(self.waits.is_empty(), "{:?} operations still wait", self.waits.len());
        // The tokens of callers are void.
        while let Some(grant) = self.tokens.pop() {
            self.input(SessionInput::TokenDropped { grant });
        }
        self.call(SessionCommand::Token, AwaitedResult::Token, 60_000);
        assert!(self.waits.is_empty() && self.tokens.is_empty(), "the session has ended");
        assert_eq!(self.world.session.unclaimed().claim(), None);
        for shard in &self.shards {
            assert!(
                shard.applied.is_empty() && shard.out.is_empty(),
                "nothing from before the restore counts"
            );
        }
        self.written
    }

    fn advance(&mut self, ms_: u64) {
        let end = self.world.now + ms(ms_);
        while self.world.session.wake_at(self.world.now) <= end {
            self.world.now = self.world.session.wake_at(self.world.now).max(self.world.now);
            self.input(SessionInput::Tick);
            assert!(
                self.world.session.wake_at(self.world.now) > self.world.now,
                "the session would spin"
            );
        }
        self.world.now = end;
    }

    /// Runs the network without faults for this many milliseconds.
    fn run_network(&mut self, for_ms: u64) {
        for _ in 0..for_ms {
            for _ in 0..30 {
                self.network();
            }
            self.advance(1);
        }
    }

    /// Runs the test. Returns how many shares of pushes were written into push slots.
    fn run(mut self) -> usize {
        for _ in 0..400 {
            self.random_event();
        }
        self.drain();
        self.check();
        self.written
    }

    fn random_event(&mut self) {
        match self.random.below(40) {
            0..6 => self.act(),
            6 => self.inject_fault(),
            10 if self.synchronous => ShardModel::reject_one_as_stale(&mut self.shards),
            11 if self.synchronous => self.shards[OWNER].expire_waiting_pushes(),
            7..10 => {
                let time = self.random.below(60);
                self.advance(time);
            }
            _ => self.network(),
        }
    }

    /// Ends all faults: every operation is answered, and what is left over is given up.
    fn drain(&mut self) {
        if let Some((sequence, _, _)) = self.begun.take() {
            self.input(SessionInput::Abandoned { sequence });
        }
        for _ in 0..60 {
            // Tokens whose answers were lost come with the next request.
            self.call(SessionCommand::Token, AwaitedResult::Token, 60_000);
            self.run_network(50);
            while let Some(grant) = self.tokens.pop() {
                self.input(SessionInput::TokenDropped { grant });
            }
        }
        // All operations were answered long before their deadlines, which are up to 30 s away.
        assert!(self.waits.is_empty(), "{:?} operations still wait", self.waits.len());
        self.run_network(700);
    }

    /// Returns how many pushes were reported to their callers.
    fn ended(&self) -> usize {
        self.reported_applied.len() + self.reported_stale.len()
    }

    fn check(&mut self) {
        self.shards.iter_mut().for_each(ShardModel::apply_accepted);
        let owner = &self.shards[OWNER];
        assert!(owner.out.is_empty(), "tokens {:?} are lost", owner.out);
        for fill in 1..self.next_fill {
            let counts: Vec<usize> =
                self.shards.iter().filter_map(|shard| shard.applied.get(&fill)).copied().collect();
            assert!(counts.iter().all(|&count| count == 1), "push {fill} counts {counts:?} times");
            assert!(
                !self.reported_applied.contains(&fill) || !counts.is_empty(),
                "push {fill} is lost"
            );
            let counted = !self.reported_stale.contains(&fill) || counts.is_empty();
            assert!(counted, "push {fill} counts, but was reported as stale");
            let all = match self.synchronous {
                true => self.shards.len(),
                false => self.shards_with_bytes.get(&fill).copied().unwrap_or(0),
            };
            assert!([0, all].contains(&counts.len()), "push {fill} counts on some shards only");
        }
        // Nothing is left that would block the window.
        let end = self.ended() + WINDOW as usize + 1;
        self.call(SessionCommand::Token, AwaitedResult::Token, 60_000);
        self.run_network(100);
        for _ in self.ended()..end {
            let grant = self.tokens.pop().expect("a token");
            let order = order(&self.plan, Some(grant), 255);
            let waiting = self.ended();
            self.call(SessionCommand::Push { order }, AwaitedResult::Push(255), 60_000);
            self.call(SessionCommand::Token, AwaitedResult::Token, 60_000);
            while !self.waits.is_empty() {
                self.run_network(1);
            }
            assert_eq!(self.ended(), waiting + 1);
        }
        self.run_network(50);
        let idle = |connection: &TestConnection| {
            connection.to_shard.iter().all(|f| matches!(f.message, Message::Heartbeat(_)))
        };
        assert!(self.connections.iter().all(idle));
    }
}

#[test]
fn every_push_counts_once_and_nothing_is_lost_under_random_faults() {
    for_seeds(|seed| RandomTest::new(seed).run());
}

#[test]
fn a_synchronous_push_counts_on_every_shard_or_on_none_under_random_faults() {
    for_seeds(|seed| RandomTest::of(seed, true, false).run());
}

#[test]
fn a_stale_push_counts_on_no_shard_under_random_faults() {
    for_seeds(|seed| RandomTest::of(seed, false, true).run());
}

#[test]
fn no_session_state_outlives_a_restore_under_random_faults() {
    for_seeds(|seed| RandomTest::new(seed).run_with_restore());
}

fn for_seeds(run: impl Fn(u64) -> usize + std::panic::RefUnwindSafe) {
    let mut written = 0;
    for seed in 0..400 {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(push_slots) => written += push_slots,
            Err(panic) => {
                eprintln!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(written > 100, "only {written} shares were written into push slots");
}
