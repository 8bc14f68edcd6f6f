//! The clients of the tests, and the messages that they send.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, Sequence, ShardId, TokenId,
};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::message::{
    BodyCrc, EffectPart, FeatureOffer, Hello, Operation, PulledEncoded, PushEncoded, PushPart, Role,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyStamp, EffectRef, Envelope, Features, Grant, Header, Message, encode, version,
};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use crate::shard::output::PulledParts;

/// A client task, with the fields of its hello.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) role: Role,
    pub(super) task: u32,
    pub(super) incarnation: u64,
    pub(super) epoch: ClientEpoch,
}

/// The fields that all parts of a push have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Push {
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    pub(super) grant: Grant,
    pub(super) push_slot: u32,
    pub(super) next: bool,
    /// How many gradients had been applied to the values that it was computed from.
    pub(super) read: Option<u64>,
    /// The effect that it has.
    pub(super) effect: Option<EffectRef>,
}

pub(super) fn worker(task: u32) -> Peer {
    Peer { role: Role::Worker {}, task, incarnation: 100 + u64::from(task), epoch: ClientEpoch(0) }
}

pub(super) fn chief() -> Peer {
    Peer { role: Role::Chief {}, ..worker(0) }
}

/// `w` (3 f32, at 0) and `d` (2 f64, at 16) are trained, `ledger` (4 f32, at 32) and `n` (1 i64,
/// at 48) are plain: 56 bytes.
pub(super) fn variables() -> Vec<VariableSpec> {
    vec![
        VariableSpec::f32("w", [3]).unwrap(),
        VariableSpec::new("d", DType::F64, Shape::new([2]).unwrap()).unwrap(),
        VariableSpec::f32("ledger", [4]).unwrap().plain(),
        VariableSpec::new("n", DType::I64, Shape::new([1]).unwrap()).unwrap(),
    ]
}

pub(super) fn place(variables: Vec<VariableSpec>, shards: u16) -> Arc<Catalogue> {
    let map = ShardMap::new([0], shards).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    Arc::new(Catalogue::new(variables, &placement).unwrap())
}

/// Returns the elements as bytes, padded to a whole word.
pub(super) fn bytes_of<T: bytemuck::Pod>(elements: &[T]) -> Vec<u8> {
    let mut bytes = bytemuck::cast_slice::<T, u8>(elements).to_vec();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// Returns the index of pushed rows, whose numbers have 32 or 64 bits.
pub(super) fn index_of<T: bytemuck::Pod>(rows: &[T]) -> Vec<u8> {
    let mut index = (rows.len() as u64).to_le_bytes().to_vec();
    index.extend(bytes_of(rows));
    index
}

pub(super) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(super) fn f64s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(super) fn identity() -> Identity {
    let free = Identity::new().with_free("checkpoints", "none").with_long("rules", "Sgd(1)");
    let free = free.with(Identity::LAST_STEP, "none").with(Identity::LEASE_MS, "5000");
    free.with("ps", "0").with("optimizer", "sgd")
}

impl Peer {
    /// Returns this task after a restart.
    pub(super) fn restarted(&self) -> Peer {
        Peer { incarnation: self.incarnation + 1000, epoch: ClientEpoch(0), ..self.clone() }
    }

    pub(super) fn hello(&self, shard: usize) -> Hello {
        // A peer is another shard of the only ps task.
        let (job, task) = match self.role {
            Role::Peer {} => ("ps", 0),
            _ => ("worker", self.task),
        };
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: self.role,
            job: Text::clipped(job),
            task,
            shard: ShardId { task: 0, shard: shard as u16 },
            incarnation: Incarnation(self.incarnation),
            client_epoch: self.epoch,
            seen_epoch: RestoreEpoch(0),
            seen_arena: super::world::LIFE.arena,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: identity().to_wire(),
            auth: None,
            features: FeatureOffer::of(Features::ALL),
        }
    }
}

impl Push {
    pub(super) fn gradient(sequence: u64, grant: Grant, push_slot: u32) -> Push {
        let operation = Operation::Gradient {};
        Push { sequence, operation, grant, push_slot, next: false, read: None, effect: None }
    }

    pub(super) fn plain(sequence: u64, operation: Operation, push_slot: u32) -> Push {
        let token = TokenId(0);
        let step = GlobalStep(0);
        let grant = Grant { token, generation: 0, step, push_slot: 0, samples: None, ahead: None };
        Push { sequence, operation, grant, push_slot, next: false, read: None, effect: None }
    }

    pub(super) fn part(&self, offset: u64, whole: Option<u64>) -> Message {
        let part = PushPart {
            operation: self.operation,
            token: self.grant.token,
            generation: self.grant.generation,
            push_slot: self.push_slot,
            offset,
            whole,
            next: whole.is_some() && self.next,
            read: self.read,
        };
        match self.effect {
            None => part.into(),
            Some(effect) => EffectPart { part, effect }.into(),
        }
    }

    /// Returns the message of a part with an encoded body.
    pub(super) fn encoded(
        &self,
        encoding: u8,
        elements: u32,
        offset: u64,
        whole: Option<u64>,
    ) -> Message {
        let Message::PushPart(part) = self.part(offset, whole) else { unreachable!() };
        PushEncoded { part, encoding, elements, factor: 1.0 }.into()
    }

    pub(super) fn envelope(&self) -> Envelope {
        let sequence = Sequence(self.sequence);
        let step = self.grant.step;
        Envelope { sequence, step, ..Envelope::default() }
    }
}

/// Encodes a message as a frame, and decodes the frame.
pub(super) fn pack(envelope: &Envelope, message: &Message, body_bytes: usize) -> (Header, Message) {
    let mut frame = Vec::new();
    encode(&mut frame, envelope, message, BodyStamp::plain(body_bytes as u64));
    unpack_frame(&frame)
}

fn unpack_frame(frame: &[u8]) -> (Header, Message) {
    let (head, meta) = frame.split_at(Header::BYTES);
    let header = Header::take(head.try_into().unwrap()).unwrap();
    let message = Message::take(header.kind, Features::NONE, meta).unwrap();
    (header, message)
}

/// Returns the bodies of all parts of a pull in one buffer, and their version.
pub(super) fn unpack(mut parts: PulledParts) -> (Vec<u8>, u64) {
    let mut bytes = Vec::new();
    let mut version = None;
    let mut head = Vec::new();
    while let Some(range) = parts.next_part(Features::NONE, &mut head) {
        let (header, message) = unpack_frame(&std::mem::take(&mut head));
        let (pulled, covered) = match message {
            Message::Pulled(pulled) => (pulled, header.body_bytes),
            Message::PulledEncoded(PulledEncoded { part, bytes }) => (part, bytes),
            message => panic!("{message:?}"),
        };
        assert_eq!((pulled.offset, covered), (range.start, range.end - range.start));
        assert!(
            version.is_none_or(|version| version == pulled.version),
            "all parts have one version"
        );
        version = Some(pulled.version);
        let start = bytes.len();
        parts.slices(range).for_each(|slice| bytes.extend_from_slice(slice));
        assert_eq!((bytes.len() - start) as u64, header.body_bytes);
    }
    (bytes, version.expect("an answer has at least one part"))
}
