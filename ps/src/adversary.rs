//! An adversary test of one shard: valid messages with arbitrary numbers in every field.
//!
//! Peers of every role send messages in any order, between ticks, lost connections and kills.
//! [`play`] reads its input as choices, so that a fuzzer and a property test drive the same code.
//! Peers are mostly honest, since otherwise no push would ever be complete; now and then a field is
//! wrong. The shard asserts its invariants after every input. A killed shard must open again with
//! the same values and counts.

mod choices;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, PartitionId, RequestId, RestoreEpoch, Sequence, ShardId,
    TaskId, TokenId,
};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::message::{
    self, BodyCrc, CheckpointId, Hello, Operation, PushEncoded, PushPart, PushShared, Role,
    Selection, SharedRange,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, Header, Message, encode, version};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_common::{rows, table};
use pushpull_optim::optimizer::{Adam, Sgd};
use pushpull_store::arena::{ArenaStorage, Budget};
use pushpull_store::testing::test_files::TestFiles;

use crate::aggregate::mode::Mode;
use crate::aggregate::staleness::StalenessPolicy;
use crate::aggregate::token_ledger::generation_of;
use crate::config::{NonFinite, PsConfig};
use crate::metrics::Counters;
use crate::shard::output::{PulledParts, ShardOutput};
use crate::shard::shard_files::{ServerRun, ShardSetup};
use crate::shard::work::Work;
use crate::shard::{PeerOrigin, Shard, ShardInput, TICK};
use choices::{Choices, KnownNumbers};

/// The maximum memory of the shard.
const BYTES_MAX: u64 = 16 << 20;

/// The bytes of a block: few, so that small variables have several blocks.
const BLOCK_BYTES: usize = 256;

/// More outputs than one input can cause with at most six connections.
const OUTPUTS_MAX: usize = 4096;

/// The maximum number of actions that one input plays.
const ACTIONS_MAX: usize = 400;

/// The lease of a member.
const LEASE: Duration = Duration::from_millis(500);

/// The peer's side of a connection.
#[derive(Clone, Copy, Debug)]
struct PeerLine {
    connection: u64,
    /// The epoch of the client, from its hello or its welcome.
    epoch: ClientEpoch,
    /// The sequence of the newest push.
    next: u64,
    /// The body that is due: its length, and how much has been sent.
    body: Option<(usize, usize)>,
}

/// A shard and the state of its peers.
struct Play<'a> {
    choices: Choices<'a>,
    shard: Shard,
    test_files: TestFiles,
    config: Arc<PsConfig>,
    id: ShardId,
    catalogue: Arc<Catalogue>,
    now: Instant,
    lines: Vec<PeerLine>,
    next_connection: u64,
    next_request: u64,
    streams: Vec<PulledParts>,
    known: KnownNumbers,
    /// The metrics of all processes of the shard together.
    counters: Arc<Counters>,
}

/// Plays the choices of an input against a shard. Returns how many gradients the shard has applied,
/// and whether it is the step owner.
///
/// # Panics
/// If the shard breaks its invariants, returns target memory of another length than the body, or
/// does not recover its state after a kill.
pub fn play(input: &[u8]) -> (u64, bool) {
    let mut play = Play::new(Choices::new(input));
    if play.choices.one_in(8) {
        // One input in eight starts before any variable is declared.
    } else {
        play.begin();
    }
    for _ in 0..ACTIONS_MAX {
        if play.choices.is_empty() {
            break;
        }
        play.act();
        play.handle_outputs();
    }
    play.reopen();
    (play.counters.gradients_applied.read(), play.id.shard == 0)
}

fn variables(choices: &mut Choices<'_>) -> Vec<VariableSpec> {
    let shape = |extents: &[u64]| Shape::new(extents.to_vec()).expect("a small shape");
    let of = |name, dtype, extents| {
        VariableSpec::new(name, dtype, shape(extents)).expect("a small variable")
    };
    let mut variables = vec![
        of("w", DType::F32, &[3]),
        of("d", DType::F64, &[2]),
        of("ledger", DType::F32, &[4]).plain(),
        of("n", DType::I64, &[1]),
        of("long", DType::F32, &[150]),
    ];
    if choices.one_in(2) {
        variables.push(of("h", DType::Bf16, &[5]));
        variables.push(of("rows", DType::F32, &[6, 2]).sparse());
    }
    if choices.one_in(4) {
        let spec = TableSpec::new(64 << 10).rows_at_once(4);
        variables.push(VariableSpec::table("ids", DType::F32, [2], spec).expect("a small table"));
    }
    variables
}

