//! The commit: a change of a shard's state becomes visible with one 8-byte store.
//!
//! The durable state of a shard is words in the files `control` (the shard and its clients) and
//! `tables` (which block holds which logical block, and the pushes in the inbox), and in one index
//! file per growing table. Words change only in transactions:
//!
//! 1. The blocks that the new words will name are written and [`fence`]d.
//! 2. The addresses and new values of the words are written to the `intent`, with a checksum.
//! 3. One store marks the intent committed. This is the commit.
//! 4. The words are stored in place.
//! 5. The intent is marked idle.
//!
//! A process killed before step 3 has changed nothing. A process killed after it has left
//! everything needed to repeat step 4. The step is idempotent, so recovery may itself be killed and
//! repeated.

mod image;
mod index;
mod recovery;
mod words;

use pushpull_common::table::scatter;

use crate::arena::{Arena, Memory, fence, file_name};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::planted::{Bug, PlantedBugs};
pub use index::index_bytes;
pub(crate) use index::page_word;
use words::Words;
pub use words::{Address, CELL_WORDS, offset_of};

/// Marks an address in the intent as a word of the tables.
const TABLES: u64 = 1 << 63;
/// Marks an address in the intent as a word of an index. The index number is between this bit and
/// the position.
const INDEX: u64 = 1 << 62;
const INDEX_AT: u32 = 46;

// The layout of the intent, in words. The upper half of its state is idle or committed, two values
// that differ in every bit; the lower half is the number of commits.
const STATE: usize = PAGE_BYTES / 8;
const COUNT: usize = STATE + 1;
const CHECKSUM: usize = STATE + 2;
const PAIRS: usize = STATE + 4;
const IDLE: u32 = 0x55aa_c33c;
/// The state of an intent whose transaction is committed, in the upper half of its word.
pub const COMMITTED: u32 = 0xaa55_3cc3;

fn state(what: u32, commits: u64) -> u64 {
    u64::from(what) << 32 | commits & u64::from(u32::MAX)
}

// Commits are numbered, so that an old copy of one file is not mistaken for a current one.
/// The control word with the number of commits.
const COMMITS: usize = CELL_WORDS - 1;
/// The control word with the number of the last commit that changed the tables. The last word of
/// the tables repeats it.
const TABLES_AT: usize = CELL_WORDS - 2;
/// The words that a commit changes in addition to the staged ones.
const NUMBERS: usize = 3;

/// The number of words in the first control cell that the shard may use.
pub const FIRST_WORDS: usize = TABLES_AT;

/// Returns the bytes of a tables file after its first page, for `words` words.
pub fn table_bytes(words: usize) -> u64 {
    ((words + 1).div_ceil(CELL_WORDS) * PAGE_BYTES) as u64
}

/// Returns the bytes of an intent file after its first page, with capacity for `words` words and a
/// cell checksum for each.
fn intent_bytes(words: usize) -> u64 {
    (4 * 8 + 16 * 2 * (words + NUMBERS)).next_multiple_of(PAGE_BYTES) as u64
}

/// Returns whether no commit was ever made with this intent file. Its pages may not have been
/// flushed.
pub fn is_unused_intent(bytes: &[u8]) -> bool {
    let words = bytes.get(PAGE_BYTES..).unwrap_or(&[]);
    let idle = state(IDLE, 0).to_le_bytes();
    let rest = words.strip_prefix(&idle).unwrap_or(words);
    rest.iter().all(|&byte| byte == 0)
}

/// The durable words of a shard, and the transactions that change them.
///
/// Invariant: between calls the intent is idle and every checksum is correct.
#[derive(Debug)]
pub struct Journal {
    arena: Arena,
    control: Words,
    tables: Option<Words>,
    /// The indices of the growing tables, in the order of the layout.
    indices: Vec<Words>,
    intent: Memory,
    staged: Vec<(Address, u64)>,
    /// Reused buffers for the words of a transaction, which can be very many.
    sorted: Vec<(u64, u64)>,
    words: Vec<(Address, u64)>,
    /// The number of commits.
    commits: u64,
    /// The intent capacity, in words, for everything but growing tables.
    base_words: usize,
    planted: PlantedBugs,
}

impl Journal {
    /// Creates the journal of a new arena, whose control words are all zero, with an intent
    /// capacity of `words` words.
    pub fn create(
        arena: &Arena,
        control: Memory,
        words: usize,
        planted: PlantedBugs,
    ) -> Result<Journal, StorageError> {
        let mut intent = arena.create(Kind::Intent, 0, intent_bytes(words))?;
        intent.store(STATE, state(IDLE, 0));
        let mut control = Words::new(control, arena.stamp.arena, Kind::Control, 0);
        control.seal(0..control.cells());
        Ok(Journal::of(arena, control, intent, words, planted))
    }

