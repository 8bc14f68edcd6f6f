//! Readers in other processes that read values in place. A block that such a reader may be reading
//! is not written.
//!
//! `pushpull_common::shared_values` describes the mechanism. The block table exists only while some
//! reader has a reader slot. Without readers all of this costs one branch for each change.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::SharedValues;
use pushpull_common::shared_values::{
    BlockTable, READER_SLOT_WORDS, ReaderSlot, ValueCounts, block_table_words, holds,
};

use super::Store;
use super::pool::Pool;
use crate::arena::{Budget, Reservation, SharedWords};
use crate::error::StorageError;
use crate::planted::{Bug, PlantedBugs};

/// The bit of [`SharedValues::shares`] that stands for values.
pub const VALUES: u64 = 1;

/// The sequences of the block table at which a block held a logical block: from `first` up to
/// `end`, exclusive. Nothing reads a block whose range is empty.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SequenceRange {
    first: u64,
    end: u64,
}

/// The readers of a store's values in other processes, if there are any.
#[derive(Debug, Default)]
pub(super) struct Readers(Option<Box<SharedReaders>>);

#[derive(Debug)]
struct SharedReaders {
    block_table: BlockTable<SharedWords>,
    readers: Vec<InPlaceReader>,
    /// For each logical block, the sequence from which its committed block holds it.
    first_sequences: Vec<u64>,
    /// The logical blocks that the current change moves to other blocks.
    moved_blocks: Vec<u32>,
    planted: PlantedBugs,
    /// Whether [`Bug::StaleSequence`] has suppressed the last publication.
    commit_hidden: bool,
    _reservation: Reservation,
}

/// A reader in another process.
#[derive(Debug)]
struct InPlaceReader {
    connection: u64,
    reader_slot: ReaderSlot<SharedWords>,
    /// The pulls and bytes that it had counted when they were last read.
    counted: (u64, u64),
    /// The pin that was observed last, the counts at that time, and the time of the first
    /// observation.
    observed_pin: Option<(u64, (u64, u64), Instant)>,
    _reservation: Reservation,
}

impl SharedReaders {
    fn has_pins(&self) -> bool {
        self.readers.iter().any(|reader| reader.reader_slot.pinned() != 0)
    }
}

impl Readers {
    /// Returns whether there are readers.
    pub(super) fn exist(&self) -> bool {
        self.0.is_some()
    }

    /// Records that the current change moves a logical block to another block. Returns the
    /// sequences of the block that it replaces.
    pub(super) fn block_moved(&mut self, logical: u32) -> SequenceRange {
        let Some(shared_values) = &mut self.0 else { return SequenceRange::default() };
        shared_values.moved_blocks.push(logical);
        let end = shared_values.block_table.sequence() + 2;
        SequenceRange {
            first: std::mem::replace(&mut shared_values.first_sequences[logical as usize], end),
            end,
        }
    }

    /// Returns whether a reader may be reading a replaced block.
    pub(super) fn may_read(&self, sequences: SequenceRange) -> bool {
        let Some(shared_values) = self.0.as_ref().filter(|_| sequences.end > 0) else {
            return false;
        };
        if shared_values.planted.has(Bug::PinIgnored) {
            return false;
        }
        shared_values
            .readers
            .iter()
            .any(|reader| holds(reader.reader_slot.pinned(), sequences.first, sequences.end))
    }

    /// Begins a change of values in place. Returns false if a reader has a pin. Readers that arrive
    /// before the change is published are rejected.
    pub(super) fn begin_in_place(&mut self) -> bool {
        let Some(shared_values) = &mut self.0 else { return true };
        // This check usually decides, without rejecting any reader.
        if shared_values.has_pins() {
            return false;
        }
        shared_values.block_table.begin();
        let free = !shared_values.has_pins();
        if !free {
            shared_values.block_table.publish(shared_values.block_table.counts());
        }
        free
    }

    /// Publishes the unchanged values again after a change in place was rolled back.
    pub(super) fn cancel_in_place(&mut self) {
        if let Some(shared_values) = &mut self.0
            && shared_values.block_table.is_changing()
        {
            shared_values.block_table.publish(shared_values.block_table.counts());
        }
    }

