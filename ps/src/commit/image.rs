//! All durable words as they were at one commit, in one piece, and the files to be made of it.

use super::words::Words;
use super::{Address, CELL_WORDS, COMMITS, IDLE, Journal, STATE, intent_bytes, offset_of, state};
use crate::arena::Arena;
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES};

/// The files of an image of the durable words.
pub(crate) struct ImageFiles<'a> {
    pub(crate) control: &'a [u8],
    /// How many commits it is of.
    pub(crate) commits: u64,
    pub(crate) generation: u64,
    pub(crate) tables: &'a [u8],
}

impl Journal {
    /// The words of both files as they are now, with all that verifies them.
    ///
    /// One control word, which is 0 here, is 1 there: the image says that it is one.
    pub(crate) fn image(&self, marker: usize) -> Vec<u8> {
        let control = self.control.memory.bytes();
        let (generation, tables) = match &self.tables {
            Some(tables) => (tables.generation, tables.memory.bytes()),
            None => (0, &[][..]),
        };
        let mut image = Vec::with_capacity(16 + control.len() + tables.len());
        image.extend_from_slice(&(control.len() as u64).to_le_bytes());
        image.extend_from_slice(&generation.to_le_bytes());
        image.extend_from_slice(control);
        image.extend_from_slice(tables);
        let sum_at = Words::checksum_place(marker / CELL_WORDS);
        let change = Words::share(marker, self.control.load(marker)) ^ Words::share(marker, 1);
        let sum = self.control.memory.load(sum_at) ^ change;
        for (place, value) in [(Words::place(marker), 1), (sum_at, sum)] {
            image[16 + 8 * place..][..8].copy_from_slice(&value.to_le_bytes());
        }
        image
    }

    /// The files of an image.
    pub(crate) fn split_image(image: &[u8]) -> Option<ImageFiles<'_>> {
        let word = |at: usize| Some(u64::from_le_bytes(image.get(at..at + 8)?.try_into().ok()?));
        let (length, generation) = (usize::try_from(word(0)?).ok()?, word(8)?);
        let (control, tables) = image.get(16..)?.split_at_checked(length)?;
        let at = 16 + offset_of(Address::Control(COMMITS));
        let commits = word(at).filter(|_| control.len() >= 2 * PAGE_BYTES)?;
        Some(ImageFiles { control, commits, generation, tables })
    }

    /// Makes an intent file that is idle after so many commits.
    pub(crate) fn idle_intent(
        arena: &Arena,
        words: usize,
        commits: u64,
    ) -> Result<(), StorageError> {
        let mut intent = arena.create(Kind::Intent, 0, intent_bytes(words))?;
        intent.store(STATE, state(IDLE, commits));
        Ok(())
    }
}
