//! The durable words of table indices: one growing file per table.
//!
//! The first cell is the table's header. Its last word is the number of the last commit that
//! changed the file; a word of the tables file repeats it, so that an old copy of an index is not
//! mistaken for a current one. The other cells are the pages of the index.

use super::words::Words;
use super::{Address, CELL_WORDS, Journal};
use crate::arena::Memory;
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};

/// The last word of the first cell. The words before it are the table's.
const NUMBER_AT: usize = CELL_WORDS - 1;

/// Returns the bytes of an index file after its first page, for `pages` pages and the table's
/// header cell.
pub fn index_bytes(pages: usize) -> u64 {
    ((1 + pages) * PAGE_BYTES) as u64
}

/// Returns the address of a word in a page of an index.
pub(crate) fn page_word(table: u16, page: u32, position: usize) -> Address {
    Address::Index(table, (1 + page as usize) * CELL_WORDS + position)
}

impl Journal {
    /// Maps the next index of a generation. A new index must then be sealed with
    /// [`Journal::seal_index`].
    pub(crate) fn use_index(&mut self, memory: Memory, generation: u64) {
        let salt = generation | (self.indices.len() as u64) << 48;
        let words = Words::new(memory, self.arena.stamp.arena, Kind::Index, salt);
        self.indices.push(words);
    }

    /// Returns a page of an index. Its words are little-endian.
    pub(crate) fn index_page(&self, table: u16, page: u32) -> &[u64] {
        self.indices[usize::from(table)].cell(1 + page as usize)
    }

    /// Returns the capacity of an index in pages.
    pub(crate) fn index_pages(&self, table: u16) -> usize {
        self.indices[usize::from(table)].cells().saturating_sub(1)
    }

    /// Extends an index to `pages` pages, which must be more than it has. The new pages are zeros
    /// and not yet in use.
    pub(crate) fn grow_index(
        &mut self,
        table: u16,
        pages: usize,
        path: std::path::PathBuf,
    ) -> Result<(), StorageError> {
        let index = &mut self.indices[usize::from(table)];
        let cells = index.cells();
        let grown = index.memory.grow((2 + pages) * PAGE_BYTES);
        let doing = "reserve space for";
        grown.map_err(|source| StorageError::Io { doing, path, source })?;
        index.seal(cells..1 + pages);
        Ok(())
    }

    /// Stores a word of an index that no committed word names yet. [`Journal::seal_index`] must
    /// follow.
    pub(crate) fn fill_index(&mut self, address: Address, value: u64) {
        if let Address::Index(table, index) = address {
            self.indices[usize::from(table)].memory.store(Words::position(index), value);
        }
    }

    /// Computes the checksums of all cells of an index that no committed word names yet.
    pub(crate) fn seal_index(&mut self, table: u16) {
        let index = &mut self.indices[usize::from(table)];
        index.seal(0..index.cells());
    }

    /// Verifies the header cell and the first `pages` pages of an index, and zeroes the unused
    /// pages after them: a process may have been killed while it extended the file.
    pub(crate) fn verify_index(&mut self, table: u16, pages: usize) -> Result<(), Fault> {
        let number = self.load(self.number_in_tables(table));
        let index = &mut self.indices[usize::from(table)];
        let used = 1 + pages;
        let cells = index.cells();
        if used > cells {
            let what = format!("{used} pages after the first; the file ends");
            return Err(Fault::at(index.memory.len(), what));
        }
        index.verify(used)?;
        let found = index.load(NUMBER_AT);
        if found != number {
            let what = format!("the index of commit {number}, not of {found}");
            return Err(Fault::at(Words::position(NUMBER_AT) * 8, what));
        }
        for word in used * CELL_WORDS..cells * CELL_WORDS {
            if index.load(word) != 0 {
                index.memory.store(Words::position(word), 0);
            }
        }
        index.seal(used..cells);
        Ok(())
    }

    /// Stages the commit number of each index that the transaction changes, in the index and in the
    /// tables.
    pub(super) fn number_indices(&mut self, number: u64) {
        for table in 0..self.indices.len() as u16 {
            let is_of_table = |address| matches!(address, Address::Index(t, _) if t == table);
            if self.staged.iter().any(|&(address, _)| is_of_table(address)) {
                self.stage(Address::Index(table, NUMBER_AT), number);
                self.stage(self.number_in_tables(table), number);
            }
        }
    }

    /// Returns the word of the tables that repeats an index's last commit number. These words
    /// precede the last one.
    fn number_in_tables(&self, table: u16) -> Address {
        let last = self.tables.as_ref().map_or(0, Words::last);
        Address::Tables(last - 1 - usize::from(table))
    }
}
