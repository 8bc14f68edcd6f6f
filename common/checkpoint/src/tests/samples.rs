//! Models in which every element has its own value, and saves of them.

use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::memory::MemoryStorage;
use crate::shard_file::write_unverified;
use crate::{
    CheckpointError, CheckpointPiece, CheckpointSource, CheckpointStorage, CheckpointTraining,
    ClientWindow, Contents, FileEntry, Opened, PublishedCheckpoint, RestoredShard, Save, Settled,
    ShardEntry, write_shard,
};

pub(super) const SLOTS: [&str; 2] = ["m", "v"];

pub(super) fn slots() -> Vec<String> {
    SLOTS.map(str::to_owned).to_vec()
}

pub(super) fn place(variables: Vec<VariableSpec>, tasks: u32, shards: u16) -> Arc<Catalogue> {
    let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    Arc::new(Catalogue::new(variables, &placement).unwrap())
}

/// Returns variables of every type, a scalar, an empty one, odd counts, and names made to collide.
pub(super) fn variables(parts: u32) -> Vec<VariableSpec> {
    let cut = Partitioner::Fixed { shards: parts };
    let f64s = Shape::new([5, 3]).unwrap();
    vec![
        VariableSpec::f32("layer/w", [11, 3]).unwrap().partitioner(cut.clone()),
        VariableSpec::f32("layer/w/part_0", [3]).unwrap(),
        VariableSpec::f32("größe \"ß\"", [7]).unwrap().plain().partitioner(cut.clone()),
        VariableSpec::new("wide", DType::F64, f64s).unwrap().partitioner(cut),
        VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap(),
        VariableSpec::f32("none", [0, 4]).unwrap(),
        VariableSpec::f32("layer/w/part_0:m", [2]).unwrap(),
    ]
}

/// Returns the bytes of an element. No two elements have the same bytes, except by chance.
pub(super) fn element(name: &str, stream: &str, index: u64, step: u64, size: usize) -> Vec<u8> {
    let text = format!("{name}\n{stream}\n{index}\n{step}");
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash.to_le_bytes()[..size].to_vec()
}

fn stream_name(stream: StoredStream, slots: &[&str]) -> String {
    match stream {
        StoredStream::Values => "values".into(),
        StoredStream::Slot(index) => slots[index].into(),
    }
}

/// Returns the contents of a shard's memory at a step: its layout, without padding.
fn memory(catalogue: &Catalogue, shard: ShardId, stream: &str, step: u64) -> Vec<(u64, Vec<u8>)> {
    let layout = catalogue.layout(shard);
    let of = |part: &pushpull_common::catalogue::Partition| {
        let name = catalogue.variable(part.variable).name();
        let elements = part.elements.clone();
        elements.flat_map(|i| element(name, stream, i, step, part.dtype.size())).collect()
    };
    let parts = layout.partitions().iter();
    parts
        .filter(|part| stream == "values" || part.trainable)
        .map(|part| (part.offset, of(part)))
        .collect()
}

#[derive(Debug)]
struct SampleMemory<'a> {
    catalogue: &'a Catalogue,
    shard: ShardId,
    step: u64,
}

impl CheckpointSource for SampleMemory<'_> {
    fn read(
        &mut self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let stream = stream_name(stream, &SLOTS);
        let memory = memory(self.catalogue, self.shard, &stream, self.step);
        let bytes = range.end - range.start;
        let found =
            memory.iter().find(|(at, whole)| (*at, whole.len() as u64) == (range.start, bytes));
        // The pieces have an odd size, because blocks and partitions may end anywhere.
        found.expect("one partition").1.chunks(13).try_for_each(out)
    }
}

/// Saves a step as a server does: shard by shard, then the manifest.
pub(super) fn save(
    storage: &Arc<dyn CheckpointStorage>,
    catalogue: &Catalogue,
    step: u64,
) -> Result<PublishedCheckpoint, CheckpointError> {
    save_with(storage, catalogue, step, Planted::Nothing)
}

/// A bug that proves that the tests would find such a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    Nothing,
    /// A checkpoint is published before it is read back.
    PublishBeforeVerify,
}

