//! Resharding: gives a shard its part of a checkpoint that was saved in any layout.

use std::ops::Range;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::ids::{PartitionId, ShardId, VariableId};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::table::{RowHead, bucket};

use crate::data_entry::DataEntry;
use crate::error::CheckpointError;
use crate::manifest::ClientWindow;
use crate::restore::Opened;
use crate::saved_coordinator::{self, SavedCoordinator};
use crate::training::CheckpointTraining;

/// The state of a restored shard besides its values and slots.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoredShard {
    /// The number of pushes it has applied.
    pub version: u64,
    /// The number of gradients it has applied.
    pub gradients: u64,
    /// How many gradients one shard of the checkpoint has applied more than another.
    pub gradients_apart: u64,
    /// The push windows of its clients; empty if the layout has changed.
    pub clients: Vec<ClientWindow>,
    /// The data position of the checkpoint.
    pub data: Option<DataEntry>,
    /// The effects that have counted in its values; if the layout has changed, those that have
    /// counted on every shard.
    pub coordinators: Vec<SavedCoordinator>,
}

/// A piece of a checkpoint, as a shard receives it.
#[derive(Debug)]
pub enum CheckpointPiece<'a> {
    /// The bytes of a range of its layout, in the values or a slot.
    Range(StoredStream, Range<u64>, &'a [u8]),
    /// A row of a table, by the table's index among those of the shard: the row's head, its values,
    /// and its slots in order.
    Row(usize, RowHead, &'a [&'a [u8]]),
}

/// A callback that takes pieces.
pub(crate) type Sink<'a> = dyn FnMut(CheckpointPiece<'_>) -> Result<(), CheckpointError> + 'a;

/// A callback that takes a row: its head, and its bytes of each stream.
type TakeRow<'a> = dyn FnMut(RowHead, &[&[u8]]) -> Result<(), CheckpointError> + 'a;

/// The saved variable, the saved stream and the target stream of a partition's values, and of each
/// of its slots.
type PlannedStreams = Vec<(VariableId, StoredStream, StoredStream)>;

impl Opened {
    /// Checks that [`Opened::restore_shard`] can restore the part of this shard, whose tables hold
    /// at most `row_limits` rows each. Verifies every file that has some of the part.
    pub fn check_shard(
        &mut self,
        target: &Catalogue,
        shard: ShardId,
        training: &CheckpointTraining,
        row_limits: &[u64],
    ) -> Result<(), CheckpointError> {
        let layout = target.layout(shard);
        let plan = self.plan_streams(target, layout.partitions(), training)?;
        let of_tables = self.plan_streams(target, layout.tables(), training)?;
        for (part, streams) in layout.partitions().iter().zip(plan) {
            let variables = streams.first().map(|(variable, ..)| *variable);
            variables.map_or(Ok(()), |id| self.verify_elements(id, &part.elements))?;
        }
        let tables = layout.tables().iter().zip(of_tables).zip(row_limits);
        for ((part, streams), &limit) in tables {
            let Some((variable, ..)) = streams.first() else { continue };
            let checkpoint = self.manifest().checkpoint.to_string();
            let mut rows = 0;
            self.read_buckets(*variable, part, &[], &mut |_, _| {
                rows += 1;
                if rows <= limit {
                    return Ok(());
                }
                let variable = target.variable(part.variable).name().to_owned();
                let checkpoint = checkpoint.clone();
                Err(CheckpointError::TableFull { variable, checkpoint, limit })
            })?;
        }
        Ok(())
    }

    fn plan_streams(
        &self,
        target: &Catalogue,
        parts: &[Partition],
        training: &CheckpointTraining,
    ) -> Result<Vec<PlannedStreams>, CheckpointError> {
        parts.iter().map(|part| self.streams_for(target, part, training)).collect()
    }

    /// Fills a shard's layout. Calls `sink` for each of its partitions with ranges of bytes of the
    /// layout, in pieces of at most 1 MiB, and then for each row of its tables. Slots are numbered
    /// as in the target's `training`. Slots and variables that only the checkpoint has are left
    /// out.
    ///
    /// All compatibility checks are made before `sink` is called. Only a file that cannot be
    /// trusted may end the restore later; the shard must not be used then.
    pub fn restore_shard(
        &mut self,
        target: &Catalogue,
        shard: ShardId,
        training: &CheckpointTraining,
        sink: &mut Sink<'_>,
    ) -> Result<RestoredShard, CheckpointError> {
        let layout = target.layout(shard);
        let plan = self.plan_streams(target, layout.partitions(), training)?;
        let of_tables = self.plan_streams(target, layout.tables(), training)?;
        for (part, streams) in layout.partitions().iter().zip(plan) {
            for (variable, from, to) in streams {
                let mut start = part.offset;
                self.read(variable, from, part.elements.clone(), &mut |piece| {
                    let range = start..start + piece.len() as u64;
                    start = range.end;
                    sink(CheckpointPiece::Range(to, range, piece))
                })?;
            }
        }
        for (table, (part, streams)) in layout.tables().iter().zip(of_tables).enumerate() {
            let Some((variable, ..)) = streams.first() else { continue };
            let from: Vec<usize> = streams.iter().map(|(_, from, _)| from.number()).collect();
            self.read_buckets(*variable, part, &from, &mut |head, row| {
                sink(CheckpointPiece::Row(table, head, row))
            })?;
        }
        Ok(self.counts(target, shard))
    }

