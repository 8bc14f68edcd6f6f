//! A session and a few shards under lost connections, callers that give up, and little time.
//!
//! What must hold: every operation is answered once and by its deadline; a push counts on all of
//! its shards or on none, and once; no token is lost; and when the network heals all comes to an
//! end. When a checkpoint is restored under the session, all that waits is told so, and nothing of
//! before counts after.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, Sequence, VariableId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Grant, Message, Outcome};

use super::model::{Fill, RESTORED_STEP, Shard};
use super::world::{Frame, OWNER, World, header, ms, order, plan, shard};
use crate::error::Error;
use crate::params::Buffer;
use crate::parts::Scattered;
use crate::push_buffers::{BufferSlot, GradientBuffer, PushBufferId, SlotMemory};
use crate::session::{Command, Input, OpId, Output, PushOrder, Reply};
use crate::sharding_plan::ShardingPlan;

/// The SplitMix64 sequence of Steele, Lea and Flood, 2014.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// The network to one shard.
#[derive(Default)]
struct Line {
    /// The session wants a connection.
    wanted: bool,
    connected: bool,
    to_shard: VecDeque<Frame>,
    /// The body that follows the last message delivered.
    body: Option<Vec<u8>>,
}

/// What a caller waits for.
enum WaitHistory {
    Token,
    Pull,
    PullOne(VariableId),
    /// A push whose bytes are this.
    Push(u8),
    Begin(u8),
    Nothing,
}

/// A room of a tray: what the shard sees in it, and whether gradients of the worker have it.
#[derive(Clone, Debug)]
struct Seen {
    number: u32,
    fill: Fill,
    taken: Arc<AtomicBool>,
}

/// The room in the hands of the worker.
#[derive(Debug)]
struct Taken {
    bytes: Buffer,
    seen: Seen,
}

impl SlotMemory for Taken {
    fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.bytes_mut()
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.seen.taken.store(false, Ordering::Relaxed);
    }
}

struct Test {
    random: Random,
    plan: Arc<ShardingPlan>,
    world: World,
    shards: Vec<Shard>,
    lines: Vec<Line>,
    waits: BTreeMap<OpId, (WaitHistory, Instant)>,
    tokens: Vec<Grant>,
    /// A push that was begun, its bytes, and the variables sent of it.
    begun: Option<(Sequence, u8, u32)>,
    next_fill: u8,
    /// On how many shards each push has bytes.
    covers: BTreeMap<u8, usize>,
    /// Pushes whose callers were told that they are applied.
    told: Vec<u8>,
    /// Pushes whose callers were told that their step has passed.
    told_stale: Vec<u8>,
    synchronous: bool,
    /// Whether transports pass descriptors, and the trays that have come over them.
    same_host: bool,
    push_buffers: BTreeMap<usize, (PushBufferId, Vec<Seen>)>,
    /// How many shares of pushes were written into rooms.
    written: usize,
    next_op: u64,
    /// Shards that are still to be restored, once that has begun.
    restoring: Option<Vec<usize>>,
}

impl Test {
    fn new(seed: u64) -> Test {
        Test::of(seed, false, false)
    }

    fn of(seed: u64, synchronous: bool, owner_first: bool) -> Test {
        let mut random = Random(seed);
        let shards = 1 + random.below(3) as u32;
        let plan = Arc::into_inner(plan(shards, 1 + random.below(9))).unwrap();
        let plan = Arc::new(plan.with_parts_of(8 + 8 * random.below(4)));
        let push_slots = 1 + random.below(3) as usize;
        let bytes = |task| plan.catalogue().layout(shard(task)).bytes();
        let same_host = random.below(2) == 0;
        let mut test = Test {
            shards: (0..shards)
                .map(|task| Shard::new(task == 0, bytes(task), push_slots))
                .collect(),
            lines: (0..shards).map(|_| Line::default()).collect(),
            random,
            world: World::with(|start| start.incarnation.0 = seed),
            waits: BTreeMap::new(),
            tokens: Vec::new(),
            begun: None,
            next_fill: 1,
            covers: BTreeMap::new(),
            told: Vec::new(),
            told_stale: Vec::new(),
            synchronous,
            same_host,
            push_buffers: BTreeMap::new(),
            written: 0,
            next_op: 1,
            restoring: None,
            plan,
        };
        for shard in &mut test.shards {
            (shard.synchronous, shard.owner_first) = (synchronous, owner_first);
        }
        let shards = test.plan.shards().to_vec();
        test.call(Command::Open { shards }, WaitHistory::Nothing, 60_000);
        test.calm(200);
        test.call(Command::Joined { plan: test.plan.clone() }, WaitHistory::Nothing, 60_000);
        assert!(test.waits.is_empty());
        test
    }

