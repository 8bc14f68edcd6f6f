//! The file of one shard: its values and slots, one tensor for each partition.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::ids::{PartitionId, ShardId};
use pushpull_common::stored_stream::StoredStream;

use crate::error::CheckpointError;
use crate::files::{FileEntry, HashedFile, WrittenFile, verify_written};
use crate::header::{self, Tensor};
use crate::hex;
use crate::name::CheckpointName;
use crate::storage::{CheckpointStorage, ReadFile};
use crate::training::CheckpointTraining;

/// The memory of a shard at one version.
pub trait CheckpointSource: fmt::Debug {
    /// Calls `out` with the bytes of a range of the shard's layout, in order, in pieces of any
    /// size. The range is within one partition, which is trainable if the stream is a slot.
    fn read(
        &mut self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError>;
}

/// Writes the file of a shard into the temporary folder of a save, makes it durable, and reads it
/// back.
///
/// Only the shard's own process may call this, once for each save. The publisher of the checkpoint
/// needs the returned entry.
pub fn write_shard(
    storage: &dyn CheckpointStorage,
    checkpoint: CheckpointName,
    catalogue: &Catalogue,
    shard: ShardId,
    training: &CheckpointTraining,
    source: impl CheckpointSource,
) -> Result<FileEntry, CheckpointError> {
    // The source's memory is released before the file is read back.
    let written = write_unverified(storage, checkpoint, catalogue, shard, training, source)?;
    verify_written(storage, &checkpoint.temporary(), written)
}

/// Writes the file of a shard and makes it durable. The caller reads it back.
pub(crate) fn write_unverified(
    storage: &dyn CheckpointStorage,
    checkpoint: CheckpointName,
    catalogue: &Catalogue,
    shard: ShardId,
    training: &CheckpointTraining,
    mut source: impl CheckpointSource,
) -> Result<WrittenFile, CheckpointError> {
    let plan = ShardFile::plan(catalogue, shard, training, checkpoint)?;
    let folder = checkpoint.temporary();
    let mut out = HashedFile::new(storage.create(&folder, &plan.name)?);
    out.write(&plan.head)?;
    for (stream, range) in plan.ranges {
        let mut left = range.end - range.start;
        let wrong = |by: &str| CheckpointError::Memory {
            reason: format!(
                "{shard} returned {by} bytes than the range {range:?} of {stream:?} has"
            ),
        };
        source.read(stream, range.clone(), &mut |bytes| {
            left = left.checked_sub(bytes.len() as u64).ok_or_else(|| wrong("more"))?;
            out.write(bytes)
        })?;
        if left > 0 {
            return Err(wrong("fewer"));
        }
    }
    out.finish(&plan.name)
}

/// The contents and the layout of a shard's file. They follow from the catalogue and the
/// optimizers.
#[derive(Debug)]
pub(crate) struct ShardFile {
    pub(crate) name: String,
    head: Vec<u8>,
    /// The stream and the range of each tensor, in the order of the file.
    ranges: Vec<(StoredStream, Range<u64>)>,
    /// The offset of each tensor in the file.
    starts: BTreeMap<(StoredStream, PartitionId), u64>,
    pub(crate) bytes: u64,
}

impl ShardFile {
    pub(crate) fn plan(
        catalogue: &Catalogue,
        shard: ShardId,
        training: &CheckpointTraining,
        checkpoint: CheckpointName,
    ) -> Result<ShardFile, CheckpointError> {
        if let Some(name) = training.bad_slot() {
            return Err(CheckpointError::SlotName { name: name.to_owned() });
        }
        let layout = catalogue.layout(shard);
        let slots = (0..training.most_slots()).map(StoredStream::Slot);
        let has = |stream: StoredStream, part: &Partition| match stream {
            StoredStream::Values => true,
            StoredStream::Slot(slot) => slot < training.slots_of(part).len(),
        };
        let mut order: Vec<(StoredStream, &Partition)> = std::iter::once(StoredStream::Values)
            .chain(slots)
            .flat_map(|stream| layout.partitions().iter().map(move |part| (stream, part)))
            .filter(|(stream, part)| has(*stream, part))
            .collect();
        // The sort is stable. Wider elements come first, so that all are aligned without gaps.
        order.sort_by_key(|(_, part)| std::cmp::Reverse(part.dtype.size()));
        let tensor = |&(stream, part)| tensor_of(catalogue, stream, part, training.slots_of(part));
        let tensors: Vec<Tensor> = order.iter().map(tensor).collect();
        let metadata = [
            ("format", "pushpull".to_owned()),
            ("checkpoint", checkpoint.to_string()),
            ("shard", shard.to_string()),
            ("catalogue", hex::encode(&catalogue.digest())),
        ];
        let head = header::head(&metadata, &tensors)?;
        let mut bytes = head.len() as u64;
        let mut starts = BTreeMap::new();
        for (stream, part) in &order {
            starts.insert((*stream, part.id), bytes);
            bytes += part.bytes;
        }
        let ranges =
            order.iter().map(|(s, part)| (*s, part.offset..part.offset + part.bytes)).collect();
        Ok(ShardFile { name: file_name(shard), head, ranges, starts, bytes })
    }

    /// Returns the offset of a partition's tensor; `None` if the file has no such tensor.
    pub(crate) fn start(&self, stream: StoredStream, partition: PartitionId) -> Option<u64> {
        self.starts.get(&(stream, partition)).copied()
    }

    /// Checks that a manifest entry is one for this file.
    pub(crate) fn check_entry(
        &self,
        folder: &str,
        entry: &FileEntry,
    ) -> Result<(), CheckpointError> {
        entry.check(folder, &self.name, self.bytes)
    }

    /// Checks that an open file, which has the planned length, starts with the expected head.
    pub(crate) fn check_head(
        &self,
        folder: &str,
        file: &dyn ReadFile,
    ) -> Result<(), CheckpointError> {
        header::check(&self.head, &format!("{folder}/{}", self.name), file)
    }
}

/// Returns the name of a partition's values: the variable's name and the partition's number in it.
pub(crate) fn tensor_name(catalogue: &Catalogue, part: &Partition) -> String {
    let first = catalogue.partitions_of(part.variable)[0].id;
    format!("{}/part_{}", catalogue.variable(part.variable).name(), part.id.0 - first.0)
}

/// Returns the tensor of a partition.
///
/// The name of a slot follows a `:`, and contains neither `:` nor `/`. The names of values end with
/// `/part_` and a number. So no two tensors have the same name, however variables are named.
fn tensor_of(
    catalogue: &Catalogue,
    stream: StoredStream,
    part: &Partition,
    slots: &[String],
) -> Tensor {
    let mut name = tensor_name(catalogue, part);
    if let StoredStream::Slot(index) = stream {
        name = format!("{name}:{}", slots[index]);
    }
    let mut extents = catalogue.variable(part.variable).shape().extents().to_vec();
    if let Some(rows) = extents.first_mut() {
        *rows = part.rows.end - part.rows.start;
    }
    Tensor { name, dtype: part.dtype, extents }
}

/// Returns the name of a shard's file.
pub(crate) fn file_name(shard: ShardId) -> String {
    format!("shard-{}-{}.safetensors", shard.task, shard.shard)
}