fn config(choices: &mut Choices<'_>, shards: u16) -> PsConfig {
    let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build();
    let cluster = cluster.expect("one task with an address is a cluster");
    let config = match choices.one_in(3) {
        true => PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.1)),
        false => PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0)),
    };
    let policies = [NonFinite::Reject, NonFinite::Count, NonFinite::Allow];
    let mut config = config
        .shards(shards)
        .lease(LEASE)
        .token_timeout(choices.one_in(2).then_some(3 * LEASE))
        .inbox_pushes(1 + choices.below(3))
        .connections_max(6)
        .non_finite(policies[choices.below(3)])
        .integrity_full(choices.one_in(4));
    config.block_bytes = BLOCK_BYTES;
    config.last_step = choices.one_in(4).then(|| choices.below(8) as u64 + 1);
    if choices.one_in(2) {
        let total = 1 + choices.below(3) as u32;
        let aggregate = 1 + choices.below(total as usize) as u32;
        let mode =
            Mode::Synchronous { replicas_to_aggregate: aggregate, total_num_replicas: total };
        config = config.mode(mode).deterministic(aggregate == total && choices.one_in(3));
        if choices.one_in(3) {
            config = config.clip_by_global_norm(0.5);
        }
    } else {
        config.wait_ahead = choices.one_in(4).then_some(1);
        config.reject_older = choices.one_in(4).then(|| choices.below(2) as u64);
        if choices.one_in(4) {
            config.staleness = StalenessPolicy::DelayCompensation { lambda: 0.5 };
        }
    }
    config.check().expect("the configuration is valid");
    config
}

impl<'a> Play<'a> {
    fn new(mut choices: Choices<'a>) -> Play<'a> {
        let shards = 1 + u16::from(choices.one_in(2));
        let id = ShardId { task: 0, shard: choices.below(usize::from(shards)) as u16 };
        let config = Arc::new(config(&mut choices, shards));
        let variables = variables(&mut choices);
        let map = ShardMap::new([0], shards).expect("one task");
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
        let placement = placement.expect("small variables can be placed");
        let catalogue = Catalogue::new(variables, &placement).expect("a small catalogue");
        let test_files = TestFiles::default();
        let now = Instant::now();
        let counters = Arc::<Counters>::default();
        let shard = open(&config, id, &test_files, &counters, now);
        Play {
            counters,
            choices,
            shard,
            test_files,
            config,
            id,
            catalogue: Arc::new(catalogue),
            now,
            lines: Vec::new(),
            next_connection: 1,
            next_request: 1,
            streams: Vec::new(),
            known: KnownNumbers::default(),
        }
    }

    /// Connects an honest chief, which declares and initializes the variables.
    fn begin(&mut self) {
        let epoch = if self.id.shard == 0 { 0 } else { 1 };
        let hello = Hello { client_epoch: ClientEpoch(epoch), ..self.hello(Role::Chief {}, 0) };
        self.connect(&hello, PeerOrigin::Remote);
        let catalogue = self.catalogue.clone();
        let declare = message::Declare { digest: catalogue.digest() };
        self.send(0, Envelope::default(), declare.into(), catalogue.encode());
        let initialize = message::Initialize { epoch: RestoreEpoch(1) };
        self.send(0, Envelope::default(), initialize.into(), &[]);
        self.settle();
    }

    fn act(&mut self) {
        match self.choices.below(32) {
            0..3 => self.connect_any(),
            3 => self.disconnect(),
            4 => self.advance_time(),
            5..9 => self.settle(),
            9 => {
                self.shard.work(self.now);
            }
            10 => self.streams.clear(),
            11 => self.reopen(),
            12 => self.on_owner_message(),
            13 | 14 => self.continue_body(),
            15..22 => self.push(),
            _ => self.send_any_message(),
        }
    }

    fn hello(&self, role: Role, task: u32) -> Hello {
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role,
            job: Text::clipped("worker"),
            task,
            shard: self.id,
            incarnation: Incarnation(100 + u64::from(task)),
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: Identity::new().to_wire(),
            auth: List::default(),
        }
    }

