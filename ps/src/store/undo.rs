//! Changes in place, which can be undone.
//!
//! A change of a few bytes does not copy a block for each of them. It keeps what they were, says so,
//! and then changes them where they lie. The commit makes the change good; a process that is killed
//! before it leaves what is needed to put the old bytes back, as often as it takes.

use crate::arena::{Memory, fence};
use crate::layout::{Fault, PAGE_BYTES};

/// What the rows of one change may hold together where no variable is sparse; a larger change is made
/// in other blocks.
pub(crate) const UNDO_BYTES: usize = 256 << 10;

// In words behind the first page.
const STATE: usize = PAGE_BYTES / 8;
const VERSION: usize = STATE + 1;
const LENGTH: usize = STATE + 2;
const CHECKSUM: usize = STATE + 3;
const ENTRIES: usize = (STATE + 4) * 8;
const IDLE: u64 = 0x5a5a_a5a5_0ff0_f00f;
const PREPARED: u64 = 0xa5a5_5a5a_f00f_0ff0;

/// An entry: which pool, which block, where in it, how many bytes; then the bytes, in whole words.
const ENTRY_BYTES: usize = 16;

/// What a stretch of a block held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// 0 for values, 1 for slots.
    pub(crate) pool: u32,
    pub(crate) block: u32,
    pub(crate) start: u32,
    pub(crate) bytes: Vec<u8>,
}

/// The rows of the change under way.
#[derive(Debug)]
pub(crate) struct Undo {
    memory: Memory,
    end: usize,
}

impl Undo {
    /// The bytes of its file behind the first page, for rows that hold so many together.
    pub(crate) const fn bytes(rows: usize) -> u64 {
        (4 * 8 + 2 * rows).next_multiple_of(PAGE_BYTES) as u64
    }

    /// In new memory.
    pub(crate) fn create(mut memory: Memory) -> Undo {
        memory.store(STATE, IDLE);
        Undo { memory, end: ENTRIES }
    }

    /// In memory that an earlier process left.
    pub(crate) fn open(memory: Memory) -> Undo {
        Undo { memory, end: ENTRIES }
    }

    /// Keeps a row; false if there is no room for it.
    pub(crate) fn keep(&mut self, pool: u32, block: u32, start: u32, bytes: &[u8]) -> bool {
        let need = ENTRY_BYTES + bytes.len().next_multiple_of(8);
        if need > self.memory.len() - self.end {
            return false;
        }
        let mut head = [0; ENTRY_BYTES];
        for (at, word) in [pool, block, start, bytes.len() as u32].into_iter().enumerate() {
            head[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
        }
        self.memory.write(self.end, &head);
        self.memory.write(self.end + ENTRY_BYTES, bytes);
        self.end += need;
        true
    }

    /// Says that the rows that were kept are about to be changed by the push that makes `version`.
    pub(crate) fn prepare(&mut self, version: u64) {
        self.memory.store(VERSION, version);
        self.memory.store(LENGTH, (self.end - ENTRIES) as u64);
        let sum = self.checksum(self.end - ENTRIES, version);
        self.memory.store(CHECKSUM, sum);
        fence();
        self.memory.store(STATE, PREPARED);
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        if self.memory.load(STATE) != IDLE {
            self.memory.store(STATE, IDLE);
        }
        self.end = ENTRIES;
    }

    /// Whether rows are prepared.
    pub(crate) fn is_prepared(&self) -> Result<bool, Fault> {
        match self.memory.load(STATE) {
            IDLE => Ok(false),
            PREPARED => Ok(true),
            other => {
                let what = format!("rows that are idle or prepared, not {other:#018x}");
                Err(Fault::at(STATE * 8, what))
            }
        }
    }

    /// The rows that are to be put back, if the last commit is of `version`. The caller puts them
    /// back and then clears.
    pub(crate) fn rows(&self, version: u64) -> Result<Vec<Row>, Fault> {
        if !self.is_prepared()? {
            return Ok(Vec::new());
        }
        let length = self.memory.load(LENGTH);
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= self.memory.len() - ENTRIES)
            .ok_or_else(|| Fault::at(LENGTH * 8, "rows that end in the file"))?;
        let prepared = self.memory.load(VERSION);
        let (expected, found) = (self.checksum(length, prepared), self.memory.load(CHECKSUM));
        if expected != found {
            let what = format!("the checksum {expected:#x} of the rows, not {found:#x}");
            return Err(Fault::at(CHECKSUM * 8, what));
        }
        match prepared.checked_sub(version) {
            // The commit was made: the change is good.
            None | Some(0) => Ok(Vec::new()),
            Some(1) => self.decode(length),
            Some(_) => {
                let what = format!("rows of version {} at most, not of {prepared}", version + 1);
                Err(Fault::at(VERSION * 8, what))
            }
        }
    }