    /// Publishes a committed change: the blocks that it moved, and its counts.
    pub(super) fn publish(&mut self, counts: ValueCounts, committed: &[u32]) {
        let Some(shared_values) = &mut self.0 else { return };
        let SharedReaders { block_table, moved_blocks, planted, commit_hidden, .. } =
            &mut **shared_values;
        if moved_blocks.is_empty() && !block_table.is_changing() && block_table.counts() == counts {
            return;
        }
        *commit_hidden = planted.has(Bug::StaleSequence) && !*commit_hidden;
        if *commit_hidden {
            return;
        }
        block_table.begin();
        for logical in moved_blocks.drain(..) {
            block_table.set_block(logical as usize, committed[logical as usize]);
        }
        block_table.publish(counts);
    }

    /// Asserts that the block table names the committed blocks.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_invariants(&self, committed: &[u32]) {
        let Some(shared_values) =
            self.0.as_ref().filter(|shared_values| shared_values.moved_blocks.is_empty())
        else {
            return;
        };
        assert!(!shared_values.readers.is_empty(), "a block table without readers is dropped");
        for (logical, &committed) in committed.iter().enumerate() {
            assert_eq!(
                shared_values.block_table.block(logical),
                u64::from(committed),
                "logical block {logical} in the block table"
            );
            assert!(
                shared_values.first_sequences[logical] <= shared_values.block_table.sequence(),
                "logical block {logical} is published"
            );
        }
    }

    /// Revokes the reader slot of a connection, so that its current copy becomes invalid. Returns
    /// the pulls and bytes that it has counted since they were last read.
    fn remove(&mut self, connection: u64) -> (u64, u64) {
        let Some(shared_values) = &mut self.0 else { return (0, 0) };
        let mut counted = (0, 0);
        for mut reader in
            shared_values.readers.extract_if(.., |reader| reader.connection == connection)
        {
            if !shared_values.planted.has(Bug::RevokedUnseen) {
                reader.reader_slot.revoke();
            }
            counted = reader.count();
        }
        if shared_values.readers.is_empty() {
            self.0 = None;
        }
        counted
    }
}

impl InPlaceReader {
    /// Returns whether the reader has held the same pin for the timeout.
    fn has_stalled(&mut self, now: Instant, stall_timeout: Duration) -> bool {
        let pin = self.reader_slot.pinned();
        let counted = self.reader_slot.counted();
        match self.observed_pin {
            _ if pin == 0 => self.observed_pin = None,
            Some((p, c, since)) if (p, c) == (pin, counted) => {
                return now.saturating_duration_since(since) >= stall_timeout;
            }
            _ => self.observed_pin = Some((pin, counted, now)),
        }
        false
    }

    /// Returns the pulls and bytes that the reader has counted since the last call. A faulty client
    /// may report any numbers.
    fn count(&mut self) -> (u64, u64) {
        let now = self.reader_slot.counted();
        let (pulls, bytes) = std::mem::replace(&mut self.counted, now);
        (now.0.wrapping_sub(pulls), now.1.wrapping_sub(bytes))
    }
}

