//! The records of a table: each holds a row, its slots and its usage counters.
//!
//! A record named by the committed index is changed in place, with its old contents saved for undo,
//! or copied to a free record, which the commit then names instead. Records are stored in files of
//! equal size, so that a table grows without moving any record.

use pushpull_common::table::RowHead;
use pushpull_common::tensor::DType;

use super::index::RECORDS_MAX;
use crate::arena::{Arena, Blocks, Budget, Grid, Memory, Part, PinnedSet, Promise, Reservation};
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES};
use crate::undo::Undo;

/// The size of a record's head, in bytes.
pub(super) const HEAD_BYTES: usize = 24;
const ID: usize = 0;
const STEP: usize = 8;
const PUSHES: usize = 16;
const CRC: usize = 20;

/// The maximum size of a file of records. Creating one stalls nobody for long.
const FILE_BYTES_MAX: usize = 32 << 20;

/// The layout of a record: its head, then values and slots, each padded to whole words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordShape {
    pub dtype: DType,
    pub row_bytes: usize,
    pub slots: usize,
}

impl RecordShape {
    fn stream_bytes(self) -> usize {
        self.row_bytes.next_multiple_of(8)
    }

    pub(super) fn record_bytes(self) -> usize {
        HEAD_BYTES + (1 + self.slots) * self.stream_bytes()
    }

    /// Returns the undo bytes for a record, as a tile of its own.
    pub(super) fn undo_bytes(self) -> usize {
        Undo::need(1, self.record_bytes(), 1)
    }

    /// Returns the values of a record, then its slots.
    pub(super) fn streams_mut(self, record: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
        let streams = record[HEAD_BYTES..].chunks_exact_mut(self.stream_bytes());
        streams.map(move |stream| &mut stream[..self.row_bytes])
    }

    /// Returns the byte range of a record's values (stream 0) or of one of its slots (from 1).
    pub(super) fn stream(self, stream: usize) -> std::ops::Range<usize> {
        let start = HEAD_BYTES + stream * self.stream_bytes();
        start..start + self.row_bytes
    }
}

/// Returns the head of a record.
pub(super) fn head_of(record: &[u8]) -> RowHead {
    RowHead { id: word(record, ID), step: word(record, STEP), pushes: word(record, PUSHES) as u32 }
}

/// Writes the head of a record whose values are already there, and its checksum: 0 without
/// `integrity`.
pub(super) fn put_head(head: RowHead, record: &mut [u8], integrity: bool) {
    let bytes: &mut [u8; HEAD_BYTES] =
        record.first_chunk_mut().expect("a record is longer than its head");
    bytes[ID..STEP].copy_from_slice(&head.id.to_le_bytes());
    bytes[STEP..PUSHES].copy_from_slice(&head.step.to_le_bytes());
    bytes[PUSHES..CRC].copy_from_slice(&head.pushes.to_le_bytes());
    let crc = if integrity { checksum(record) } else { 0 };
    record[CRC..HEAD_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Returns the id of a record.
pub(super) fn id_of(record: &[u8]) -> u64 {
    word(record, ID)
}

fn word(record: &[u8], at: usize) -> u64 {
    u64::from_le(bytemuck::pod_read_unaligned(&record[at..at + 8]))
}

fn checksum(record: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&record[..CRC]), &record[HEAD_BYTES..])
}

/// Returns whether the checksum of a record is correct.
pub(super) fn is_sound(record: &[u8]) -> bool {
    (word(record, PUSHES) >> 32) as u32 == checksum(record)
}

/// The location of a table's files, and the memory for them.
#[derive(Clone, Debug)]
pub struct TableFiles {
    /// The shard's files.
    pub arena: Arena,
    /// The generation of the files.
    pub generation: u64,
    /// The table's number in the layout of the shard.
    pub table: u16,
    /// The memory that is kept for the table.
    pub promises: TablePromises,
}

/// The memory that is kept for a table. The index has a promise of its own: records are never given
/// back, and while a checkpoint pins them there can be twice as many.
#[derive(Clone, Debug)]
pub struct TablePromises {
    pub(super) index: Promise,
    pub(super) records: Promise,
}

/// The most memory that a table takes while nothing is pinned.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableNeed {
    pub(super) index: u64,
    pub(super) records: u64,
}

impl TableNeed {
    /// Returns the sum, in bytes.
    pub fn bytes(self) -> u64 {
        self.index.saturating_add(self.records)
    }

    /// Keeps this memory of a budget.
    pub fn promised(self, budget: &Budget) -> TablePromises {
        let TableNeed { index, records } = self;
        TablePromises { index: budget.promise(index), records: budget.promise(records) }
    }
}