    /// Connects a peer with a random role and, at times, wrong fields in its hello.
    fn connect_any(&mut self) {
        let roles = [Role::Worker {}, Role::Chief {}, Role::Reader {}, Role::Peer {}];
        let role = roles[[0, 0, 0, 1, 1, 2, 3, 3][self.choices.below(8)]];
        let task = self.choices.below(4) as u32;
        let mut hello = self.hello(role, task);
        if role == (Role::Peer {}) {
            (hello.job, hello.task) = (Text::clipped("ps"), 0);
        }
        if self.choices.one_in(3) {
            hello.incarnation = Incarnation(self.number());
        }
        // Often an epoch that the step owner has minted or would mint for this task.
        let epoch = match self.choices.below(4) {
            0 => 0,
            1 => u64::from(task) + 1,
            2 => self.choices.of(&self.known.epochs),
            _ => self.number(),
        };
        hello.client_epoch = ClientEpoch(epoch);
        if self.choices.one_in(16) {
            let (epoch, step) = (self.number() as u32, self.number());
            (hello.seen_epoch, hello.seen_step) = (RestoreEpoch(epoch), GlobalStep(step));
            hello.task = self.number() as u32;
        }
        if self.choices.one_in(16) {
            hello.catalogue = Some(self.catalogue.digest());
            hello.shard.shard = self.number() as u16;
        }
        let same_host = self.choices.one_in(4);
        self.connect(
            &hello,
            if same_host { PeerOrigin::Unix { same_user: true } } else { PeerOrigin::Remote },
        );
    }