    /// Passes the rows of a table partition's buckets to `take`, with their bytes of the streams
    /// `from`, from every saved partition of the variable that has some.
    fn read_buckets(
        &mut self,
        variable: VariableId,
        part: &Partition,
        from: &[usize],
        take: &mut TakeRow<'_>,
    ) -> Result<(), CheckpointError> {
        let row_bytes = part.row_bytes() as usize;
        let saved = self.catalogue().partitions_of(variable).iter();
        let overlaps = |saved: &&Partition| {
            saved.rows.start < part.rows.end && part.rows.start < saved.rows.end
        };
        let saved: Vec<PartitionId> = saved.filter(overlaps).map(|saved| saved.id).collect();
        for saved in saved {
            self.read_rows(saved, from, &mut |heads, bytes| {
                for (row, head) in heads.iter().enumerate() {
                    if part.rows.contains(&bucket(head.id)) {
                        let within = row * row_bytes..(row + 1) * row_bytes;
                        let row: Vec<&[u8]> = bytes.iter().map(|b| &b[within.clone()]).collect();
                        take(*head, &row)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns the saved streams of a partition's values and slots, with their targets.
    fn streams_for(
        &self,
        target: &Catalogue,
        part: &Partition,
        training: &CheckpointTraining,
    ) -> Result<PlannedStreams, CheckpointError> {
        let wanted = target.variable(part.variable);
        let variable = wanted.name().to_owned();
        let checkpoint = self.manifest().checkpoint.to_string();
        let Some(id) = self.catalogue().find(&variable) else {
            return Err(CheckpointError::VariableMissing { variable, checkpoint });
        };
        let saved = self.catalogue().variable(id);
        // A checkpoint holds master values; those of half types are f32.
        if saved.dtype().master() != wanted.dtype().master() {
            let found = saved.dtype();
            let expected = wanted.dtype();
            return Err(CheckpointError::DTypeMismatch { variable, checkpoint, found, expected });
        }
        if saved.as_table().is_some() != wanted.as_table().is_some() {
            let found = saved.as_table().is_some();
            return Err(CheckpointError::TableMismatch { variable, checkpoint, found });
        }
        if saved.shape() != wanted.shape() {
            let found = saved.shape().clone();
            let expected = wanted.shape().clone();
            return Err(CheckpointError::ShapeMismatch { variable, checkpoint, found, expected });
        }
        let saved_by = self.manifest().training.optimizer(id);
        let trained_by = training.optimizer(part.variable);
        if let (Some(saved_by), Some(trained_by)) = (saved_by, trained_by)
            && saved_by.kind != trained_by.kind
        {
            let found = saved_by.kind.clone();
            let expected = trained_by.kind.clone();
            return Err(CheckpointError::OptimizerMismatch {
                variable,
                checkpoint,
                found,
                expected,
            });
        }
        let mut streams = vec![(id, StoredStream::Values, StoredStream::Values)];
        let held = self.manifest().training.slots(id);
        for (index, slot) in training.slots_of(part).iter().enumerate() {
            let Some(from) = held.iter().position(|held| held == slot) else {
                let found = held.to_vec();
                let expected = slot.to_owned();
                return Err(CheckpointError::SlotMissing { variable, checkpoint, found, expected });
            };
            streams.push((id, StoredStream::Slot(from), StoredStream::Slot(index)));
        }
        Ok(streams)
    }

    /// Returns the difference between the most and the fewest gradients that a shard with variables
    /// has applied.
    fn gradients_apart(&self) -> u64 {
        // Every gradient has a share, if an empty one, on each of them.
        let saved = self.catalogue().shards().filter_map(|shard| self.manifest().shard(shard));
        let counts: Vec<u64> = saved.map(|shard| shard.gradients).collect();
        let fewest = counts.iter().min();
        let most = counts.iter().max();
        most.zip(fewest).map_or(0, |(most, fewest)| most - fewest)
    }

    /// Returns the counts and windows of a restored shard.
    ///
    /// With an unchanged catalogue, a shard gets its own back. With another one, it takes the
    /// largest counts of all shards, because versions must not go back for any client. Adam's t is
    /// a count of gradients. The counts of shards differ only by the pushes that were in flight, so
    /// the largest calls no slot fresher than it is.
    fn counts(&self, target: &Catalogue, shard: ShardId) -> RestoredShard {
        let mut data = self.manifest().shards.iter().filter_map(|shard| shard.data.clone());
        let data = data.next();
        let gradients_apart = self.gradients_apart();
        let same = target.digest() == self.catalogue().digest();
        if let Some(entry) = self.manifest().shard(shard).filter(|_| same) {
            let version = entry.version;
            let gradients = entry.gradients;
            let clients = entry.clients.clone();
            let coordinators = entry.coordinators.clone();
            return RestoredShard {
                version,
                gradients,
                gradients_apart,
                clients,
                data,
                coordinators,
            };
        }
        let shards = &self.manifest().shards;
        RestoredShard {
            version: shards.iter().map(|shard| shard.version).max().unwrap_or(0),
            gradients: shards.iter().map(|shard| shard.gradients).max().unwrap_or(0),
            gradients_apart,
            clients: Vec::new(),
            data,
            coordinators: saved_coordinator::of_every_shard(
                shards.iter().map(|shard| shard.coordinators.as_slice()),
            ),
        }
    }
}
