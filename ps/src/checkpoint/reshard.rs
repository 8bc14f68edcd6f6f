//! Giving a shard its part of a checkpoint, however the checkpoint's own shards were cut.

use std::ops::Range;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::table::bucket;

use super::error::CheckpointError;
use super::manifest::ClientWindow;
use super::restore::Opened;
use super::shard_file::Stream;
use super::table_file::RowHead;
use super::training::Training;

/// What a shard must know beside its values and slots.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RestoredShard {
    /// How many pushes it has applied.
    pub(crate) version: u64,
    /// How many gradients it has applied.
    pub(crate) gradients: u64,
    /// What it remembers of its clients; nothing if variables lie elsewhere than they did.
    pub(crate) clients: Vec<ClientWindow>,
}

/// What a shard is given of a checkpoint at a time.
#[derive(Debug)]
pub(crate) enum Piece<'a> {
    /// The bytes of a range of its layout, values or a slot.
    Range(Stream, Range<u64>, &'a [u8]),
    /// A row of a table, by the table's place among those of the shard: what is known of it, its
    /// values, and its slots in their order.
    Row(usize, RowHead, &'a [&'a [u8]]),
}

/// Takes pieces.
pub(crate) type Sink<'a> = dyn FnMut(Piece<'_>) -> Result<(), CheckpointError> + 'a;

impl Opened {
    /// Fills a shard's layout: calls `sink` for each partition of it with ranges of bytes of that
    /// layout, in pieces of at most 1 MiB, and then for each row of its tables. Slots are numbered as
    /// in `training`, which is the
    /// target's; those that only the checkpoint has are left out, as are such variables.
    ///
    /// Everything is checked before `sink` is called; only a file that cannot be trusted may end
    /// it later, and then the shard must not be used.
    pub(crate) fn restore_shard(
        &mut self,
        target: &Catalogue,
        shard: ShardId,
        training: &Training,
        sink: &mut Sink<'_>,
    ) -> Result<RestoredShard, CheckpointError> {
        let layout = target.layout(shard);
        let parts = layout.partitions();
        let plan: Vec<Vec<(VariableId, Stream, Stream)>> = parts
            .iter()
            .map(|part| self.streams_for(target, part, training))
            .collect::<Result<_, CheckpointError>>()?;
        let of_tables: Vec<Vec<(VariableId, Stream, Stream)>> = layout
            .tables()
            .iter()
            .map(|part| self.streams_for(target, part, training))
            .collect::<Result<_, CheckpointError>>()?;
        for (part, streams) in parts.iter().zip(plan) {
            for (variable, from, to) in streams {
                let mut start = part.offset;
                self.read(variable, from, part.elements.clone(), &mut |piece| {
                    let range = start..start + piece.len() as u64;
                    start = range.end;
                    sink(Piece::Range(to, range, piece))
                })?;
            }
        }
        for (table, (part, streams)) in layout.tables().iter().zip(of_tables).enumerate() {
            self.restore_table(table, part, &streams, sink)?;
        }
        Ok(self.counts(target, shard))
    }

    /// Gives a partition of a table the rows of its buckets, wherever they lay.
    fn restore_table(
        &self,
        table: usize,
        part: &Partition,
        streams: &[(VariableId, Stream, Stream)],
        sink: &mut Sink<'_>,
    ) -> Result<(), CheckpointError> {
        let from: Vec<usize> = streams.iter().map(|(_, from, _)| from.number()).collect();
        let Some((variable, ..)) = streams.first() else { return Ok(()) };
        let row_bytes = part.row_bytes() as usize;
        let saved = self.catalogue().partitions_of(*variable).iter();
        let overlaps = |saved: &&Partition| {
            saved.rows.start < part.rows.end && part.rows.start < saved.rows.end
        };
        for saved in saved.filter(overlaps) {
            self.read_rows(saved.id, &from, &mut |heads, bytes| {
                for (row, head) in heads.iter().enumerate() {
                    if part.rows.contains(&bucket(head.id)) {
                        let within = row * row_bytes..(row + 1) * row_bytes;
                        let row: Vec<&[u8]> = bytes.iter().map(|b| &b[within.clone()]).collect();
                        sink(Piece::Row(table, *head, &row))?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Where the values and slots of a partition come from, and what they become.
    fn streams_for(
        &self,
        target: &Catalogue,
        part: &Partition,
        training: &Training,
    ) -> Result<Vec<(VariableId, Stream, Stream)>, CheckpointError> {
        let wanted = target.variable(part.variable);
        let variable = wanted.name().to_owned();
        let Some(id) = self.catalogue().find(&variable) else {
            let checkpoint = self.manifest().checkpoint.to_string();
            return Err(CheckpointError::VariableMissing { variable, checkpoint });
        };
        let saved = self.catalogue().variable(id);
        // What is saved are the master values, which halves share with f32.
        if saved.dtype().master() != wanted.dtype().master() {
            let (found, expected) = (saved.dtype(), wanted.dtype());
            return Err(CheckpointError::DTypeMismatch { variable, found, expected });
        }
        if saved.as_table().is_some() != wanted.as_table().is_some() {
            let found = saved.as_table().is_some();
            return Err(CheckpointError::TableMismatch { variable, found });
        }
        if saved.shape() != wanted.shape() {
            let (found, expected) = (saved.shape().clone(), wanted.shape().clone());
            return Err(CheckpointError::ShapeMismatch { variable, found, expected });
        }
        let saved_by = self.manifest().training.optimizer(id);
        let trained_by = training.optimizer(part.variable);
        if let (Some(saved_by), Some(trained_by)) = (saved_by, trained_by)
            && saved_by.kind != trained_by.kind
        {
            let (found, expected) = (saved_by.kind.clone(), trained_by.kind.clone());
            return Err(CheckpointError::OptimizerMismatch { variable, found, expected });
        }
        let mut streams = vec![(id, Stream::Values, Stream::Values)];
        let held = self.manifest().training.slots(id);
        for (index, slot) in training.slots_of(part).iter().enumerate() {
            let Some(from) = held.iter().position(|held| held == slot) else {
                let (found, expected) = (held.to_vec(), slot.to_owned());
                return Err(CheckpointError::SlotMissing { variable, found, expected });
            };
            streams.push((id, Stream::Slot(from), Stream::Slot(index)));
        }
        Ok(streams)
    }

    /// A shard whose variables lie where they lay has its own counts and windows again. Elsewhere
    /// there is no such shard, and it takes the largest counts of all: versions must not go back
    /// for anybody. Adam's t is a count of gradients, and those of the shards differ by the pushes
    /// that were under way only; the largest says of no slot that it is fresher than it is.
    fn counts(&self, target: &Catalogue, shard: ShardId) -> RestoredShard {
        let same = target.digest() == self.catalogue().digest();
        if let Some(entry) = self.manifest().shard(shard).filter(|_| same) {
            let (version, gradients) = (entry.version, entry.gradients);
            return RestoredShard { version, gradients, clients: entry.clients.clone() };
        }
        let shards = &self.manifest().shards;
        RestoredShard {
            version: shards.iter().map(|shard| shard.version).max().unwrap_or(0),
            gradients: shards.iter().map(|shard| shard.gradients).max().unwrap_or(0),
            clients: Vec::new(),
        }
    }
}