    fn connect(&mut self, hello: &Hello, origin: PeerOrigin) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let envelope = self.envelope(Envelope::default());
        let Some((header, Message::Hello(hello))) = framed(&envelope, &hello.clone().into(), 0)
        else {
            return;
        };
        self.lines.push(PeerLine { connection, epoch: hello.client_epoch, next: 1, body: None });
        let (hello, header) = (&hello, &header);
        self.shard.handle(self.now, ShardInput::Connected { connection, hello, header, origin });
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
        let time = times[self.choices.below(times.len())];
        self.now += time;
        // The clock jumps, as after a stop of the process. At times the same tick arrives twice.
        let ticks = if self.choices.one_in(2) { 1 } else { 2 };
        for _ in 0..ticks {
            self.shard.handle(self.now, ShardInput::Tick);
        }
    }

    /// Does all work that is due.
    fn settle(&mut self) {
        while self.shard.has_work() {
            match self.shard.work(self.now) {
                Work::Blocked => self.streams.clear(),
                Work::Idle | Work::More | Work::Flushing => {}
                // The shard retries a failed growth only after some time, so this loop cannot wait.
                Work::Growing => return self.handle_outputs(),
            }
            self.handle_outputs();
        }
    }

    /// Sends a message of the step owner to the shard, unless the shard is the step owner.
    fn on_owner_message(&mut self) {
        if self.id.shard == 0 {
            return;
        }
        self.shard.handle(self.now, ShardInput::OwnerLink { up: self.choices.one_in(4) });
        let token = TokenId(self.choices.of(&self.known.tokens));
        let client = ClientEpoch(self.choices.of(&self.known.epochs));
        let message: Message = match self.choices.below(6) {
            5 => message::ChiefIs { client }.into(),
            _ if self.config.rule().is_none() => message::Recall { token, client }.into(),
            4 => message::Recall { token, client }.into(),
            0 => message::TokenOver { token }.into(),
            1 => message::KeepCut {}.into(),
            _ => {
                let count = self.choices.below(4);
                let factors = [1.0, 1.0, 0.5, 0.0, f64::NAN, f64::MIN_POSITIVE];
                let pushes: Vec<(TokenId, f64)> = (0..count)
                    .map(|_| {
                        let token = TokenId(self.choices.of(&self.known.tokens));
                        (token, factors[self.choices.below(factors.len())])
                    })
                    .collect();
                message::Commit { pushes: List::new(pushes).expect("a few") }.into()
            }
        };
        let step = match self.choices.one_in(3) {
            true => self.number(),
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
        let operation = operations[[0, 0, 0, 0, 1, 2][self.choices.below(6)]];
        if self.choices.one_in(2) {
            let newest = TokenId(u64::MAX);
            self.send(index, Envelope::default(), message::TokenRequest { newest }.into(), &[]);
        }
        if !self.choices.one_in(4) {
            self.send(index, Envelope::default(), message::Reserve {}.into(), &[]);
        }
        let known = self.known.tokens.last().copied();
        let token = known.unwrap_or_else(|| 1 + self.choices.below(16) as u64);
        let token = if self.choices.one_in(6) { self.number() } else { token };
        let push_slot = self.known.push_slots.last().copied().unwrap_or(1);
        let push_slot = if self.choices.one_in(6) { self.number() } else { push_slot } as u32;
        let step = self.shard.step().0;
        let step = if self.choices.one_in(6) { self.number() } else { step };
        let sequence = self.sequence(index);
        let generation = match self.choices.one_in(16) {
            true => self.number() as u32,
            false => self.generation(index, token),
        };
        let read = self.choices.one_in(3).then(|| self.number());
        let next = self.choices.one_in(3);
        let parts = self.parts(operation);
        let total: u64 = parts.iter().map(|(_, body)| body.len() as u64).sum();
        let count = parts.len();
        let stops = self.choices.one_in(6).then(|| self.choices.below(count + 1));
        let shared = self.choices.one_in(4);
        for (at, (offset, body)) in parts.into_iter().enumerate() {
            if stops == Some(at) {
                return;
            }
            let last = at + 1 == count;
            let named = if self.choices.one_in(12) { self.number() } else { total };
            let whole = last.then_some(named);
            let offset = if self.choices.one_in(12) { self.number() } else { offset };
            let end = offset.wrapping_add(body.len() as u64);
            let (token, next) = (TokenId(token), last && next);
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
                self.send(index, envelope, shared.into(), &[]);
            } else {
                self.send(index, envelope, part.into(), &body);
            }
        }
    }

    /// Returns the parts of an honest push: offset and body of each.
    fn parts(&mut self, operation: Operation) -> Vec<(u64, Vec<u8>)> {
        let catalogue = self.catalogue.clone();
        let layout = catalogue.layout(self.id);
        let chosen = self.choices.byte();
        let mut parts = Vec::new();
        for (index, partition) in layout.all().iter().enumerate() {
            let fits = match operation {
                Operation::Gradient {} => partition.trainable,
                Operation::AssignAdd {} => !partition.trainable,
                _ => true,
            };
            let takes = chosen >> (index % 8) & 1 == 0;
            if !fits || !takes || partition.bytes == 0 {
                continue;
            }
            if !partition.is_sparse() {
                let bytes = (partition.end() - partition.offset) as usize;
                parts.push((partition.offset, self.content(bytes)));
                continue;
            }
            let Some(at) = partition.index else { continue };
            let numbers = self.rows_of(partition);
            let mut body = Vec::new();
            rows::encode_index(partition, numbers.iter().copied(), &mut body);
            parts.push((at, body));
            let bytes = rows::values_bytes(partition, numbers.len() as u64) as usize;
            if bytes > 0 {
                parts.push((partition.offset, self.content(bytes)));
            }
        }
        if parts.is_empty() {
            parts.push((0, Vec::new()));
        }
        parts
    }

    /// Returns up to three rows of a partition, in ascending order.
    fn rows_of(&mut self, partition: &Partition) -> Vec<u64> {
        let count = self.choices.below(4) as u64;
        match partition.is_table() {
            true => (0..)
                .filter(|&id| partition.rows.contains(&table::bucket(id)))
                .take(count as usize)
                .collect(),
            false => (0..count.min(partition.row_count())).collect(),
        }
    }

    /// Returns a body of one repeated word: zeros, NaN, any number, or ones.
    fn content(&mut self, bytes: usize) -> Vec<u8> {
        let word = match self.choices.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => self.number(),
            _ => u64::from_le_bytes(bytemuck::cast([1.0_f32, 1.0])),
        };
        let words = std::iter::repeat_n(word.to_le_bytes(), bytes.div_ceil(8));
        words.flatten().take(bytes).collect()
    }

    /// Sends a message of any kind, with any number in any field.
    fn send_any_message(&mut self) {
        let Some(index) = self.line() else { return };
        let mut body = Vec::new();
        if self.choices.one_in(2) {
            let bytes = [0, 4, 8, 12, 16, 24, 600][self.choices.below(7)];
            body = self.content(bytes);
        }
        let encoding = self.choices.below(8) as u8;
        let partition = PartitionId(match self.choices.one_in(4) {
            true => self.number() as u32,
            false => self.choices.below(8) as u32,
        });
        let message: Message = match self.choices.below(31) {
            0 => message::Heartbeat {}.into(),
            1 => message::Pull { selection: self.selection(partition) }.into(),
            2 => {
                let pull = message::Pull { selection: self.selection(partition) };
                message::PullEncoded { pull, encoding }.into()
            }
            3 => message::PullRows { partition }.into(),
            4 => {
                let pull = message::PullRows { partition };
                message::PullRowsEncoded { pull, encoding }.into()
            }
            5 => message::AwaitReady {}.into(),
            6 => message::FetchCatalogue {}.into(),
            7 => message::ShareValues { wants: self.number() }.into(),
            8 => message::SharePushBuffer {}.into(),
            9 => {
                if self.choices.one_in(2) {
                    body = self.catalogue.encode().to_vec();
                }
                message::Declare { digest: self.catalogue.digest() }.into()
            }
            10 => message::Initialize { epoch: RestoreEpoch(self.number() as u32) }.into(),
            11 => message::FindCheckpoint {}.into(),
            12 => {
                let (epoch, of, step) = (self.number() as u32, self.number() as u32, self.number());
                let checkpoint = CheckpointId {
                    name: Text::clipped("ckpt"),
                    epoch: RestoreEpoch(of),
                    step: GlobalStep(step),
                };
                message::Restore { checkpoint, epoch: RestoreEpoch(epoch) }.into()
            }
            13 => message::Save {}.into(),
            14 => message::SaveShard { name: Text::clipped("ckpt") }.into(),
            15 => message::TokenRequest { newest: TokenId(self.number()) }.into(),
            16 => {
                let token = self.choices.of(&self.known.tokens);
                let generation = self.generation(index, token);
                message::ReturnToken { token: TokenId(token), generation }.into()
            }
            17 => {
                let (token, generation) = (TokenId(self.number()), self.number() as u32);
                message::ReturnToken { token, generation }.into()
            }
            18 => message::Reserve {}.into(),
            19 => self.any_part(index).into(),
            20 => {
                let part = self.any_part(index);
                let elements = match self.choices.one_in(2) {
                    true => self.number() as u32,
                    false => (body.len() / 2) as u32,
                };
                let factor = [1.0, 0.5, 0.0, f64::NAN, f64::INFINITY][self.choices.below(5)];
                PushEncoded { part, encoding, elements, factor }.into()
            }
            21 => {
                let part = self.any_part(index);
                let count = self.choices.below(4);
                let ranges =
                    (0..count).map(|_| SharedRange { start: self.number(), end: self.number() });
                let ranges = List::new(ranges.collect()).expect("a few");
                let PushPart { operation, token, generation, push_slot, whole, next, read, .. } =
                    part;
                PushShared { operation, token, generation, push_slot, whole, next, read, ranges }
                    .into()
            }
            22 => message::Withdraw {}.into(),
            23 => message::OutcomeQuery {}.into(),
            24 if self.choices.one_in(4) => message::Finish {}.into(),
            25 => message::Leave {}.into(),
            26 | 27 => {
                let token = match self.choices.one_in(4) {
                    true => self.number(),
                    false => self.choices.of(&self.known.tokens),
                };
                let squares = [0.0, 1.0, -1.0, f64::NAN, f64::INFINITY][self.choices.below(5)];
                let client = ClientEpoch(self.choices.of(&self.known.epochs));
                let shard = ShardId { task: 0, shard: self.choices.below(3) as u16 };
                message::Held { token: TokenId(token), client, shard, squares }.into()
            }
            28 => {
                let shard = ShardId { task: 0, shard: self.choices.below(3) as u16 };
                message::StepApplied { shard }.into()
            }
            29 => {
                let token = TokenId(self.choices.of(&self.known.tokens));
                let shard = ShardId { task: 0, shard: self.choices.below(3) as u16 };
                message::Recalled { token, shard, applied: self.choices.one_in(2) }.into()
            }
            _ => message::TokenOver { token: TokenId(self.number()) }.into(),
        };
        let sequence = match self.choices.one_in(3) {
            true => self.number(),
            false => self.sequence(index),
        };
        let step = match self.choices.one_in(2) {
            true => self.number(),
            false => self.shard.step().0,
        };
        let epoch = if self.choices.one_in(16) { self.number() as u32 } else { 0 };
        let deadlines = [0, 1, 100, u32::MAX];
        let envelope = Envelope {
            sequence: Sequence(sequence),
            step: GlobalStep(step),
            restore_epoch: RestoreEpoch(epoch),
            deadline_ms: deadlines[self.choices.below(deadlines.len())],
            ..Envelope::default()
        };
        if Message::body_limit(message.kind()) == Some(0) {
            body.clear();
        }
        self.send(index, envelope, message, &body);
    }

    /// Returns the generation under which the client of a connection would hold a token.
    fn generation(&self, index: usize, token: u64) -> u32 {
        generation_of(TokenId(token), self.lines[index].epoch)
    }

    fn any_part(&mut self, index: usize) -> PushPart {
        let operations = [Operation::Gradient {}, Operation::Assign {}, Operation::AssignAdd {}];
        let token = self.number();
        PushPart {
            operation: operations[self.choices.below(3)],
            token: TokenId(token),
            generation: match self.choices.one_in(2) {
                true => self.generation(index, token),
                false => self.number() as u32,
            },
            push_slot: match self.choices.one_in(3) {
                true => self.number() as u32,
                false => self.choices.of(&self.known.push_slots) as u32,
            },
            offset: self.number(),
            whole: self.choices.one_in(2).then(|| self.number()),
            next: self.choices.one_in(2),
            read: self.choices.one_in(2).then(|| self.number()),
        }
    }

    fn selection(&mut self, partition: PartitionId) -> Selection {
        match self.choices.below(4) {
            0 => Selection::All {},
            1 => Selection::Dense {},
            _ => {
                let partitions = vec![partition, PartitionId(partition.0.wrapping_add(1))];
                Selection::Partitions { partitions: List::new(partitions).expect("two") }
            }
        }
    }

    /// Returns the next sequence for the pushes of a connection, or at times the last one again.
    fn sequence(&mut self, index: usize) -> u64 {
        let again = self.choices.one_in(4);
        let line = &mut self.lines[index];
        line.next += u64::from(!again);
        line.next
    }

    fn number(&mut self) -> u64 {
        self.choices.number(&self.known)
    }

    /// Chooses a connection; `None` if there is none.
    fn line(&mut self) -> Option<usize> {
        let count = self.lines.len();
        (count > 0).then(|| self.choices.below(count))
    }

    fn envelope(&mut self, envelope: Envelope) -> Envelope {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        Envelope { request, ..envelope }
    }

    /// Sends a message with its body. The second half of the body may follow later or never.
    fn send(&mut self, index: usize, envelope: Envelope, message: Message, body: &[u8]) {
        let Some(line) = self.lines.get(index).copied().filter(|line| line.body.is_none()) else {
            return;
        };
        let envelope = self.envelope(envelope);
        let Some((header, message)) = framed(&envelope, &message, body.len()) else { return };
        let connection = line.connection;
        if header.body_bytes > 0 {
            self.lines[index].body = Some((body.len(), 0));
        }
        self.shard.handle(self.now, ShardInput::Message { connection, header: &header, message });
        let now = if self.choices.one_in(12) { body.len() / 2 } else { body.len() };
        if header.body_bytes > 0 {
            self.receive(index, connection, &body[..now]);
        }
        self.handle_outputs();
    }

    /// Sends the rest of a body that is due, as zeros.
    fn continue_body(&mut self) {
        let due = self.lines.iter().position(|line| line.body.is_some());
        let Some(index) = due else { return };
        let PeerLine { connection, body, .. } = self.lines[index];
        let (bytes, taken) = body.unwrap_or_default();
        self.receive(index, connection, &vec![0; bytes - taken]);
    }

    /// Delivers bytes of the body that is due, as the runtime does.
    fn receive(&mut self, index: usize, connection: u64, bytes: &[u8]) {
        let line = self.lines.get_mut(index).filter(|line| line.connection == connection);
        let Some(PeerLine { body: Some((length, taken)), .. }) = line else { return };
        if let Some(target) = self.shard.body_target(connection) {
            assert_eq!(target.len(), *length, "the target is as long as the body");
            target[*taken..*taken + bytes.len()].copy_from_slice(bytes);
        }
        *taken += bytes.len();
        if taken == length {
            self.lines[index].body = None;
            self.shard.handle(self.now, ShardInput::Body { connection });
        } else if !bytes.is_empty() {
            self.shard.handle(self.now, ShardInput::Progress { connection });
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
                    self.known.learn(&message);
                    let line = self.lines.iter_mut().find(|line| line.connection == connection);
                    if let (Some(line), Message::Welcome(welcome)) = (line, &message) {
                        line.epoch = welcome.client_epoch;
                    }
                }
                ShardOutput::Stream { parts, .. } => self.streams.push(parts),
                ShardOutput::Close { connection } => {
                    if let Some(at) = self.lines.iter().position(|l| l.connection == connection) {
                        self.lines.swap_remove(at);
                        self.shard.handle(self.now, ShardInput::Disconnected { connection });
                    }
                }
                ShardOutput::Shared { message, .. } => self.known.learn(&message),
                ShardOutput::Members { joined, present } => assert!(present <= joined),
                ShardOutput::RestoreShard(_)
                | ShardOutput::SaveShard(_)
                | ShardOutput::Flush(_) => {
                    unreachable!("there is no checkpoint directory and no disk")
                }
                ShardOutput::ToOwner { .. }
                | ShardOutput::SaverOrder(_)
                | ShardOutput::Event(_) => {}
            }
        }
    }

    /// Kills the process and opens the shard again from its files.
    fn reopen(&mut self) {
        let settles = self.choices.one_in(2);
        if settles {
            self.settle();
        }
        // While work is due, the state in memory may differ from the durable state.
        let before = (!self.shard.has_work()).then(|| self.shard.durable_state());
        self.streams.clear();
        self.lines.clear();
        self.test_files = TestFiles::with(self.test_files.contents());
        self.shard = open(&self.config, self.id, &self.test_files, &self.counters, self.now);
        if let Some(before) = before {
            let after = self.shard.durable_state();
            assert!(before == after, "the state changed from {before:?} to {after:?}");
        }
        self.shard.check_invariants();
        self.handle_outputs();
    }
}