    fn call(&mut self, command: Command, waits: WaitHistory, timeout_ms: u64) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let deadline = self.world.now + ms(timeout_ms);
        self.waits.insert(op, (waits, deadline));
        self.input(Input::Command { op, command, deadline });
    }

    fn input(&mut self, input: Input) {
        let now = self.world.now;
        self.world.session.handle(now, input);
        while let Some(output) = self.world.session.poll_output() {
            match output {
                Output::Connect { link, .. } => {
                    assert!(!self.lines[link].wanted && !self.lines[link].connected);
                    self.lines[link].wanted = true;
                }
                Output::Disconnect { link } => {
                    self.push_buffers.remove(&link);
                    self.lines[link] = Line::default();
                    self.shards[link].disconnected();
                }
                Output::Send { link, envelope, message, body, .. } => {
                    assert!(self.lines[link].connected);
                    let frame = Frame { link, envelope, message, body: body.concat() };
                    self.lines[link].to_shard.push_back(frame);
                }
                Output::Reply { op, reply } => self.replied(op, reply),
                Output::Progress { .. } => {}
                Output::SharedValues { .. } => unreachable!("no shard shares its values"),
                Output::SharedPushBuffer { link, push_buffer, shared, .. } => {
                    let seen = |&number: &u32| {
                        let (fill, taken) =
                            (self.shards[link].shared[&number].clone(), Arc::default());
                        Seen { number, fill, taken }
                    };
                    let push_slots = shared.push_slots.items().iter().map(seen).collect();
                    self.push_buffers.insert(link, (push_buffer, push_slots));
                }
            }
        }
    }

    fn replied(&mut self, op: OpId, reply: Result<Reply, Error>) {
        let (waits, deadline) = self.waits.remove(&op).expect("an operation is answered once");
        assert!(self.world.now <= deadline, "by its deadline");
        match (waits, reply) {
            (_, Err(Error::Timeout { .. } | Error::Window { .. })) => {}
            (_, Err(Error::RolledBack { to_step, .. })) if self.restoring.is_some() => {
                assert_eq!(GlobalStep(to_step), RESTORED_STEP);
            }
            (WaitHistory::Token, Ok(Reply::Token(Some(grant)))) => self.tokens.push(grant),
            (WaitHistory::Pull, Ok(Reply::Pulled { buffer, .. })) => {
                let first = buffer.bytes()[0];
                for id in 0..self.shards.len() as u32 {
                    let values = &buffer.bytes()[self.plan.range(VariableId(id))];
                    let all = if self.synchronous { first } else { values[0] };
                    assert!(values.iter().all(|byte| *byte == all), "of one version");
                }
            }
            (WaitHistory::PullOne(variable), Ok(Reply::Pulled { buffer, .. })) => {
                let values = &buffer.bytes()[..self.plan.range(variable).len()];
                assert!(values.iter().all(|byte| *byte == values[0]), "of one version");
            }
            (WaitHistory::Push(fill), Ok(Reply::Pushed { outcome })) => match outcome {
                Outcome::Stale { .. } => self.told_stale.push(fill),
                _ => self.told.push(fill),
            },
            (WaitHistory::Begin(fill), Ok(Reply::Begun { sequence })) => {
                self.begun = Some((sequence, fill, 0));
            }
            (WaitHistory::Nothing, Ok(_)) => {}
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
                let buffer = Buffer::of_bytes(plan.range(variable).len());
                let pull = Command::PullVariable { plan, variable, buffer, token: None };
                self.call(pull, WaitHistory::PullOne(variable), timeout);
            }
            (0 | 1, _, _) => self.call(Command::Token, WaitHistory::Token, timeout),
            (2, _, _) => {
                let (plan, buffer) = (self.plan.clone(), Buffer::new(&self.plan));
                self.call(Command::Pull { plan, buffer, token: None }, WaitHistory::Pull, timeout);
            }
            (3..=5, Some(_), _) if self.next_fill < 250 && self.same_host => {
                self.push_written(timeout)
            }
            (3..=5, Some(_), _) if self.next_fill < 250 => {
                let (grant, fill) = (self.tokens.pop(), self.fill());
                let mut order = order(&self.plan, grant, fill);
                if self.random.below(4) == 0 {
                    let keep = self.random.below(self.shards.len() as u64) as u32;
                    order.parts.retain(|(to, _)| to.task == keep);
                }
                self.covers.insert(fill, order.parts.len());
                self.call(Command::Push { order }, WaitHistory::Push(fill), timeout);
            }
            (6, Some(_), None) if self.next_fill < 250 => {
                let (grant, fill) = (self.tokens.pop().unwrap(), self.fill());
                let mut order = order(&self.plan, Some(grant), fill);
                order.parts.clear();
                self.call(Command::Begin { order }, WaitHistory::Begin(fill), timeout);
            }
            (6 | 7, _, Some((sequence, fill, sent))) => self.go_on(sequence, fill, sent, timeout),
            (8, Some(_), _) => {
                let grant = self.tokens.pop().unwrap();
                self.input(Input::TokenDropped { grant });
            }
            (9, _, _) if !self.waits.is_empty() => {
                let at = self.random.below(self.waits.len() as u64) as usize;
                let op = *self.waits.keys().nth(at).unwrap();
                self.waits.remove(&op);
                self.input(Input::Cancelled { op });
            }
            _ => {}
        }
    }

    fn fill(&mut self) -> u8 {
        self.next_fill += 1;
        self.next_fill - 1
    }

    /// Pushes all variables, from rooms of trays as far as there are some.
    fn push_written(&mut self, timeout: u64) {
        let (grant, fill) = (self.tokens.pop(), self.fill());
        let mut buffer = GradientBuffer::new(&self.plan, self.plan.runs(|_| true).into());
        let bytes = self.plan.bytes();
        let take = |of| {
            let link = self.plan.shards().iter().position(|&shard| shard == of)?;
            let (push_buffer, push_slots) = self.push_buffers.get(&link)?;
            let seen = push_slots
                .iter()
                .find(|push_slot| !push_slot.taken.swap(true, Ordering::Relaxed))?
                .clone();
            seen.fill.store(fill, Ordering::Relaxed);
            let (number, bytes) = (seen.number, Buffer::of_bytes(bytes));
            Some(BufferSlot {
                shard: of,
                push_buffer: *push_buffer,
                number,
                memory: Box::new(Taken { bytes, seen }),
            })
        };
        buffer.renew(|_| true, take);
        self.written += buffer.push_slots();
        for id in (0..self.shards.len() as u32).map(VariableId) {
            let range = self.plan.range(id);
            buffer.slice_mut(range.start..range.end.next_multiple_of(8)).fill(fill);
        }
        let all = (0..self.shards.len() as u32).map(VariableId);
        let scatter = Arc::new(self.plan.scatter(all));
        let factors = BTreeMap::new();
        let scattered = Scattered { scatter, buffer: Arc::new(buffer), factors };
        let order = order(&self.plan, grant, fill);
        let order = PushOrder { scattered: Some(scattered), parts: Vec::new(), ..order };
        self.covers.insert(fill, self.shards.len());
        self.call(Command::Push { order }, WaitHistory::Push(fill), timeout);
    }

    /// Pushes all variables from memory of this process.
    fn push_scattered(&mut self, timeout: u64) {
        let (grant, fill) = (self.tokens.pop(), self.fill());
        let all = (0..self.shards.len() as u32).map(VariableId);
        let scatter = Arc::new(self.plan.scatter(all));
        let mut buffer = GradientBuffer::new(&self.plan, Arc::default());
        buffer.slice_mut(0..self.plan.bytes()).fill(fill);
        let scattered = Scattered { scatter, buffer: Arc::new(buffer), factors: BTreeMap::new() };
        let order = order(&self.plan, grant, fill);
        let order = PushOrder { scattered: Some(scattered), parts: Vec::new(), ..order };
        self.covers.insert(fill, self.shards.len());
        self.call(Command::Push { order }, WaitHistory::Push(fill), timeout);
    }

    /// Goes on with a push that was begun: one more variable, the end, or nothing of it at all.
    fn go_on(&mut self, sequence: Sequence, fill: u8, sent: u32, timeout: u64) {
        match self.random.below(4) {
            0 => {
                self.begun = None;
                self.input(Input::Abandoned { sequence });
            }
            1 if sent > 0 => {
                self.begun = None;
                self.call(Command::End { sequence }, WaitHistory::Push(fill), timeout);
            }
            _ if (sent as usize) < self.shards.len() => {
                let body = |range: std::ops::Range<usize>| Bytes::from(vec![fill; range.len()]);
                let parts = self.plan.parts([VariableId(sent)].into_iter(), body);
                self.begun = Some((sequence, fill, sent + 1));
                self.covers.insert(fill, sent as usize + 1);
                self.call(
                    Command::More { sequence, own: None, parts },
                    WaitHistory::Nothing,
                    timeout,
                );
            }
            _ => {}
        }
    }

    /// Something happens on one line or in one shard.
    fn network(&mut self) {
        let link = self.random.below(self.lines.len() as u64) as usize;
        let line = &mut self.lines[link];
        if line.wanted {
            (line.wanted, line.connected) = (false, true);
            let same_host = self.same_host;
            return self.input(Input::Connected { link, same_host });
        }
        if let Some(body) = line.body.take() {
            self.world.session.with_targets(link, |targets| {
                let mut rest = &body[..];
                for target in targets.into_iter().flatten() {
                    let (head, tail) = rest.split_at(target.len());
                    target.copy_from_slice(head);
                    rest = tail;
                }
                assert!(rest.is_empty() || rest.len() == body.len());
            });
            return self.input(Input::Body { link });
        }
        match self.random.below(4) {
            0 if self.synchronous => Shard::accept_one(&mut self.shards),
            0 => self.shards[link].work(),
            1 if link == OWNER => {
                self.shards.iter_mut().for_each(Shard::apply_accepted);
                self.shards[link].grant_waiting();
            }
            2 if line.connected => {
                if let Some(frame) = line.to_shard.pop_front() {
                    if matches!(frame.message, Message::TokenRequest(_)) {
                        // Tokens are of a step that begins when the last is applied.
                        self.shards.iter_mut().for_each(Shard::apply_accepted);
                    }
                    self.shards[link].hear(&frame);
                }
            }
            _ => {
                let Some((request, step, message, body)) = self.shards[link].says.pop_front()
                else {
                    return;
                };
                let header = header(request, self.shards[link].epoch, step, &message, body.len());
                line.body = (!body.is_empty()).then_some(body);
                self.input(Input::Message { link, header, message });
            }
        }
    }

    /// A connection is lost, at any point, at times with its server; or a room.
    fn trouble(&mut self) {
        let link = self.random.below(self.lines.len() as u64) as usize;
        if self.random.below(3) == 0 {
            return self.shards[link].steal_push_slots();
        }
        let line = std::mem::take(&mut self.lines[link]);
        self.push_buffers.remove(&link);
        if line.connected || line.wanted {
            match self.random.below(2) {
                0 => self.shards[link].disconnected(),
                _ => self.shards[link].restart(),
            }
            self.input(Input::Disconnected { link, error: "reset".into() });
        }
    }

    /// The chief restores one shard after the other, each of which closes its connections.
    fn restore_one(&mut self) {
        let Some(link) = self.restoring.as_mut().and_then(Vec::pop) else { return };
        self.shards[link].begin_epoch();
        let line = std::mem::take(&mut self.lines[link]);
        self.push_buffers.remove(&link);
        if line.connected || line.wanted {
            self.input(Input::Disconnected { link, error: "restored".into() });
        }
    }

    /// All shards are restored, at some time of 400 turns.
    fn run_through_a_restore(mut self) -> usize {
        let begins = self.random.below(350);
        for turn in 0..400 {
            if turn == begins {
                self.restoring = Some((0..self.shards.len()).rev().collect());
            }
            if self.random.below(10) == 0 {
                self.restore_one();
            }
            self.turn();
        }
        while self.restoring.as_ref().is_some_and(|left| !left.is_empty()) {
            self.restore_one();
        }
        self.calm(1_500);
        assert!(self.waits.is_empty(), "{:?} operations still wait", self.waits.len());
        // What callers still have is void.
        while let Some(grant) = self.tokens.pop() {
            self.input(Input::TokenDropped { grant });
        }
        self.call(Command::Token, WaitHistory::Token, 60_000);
        assert!(self.waits.is_empty() && self.tokens.is_empty(), "it has ended");
        assert_eq!(self.world.session.unclaimed().claim(), None);
        for shard in &self.shards {
            assert!(shard.applied.is_empty() && shard.out.is_empty(), "nothing of before counts");
        }
        self.written
    }

    fn pass(&mut self, ms_: u64) {
        let end = self.world.now + ms(ms_);
        while self.world.session.wake_at(self.world.now) <= end {
            self.world.now = self.world.session.wake_at(self.world.now).max(self.world.now);
            self.input(Input::Tick);
            assert!(self.world.session.wake_at(self.world.now) > self.world.now, "it spins");
        }
        self.world.now = end;
    }

    /// The network works, for so many milliseconds.
    fn calm(&mut self, for_ms: u64) {
        for _ in 0..for_ms {
            for _ in 0..30 {
                self.network();
            }
            self.pass(1);
        }
    }

    /// How many shares of pushes were written into rooms.
    fn run(mut self) -> usize {
        for _ in 0..400 {
            self.turn();
        }
        self.heal();
        self.check();
        self.written
    }

    fn turn(&mut self) {
        match self.random.below(40) {
            0..6 => self.act(),
            6 => self.trouble(),
            10 if self.synchronous => Shard::pass_one_by(&mut self.shards),
            11 if self.synchronous => self.shards[OWNER].say_who_is_missing(),
            7..10 => {
                let time = self.random.below(60);
                self.pass(time);
            }
            _ => self.network(),
        }
    }

    /// No more trouble: whoever waits is answered, and what is left over is given up.
    fn heal(&mut self) {
        if let Some((sequence, _, _)) = self.begun.take() {
            self.input(Input::Abandoned { sequence });
        }
        for _ in 0..60 {
            // Tokens whose answers were lost come with the next request.
            self.call(Command::Token, WaitHistory::Token, 60_000);
            self.calm(50);
            while let Some(grant) = self.tokens.pop() {
                self.input(Input::TokenDropped { grant });
            }
        }
        // All that wait were answered long before their deadlines, which are up to 30 s away.
        assert!(self.waits.is_empty(), "{:?} operations still wait", self.waits.len());
        self.calm(700);
    }

    /// Pushes whose callers were told what became of them.
    fn ended(&self) -> usize {
        self.told.len() + self.told_stale.len()
    }

    fn check(&mut self) {
        self.shards.iter_mut().for_each(Shard::apply_accepted);
        let owner = &self.shards[OWNER];
        assert!(owner.out.is_empty(), "tokens {:?} are lost", owner.out);
        for fill in 1..self.next_fill {
            let counts: Vec<usize> =
                self.shards.iter().filter_map(|shard| shard.applied.get(&fill)).copied().collect();
            assert!(counts.iter().all(|&count| count == 1), "push {fill} counts {counts:?} times");
            assert!(!self.told.contains(&fill) || !counts.is_empty(), "push {fill} is lost");
            let counted = !self.told_stale.contains(&fill) || counts.is_empty();
            assert!(counted, "push {fill} counts, and its caller was told otherwise");
            let all = match self.synchronous {
                true => self.shards.len(),
                false => self.covers.get(&fill).copied().unwrap_or(0),
            };
            assert!([0, all].contains(&counts.len()), "push {fill} counts on some shards only");
        }
        // Nothing is left that would block the window.
        let end = self.ended() + WINDOW as usize + 1;
        self.call(Command::Token, WaitHistory::Token, 60_000);
        self.calm(100);
        for _ in self.ended()..end {
            let grant = self.tokens.pop().expect("a token");
            let order = order(&self.plan, Some(grant), 255);
            let waiting = self.ended();
            self.call(Command::Push { order }, WaitHistory::Push(255), 60_000);
            self.call(Command::Token, WaitHistory::Token, 60_000);
            while !self.waits.is_empty() {
                self.calm(1);
            }
            assert_eq!(self.ended(), waiting + 1);
        }
        self.calm(50);
        let idle =
            |line: &Line| line.to_shard.iter().all(|f| matches!(f.message, Message::Heartbeat(_)));
        assert!(self.lines.iter().all(idle));
    }
}

#[test]
fn whatever_happens_every_push_counts_once_and_nothing_is_lost() {
    for_seeds(|seed| Test::new(seed).run());
}

#[test]
fn whatever_happens_a_synchronous_push_counts_on_every_shard_or_on_none() {
    for_seeds(|seed| Test::of(seed, true, false).run());
}

#[test]
fn whatever_happens_a_push_that_is_too_old_counts_on_no_shard() {
    for_seeds(|seed| Test::of(seed, false, true).run());
}

#[test]
fn whatever_happens_nothing_of_a_session_outlives_a_restore() {
    for_seeds(|seed| Test::new(seed).run_through_a_restore());
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
    assert!(written > 100, "rooms were written {written} times");
}
