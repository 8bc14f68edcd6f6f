//! The file of one partition of a growing table: ids, steps and counts of pushes, values and slots,
//! one tensor each.
//!
//! The manifest has the number of rows. A reader therefore knows the expected head, as with the
//! files of shards.

use std::fmt;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::table::RowHead;
use pushpull_common::tensor::DType;
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;
use crate::files::{FileEntry, HashedFile, PIECE_BYTES, verify, verify_written};
use crate::header::{self, Tensor};
use crate::hex;
use crate::name::CheckpointName;
use crate::shard_file::tensor_name;
use crate::storage::{CheckpointStorage, ReadFile};
use crate::training::CheckpointTraining;

/// One partition of a table in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableEntry {
    /// The partition's index in the catalogue.
    pub(crate) partition: u32,
    /// The number of its rows.
    pub(crate) rows: u64,
    /// Its file.
    pub(crate) file: FileEntry,
}

/// A callback that takes rows in batches: the head of each row, and the bytes of each requested
/// stream.
pub(crate) type TakeRows<'a> =
    dyn FnMut(&[RowHead], &[Vec<u8>]) -> Result<(), CheckpointError> + 'a;

/// The rows of a partition of a table at one version. Each method visits all rows, in the same
/// order.
pub trait TableSource: fmt::Debug {
    /// Returns the number of rows.
    fn rows(&self) -> u64;

    /// Calls `out` with the head of each row.
    fn heads(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError>;

    /// Calls `out` with the values of each row (stream 0) or with one of its slots (from 1 on).
    fn stream(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError>;
}

/// Writes the file of a partition into the temporary folder of a save, makes it durable, and reads
/// it back.
pub fn write_table(
    storage: &dyn CheckpointStorage,
    checkpoint: CheckpointName,
    catalogue: &Catalogue,
    partition: &Partition,
    training: &CheckpointTraining,
    source: impl TableSource,
) -> Result<TableEntry, CheckpointError> {
    let rows = source.rows();
    let plan = TableFile::plan(catalogue, partition, training, rows, checkpoint)?;
    let folder = checkpoint.temporary();
    let mut out = HashedFile::new(storage.create(&folder, &plan.name)?);
    out.write(&plan.head)?;
    source.heads(&mut |head| out.write(&head.id.to_le_bytes()))?;
    source.heads(&mut |head| out.write(&head.step.to_le_bytes()))?;
    source.heads(&mut |head| out.write(&u64::from(head.pushes).to_le_bytes()))?;
    for stream in 0..plan.streams.len() {
        source.stream(stream, &mut |row| out.write(row))?;
    }
    let written = out.finish(&plan.name)?;
    // The source's memory is released before the file is read back.
    drop(source);
    let file = verify_written(storage, &folder, written)?;
    Ok(TableEntry { partition: partition.id.0, rows, file })
}

/// The contents and the layout of a partition's file. They follow from the catalogue and the number
/// of rows.
#[derive(Debug)]
pub(crate) struct TableFile {
    pub(crate) name: String,
    head: Vec<u8>,
    rows: u64,
    row_bytes: u64,
    /// The offsets of the values and of each slot.
    streams: Vec<u64>,
    bytes: u64,
}

/// The tensors that precede the values.
const HEADS: [&str; 3] = ["ids", "steps", "pushes"];

impl TableFile {
    pub(crate) fn plan(
        catalogue: &Catalogue,
        partition: &Partition,
        training: &CheckpointTraining,
        rows: u64,
        checkpoint: CheckpointName,
    ) -> Result<TableFile, CheckpointError> {
        let name = tensor_name(catalogue, partition);
        let slots = training.slots_of(partition);
        let mut extents = catalogue.variable(partition.variable).shape().extents().to_vec();
        if let Some(first) = extents.first_mut() {
            *first = rows;
        }
        // The 8-byte words come first, so that all tensors are aligned.
        let heads = HEADS.map(|head| Tensor {
            name: format!("{name}:{head}"),
            dtype: DType::I64,
            extents: vec![rows],
        });
        let named = std::iter::once(name.clone())
            .chain(slots.iter().map(|slot| format!("{name}:slot:{slot}")));
        let values =
            named.map(|name| Tensor { name, dtype: partition.dtype, extents: extents.clone() });
        let tensors: Vec<Tensor> = heads.into_iter().chain(values).collect();
        let metadata = [
            ("format", "pushpull".to_owned()),
            ("checkpoint", checkpoint.to_string()),
            ("catalogue", hex::encode(&catalogue.digest())),
        ];
        let row_bytes = partition.row_bytes();
        if rows > ROWS_MAX {
            let what = "rows of a table in one file";
            let limit = ROWS_MAX;
            return Err(CheckpointError::TooLarge { what, found: rows, limit });
        }
        let head = header::head(&metadata, &tensors)?;
        let first = head.len() as u64 + rows * 8 * HEADS.len() as u64;
        let streams: Vec<u64> =
            (0..1 + slots.len() as u64).map(|stream| first + stream * rows * row_bytes).collect();
        let bytes = first + streams.len() as u64 * rows * row_bytes;
        Ok(TableFile { name: file_name(partition), head, rows, row_bytes, streams, bytes })
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

    /// Opens the file of this entry and verifies all of it.
    pub(crate) fn open(
        &self,
        storage: &dyn CheckpointStorage,
        folder: &str,
        entry: &FileEntry,
    ) -> Result<Box<dyn ReadFile>, CheckpointError> {
        let file = verify(storage, folder, entry)?;
        self.check_head(folder, &*file)?;
        Ok(file)
    }

    /// Reads all rows of an open file, in batches: their heads, and the bytes of these streams.
    pub(crate) fn read(
        &self,
        file: &dyn ReadFile,
        streams: &[usize],
        take: &mut TakeRows<'_>,
    ) -> Result<(), CheckpointError> {
        let each = (PIECE_BYTES as u64 / self.row_bytes.max(8)).max(1);
        let words = |tensor: u64, from: u64, rows: u64| -> Result<Vec<u64>, CheckpointError> {
            let mut bytes = vec![0; rows as usize * 8];
            let start = self.head.len() as u64 + tensor * self.rows * 8;
            file.read(start + from * 8, &mut bytes)?;
            let words = bytes.as_chunks::<8>().0.iter();
            Ok(words.map(|word| u64::from_le_bytes(*word)).collect())
        };
        let mut from = 0;
        while from < self.rows {
            let rows = each.min(self.rows - from);
            let ids = words(0, from, rows)?;
            let steps = words(1, from, rows)?;
            let pushes = words(2, from, rows)?;
            let heads = ids.into_iter().zip(steps).zip(pushes).map(|((id, step), pushes)| {
                RowHead { id, step, pushes: u32::try_from(pushes).unwrap_or(u32::MAX) }
            });
            let heads: Vec<RowHead> = heads.collect();
            let mut bytes = Vec::with_capacity(streams.len());
            for &stream in streams {
                let mut rows = vec![0; (rows * self.row_bytes) as usize];
                file.read(self.streams[stream] + from * self.row_bytes, &mut rows)?;
                bytes.push(rows);
            }
            take(&heads, &bytes)?;
            from += rows;
        }
        Ok(())
    }
}

/// Far more rows than a machine can hold, and few enough that byte counts cannot overflow.
const ROWS_MAX: u64 = 1 << 32;

/// Returns the name of a partition's file.
pub(crate) fn file_name(partition: &Partition) -> String {
    format!("table-{}.safetensors", partition.id.0)
}
