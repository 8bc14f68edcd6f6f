//! Images of all durable words at one commit, and the files that are restored from one.

use super::words::Words;
use super::{Address, CELL_WORDS, COMMITS, IDLE, Journal, STATE, intent_bytes, offset_of, state};
use crate::arena::Arena;
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES};

/// The files contained in an image.
pub struct ImageFiles<'a> {
    pub control: &'a [u8],
    /// The number of commits at the time of the image.
    pub commits: u64,
    pub generation: u64,
    pub tables: &'a [u8],
}

impl Journal {
    /// Returns the contents of both files, with their checksums.
    ///
    /// The control word `marker`, which is 0 in the files, is 1 in the image and identifies it as
    /// one.
    pub fn image(&self, marker: usize) -> Vec<u8> {
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
        let sum_at = Words::checksum_position(marker / CELL_WORDS);
        let change =
            Words::contribution(marker, self.control.load(marker)) ^ Words::contribution(marker, 1);
        let sum = self.control.memory.load(sum_at) ^ change;
        for (position, value) in [(Words::position(marker), 1), (sum_at, sum)] {
            image[16 + 8 * position..][..8].copy_from_slice(&value.to_le_bytes());
        }
        image
    }

    /// Splits an image into its files; `None` if it is malformed.
    pub fn split_image(image: &[u8]) -> Option<ImageFiles<'_>> {
        let word = |at: usize| Some(u64::from_le_bytes(image.get(at..at + 8)?.try_into().ok()?));
        let length = usize::try_from(word(0)?).ok()?;
        let generation = word(8)?;
        let (control, tables) = image.get(16..)?.split_at_checked(length)?;
        let at = 16 + offset_of(Address::Control(COMMITS));
        let commits = word(at).filter(|_| control.len() >= 2 * PAGE_BYTES)?;
        Some(ImageFiles { control, commits, generation, tables })
    }

    /// Creates an intent file that is idle after `commits` commits, with capacity for `words`
    /// words.
    pub fn idle_intent(arena: &Arena, words: usize, commits: u64) -> Result<(), StorageError> {
        let mut intent = arena.create(Kind::Intent, 0, intent_bytes(words))?;
        intent.store(STATE, state(IDLE, commits));
        Ok(())
    }
}
