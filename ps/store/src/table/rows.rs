//! Images of a table's rows for checkpoints, and restoring rows from one.

use pushpull_common::table::RowHead;

use super::Table;
use super::index::{ChangedPages, DirtyPages, ENTRIES, IndexEntry, Pages, pages_for, tag_of};
use super::records::{RecordShape, head_of, id_of, put_head};
use crate::arena::PinnedSet;
use crate::commit::Journal;
use crate::error::StorageError;

/// All rows of a table partition at one version, pinned while this lives. Readable on any thread.
#[derive(Debug)]
pub(crate) struct TableImage {
    rows: u64,
    shape: RecordShape,
    sets: Vec<PinnedSet>,
}

impl TableImage {
    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the head of each row, always in the same order.
    pub(crate) fn heads(&self) -> impl Iterator<Item = RowHead> {
        self.sets.iter().flat_map(PinnedSet::blocks).map(head_of)
    }

    /// Returns the values of each row (stream 0) or one of its slots (from 1), in the order of
    /// [`TableImage::heads`].
    pub(crate) fn stream(&self, stream: usize) -> impl Iterator<Item = &[u8]> {
        let within = self.shape.stream(stream);
        self.sets.iter().flat_map(PinnedSet::blocks).map(move |record| &record[within.clone()])
    }
}

/// The pages of an index being rebuilt, and their number.
#[derive(Debug)]
pub(super) struct RestoredIndex {
    pages: ChangedPages,
    count: u32,
}

/// An empty index.
struct EmptyIndex;

impl Pages for EmptyIndex {
    fn page(&self, _: u32) -> &[u64] {
        &[0; ENTRIES]
    }
}

impl Table {
    /// Pins all rows, for a checkpoint of a global step.
    pub(crate) fn image(&mut self, step: u64) -> TableImage {
        // All later changes get a step that is at least the checkpoint's.
        self.step = self.step.max(step);
        TableImage { rows: self.rows, shape: self.records.shape, sets: self.records.pin() }
    }

    /// Adds a row to a table that is being restored, from its values and slots. Of several rows
    /// with one id, the first counts. `Table::restored` then writes the index.
    ///
    /// # Errors
    /// [`StorageError::DoesNotFit`] if the table has no capacity for the row.
    pub fn restore_row(&mut self, head: RowHead, streams: &[&[u8]]) -> Result<(), StorageError> {
        if self.rows >= self.limit {
            let limit = self.limit;
            return Err(StorageError::DoesNotFit { need: self.rows + 1, limit });
        }
        if self.records.free_count() == 0 {
            self.records.grow()?;
        }
        let tag = tag_of(head.id, self.salt);
        let restored = self
            .restored
            .get_or_insert_with(|| RestoredIndex { pages: ChangedPages::new(), count: 1 });
        let mut dirty_pages =
            DirtyPages::new(&EmptyIndex, &mut restored.pages, &mut restored.count);
        let same = |entry| match entry {
            IndexEntry::Row(record) => id_of(self.records.read(record)) == head.id,
            _ => false,
        };
        if dirty_pages.find(tag, same).is_some() {
            return Ok(());
        }
        let Some(record) = self.records.take() else {
            return Err(StorageError::DoesNotFit { need: 1, limit: 0 });
        };
        self.records.set_live(record);
        let inserted = dirty_pages.insert(tag, IndexEntry::Row(record));
        self.rows += 1;
        dirty_pages.grow(pages_for(self.rows));
        if inserted.is_err() {
            return Err(StorageError::DoesNotFit { need: self.rows, limit: self.rows - 1 });
        }
        let shape = self.records.shape;
        let integrity = self.integrity;
        let out = self.records.write(record);
        for (stream, bytes) in streams.iter().enumerate() {
            out[shape.stream(stream)].copy_from_slice(bytes);
        }
        put_head(head, out, integrity);
        self.step = self.step.max(head.step);
        Ok(())
    }

    /// Writes the index of the restored rows to the journal. No committed word names it yet.
    pub(crate) fn restored(&mut self, journal: &mut Journal) -> Result<(), StorageError> {
        let Some(RestoredIndex { pages, count }) = self.restored.take() else { return Ok(()) };
        self.pages = count;
        self.ensure_pages(journal, count as usize)?;
        for (&page, words) in &pages {
            for (place, word) in words.differences(EmptyIndex.page(page)) {
                journal.fill_index(self.address(page, place), u64::from_le(word));
            }
        }
        self.head().into_iter().for_each(|(address, value)| journal.fill_index(address, value));
        journal.seal_index(self.number);
        Ok(())
    }
}
