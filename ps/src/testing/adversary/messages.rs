//! The messages of an adversary: honest pushes, and any message with any numbers.

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::codec::Codec;
use pushpull_common::ids::{
    ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, Incarnation,
    PartitionId, RestoreEpoch, Sequence, ShardId, TokenId,
};
use pushpull_common::protocol::limits::{CHECKPOINT_NAME_BYTES_MAX, COORDINATOR_NAME_BYTES_MAX};
use pushpull_common::protocol::message::{
    self, CheckpointId, Hello, Operation, PushEncoded, PushPart, PushShared, Role, Selection,
    SharedRange,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, EffectId, EffectRef, Envelope, Features, Header, Message, encode,
};
use pushpull_common::tensor::DType;
use pushpull_common::{rows, table};

use super::choices::{Choices, KnownNumbers};
use super::setting::ShardSetting;
use crate::aggregate::token_ledger::generation_of;

/// Draws messages from the choices of an input and from the numbers that peers have learned.
pub(super) struct MessageDraw<'a> {
    pub(super) choices: Choices<'a>,
    pub(super) known: KnownNumbers,
    /// Whether every push gives all elements of a partition the same value.
    pub(super) is_uniform: bool,
}

/// A part of an honest push.
pub(super) struct DrawnPart {
    pub(super) offset: u64,
    /// The bytes of the layout that the part covers.
    pub(super) bytes: u64,
    pub(super) body: Vec<u8>,
    /// The encoding of the body and the number of its elements, if it is encoded.
    pub(super) encoding: Option<(u8, u32)>,
}

