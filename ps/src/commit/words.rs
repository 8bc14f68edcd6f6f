//! Words in cells of a page, each with a checksum that changes with its words.
//!
//! It finds any single changed word for certain, and anything else but for one time in 2^64.

use pushpull_common::table::scatter;

use crate::arena::Memory;
use crate::layout::{Fault, Kind, PAGE_BYTES};

/// Words in a cell, its checksum aside.
pub(crate) const CELL_WORDS: usize = PAGE_BYTES / 8 - 1;

/// Words with a checksum for each cell, behind the first page of a file.
#[derive(Debug)]
pub(super) struct Words {
    pub(super) memory: Memory,
    pub(super) generation: u64,
    /// Makes the checksums of two files differ, so that a page of one is nothing to the other.
    pub(super) salt: u64,
}

impl Words {
    pub(super) fn new(memory: Memory, arena: u64, kind: Kind, generation: u64) -> Words {
        let salt = scatter(scatter(arena ^ generation.rotate_left(32)) ^ kind as u64);
        Words { memory, generation, salt }
    }

    pub(super) fn cells(&self) -> usize {
        (self.memory.len() / PAGE_BYTES).saturating_sub(1)
    }

    /// The last word.
    pub(super) fn last(&self) -> usize {
        (self.cells() * CELL_WORDS).saturating_sub(1)
    }

    /// Where a word lies in the memory, in words.
    pub(super) fn place(index: usize) -> usize {
        (index / CELL_WORDS + 1) * (CELL_WORDS + 1) + index % CELL_WORDS
    }

    pub(super) fn checksum_place(cell: usize) -> usize {
        (cell + 1) * (CELL_WORDS + 1) + CELL_WORDS
    }

    pub(super) fn load(&self, index: usize) -> u64 {
        self.memory.load(Words::place(index))
    }

    /// The words of a cell, as they are in the file: little-endian.
    pub(super) fn cell(&self, cell: usize) -> &[u64] {
        let start = (cell + 1) * PAGE_BYTES;
        bytemuck::cast_slice(&self.memory.bytes()[start..start + CELL_WORDS * 8])
    }

    /// What a word adds to the checksum of its cell.
    pub(super) fn share(index: usize, value: u64) -> u64 {
        scatter(scatter(value) ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn checksum(&self, cell: usize) -> u64 {
        let first = cell * CELL_WORDS;
        self.checksum_of(cell, (first..first + CELL_WORDS).map(|index| self.load(index)))
    }

    /// The checksum of a cell that holds these words.
    pub(super) fn checksum_of(&self, cell: usize, words: impl Iterator<Item = u64>) -> u64 {
        let shares = words.zip(cell * CELL_WORDS..).map(|(word, index)| Words::share(index, word));
        shares.fold(scatter(self.salt ^ cell as u64), |sum, share| sum ^ share)
    }

    pub(super) fn compare(cell: usize, expected: u64, found: u64) -> Result<(), Fault> {
        if expected == found {
            return Ok(());
        }
        let what = format!("the checksum {expected:#018x} of its page, not {found:#018x}");
        Err(Fault::at(Words::checksum_place(cell) * 8, what))
    }

    /// Gives cells that hold zeros the checksums of zeros.
    pub(super) fn seal(&mut self, cells: std::ops::Range<usize>) {
        for cell in cells {
            let checksum = self.checksum(cell);
            self.memory.store(Words::checksum_place(cell), checksum);
        }
    }

    pub(super) fn verify(&self, cells: usize) -> Result<(), Fault> {
        for cell in 0..cells {
            let found = self.memory.load(Words::checksum_place(cell));
            Words::compare(cell, self.checksum(cell), found)?;
        }
        Ok(())
    }
}

/// A word of the durable state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Of the control file.
    Control(usize),
    /// Of the tables.
    Tables(usize),
    /// Of the index of a table that grows, by its place among those of the shard.
    Index(u16, usize),
}

impl Address {
    /// Which word of its file it is.
    pub(super) fn index(self) -> usize {
        let (Address::Control(index) | Address::Tables(index) | Address::Index(_, index)) = self;
        index
    }

    /// Another of the same file.
    pub(super) fn beside(self, index: usize) -> Address {
        match self {
            Address::Control(_) => Address::Control(index),
            Address::Tables(_) => Address::Tables(index),
            Address::Index(table, _) => Address::Index(table, index),
        }
    }
}

/// Where a word lies in its file, in bytes.
pub(crate) fn offset_of(address: Address) -> usize {
    Words::place(address.index()) * 8
}