/// Records by number.
///
/// Invariant: every record is either live, in exactly one of the lists, or taken by the change in
/// progress.
#[derive(Debug)]
pub(super) struct Records {
    files: TableFiles,
    pub(super) shape: RecordShape,
    /// The base-2 logarithm of the number of records in a file.
    file_bits: u32,
    memory: Vec<(Blocks, Reservation)>,
    /// The records that the committed index names, one bit each.
    live: Vec<u64>,
    /// Unused records.
    free: Vec<u32>,
    /// Records that the commit in progress replaces.
    freed: Vec<u32>,
    /// Records that were replaced while pinned.
    retired: Vec<u32>,
}

impl Records {
    /// Creates an empty set, for a table of at most `most` rows.
    pub(super) fn new(files: TableFiles, shape: RecordShape, most: u64) -> Records {
        let file_bits = file_bits(shape, most);
        let memory = Vec::new();
        let live = Vec::new();
        let free = Vec::new();
        let freed = Vec::new();
        let retired = Vec::new();
        Records { files, shape, file_bits, memory, live, free, freed, retired }
    }

    /// Returns the memory of the files that hold `records` records, in a table of at most `most`
    /// rows.
    pub(super) fn need(shape: RecordShape, most: u64, records: u64) -> u64 {
        let bits = file_bits(shape, most);
        let file = ((shape.record_bytes() as u64) << bits) + PAGE_BYTES as u64;
        records.div_ceil(1 << bits).saturating_mul(file)
    }

    /// Opens the `count` files of an earlier process. The caller then marks the live records and
    /// calls [`Records::finish_open`].
    pub(super) fn open(
        files: TableFiles,
        shape: RecordShape,
        most: u64,
        count: u32,
    ) -> Result<Records, StorageError> {
        let mut records = Records::new(files, shape, most);
        for number in 0..count {
            let TableFiles { arena, generation, table, .. } = &records.files;
            let part = Part::OfTable(*table, number);
            let bytes = Some(records.file_bytes());
            let memory = arena.open_part(Kind::Rows, *generation, part, bytes)?;
            let reservation =
                records.files.promises.records.reserve_recovered(records.grid().need())?;
            records.add_file(memory, reservation);
        }
        records.free.clear();
        Ok(records)
    }

    fn grid(&self) -> Grid {
        let record_bytes = self.shape.record_bytes();
        Grid {
            offset: PAGE_BYTES,
            block_bytes: record_bytes,
            stride: record_bytes,
            count: 1 << self.file_bits,
            parts: 1,
            region: 0,
        }
    }

    /// Returns the size of a file after its first page.
    fn file_bytes(&self) -> u64 {
        self.grid().need() - PAGE_BYTES as u64
    }

    fn add_file(&mut self, memory: Memory, reservation: Reservation) {
        let first = (self.memory.len() as u32) << self.file_bits;
        // The files can be very many, and none grows.
        let memory = memory.without_file();
        self.memory.push((Blocks::with_pinned_sets(memory, self.grid()), reservation));
        self.live.resize(self.memory.len() << self.file_bits >> 6, 0);
        // The lowest number is on top, to be taken first.
        let free = std::mem::take(&mut self.free);
        self.free.extend((first..first + (1 << self.file_bits)).rev());
        self.free.extend(free);
    }

    /// Adds a file.
    ///
    /// # Errors
    /// If the budget or the numbering is exhausted, or the file cannot be created.
    pub(super) fn grow(&mut self) -> Result<(), StorageError> {
        let number = self.memory.len() as u32;
        let most = RECORDS_MAX >> self.file_bits;
        let bytes = self.file_bytes();
        if number >= most {
            return Err(StorageError::DoesNotFit { need: bytes, limit: 0 });
        }
        let reservation = self.files.promises.records.reserve(self.grid().need())?;
        let TableFiles { arena, generation, table, .. } = &self.files;
        let part = Part::OfTable(*table, number);
        // An earlier process may have been killed or denied space while it created the file.
        let name = part.file_name(Kind::Rows, *generation);
        arena.storage.remove(&name)?;
        let memory = arena.create_part(Kind::Rows, *generation, part, bytes).inspect_err(|_| {
            // A retry creates the file again. Until then its space is free for others.
            let _ = arena.storage.remove(&name);
        })?;
        self.add_file(memory, reservation);
        Ok(())
    }

    /// Returns the location of the files.
    pub(super) fn files(&self) -> &TableFiles {
        &self.files
    }

    /// Returns the number of files.
    pub(super) fn file_count(&self) -> u32 {
        self.memory.len() as u32
    }

    /// Returns the number of records.
    pub(super) fn count(&self) -> u64 {
        (self.memory.len() as u64) << self.file_bits
    }

