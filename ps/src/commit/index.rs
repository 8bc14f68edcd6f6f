//! The words of indices of tables that grow: a file for each, which grows with it.
//!
//! The first cell is the table's own: what it counts, and in its last word the number of the last
//! commit that changed the file, which a word of the tables has too. So an old copy of an index is
//! not taken for one that belongs to the others. The cells behind it are the pages of the index.

use super::words::Words;
use super::{Address, CELL_WORDS, Journal};
use crate::arena::Memory;
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};

/// The last word of the first cell; those before are the table's.
const NUMBER_AT: usize = CELL_WORDS - 1;

/// The bytes of an index file, behind its first page, that has so many pages beside the table's
/// own.
pub(crate) fn index_bytes(pages: usize) -> u64 {
    ((1 + pages) * PAGE_BYTES) as u64
}

/// The word of a page of an index.
pub(crate) fn page_word(table: u16, page: u32, place: usize) -> Address {
    Address::Index(table, (1 + page as usize) * CELL_WORDS + place)
}

impl Journal {
    /// Takes the next index of a generation into use; of a new one, [`Journal::seal_index`] follows.
    pub(crate) fn use_index(&mut self, memory: Memory, generation: u64) {
        let salt = generation | (self.indices.len() as u64) << 48;
        let words = Words::new(memory, self.arena.stamp.arena, Kind::Index, salt);
        self.indices.push(words);
    }

    /// A page of an index; its words are little-endian.
    pub(crate) fn index_page(&self, table: u16, page: u32) -> &[u64] {
        self.indices[usize::from(table)].cell(1 + page as usize)
    }

    /// How many pages an index has room for.
    pub(crate) fn index_pages(&self, table: u16) -> usize {
        self.indices[usize::from(table)].cells().saturating_sub(1)
    }

    /// Makes room for so many pages, which are more than there are; the new ones are zeros and mean nothing yet.
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

    /// Stores a word of an index that nothing names yet; [`Journal::seal_index`] follows.
    pub(crate) fn fill_index(&mut self, address: Address, value: u64) {
        if let Address::Index(table, index) = address {
            self.indices[usize::from(table)].memory.store(Words::place(index), value);
        }
    }

    /// Gives all cells of an index that nothing names yet their checksums.
    pub(crate) fn seal_index(&mut self, table: u16) {
        let index = &mut self.indices[usize::from(table)];
        index.seal(0..index.cells());
    }

    /// Verifies the first pages of an index, so many, and what belongs to the table itself; those
    /// behind, which mean nothing yet, are zeros again: a process may have been killed while it made
    /// room.
    pub(crate) fn verify_index(&mut self, table: u16, pages: usize) -> Result<(), Fault> {
        let number = self.load(self.number_in_tables(table));
        let index = &mut self.indices[usize::from(table)];
        let (used, cells) = (1 + pages, index.cells());
        if used > cells {
            let what = format!("{used} pages behind the first; the file ends");
            return Err(Fault::at(index.memory.len(), what));
        }
        index.verify(used)?;
        let found = index.load(NUMBER_AT);
        if found != number {
            let what = format!("the index of commit {number}, not of {found}");
            return Err(Fault::at(Words::place(NUMBER_AT) * 8, what));
        }
        for word in used * CELL_WORDS..cells * CELL_WORDS {
            if index.load(word) != 0 {
                index.memory.store(Words::place(word), 0);
            }
        }
        index.seal(used..cells);
        Ok(())
    }

    /// Numbers the indices that the transaction changes, there and in the tables.
    pub(super) fn number_indices(&mut self, number: u64) {
        for table in 0..self.indices.len() as u16 {
            let is_its = |address| matches!(address, Address::Index(its, _) if its == table);
            if self.staged.iter().any(|&(address, _)| is_its(address)) {
                self.stage(Address::Index(table, NUMBER_AT), number);
                self.stage(self.number_in_tables(table), number);
            }
        }
    }

    /// The word of the tables that has the number of the last commit that changed an index: those lie
    /// before the last.
    fn number_in_tables(&self, table: u16) -> Address {
        let last = self.tables.as_ref().map_or(0, Words::last);
        Address::Tables(last - 1 - usize::from(table))
    }
}
