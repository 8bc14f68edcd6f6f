//! Words in page-sized cells, each with a checksum that is updated incrementally with its words.
//!
//! The checksum detects every single changed word, and any other change with probability 1 - 2^-64.

use pushpull_common::table::scatter;

use crate::arena::Memory;
use crate::layout::{Fault, Kind, PAGE_BYTES};

/// The words in a cell, without its checksum.
pub const CELL_WORDS: usize = PAGE_BYTES / 8 - 1;

/// Words with a checksum per cell, after the first page of a file.
#[derive(Debug)]
pub(super) struct Words {
    pub(super) memory: Memory,
    pub(super) generation: u64,
    /// Makes the checksums of two files differ, so that a page of one file is invalid in the other.
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

    /// Returns the index of the last word.
    pub(super) fn last(&self) -> usize {
        (self.cells() * CELL_WORDS).saturating_sub(1)
    }

    /// Returns the position of a word in the memory, in words.
    pub(super) fn position(index: usize) -> usize {
        (index / CELL_WORDS + 1) * (CELL_WORDS + 1) + index % CELL_WORDS
    }

    pub(super) fn checksum_position(cell: usize) -> usize {
        (cell + 1) * (CELL_WORDS + 1) + CELL_WORDS
    }

    pub(super) fn load(&self, index: usize) -> u64 {
        self.memory.load(Words::position(index))
    }

    /// Returns the words of a cell as stored: little-endian.
    pub(super) fn cell(&self, cell: usize) -> &[u64] {
        let start = (cell + 1) * PAGE_BYTES;
        bytemuck::cast_slice(&self.memory.bytes()[start..start + CELL_WORDS * 8])
    }

    /// Returns what a word contributes to the checksum of its cell.
    pub(super) fn contribution(index: usize, value: u64) -> u64 {
        scatter(scatter(value) ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn checksum(&self, cell: usize) -> u64 {
        let first = cell * CELL_WORDS;
        self.checksum_of(cell, (first..first + CELL_WORDS).map(|index| self.load(index)))
    }

    /// Returns the checksum of a cell with these words.
    pub(super) fn checksum_of(&self, cell: usize, words: impl Iterator<Item = u64>) -> u64 {
        let contributions =
            words.zip(cell * CELL_WORDS..).map(|(word, index)| Words::contribution(index, word));
        contributions.fold(scatter(self.salt ^ cell as u64), |sum, contribution| sum ^ contribution)
    }

    pub(super) fn compare(cell: usize, expected: u64, found: u64) -> Result<(), Fault> {
        if expected == found {
            return Ok(());
        }
        let what = format!("the checksum {expected:#018x} of its page, not {found:#018x}");
        Err(Fault::at(Words::checksum_position(cell) * 8, what))
    }

    /// Computes and stores the checksums of cells.
    pub(super) fn seal(&mut self, cells: std::ops::Range<usize>) {
        for cell in cells {
            let checksum = self.checksum(cell);
            self.memory.store(Words::checksum_position(cell), checksum);
        }
    }

    pub(super) fn verify(&self, cells: usize) -> Result<(), Fault> {
        for cell in 0..cells {
            let found = self.memory.load(Words::checksum_position(cell));
            Words::compare(cell, self.checksum(cell), found)?;
        }
        Ok(())
    }
}

/// The address of a durable word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A word of the control file.
    Control(usize),
    /// A word of the tables.
    Tables(usize),
    /// A word of a table index: the index's position among those of the shard, and the word.
    Index(u16, usize),
}

impl Address {
    /// Returns the word's position in its file.
    pub(super) fn index(self) -> usize {
        let (Address::Control(index) | Address::Tables(index) | Address::Index(_, index)) = self;
        index
    }

    /// Returns the address of another word in the same file.
    pub(super) fn beside(self, index: usize) -> Address {
        match self {
            Address::Control(_) => Address::Control(index),
            Address::Tables(_) => Address::Tables(index),
            Address::Index(table, _) => Address::Index(table, index),
        }
    }
}

/// Returns the byte offset of a word in its file.
pub fn offset_of(address: Address) -> usize {
    Words::position(address.index()) * 8
}
