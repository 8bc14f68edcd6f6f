//! Recovery of the durable words: verifies them, and completes a committed intent.

use super::words::Words;
use super::{
    Address, CELL_WORDS, CHECKSUM, COMMITS, COMMITTED, COUNT, IDLE, Journal, PAIRS, STATE,
    TABLES_AT, decode_address, intent_bytes, state,
};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::planted::Bug;

impl Journal {
    /// Returns the first cell of the control words as it will be after `redo`, verified.
    pub fn first_cell(&mut self) -> Result<Vec<u64>, StorageError> {
        // The words, followed by their checksum.
        let positions = Words::position(0)..=Words::checksum_position(0);
        let mut cell: Vec<u64> =
            positions.map(|position| self.control.memory.load(position)).collect();
        for (address, value) in self.committed()?.unwrap_or_default() {
            if let Address::Control(position) = address
                && let Some(word) =
                    position.checked_sub(Words::position(0)).and_then(|at| cell.get_mut(at))
            {
                *word = value;
            }
        }
        let found = cell.pop().unwrap_or(0);
        let expected = self.control.checksum_of(0, cell.iter().copied());
        let checked = Words::compare(0, expected, found);
        checked.map_err(|fault| self.corrupt(Kind::Control, 0, fault))?;
        self.commits = cell[COMMITS];
        let found = self.intent.load(STATE) as u32;
        let commits = self.commits as u32;
        if found != commits {
            let what = format!("the intent of commit {commits}, not of {found}");
            return Err(self.corrupt(Kind::Intent, 0, Fault::at(STATE * 8, what)));
        }
        Ok(cell)
    }

    /// Verifies that the intent file has capacity for `words` words.
    pub fn check_intent(&mut self, words: usize) -> Result<(), StorageError> {
        let need = intent_bytes(words) + PAGE_BYTES as u64;
        let found = self.intent.len();
        match found as u64 >= need {
            true => {
                self.base_words = words;
                Ok(())
            }
            false => {
                let what = format!("a file of at least {need} bytes, not of {found}");
                Err(self.corrupt(Kind::Intent, 0, Fault::at(found, what)))
            }
        }
    }

    /// Returns the number of words that were committed but not yet stored in place; `None` if the
    /// intent is idle.
    pub fn intent(&self) -> Result<Option<usize>, StorageError> {
        Ok(self.committed()?.map(|words| words.len()))
    }

    /// Returns the positions and words of a committed intent; `None` if it is idle.
    fn committed(&self) -> Result<Option<Vec<(Address, u64)>>, StorageError> {
        self.read_intent().map_err(|fault| self.corrupt(Kind::Intent, 0, fault))
    }

    fn read_intent(&self) -> Result<Option<Vec<(Address, u64)>>, Fault> {
        if self.intent.len() < PAIRS * 8 {
            return Err(Fault::at(self.intent.len(), "an intent; the file ends"));
        }
        let state = self.intent.load(STATE);
        match (state >> 32) as u32 {
            IDLE => return Ok(None),
            COMMITTED => {}
            _ => {
                let what = format!("an intent that is idle or committed, not {state:#018x}");
                return Err(Fault::at(STATE * 8, what));
            }
        }
        let count = self.intent.load(COUNT);
        let capacity = (self.intent.len() / 8 - PAIRS) / 2;
        let count = usize::try_from(count).ok().filter(|&count| count <= capacity);
        let count =
            count.ok_or_else(|| Fault::at(COUNT * 8, format!("at most {capacity} words")))?;
        let pair =
            |i: usize| (self.intent.load(PAIRS + 2 * i), self.intent.load(PAIRS + 2 * i + 1));
        let sum = self.sum(state, (0..count).map(pair));
        let expected = sum;
        let found = self.intent.load(CHECKSUM);
        if expected != found {
            let what = format!("the checksum {expected:#018x} of the intent, not {found:#018x}");
            return Err(Fault::at(CHECKSUM * 8, what));
        }
        Ok(Some((0..count).map(|i| (decode_address(pair(i).0), pair(i).1)).collect()))
    }

    /// Stores the words of a committed intent in place, if there is one.
    pub fn redo(&mut self) -> Result<(), StorageError> {
        let Some(words) = self.committed()? else { return Ok(()) };
        if !words.iter().all(|&(address, _)| self.holds(address)) {
            let fault = Fault::at(PAIRS * 8, "words that the files hold");
            return Err(self.corrupt(Kind::Intent, 0, fault));
        }
        if self.planted.has(Bug::RecoveryNotIdempotent) {
            self.intent.store(STATE, state(IDLE, self.commits));
        }
        self.carry_out(&words);
        Ok(())
    }

    /// Verifies the first `words` control words, and computes the checksums of the unused cells
    /// after them: a process may have been killed while it extended the file.
    pub fn verify_control(&mut self, words: usize) -> Result<(), StorageError> {
        let used = words.div_ceil(CELL_WORDS);
        let cells = self.control.cells();
        if used > cells {
            let length = self.control.memory.len();
            let what = format!("{used} pages after the first; the file ends");
            return Err(self.corrupt(Kind::Control, 0, Fault::at(length, what)));
        }
        self.control.verify(used).map_err(|fault| self.corrupt(Kind::Control, 0, fault))?;
        self.control.seal(used..cells);
        Ok(())
    }

    /// Verifies that the tables file has `bytes` bytes after its first page.
    pub fn check_tables(&self, generation: u64, bytes: u64) -> Result<(), StorageError> {
        let found = self.tables.as_ref().map_or(0, |tables| tables.memory.len());
        let expected = bytes.saturating_add(PAGE_BYTES as u64);
        match found as u64 == expected {
            true => Ok(()),
            false => {
                let what = format!("a file of {expected} bytes");
                Err(self.corrupt(Kind::Tables, generation, Fault::at(found, what)))
            }
        }
    }

    /// Verifies the checksums of the tables, and that the control file names the same last commit.
    pub fn verify_tables(&self, generation: u64) -> Result<(), StorageError> {
        let Some(tables) = &self.tables else { return Ok(()) };
        let verified = tables.verify(tables.cells()).and_then(|()| {
            let expected = self.control.load(TABLES_AT);
            let found = tables.load(tables.last());
            if expected == found {
                return Ok(());
            }
            let what = format!("the tables of commit {expected}, not of {found}");
            Err(Fault::at(Words::position(tables.last()) * 8, what))
        });
        verified.map_err(|fault| self.corrupt(Kind::Tables, generation, fault))
    }

    /// Returns whether the address is inside its file, after the first page. Checksum words are
    /// valid positions too.
    fn holds(&self, address: Address) -> bool {
        let (file, position) = match address {
            Address::Control(position) => (Some(&self.control), position),
            Address::Tables(position) => (self.tables.as_ref(), position),
            Address::Index(table, position) => (self.indices.get(usize::from(table)), position),
        };
        let words = |file: &Words| PAGE_BYTES / 8..file.memory.len() / 8;
        file.is_some_and(|file| words(file).contains(&position))
    }
}