/// Opens the shard in these test files, or creates it.
fn open(
    config: &Arc<PsConfig>,
    id: ShardId,
    test_files: &TestFiles,
    counters: &Arc<Counters>,
    now: Instant,
) -> Shard {
    let (identity, counters) = (Arc::new(Identity::new()), counters.clone());
    let budget = Budget::new(BYTES_MAX);
    let parts = ShardSetup { id, config: config.clone(), identity, budget, counters };
    let life = ServerRun { boot: [0; 16], arena: 1, epoch_base: 0 };
    let opened = Shard::open(parts, ArenaStorage::TestFiles(test_files.clone()), life, now);
    opened.unwrap_or_else(|error| panic!("a shard cannot open its own files: {error}"))
}

/// Encodes a message and decodes it again, as it arrives; `None` if it is invalid.
fn framed(envelope: &Envelope, message: &Message, body: usize) -> Option<(Header, Message)> {
    let mut bytes = Vec::new();
    encode(&mut bytes, envelope, message, BodyStamp::plain(body as u64));
    let header = Header::take(bytes.first_chunk()?).ok()?;
    let message = Message::take(header.kind, &bytes[Header::BYTES..]).ok()?;
    Some((header, message))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn inputs() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..3000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn any_valid_messages_leave_a_shard_that_opens_again(input in inputs()) {
            super::play(&input);
        }
    }

    /// If the shard refused every push, the code behind its checks would not be tested.
    #[test]
    fn gradients_are_applied_on_the_step_owner_and_on_other_shards() {
        let mut runner = TestRunner::deterministic();
        let mut applied = [0, 0];
        for _ in 0..300 {
            let input = inputs().new_tree(&mut runner).expect("an input").current();
            let (gradients, owns_the_step) = super::play(&input);
            applied[usize::from(!owns_the_step)] += gradients;
        }
        assert!(applied.iter().all(|&applied| applied >= 10), "{applied:?}");
    }
}