    fn of(
        arena: &Arena,
        control: Words,
        intent: Memory,
        base_words: usize,
        planted: PlantedBugs,
    ) -> Journal {
        let arena = arena.clone();
        let tables = None;
        let indices = Vec::new();
        let commits = 0;
        let staged = Vec::new();
        let sorted = Vec::new();
        let words = Vec::new();
        Journal {
            arena,
            control,
            tables,
            indices,
            intent,
            staged,
            sorted,
            words,
            commits,
            base_words,
            planted,
        }
    }

    /// Opens the journal of an existing arena with this control file.
    ///
    /// The caller then maps the tables and indices that the words name, or that a committed intent
    /// is about to name, and calls `redo`.
    pub fn open(
        arena: &Arena,
        control: Memory,
        planted: PlantedBugs,
    ) -> Result<Journal, StorageError> {
        let intent = arena.open(Kind::Intent, 0, None)?;
        let control = Words::new(control, arena.stamp.arena, Kind::Control, 0);
        Ok(Journal::of(arena, control, intent, 0, planted))
    }

    /// Returns the checksum of an intent in this state.
    fn sum(&self, state: u64, pairs: impl Iterator<Item = (u64, u64)>) -> u64 {
        let start = scatter(self.control.salt ^ state);
        pairs
            .fold(start, |sum, (address, value)| scatter(sum ^ address) ^ scatter(value))
            .rotate_left(1)
    }

    /// Maps the tables of a generation.
    pub fn use_tables(&mut self, memory: Memory, generation: u64) {
        let arena = self.arena.stamp.arena;
        self.tables = Some(Words::new(memory, arena, Kind::Tables, generation));
    }

    /// Unmaps the tables and indices, after the words that named them have changed.
    pub fn unmap_tables(&mut self) {
        self.tables = None;
        self.indices.clear();
    }

    /// Sets the base capacity of the intent to `words` words and reserves it.
    pub fn reserve_intent(&mut self, words: usize) -> Result<(), StorageError> {
        self.base_words = words;
        self.grow_intent(0)
    }

    /// Extends the intent to its base capacity plus `words` words.
    pub(crate) fn grow_intent(&mut self, words: usize) -> Result<(), StorageError> {
        let words = self.base_words + words;
        let need = (intent_bytes(words) as usize).saturating_add(PAGE_BYTES);
        if need > self.intent.len() {
            // At least half as long again, so that it does not grow a little with each push.
            let need = need.max(self.intent.len() + self.intent.len() / 2);
            let need = need.next_multiple_of(PAGE_BYTES);
            let path = self.arena.storage.path(&file_name(Kind::Intent, 0));
            let doing = "reserve space for";
            let grown = self.intent.grow(need);
            grown.map_err(|source| StorageError::Io { doing, path, source })?;
        }
        Ok(())
    }

    /// Maps new tables that no committed word names yet: these first words, then zeros.
    pub fn begin_tables(
        &mut self,
        mut memory: Memory,
        generation: u64,
        words: impl Iterator<Item = u64>,
    ) {
        for (index, word) in words.enumerate() {
            memory.store(Words::position(index), word);
        }
        let number = self.control.load(TABLES_AT);
        self.use_tables(memory, generation);
        if let Some(tables) = &mut self.tables {
            tables.memory.store(Words::position(tables.last()), number);
            tables.seal(0..tables.cells());
        }
    }

    fn corrupt(&self, kind: Kind, generation: u64, fault: Fault) -> StorageError {
        self.arena.storage.corrupt(&file_name(kind, generation), fault)
    }

    /// Returns the capacity of the control file in words.
    pub fn control_words(&self) -> usize {
        self.control.cells() * CELL_WORDS
    }

    /// Extends the control file to at least `words` words. The new words are zeros and not yet in
    /// use.
    pub fn grow_control(&mut self, words: usize) -> Result<(), StorageError> {
        let cells = self.control.cells();
        let need = words.div_ceil(CELL_WORDS);
        if need <= cells {
            return Ok(());
        }
        let path = self.arena.storage.path(&file_name(Kind::Control, 0));
        let doing = "reserve space for";
        let grown = self.control.memory.grow((need + 1) * PAGE_BYTES);
        grown.map_err(|source| StorageError::Io { doing, path, source })?;
        self.control.seal(cells..need);
        Ok(())
    }

    /// Returns a word, as committed.
    #[inline]
    pub fn load(&self, address: Address) -> u64 {
        match address {
            Address::Control(index) => self.control.load(index),
            Address::Tables(index) => self.tables.as_ref().map_or(0, |tables| tables.load(index)),
            Address::Index(table, index) => self.indices[usize::from(table)].load(index),
        }
    }