impl MessageDraw<'_> {
    /// Draws any number; see [`Choices::number`].
    pub(super) fn number(&mut self) -> u64 {
        self.choices.number(&self.known)
    }

    /// Draws a hello of a random role with, at times, wrong fields.
    pub(super) fn any_hello(&mut self, setting: &ShardSetting) -> Hello {
        let roles = [
            Role::Worker {},
            Role::Chief {},
            Role::Reader {},
            Role::Peer {},
            Role::Rank {},
            Role::Admin {},
        ];
        let role = roles[[0, 0, 0, 1, 1, 2, 3, 3, 4, 5][self.choices.below(10)]];
        let task = self.choices.below(4) as u32;
        let mut hello = setting.hello(role, task);
        if role == (Role::Peer {}) {
            hello.job = Text::clipped("ps");
            hello.task = 0;
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
            hello.seen_epoch = RestoreEpoch(self.number() as u32);
            hello.seen_step = GlobalStep(self.number());
            hello.seen_arena = u64::from(self.choices.one_in(2));
            hello.task = self.number() as u32;
        }
        if self.choices.one_in(16) {
            hello.catalogue = Some(setting.catalogue.digest());
            hello.shard.shard = self.number() as u16;
        }
        hello
    }

    /// Draws a message of the step owner to another shard.
    pub(super) fn owner_message(&mut self, is_synchronous: bool) -> Message {
        let token = TokenId(self.choices.of(&self.known.tokens));
        let client = ClientEpoch(self.choices.of(&self.known.epochs));
        match self.choices.below(6) {
            5 => message::ChiefIs { client }.into(),
            4 if self.choices.one_in(2) => {
                let ends = self.choices.one_in(2);
                message::AuditPushes { client, ends }.into()
            }
            _ if !is_synchronous => message::Recall { token, client }.into(),
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
        }
    }

    /// Draws the parts of an honest push.
    pub(super) fn parts(&mut self, layout: &ShardLayout, operation: Operation) -> Vec<DrawnPart> {
        let chosen = self.choices.byte();
        let is_gradient = operation == (Operation::Gradient {});
        let codec = self.codec().filter(|_| is_gradient);
        let plain = |offset, body: Vec<u8>| {
            let bytes = body.len() as u64;
            DrawnPart { offset, bytes, body, encoding: None }
        };
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
                let content = self.content((partition.end() - partition.offset) as usize);
                let longest = match self.choices.one_in(2) {
                    true => 8 * (1 + self.choices.below(64)),
                    false => content.len(),
                };
                for (at, body) in (0..).step_by(longest).zip(content.chunks(longest)) {
                    let part = plain(partition.offset + at, body.to_vec());
                    parts.push(
                        codec.and_then(|codec| encoded(&part, partition, codec)).unwrap_or(part),
                    );
                }
                continue;
            }
            let Some(at) = partition.index else { continue };
            let numbers = self.rows_of(partition);
            let mut body = Vec::new();
            rows::encode_index(partition, numbers.iter().copied(), &mut body);
            parts.push(plain(at, body));
            let bytes = rows::values_bytes(partition, numbers.len() as u64) as usize;
            if bytes > 0 {
                parts.push(plain(partition.offset, self.content(bytes)));
            }
        }
        if self.choices.one_in(4) {
            parts.reverse();
        }
        if parts.is_empty() {
            parts.push(plain(0, Vec::new()));
        }
        parts
    }

    /// Draws a codec, or none. Each decodes equal elements to equal elements.
    fn codec(&mut self) -> Option<Codec> {
        match self.choices.below(16) {
            1 => Some(Codec::F16),
            2 => Some(Codec::Bf16),
            3 => Some(Codec::Int8),
            4 => Some(Codec::TopK { fraction: 1.0 }),
            _ => None,
        }
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
            2 if self.is_uniform => (self.number() & 0xffff) * 0x0001_0001_0001_0001,
            2 => self.number(),
            // Ones of bf16, which are numbers near 1 of f32 and f64.
            _ if self.is_uniform => 0x3f80_3f80_3f80_3f80,
            _ => u64::from_le_bytes(bytemuck::cast([1.0_f32, 1.0])),
        };
        let words = std::iter::repeat_n(word.to_le_bytes(), bytes.div_ceil(8));
        words.flatten().take(bytes).collect()
    }

    /// Draws a name of a checkpoint, which may lead out of its directory.
    fn checkpoint_name(&mut self) -> Text<CHECKPOINT_NAME_BYTES_MAX> {
        let names = ["ckpt-1-1", "ckpt", "../ckpt-1-1", "/etc/passwd", ""];
        Text::clipped(names[self.choices.below(names.len())])
    }

    /// Draws a message of any kind, with any number in any field, and its body. `client` is the
    /// epoch of its sender.
    pub(super) fn any_message(
        &mut self,
        client: ClientEpoch,
        setting: &ShardSetting,
    ) -> (Message, Vec<u8>) {
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
        let message: Message = match self.choices.below(40) {
            // Their bodies are not uniform.
            19..=21 | 34 | 35 if self.is_uniform => message::Heartbeat {}.into(),
            0 => message::Heartbeat {}.into(),
            38 => message::StatusQuery { members_from: self.number() as u32 }.into(),
            39 => message::Stop {}.into(),
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
                let catalogue = match self.choices.below(8) {
                    at @ 0..3 => &setting.others[at],
                    _ => &*setting.catalogue,
                };
                if self.choices.one_in(2) {
                    body = catalogue.encode().to_vec();
                    if self.choices.one_in(4) {
                        let at = self.number() as usize % body.len();
                        body[at] ^= self.choices.byte();
                    }
                }
                message::Declare { digest: catalogue.digest() }.into()
            }
            10 => message::Initialize { epoch: RestoreEpoch(self.number() as u32) }.into(),
            11 => message::FindCheckpoint {}.into(),
            12 => {
                let epoch = self.number() as u32;
                let of = self.number() as u32;
                let step = self.number();
                let checkpoint = CheckpointId {
                    name: self.checkpoint_name(),
                    epoch: RestoreEpoch(of),
                    step: GlobalStep(step),
                };
                let epoch = RestoreEpoch(epoch);
                match self.choices.one_in(2) {
                    true => message::Restore { checkpoint, epoch }.into(),
                    false => message::PrepareRestore { checkpoint, epoch }.into(),
                }
            }
            13 => message::Save {}.into(),
            14 => message::SaveShard { name: self.checkpoint_name() }.into(),
            15 => message::TokenRequest { newest: TokenId(self.number()) }.into(),
            16 => {
                let token = self.choices.of(&self.known.tokens);
                let generation = generation_of(TokenId(token), client);
                message::ReturnToken { token: TokenId(token), generation }.into()
            }
            17 => {
                let token = TokenId(self.number());
                let generation = self.number() as u32;
                message::ReturnToken { token, generation }.into()
            }
            18 => message::Reserve {}.into(),
            19 => self.any_part(client).into(),
            20 => {
                let part = self.any_part(client);
                let elements = match self.choices.one_in(2) {
                    true => self.number() as u32,
                    false => (body.len() / 2) as u32,
                };
                let factor = [1.0, 0.5, 0.0, f64::NAN, f64::INFINITY][self.choices.below(5)];
                PushEncoded { part, encoding, elements, factor }.into()
            }
            21 => {
                let part = self.any_part(client);
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
            24 => message::AwaitEnd {}.into(),
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
                let sequence = Sequence(self.number());
                let ended = self.choices.one_in(2);
                let oldest = Sequence(self.number());
                let client = ClientEpoch(self.choices.of(&self.known.epochs));
                match self.choices.one_in(2) {
                    true => {
                        let applied = List::new(vec![(sequence, token)]).unwrap_or_default();
                        message::PushesAudited { client, shard, ended, oldest, applied }.into()
                    }
                    false => {
                        message::Recalled { token, shard, applied: self.choices.one_in(2) }.into()
                    }
                }
            }
            30 => {
                let name = self.coordinator();
                let coordinator = CoordinatorId(self.number());
                message::OpenCoordinator {
                    name,
                    coordinator,
                    epoch: CoordinatorEpoch(self.number()),
                }
                .into()
            }
            31 => {
                let name = self.coordinator();
                let epoch = CoordinatorEpoch(0);
                message::OpenCoordinator { name, coordinator: CoordinatorId(0), epoch }.into()
            }
            32 => message::CoordinatorQuery { name: self.coordinator() }.into(),
            33 => {
                let epoch = CoordinatorEpoch(self.choices.of(&self.known.coordinators));
                message::CloseCoordinator { name: self.coordinator(), epoch }.into()
            }
            34 => {
                let part = self.any_part(client);
                let effect = self.effect();
                message::EffectPart { part, effect }.into()
            }
            35 => {
                let part = self.any_part(client);
                let effect = self.effect();
                let elements = (body.len() / 2) as u32;
                let encoded = PushEncoded { part, encoding, elements, factor: 1.0 };
                message::EffectEncoded { encoded, effect }.into()
            }
            36 => message::RingPart { pass: 0, offset: self.number() }.into(),
            _ => message::TokenOver { token: TokenId(self.number()) }.into(),
        };
        if Message::body_limit(message.kind()) == Some(0) {
            body.clear();
        }
        (message, body)
    }

    /// Draws the name of a coordinator; at times an empty one.
    fn coordinator(&mut self) -> Text<COORDINATOR_NAME_BYTES_MAX> {
        Text::clipped(["", "trainer", "evaluator"][self.choices.below(3)])
    }

    /// Draws an effect of a coordinator and an epoch that shards have answered, or of any.
    pub(super) fn effect(&mut self) -> EffectRef {
        let number = match self.choices.one_in(4) {
            true => self.number(),
            false => 1 + self.choices.below(70) as u64,
        };
        let id = EffectId {
            coordinator: CoordinatorId(self.choices.of(&self.known.coordinators)),
            epoch: CoordinatorEpoch(self.choices.of(&self.known.coordinators)),
            number: EffectNumber(number),
        };
        let settled = match self.choices.one_in(4) {
            true => self.number(),
            false => self.choices.below(8) as u64,
        };
        EffectRef { id, settled: EffectNumber(settled), digest: self.number() }
    }

    fn any_part(&mut self, client: ClientEpoch) -> PushPart {
        let operations = [Operation::Gradient {}, Operation::Assign {}, Operation::AssignAdd {}];
        let token = self.number();
        PushPart {
            operation: operations[self.choices.below(3)],
            token: TokenId(token),
            generation: match self.choices.one_in(2) {
                true => generation_of(TokenId(token), client),
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
}

/// Encodes the body of a part of a dense partition; `None` if its elements cannot be encoded.
fn encoded(part: &DrawnPart, partition: &Partition, codec: Codec) -> Option<DrawnPart> {
    let bytes = (partition.offset + partition.bytes).checked_sub(part.offset)?;
    let elements = &part.body[..part.body.len().min(bytes as usize)];
    let mut body = Vec::new();
    match partition.dtype {
        DType::F32 => {
            let values = elements.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            codec.encode(&values.collect::<Vec<_>>(), &mut body).ok()?;
        }
        DType::F64 => {
            let values = elements.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            codec.encode(&values.collect::<Vec<_>>(), &mut body).ok()?;
        }
        _ => return None,
    }
    let count = (elements.len() / partition.dtype.size()) as u32;
    let encoding = Some((codec.encoding().code(), count));
    Some(DrawnPart { offset: part.offset, bytes: part.bytes, body, encoding })
}

/// Encodes a message and decodes it again, as it arrives; `None` if it is invalid.
pub(super) fn framed(
    envelope: &Envelope,
    message: &Message,
    body: usize,
) -> Option<(Header, Message)> {
    let mut bytes = Vec::new();
    encode(&mut bytes, envelope, message, BodyStamp::plain(body as u64));
    let header = Header::take(bytes.first_chunk()?).ok()?;
    let message = Message::take(header.kind, Features::NONE, &bytes[Header::BYTES..]).ok()?;
    Some((header, message))
}