/// Saves a step with a planted bug.
pub(super) fn save_with(
    storage: &Arc<dyn CheckpointStorage>,
    catalogue: &Catalogue,
    step: u64,
    planted: Planted,
) -> Result<PublishedCheckpoint, CheckpointError> {
    let save = Save::begin(storage.clone(), RestoreEpoch(1), GlobalStep(step), None)?;
    let shards = catalogue
        .shards()
        .map(|id| {
            let memory = SampleMemory { catalogue, shard: id, step };
            let name = save.name();
            let training = CheckpointTraining::by_one(catalogue, "adam", &SLOTS);
            let file = match planted {
                Planted::Nothing => {
                    write_shard(&**storage, name, catalogue, id, &training, memory)?
                }
                Planted::PublishBeforeVerify => {
                    write_unverified(&**storage, name, catalogue, id, &training, memory)?.entry
                }
            };
            Ok(entry(id, file, step))
        })
        .collect::<Result<Vec<_>, CheckpointError>>()?;
    save.publish(catalogue, contents(catalogue, shards, step))
}

pub(super) fn entry(id: ShardId, file: FileEntry, step: u64) -> ShardEntry {
    let number = u64::from(id.task) * 10 + u64::from(id.shard);
    let applied = Settled::Applied { version: step, step, staleness: 0 };
    let client = ClientWindow {
        job: "worker".into(),
        index: 3,
        epoch: 2,
        incarnation: u64::MAX,
        newest: 9,
        settled: vec![(7, applied), (9, Settled::Withdrawn)],
    };
    ShardEntry {
        task: id.task,
        shard: id.shard,
        file,
        tables: Vec::new(),
        version: step + number,
        gradients: 2 * step + number,
        clients: vec![client],
        data: None,
        coordinators: Vec::new(),
    }
}

pub(super) fn contents(catalogue: &Catalogue, shards: Vec<ShardEntry>, step: u64) -> Contents {
    let training = CheckpointTraining::by_one(catalogue, "adam", &SLOTS);
    Contents { saved_unix_ms: step * 1000, training, shards, user: vec![0, 255, 10] }
}

/// Returns a storage with checkpoints of these steps.
pub(super) fn saved(
    catalogue: &Catalogue,
    steps: &[u64],
) -> (MemoryStorage, Arc<dyn CheckpointStorage>) {
    let memory = MemoryStorage::default();
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory.clone());
    for &step in steps {
        save(&storage, catalogue, step).unwrap();
    }
    (memory, storage)
}

/// Restores every shard of a target, and checks that each byte is written once and is right.
pub(super) fn check_restored(
    opened: &mut Opened,
    target: &Catalogue,
    slots: &[&str],
    step: u64,
) -> Vec<RestoredShard> {
    let shards: Vec<ShardId> = target.shards().collect();
    let training = CheckpointTraining::by_one(target, "adam", slots);
    let restore = |&shard: &ShardId| {
        let mut pieces: Vec<(String, u64, Vec<u8>)> = Vec::new();
        let restored = opened
            .restore_shard(target, shard, &training, &mut |piece| {
                let CheckpointPiece::Range(stream, range, bytes) = piece else {
                    panic!("no table")
                };
                assert_eq!(range.end - range.start, bytes.len() as u64);
                assert!(bytes.len() <= 1 << 20);
                let stream = stream_name(stream, slots);
                match pieces.last_mut() {
                    Some((last, start, whole))
                        if *last == stream && *start + whole.len() as u64 == range.start =>
                    {
                        whole.extend_from_slice(bytes);
                    }
                    _ => pieces.push((stream, range.start, bytes.to_vec())),
                }
                Ok(())
            })
            .unwrap();
        let mut expected: Vec<(String, u64, Vec<u8>)> = Vec::new();
        for stream in std::iter::once(&"values").chain(slots) {
            for (start, bytes) in memory(target, shard, stream, step) {
                expected.push((stream.to_string(), start, bytes));
            }
        }
        let found = merged(pieces);
        let expected = merged(expected);
        assert_eq!(found.len(), expected.len(), "{shard}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "{shard}");
        }
        restored
    };
    shards.iter().map(restore).collect()
}

/// Sorts the pieces and joins adjacent ones.
fn merged(mut pieces: Vec<(String, u64, Vec<u8>)>) -> Vec<(String, u64, Vec<u8>)> {
    pieces.retain(|piece| !piece.2.is_empty());
    pieces.sort();
    let mut merged: Vec<(String, u64, Vec<u8>)> = Vec::new();
    for (stream, start, bytes) in pieces {
        match merged.last_mut() {
            Some((last, at, whole)) if *last == stream && *at + whole.len() as u64 == start => {
                whole.extend(bytes);
            }
            _ => merged.push((stream, start, bytes)),
        }
    }
    merged
}