    /// Adds a word to the transaction, unless it has this value already. Each word is staged at
    /// most once.
    pub fn stage(&mut self, address: Address, value: u64) {
        if self.load(address) != value {
            self.staged.push((address, value));
        }
    }

    /// Empties the transaction, and returns its words.
    #[cfg(any(fuzzing, feature = "simulation"))]
    pub fn unstage(&mut self) -> Vec<(Address, u64)> {
        std::mem::take(&mut self.staged)
    }

    /// Returns how many more words the transaction can hold.
    pub fn free_words(&self) -> usize {
        // Each word may add its cell's checksum.
        ((self.intent.len() / 8 - PAIRS) / 4).saturating_sub(self.staged.len() + NUMBERS)
    }

    /// Commits the transaction: makes all its words visible atomically, with every block written
    /// before. Returns `false` if nothing was staged.
    pub fn commit(&mut self) -> bool {
        if self.staged.is_empty() {
            return false;
        }
        self.number();
        let words = self.words_of_transaction();
        for (i, &(address, value)) in words.iter().enumerate() {
            self.intent.store(PAIRS + 2 * i, encode_address(address));
            self.intent.store(PAIRS + 2 * i + 1, value);
        }
        self.intent.store(COUNT, words.len() as u64);
        let state = state(COMMITTED, self.commits);
        let pairs = words.iter().map(|&(address, value)| (encode_address(address), value));
        let sum = self.sum(state, pairs);
        self.intent.store(CHECKSUM, sum);
        if !self.planted.has(Bug::MissingFence) {
            fence();
        }
        self.intent.store(STATE, state);
        self.carry_out(&words);
        self.words = words;
        true
    }

    /// Stages the number of the commit, in the control file and in each file that the transaction
    /// changes.
    fn number(&mut self) {
        self.commits = self.commits.wrapping_add(1);
        let number = self.commits;
        self.number_indices(number);
        let tables = self.staged.iter().any(|(address, _)| matches!(address, Address::Tables(_)));
        if let Some(last) = self.tables.as_ref().map(Words::last).filter(|_| tables) {
            self.stage(Address::Control(TABLES_AT), number);
            self.stage(Address::Tables(last), number);
        }
        self.stage(Address::Control(COMMITS), number);
    }

    /// Drains the staged words, and returns them with the changed checksums at their positions in
    /// the files.
    fn words_of_transaction(&mut self) -> Vec<(Address, u64)> {
        // Encoded as numbers they sort quickly, which matters for very many words.
        let mut staged = std::mem::take(&mut self.sorted);
        staged.clear();
        staged
            .extend(self.staged.drain(..).map(|(address, value)| (encode_address(address), value)));
        staged.sort_unstable();
        debug_assert!(staged.windows(2).all(|two| two[0].0 != two[1].0), "a word is staged twice");
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        let mut checksum: Option<(Address, u64)> = None;
        for &(address, value) in &staged {
            let address = decode_address(address);
            let index = address.index();
            let change =
                Words::contribution(index, self.load(address)) ^ Words::contribution(index, value);
            let sum_at = address.beside(Words::checksum_position(index / CELL_WORDS));
            match &mut checksum {
                Some((at, sum)) if *at == sum_at => *sum ^= change,
                _ => {
                    words.extend(checksum.take());
                    checksum = Some((sum_at, self.at_place(sum_at) ^ change));
                }
            }
            words.push((address.beside(Words::position(index)), value));
        }
        words.extend(checksum);
        self.sorted = staged;
        words
    }

    /// Returns a word by its position in its file.
    fn at_place(&self, address: Address) -> u64 {
        match address {
            Address::Control(position) => self.control.memory.load(position),
            Address::Tables(position) => {
                self.tables.as_ref().map_or(0, |tables| tables.memory.load(position))
            }
            Address::Index(table, position) => {
                self.indices[usize::from(table)].memory.load(position)
            }
        }
    }

    /// Stores the words of a committed intent in place, and marks the intent idle.
    fn carry_out(&mut self, words: &[(Address, u64)]) {
        for &(address, value) in words {
            match address {
                Address::Control(position) => self.control.memory.store(position, value),
                Address::Tables(position) => {
                    if let Some(tables) = &mut self.tables {
                        tables.memory.store(position, value);
                    }
                }
                Address::Index(table, position) => {
                    self.indices[usize::from(table)].memory.store(position, value);
                }
            }
        }
        self.intent.store(STATE, state(IDLE, self.commits));
    }
}