    fn decode(&self, length: usize) -> Result<Vec<Row>, Fault> {
        let bytes = &self.memory.bytes()[ENTRIES..ENTRIES + length];
        let (mut rows, mut at) = (Vec::new(), 0);
        while at < length {
            let fault = || Fault::at(ENTRIES + at, "a row");
            let head = bytes.get(at..at + ENTRY_BYTES).ok_or_else(fault)?;
            let word =
                |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
            let (start, count) = (at + ENTRY_BYTES, word(12) as usize);
            let row = bytes.get(start..start + count).ok_or_else(fault)?.to_vec();
            rows.push(Row { pool: word(0), block: word(4), start: word(8), bytes: row });
            at = start + count.next_multiple_of(8);
        }
        Ok(rows)
    }

    fn checksum(&self, length: usize, version: u64) -> u64 {
        let bytes = &self.memory.bytes()[ENTRIES..ENTRIES + length];
        let head = [version.to_le_bytes(), (length as u64).to_le_bytes()];
        let head = crc32c::crc32c(head.as_flattened());
        u64::from(crc32c::crc32c_append(head, bytes)) << 32 | u64::from(head)
    }
}

/// Gives rows that were made to say something the checksum that belongs to it.
#[cfg(test)]
pub(crate) fn reseal(bytes: &mut [u8]) {
    let Ok(mut memory) = Memory::anonymous(bytes.len()) else { return };
    memory.write(0, bytes);
    if bytes.len() < ENTRIES {
        return;
    }
    let length = (memory.load(LENGTH) as usize).min(bytes.len() - ENTRIES);
    let version = memory.load(VERSION);
    let sum = Undo::open(memory).checksum(length, version);
    bytes[CHECKSUM * 8..CHECKSUM * 8 + 8].copy_from_slice(&sum.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_put_back_unless_the_commit_was_made() {
        let memory = Memory::anonymous(PAGE_BYTES + Undo::bytes(UNDO_BYTES) as usize).unwrap();
        let mut undo = Undo::create(memory);
        assert!(undo.keep(0, 3, 8, &[1; 12]) && undo.keep(1, 4, 0, &[2; 8]));
        assert_eq!(undo.rows(6), Ok(Vec::new()), "they are not prepared");
        undo.prepare(7);
        let rows = undo.rows(6).unwrap();
        assert_eq!(rows[0], Row { pool: 0, block: 3, start: 8, bytes: vec![1; 12] });
        assert_eq!(rows[1], Row { pool: 1, block: 4, start: 0, bytes: vec![2; 8] });
        assert_eq!(undo.rows(6).unwrap(), rows, "as often as it takes");
        assert_eq!(undo.rows(7), Ok(Vec::new()), "the change is good");
        undo.memory.store(ENTRIES / 8 + 2, 0);
        assert_eq!(undo.rows(6).unwrap_err().offset, CHECKSUM as u64 * 8);
        undo.clear();
        assert_eq!(undo.rows(6), Ok(Vec::new()));
        assert!(
            !undo.keep(0, 0, 0, &vec![0; Undo::bytes(UNDO_BYTES) as usize]),
            "it has its bounds"
        );
    }
}