impl Store {
    /// Shares the values, which have these counts, with a connection. Returns the message and the
    /// descriptors of block table, reader slot and values. Revokes a reader slot that the
    /// connection had.
    ///
    /// # Errors
    /// If the memory cannot be shared, or the budget is exhausted.
    pub fn share(
        &mut self,
        connection: u64,
        counts: ValueCounts,
        budget: &Budget,
    ) -> Result<(SharedValues, Vec<OwnedFd>), StorageError> {
        let failed = |source| {
            let path = Path::new("memory of the values").to_owned();
            StorageError::Io { doing: "share", path, source }
        };
        let geometry = self.values.blocks.geometry(self.geometry.logical_blocks);
        let (values, values_bytes) = self.values.blocks.read_only_descriptor().map_err(failed)?;
        let words = SharedWords::new(READER_SLOT_WORDS).map_err(failed)?;
        let reservation = budget.reserve_unpromised(words.bytes())?;
        let reader_slot = words.writable_descriptor().map_err(failed)?;
        let reader_slot_bytes = words.bytes();
        let committed =
            (0..self.geometry.logical_blocks).map(|logical| self.values.committed_block(logical));
        let mut made = None;
        if !self.values.readers.exist() {
            let words = SharedWords::new(block_table_words(committed.len())).map_err(failed)?;
            let reservation = budget.reserve_unpromised(words.bytes())?;
            let readers = Vec::new();
            let first_sequences = vec![0; committed.len()];
            let moved_blocks = Vec::new();
            let block_table = BlockTable::new(words, counts, committed);
            let planted = self.planted;
            let commit_hidden = false;
            made = Some(Box::new(SharedReaders {
                block_table,
                readers,
                first_sequences,
                moved_blocks,
                planted,
                commit_hidden,
                _reservation: reservation,
            }));
        }
        let shared_values = made.as_ref().or(self.values.readers.0.as_ref());
        let block_table = shared_values.map(|shared_values| shared_values.block_table.words());
        let block_table = block_table.expect("a block table is created if there is none");
        let (block_table, block_table_bytes) =
            (block_table.read_only_descriptor().map_err(failed)?, block_table.bytes());
        // Nothing below fails.
        let owner_generation = self.values.blocks.word(geometry.owner_generation_word());
        if let Some(made) = made {
            self.values.readers.0 = Some(made);
        }
        if let Some(shared_values) = &mut self.values.readers.0 {
            for reader in
                shared_values.readers.extract_if(.., |reader| reader.connection == connection)
            {
                reader.reader_slot.revoke();
            }
            let reader_slot = ReaderSlot::new(words.without_descriptor());
            shared_values.readers.push(InPlaceReader {
                connection,
                reader_slot,
                counted: (0, 0),
                observed_pin: None,
                _reservation: reservation,
            });
        }
        let shared = SharedValues {
            shares: VALUES,
            owner_generation,
            block_table_bytes,
            reader_slot_bytes,
            values_bytes,
            offset: geometry.offset,
            block_bytes: geometry.block_bytes,
            stride: geometry.stride,
            blocks: geometry.blocks,
            logical_blocks: geometry.logical_blocks,
        };
        Ok((shared, vec![block_table, reader_slot, values]))
    }

    /// Returns whether values are shared. The server is not informed of such reads.
    pub fn is_shared(&self) -> bool {
        self.values.readers.exist()
    }

    /// Revokes a connection's access to shared values, if it has any. Returns the pulls and bytes
    /// that it has reported since they were last read.
    pub fn revoke_reader(&mut self, connection: u64) -> (u64, u64) {
        let counted = self.values.readers.remove(connection);
        if !self.is_shared() {
            // The next block table counts its sequences from the start, so these would have another
            // meaning.
            self.values.forget_sequences();
        }
        counted
    }

    /// Returns the pulls and bytes that readers have reported since the last call.
    pub fn direct_pulls(&mut self) -> (u64, u64) {
        let Some(shared_values) = &mut self.values.readers.0 else { return (0, 0) };
        let counts = shared_values.readers.iter_mut().map(InPlaceReader::count);
        counts.fold((0, 0), |sum, (pulls, bytes)| {
            (sum.0.wrapping_add(pulls), sum.1.wrapping_add(bytes))
        })
    }

    /// Returns the connections of readers that have held one pin for the timeout. They may have
    /// stopped in the middle of a pull, and would hold its blocks forever.
    pub fn stalled_readers(&mut self, now: Instant, stall_timeout: Duration) -> Vec<u64> {
        let Some(shared_values) = &mut self.values.readers.0 else { return Vec::new() };
        let readers = shared_values.readers.iter_mut();
        let stalled =
            readers.filter_map(|reader| reader.has_stalled(now, stall_timeout).then_some(reader));
        stalled.map(|reader| reader.connection).collect()
    }

    /// Returns the connections of readers that hold retired blocks.
    pub fn readers_of_retired_blocks(&self) -> Vec<u64> {
        let Pool { readers, retired, .. } = &self.values;
        let readers = readers.0.iter().flat_map(|shared_values| &shared_values.readers);
        let holds_one = |reader: &&InPlaceReader| {
            let pin = reader.reader_slot.pinned();
            retired
                .iter()
                .any(|replaced| holds(pin, replaced.sequences.first, replaced.sequences.end))
        };
        readers.filter(holds_one).map(|reader| reader.connection).collect()
    }
}
