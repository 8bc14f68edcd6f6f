//! The rows of a table as they were at one version, for checkpoints; and rows put back from one.

use std::collections::BTreeMap;

use super::Table;
use super::index::{DirtyPages, ENTRIES, Entry, Pages, find, page_of, pages_for, tag_of};
use super::records::{Shape, head_of, id_of, put_head};
use crate::arena::Crowd;
use crate::checkpoint::RowHead;
use crate::commit::Journal;
use crate::error::StorageError;

/// All rows of a partition of a table at one version, pinned for as long as this lives. It may be read
/// on any thread.
#[derive(Debug)]
pub(crate) struct TableImage {
    rows: u64,
    shape: Shape,
    crowds: Vec<Crowd>,
}

impl TableImage {
    /// How many rows there are.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// What is known of each row, in an order that stays.
    pub(crate) fn heads(&self) -> impl Iterator<Item = RowHead> {
        self.crowds.iter().flat_map(Crowd::blocks).map(head_of)
    }

    /// The values of each row, or one of their slots, those from 1 on; in the same order.
    pub(crate) fn stream(&self, stream: usize) -> impl Iterator<Item = &[u8]> {
        let within = self.shape.stream(stream);
        self.crowds.iter().flat_map(Crowd::blocks).map(move |record| &record[within.clone()])
    }
}

/// The pages of an index that is made anew, and how many there are.
#[derive(Debug)]
pub(super) struct Restored {
    pages: BTreeMap<u32, Vec<u64>>,
    count: u32,
}

/// An index of no rows.
struct Nothing;

impl Pages for Nothing {
    fn page(&self, _: u32) -> &[u64] {
        &[0; ENTRIES]
    }
}

impl Table {
    /// Pins all rows, to be written to a checkpoint of a global step.
    pub(crate) fn image(&mut self, step: u64) -> TableImage {
        // Whatever changes from here on is known to be newer than the checkpoint.
        self.step = self.step.max(step);
        TableImage { rows: self.rows, shape: self.records.shape, crowds: self.records.pin() }
    }

    /// Puts a row into a table that nobody reads yet, by its values and slots; its index is made with
    /// [`Table::restored`]. Rows that there is no room for are refused; of one id, the first counts.
    pub(crate) fn restore_row(
        &mut self,
        head: RowHead,
        streams: &[&[u8]],
    ) -> Result<(), StorageError> {
        if self.rows >= self.limit {
            let limit = self.limit;
            return Err(StorageError::DoesNotFit { need: self.rows + 1, limit });
        }
        if self.records.free_count() == 0 {
            self.records.grow()?;
        }
        let tag = tag_of(head.id, self.salt);
        let restored =
            self.restored.get_or_insert_with(|| Restored { pages: BTreeMap::new(), count: 1 });
        let mut dirty_pages = DirtyPages::new(&Nothing, &mut restored.pages, &mut restored.count);
        let same = |entry| match entry {
            Entry::Row(record) => id_of(self.records.read(record)) == head.id,
            _ => false,
        };
        if find(dirty_pages.page(page_of(tag, dirty_pages.count())), tag, same).is_some() {
            return Ok(());
        }
        let Some(record) = self.records.take() else {
            return Err(StorageError::DoesNotFit { need: 1, limit: 0 });
        };
        self.records.set_live(record);
        let put = dirty_pages.insert(tag, Entry::Row(record));
        self.rows += 1;
        dirty_pages.grow(pages_for(self.rows));
        if put.is_err() {
            return Err(StorageError::DoesNotFit { need: self.rows, limit: self.rows - 1 });
        }
        let (shape, integrity) = (self.records.shape, self.integrity);
        let out = self.records.write(record);
        for (stream, bytes) in streams.iter().enumerate() {
            out[shape.stream(stream)].copy_from_slice(bytes);
        }
        put_head(head, out, integrity);
        self.step = self.step.max(head.step);
        Ok(())
    }

    /// Puts the index of the rows that were restored into the journal, where nothing names it yet.
    pub(crate) fn restored(&mut self, journal: &mut Journal) -> Result<(), StorageError> {
        let Some(Restored { pages, count }) = self.restored.take() else { return Ok(()) };
        self.pages = count;
        self.have_pages(journal, count as usize)?;
        for (&page, words) in &pages {
            for (place, &word) in words.iter().enumerate().filter(|(_, word)| **word != 0) {
                journal.fill_index(self.address(page, place), u64::from_le(word));
            }
        }
        self.head().into_iter().for_each(|(address, value)| journal.fill_index(address, value));
        journal.seal_index(self.number);
        Ok(())
    }
}