fn encode_address(address: Address) -> u64 {
    match address {
        Address::Control(position) => position as u64,
        Address::Tables(position) => position as u64 | TABLES,
        Address::Index(table, position) => position as u64 | INDEX | u64::from(table) << INDEX_AT,
    }
}

fn decode_address(word: u64) -> Address {
    let position = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
    if word & TABLES != 0 {
        return Address::Tables(position(word & !TABLES));
    }
    if word & INDEX != 0 {
        let table = (word & !INDEX) >> INDEX_AT;
        return Address::Index(table as u16, position(word & ((1 << INDEX_AT) - 1)));
    }
    Address::Control(position(word))
}

/// Recomputes the checksums of a file of words or of a committed intent that a test has modified.
#[cfg(any(test, feature = "simulation"))]
pub fn reseal(bytes: &mut [u8], arena: u64, kind: Kind, generation: u64) {
    let copy = |bytes: &[u8]| {
        let mut memory = Memory::anonymous(bytes.len()).expect("memory for a test");
        memory.write(0, bytes);
        memory
    };
    let mut words = Words::new(copy(bytes), arena, kind, generation);
    if kind != Kind::Intent {
        words.seal(0..words.cells());
        return bytes.copy_from_slice(words.memory.bytes());
    }
    let storage = crate::arena::ArenaStorage::Anonymous;
    let stamp = crate::layout::Stamp { shard: Default::default(), arena };
    let control = Words::new(copy(&[]), arena, Kind::Control, 0);
    let arena = Arena { storage, stamp };
    let planted = PlantedBugs::default();
    let journal = Journal::of(&arena, control, words.memory, 0, planted);
    let load = |word| if word < bytes.len() / 8 { journal.intent.load(word) } else { 0 };
    let count = (load(COUNT) as usize).min((bytes.len() / 8).saturating_sub(PAIRS) / 2);
    let pairs = (0..count).map(|i| (load(PAIRS + 2 * i), load(PAIRS + 2 * i + 1)));
    let sum = journal.sum(load(STATE), pairs);
    if let Some(word) = bytes.get_mut(CHECKSUM * 8..CHECKSUM * 8 + 8) {
        word.copy_from_slice(&sum.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaStorage;
    use crate::layout::Stamp;
    use crate::testing::test_files::TestFiles;

    fn arena(storage: ArenaStorage) -> Arena {
        Arena { storage, stamp: Stamp { shard: Default::default(), arena: 77 } }
    }

    fn journal(arena: &Arena) -> Journal {
        let control = arena.create(Kind::Control, 0, 2 * PAGE_BYTES as u64).unwrap();
        let mut journal = Journal::create(arena, control, 4000, PlantedBugs::default()).unwrap();
        let tables = arena.create(Kind::Tables, 1, 3 * PAGE_BYTES as u64).unwrap();
        journal.begin_tables(tables, 1, [5, 6, 7].into_iter());
        journal
    }

    fn verify(journal: &mut Journal) -> Result<(), StorageError> {
        journal.verify_control(2 * CELL_WORDS)?;
        journal.verify_tables(1)
    }

    #[test]
    fn a_transaction_changes_words_and_their_checksums() {
        let mut journal = journal(&arena(ArenaStorage::Anonymous));
        verify(&mut journal).unwrap();
        assert_eq!(journal.load(Address::Tables(2)), 7);
        for round in 0..100_u64 {
            for index in 0..40 {
                journal.stage(Address::Control(index * 25), round * index as u64);
                journal.stage(Address::Tables(index * 30), round + index as u64);
            }
            journal.commit();
            verify(&mut journal).unwrap();
        }
        assert_eq!(journal.load(Address::Control(39 * 25)), 99 * 39);
        assert_eq!(journal.load(Address::Tables(39 * 30)), 99 + 39);
        let before = journal.control_words();
        journal.grow_control(before + 1).unwrap();
        assert_eq!(journal.control_words(), before + CELL_WORDS);
        journal.verify_control(journal.control_words()).unwrap();
    }

    #[test]
    fn every_flipped_bit_of_a_cell_is_detected() {
        let test_files = TestFiles::default();
        let mut journal = journal(&arena(ArenaStorage::TestFiles(test_files)));
        journal.stage(Address::Control(3), 1 << 40);
        journal.commit();
        for word in CELL_WORDS + 1..3 * (CELL_WORDS + 1) {
            for bit in [0, 7, 31, 32, 63] {
                let memory = &mut journal.control.memory;
                let right = memory.load(word);
                memory.store(word, right ^ 1 << bit);
                let error = verify(&mut journal).unwrap_err();
                assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
                journal.control.memory.store(word, right);
            }
        }
        verify(&mut journal).unwrap();
    }
}