    /// Returns the memory of the records, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.iter().map(|(_, reservation)| reservation.bytes()).sum()
    }

    /// Returns the number of free records.
    pub(super) fn free_count(&mut self) -> usize {
        if !self.are_pinned() {
            self.free.append(&mut self.retired);
        }
        self.free.len()
    }

    /// Returns the number of records that are free once no reader pins any.
    pub(super) fn free_count_unpinned(&self) -> usize {
        self.free.len() + self.retired.len()
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Returns taken records that were not used.
    pub(super) fn give_back(&mut self, taken: impl DoubleEndedIterator<Item = u32>) {
        self.free.extend(taken.rev());
    }

    fn at(&self, record: u32) -> (&Blocks, u32) {
        let (blocks, _) = &self.memory[(record >> self.file_bits) as usize];
        (blocks, record & ((1 << self.file_bits) - 1))
    }

    pub(super) fn read(&self, record: u32) -> &[u8] {
        let (blocks, block) = self.at(record);
        blocks.read(block)
    }

    pub(super) fn write(&mut self, record: u32) -> &mut [u8] {
        let (blocks, _) = &mut self.memory[(record >> self.file_bits) as usize];
        blocks.write(record & ((1 << self.file_bits) - 1))
    }

    /// Prefetches the first bytes of a record into the cache.
    pub(super) fn prefetch(&self, record: u32, bytes: usize) {
        let (blocks, block) = self.at(record);
        // The hardware prefetcher continues in a row of many lines.
        blocks.prefetch(block, 0, 0..bytes.min(1024));
    }

    /// Marks a record as named by the committed index.
    pub(super) fn set_live(&mut self, record: u32) {
        self.live[record as usize / 64] |= 1 << (record % 64);
    }

    pub(super) fn is_live(&self, record: u32) -> bool {
        let word = self.live.get(record as usize / 64);
        word.is_some_and(|word| word >> (record % 64) & 1 == 1)
    }

    /// Completes opening, after all live records were marked: the others are free.
    pub(super) fn finish_open(&mut self) {
        let count = self.count() as u32;
        self.free = (0..count).rev().filter(|&record| !self.is_live(record)).collect();
    }

    /// Releases a record that the commit in progress no longer names.
    pub(super) fn free(&mut self, record: u32) {
        self.live[record as usize / 64] &= !(1 << (record % 64));
        self.freed.push(record);
    }

    /// Frees the replaced records after the commit. Those that may be pinned are retired until the
    /// pins are gone.
    pub(super) fn committed(&mut self) {
        if self.freed.is_empty() {
            return;
        }
        let to = if self.are_pinned() { &mut self.retired } else { &mut self.free };
        to.append(&mut self.freed);
    }

    /// Returns whether any pinned set of records is still held.
    pub(super) fn are_pinned(&mut self) -> bool {
        self.memory.iter_mut().any(|(blocks, _)| blocks.has_pinned_sets())
    }

    /// Pins all live records.
    pub(super) fn pin(&mut self) -> Vec<PinnedSet> {
        let words = (1 << self.file_bits) / 64;
        let files = self.memory.iter_mut().zip(self.live.chunks(words));
        files.map(|((blocks, _), live)| blocks.pin_set(live.to_vec())).collect()
    }

    /// Asserts the invariants. For tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_invariants(&self, taken: &[u32]) {
        let lists = [&self.free, &self.freed, &self.retired];
        let mut all: Vec<u32> = lists.into_iter().flatten().chain(taken).copied().collect();
        all.extend((0..self.count() as u32).filter(|&record| self.is_live(record)));
        all.sort_unstable();
        assert!(
            all.iter().copied().eq(0..self.count() as u32),
            "every record must be listed once: {all:?}"
        );
    }
}

/// Returns the base-2 logarithm of the records in a file: small tables have small files, and large
/// tables have few.
fn file_bits(shape: RecordShape, most: u64) -> u32 {
    let fit = (FILE_BYTES_MAX / shape.record_bytes()).max(64) as u64;
    (most / 8).clamp(64, fit).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_sizes_follow_the_row_limit() {
        let shape = |row_bytes| RecordShape { dtype: DType::F32, row_bytes, slots: 1 };
        assert_eq!(shape(12).record_bytes(), 24 + 2 * 16);
        assert_eq!((shape(12).stream(0), shape(12).stream(1)), (24..36, 40..52));
        assert_eq!(file_bits(shape(64), 1), 6);
        assert_eq!(file_bits(shape(64), 1 << 20), 17);
        assert_eq!(file_bits(shape(64), 1 << 40), 17);
        assert_eq!(file_bits(shape(1 << 20), 1 << 20), 6);
    }

    #[test]
    fn a_head_survives_encoding() {
        let mut record = vec![7; 56];
        let head = RowHead { id: u64::MAX - 1, step: 1 << 40, pushes: 9 };
        put_head(head, &mut record, true);
        assert_eq!((head_of(&record), id_of(&record)), (head, head.id));
        assert!(is_sound(&record));
        record[55] ^= 1;
        assert!(!is_sound(&record));
    }
}
