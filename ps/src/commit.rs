//! The commit: what a change of a shard's state touches becomes visible in one 8-byte store.
//!
//! The durable state of a shard is words in two files: `control` (the shard, its clients) and
//! `tables` (which block holds what, the pushes in the inbox). Words change by transactions only:
//!
//! 1. blocks that the new words will name are written, and [`fence`]d;
//! 2. the words' addresses and new values are written to the `intent`, with a checksum;
//! 3. one store marks the intent committed: this is the commit;
//! 4. the words are stored where they belong; 5. the intent is idle again.
//!
//! A process that is killed before 3 has changed nothing. One that is killed after it has left all
//! that is needed to do 4 again, as often as it takes: storing the same words twice is storing
//! them once.
//!
//! Words live in cells of a page, each with a checksum that changes with its words: it finds any
//! single changed word for certain, and anything else but for one time in 2^64.

use crate::arena::{Arena, Memory, fence, file_name};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::zoo::{Bug, Zoo};

/// Words in a cell, its checksum aside.
pub(crate) const CELL_WORDS: usize = PAGE_BYTES / 8 - 1;

/// Words with a checksum for each cell, behind the first page of a file.
#[derive(Debug)]
struct Words {
    memory: Memory,
    generation: u64,
    /// Makes the checksums of two files differ, so that a page of one is nothing to the other.
    salt: u64,
}

impl Words {
    fn new(memory: Memory, arena: u64, kind: Kind, generation: u64) -> Words {
        let salt = scramble(scramble(arena ^ generation.rotate_left(32)) ^ kind as u64);
        Words { memory, generation, salt }
    }

    fn cells(&self) -> usize {
        (self.memory.len() / PAGE_BYTES).saturating_sub(1)
    }

    /// The last word.
    fn last(&self) -> usize {
        (self.cells() * CELL_WORDS).saturating_sub(1)
    }

    /// Where a word lies in the memory, in words.
    fn place(index: usize) -> usize {
        (index / CELL_WORDS + 1) * (CELL_WORDS + 1) + index % CELL_WORDS
    }

    fn checksum_place(cell: usize) -> usize {
        (cell + 1) * (CELL_WORDS + 1) + CELL_WORDS
    }

    fn load(&self, index: usize) -> u64 {
        self.memory.load(Words::place(index))
    }

    /// What a word adds to the checksum of its cell.
    fn share(index: usize, value: u64) -> u64 {
        scramble(scramble(value) ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn checksum(&self, cell: usize) -> u64 {
        let first = cell * CELL_WORDS;
        self.checksum_of(cell, (first..first + CELL_WORDS).map(|index| self.load(index)))
    }

    /// The checksum of a cell that holds these words.
    fn checksum_of(&self, cell: usize, words: impl Iterator<Item = u64>) -> u64 {
        let shares = words.zip(cell * CELL_WORDS..).map(|(word, index)| Words::share(index, word));
        shares.fold(scramble(self.salt ^ cell as u64), |sum, share| sum ^ share)
    }

    fn compare(cell: usize, expected: u64, found: u64) -> Result<(), Fault> {
        if expected == found {
            return Ok(());
        }
        let what = format!("the checksum {expected:#018x} of its page, not {found:#018x}");
        Err(Fault::at(Words::checksum_place(cell) * 8, what))
    }

    /// Gives cells that hold zeros the checksums of zeros.
    fn seal(&mut self, cells: std::ops::Range<usize>) {
        for cell in cells {
            let checksum = self.checksum(cell);
            self.memory.store(Words::checksum_place(cell), checksum);
        }
    }

    fn verify(&self, cells: usize) -> Result<(), Fault> {
        for cell in 0..cells {
            let found = self.memory.load(Words::checksum_place(cell));
            Words::compare(cell, self.checksum(cell), found)?;
        }
        Ok(())
    }
}

/// A bijection that changes half of the bits when any one changes (the finalizer of MurmurHash3).
fn scramble(word: u64) -> u64 {
    let word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}

/// A word of the durable state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Address {
    /// Of the control file.
    Control(usize),
    /// Of the tables.
    Tables(usize),
}

/// Where a word lies in its file, in bytes.
pub(crate) fn offset_of(address: Address) -> usize {
    let (Address::Control(index) | Address::Tables(index)) = address;
    Words::place(index) * 8
}

/// In an address of the intent, marks the tables.
const TABLES: u64 = 1 << 63;

// The intent, in words behind the first page. Its state is idle or committed in the upper half, no
// bit of which makes one the other, and in the lower half how many commits there were.
const STATE: usize = PAGE_BYTES / 8;
const COUNT: usize = STATE + 1;
const CHECKSUM: usize = STATE + 2;
const PAIRS: usize = STATE + 4;
const IDLE: u32 = 0x55aa_c33c;
pub(crate) const COMMITTED: u32 = 0xaa55_3cc3;

fn state(what: u32, commits: u64) -> u64 {
    u64::from(what) << 32 | commits & u64::from(u32::MAX)
}

// Each commit is numbered, so that an old copy of one file is not taken for a part of the others.
/// The control word that counts the commits.
const COMMITS: usize = CELL_WORDS - 1;
/// The control word that has the number of the last commit that changed the tables; the last word of
/// the tables has it too.
const TABLES_AT: usize = CELL_WORDS - 2;
/// How many words a commit changes beside those that were staged.
const NUMBERS: usize = 3;

/// Control words of the first cell that are the owner's.
pub(crate) const FIRST_WORDS: usize = TABLES_AT;

/// The bytes of a tables file behind its first page, for so many words.
pub(crate) fn table_bytes(words: usize) -> u64 {
    ((words + 1).div_ceil(CELL_WORDS) * PAGE_BYTES) as u64
}

/// The bytes of an intent file, behind its first page, that has room for so many words and, for
/// each, the checksum of its cell.
fn intent_bytes(words: usize) -> u64 {
    (4 * 8 + 16 * 2 * (words + NUMBERS)).next_multiple_of(PAGE_BYTES) as u64
}

/// Whether an intent file is one that no commit was ever made with; its pages may not have been put
/// on the disk.
pub(crate) fn has_seen_no_commit(bytes: &[u8]) -> bool {
    let words = bytes.get(PAGE_BYTES..).unwrap_or(&[]);
    let idle = state(IDLE, 0).to_le_bytes();
    let rest = words.strip_prefix(&idle).unwrap_or(words);
    rest.iter().all(|&byte| byte == 0)
}

/// The files of an image of the durable words.
pub(crate) struct ImageFiles<'a> {
    pub(crate) control: &'a [u8],
    /// How many commits it is of.
    pub(crate) commits: u64,
    pub(crate) generation: u64,
    pub(crate) tables: &'a [u8],
}

/// The durable words of a shard, and the way they change.
///
/// Invariant: between two calls the intent is idle and every checksum is right.
#[derive(Debug)]
pub(crate) struct Journal {
    arena: Arena,
    control: Words,
    tables: Option<Words>,
    intent: Memory,
    staged: Vec<(Address, u64)>,
    /// How many commits there were.
    commits: u64,
    zoo: Zoo,
}

impl Journal {
    /// The journal of a new arena, whose control words are all zero, with room for a change of so
    /// many words.
    pub(crate) fn create(
        arena: &Arena,
        control: Memory,
        words: usize,
        zoo: Zoo,
    ) -> Result<Journal, StorageError> {
        let mut intent = arena.create(Kind::Intent, 0, intent_bytes(words))?;
        intent.store(STATE, state(IDLE, 0));
        let mut control = Words::new(control, arena.stamp.arena, Kind::Control, 0);
        control.seal(0..control.cells());
        let arena = arena.clone();
        let (tables, staged, commits) = (None, Vec::new(), 0);
        Ok(Journal { arena, control, tables, intent, staged, commits, zoo })
    }

    /// The journal of an arena whose control file is this. It is to be told of the tables that
    /// its words name, or that a committed intent is about to make them name, and to `redo`.
    pub(crate) fn open(arena: &Arena, control: Memory, zoo: Zoo) -> Result<Journal, StorageError> {
        let intent = arena.open(Kind::Intent, 0, None)?;
        let control = Words::new(control, arena.stamp.arena, Kind::Control, 0);
        let arena = arena.clone();
        let (tables, staged, commits) = (None, Vec::new(), 0);
        Ok(Journal { arena, control, tables, intent, staged, commits, zoo })
    }

    /// The first cell of the control words as it will be after `redo`, verified.
    pub(crate) fn first_cell(&mut self) -> Result<Vec<u64>, StorageError> {
        // The words and their checksum behind them.
        let places = Words::place(0)..=Words::checksum_place(0);
        let mut cell: Vec<u64> = places.map(|place| self.control.memory.load(place)).collect();
        for (address, value) in self.committed()?.unwrap_or_default() {
            if let Address::Control(place) = address
                && let Some(word) =
                    place.checked_sub(Words::place(0)).and_then(|at| cell.get_mut(at))
            {
                *word = value;
            }
        }
        let found = cell.pop().unwrap_or(0);
        let expected = self.control.checksum_of(0, cell.iter().copied());
        let checked = Words::compare(0, expected, found);
        checked.map_err(|fault| self.corrupt(Kind::Control, 0, fault))?;
        self.commits = cell[COMMITS];
        let (found, commits) = (self.intent.load(STATE) as u32, self.commits as u32);
        if found != commits {
            let what = format!("the intent of commit {commits}, not of {found}");
            return Err(self.corrupt(Kind::Intent, 0, Fault::at(STATE * 8, what)));
        }
        Ok(cell)
    }

    /// Whether the intent has room for a change of so many words.
    pub(crate) fn check_intent(&self, words: usize) -> Result<(), StorageError> {
        let (need, found) = (intent_bytes(words) + PAGE_BYTES as u64, self.intent.len());
        match found as u64 >= need {
            true => Ok(()),
            false => {
                let what = format!("a file of at least {need} bytes, not of {found}");
                Err(self.corrupt(Kind::Intent, 0, Fault::at(found, what)))
            }
        }
    }

    /// What the intent holds: how many words were committed and are not stored where they belong
    /// yet; `None` if it is idle.
    pub(crate) fn intent(&self) -> Result<Option<usize>, StorageError> {
        Ok(self.committed()?.map(|words| words.len()))
    }

    /// The places and words of an intent that was committed and not done.
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
        let (count, room) = (self.intent.load(COUNT), (self.intent.len() / 8 - PAIRS) / 2);
        let count = usize::try_from(count).ok().filter(|&count| count <= room);
        let count = count.ok_or_else(|| Fault::at(COUNT * 8, format!("at most {room} words")))?;
        let pair =
            |i: usize| (self.intent.load(PAIRS + 2 * i), self.intent.load(PAIRS + 2 * i + 1));
        let sum = self.sum(state, (0..count).map(pair));
        let (expected, found) = (sum, self.intent.load(CHECKSUM));
        if expected != found {
            let what = format!("the checksum {expected:#018x} of the intent, not {found:#018x}");
            return Err(Fault::at(CHECKSUM * 8, what));
        }
        Ok(Some((0..count).map(|i| (decode_address(pair(i).0), pair(i).1)).collect()))
    }

    /// The checksum of an intent that is committed in this state.
    fn sum(&self, state: u64, pairs: impl Iterator<Item = (u64, u64)>) -> u64 {
        let start = scramble(self.control.salt ^ state);
        pairs
            .fold(start, |sum, (address, value)| scramble(sum ^ address) ^ scramble(value))
            .rotate_left(1)
    }

    /// Takes the tables of a generation into use.
    pub(crate) fn use_tables(&mut self, memory: Memory, generation: u64) {
        let arena = self.arena.stamp.arena;
        self.tables = Some(Words::new(memory, arena, Kind::Tables, generation));
    }

    /// Forgets the tables: the words that named them have changed.
    pub(crate) fn forget_tables(&mut self) {
        self.tables = None;
    }

    /// Makes the intent as long as a change of so many words needs.
    pub(crate) fn reserve_intent(&mut self, words: usize) -> Result<(), StorageError> {
        let need = (intent_bytes(words) as usize).saturating_add(PAGE_BYTES);
        if need > self.intent.len() {
            let path = self.arena.place.path(&file_name(Kind::Intent, 0));
            let doing = "reserve space for";
            let grown = self.intent.grow(need);
            grown.map_err(|source| StorageError::Io { doing, path, source })?;
        }
        Ok(())
    }

    /// Takes new tables into use, which nothing names yet: all zeros but for these first words.
    pub(crate) fn begin_tables(
        &mut self,
        mut memory: Memory,
        generation: u64,
        words: impl Iterator<Item = u64>,
    ) {
        for (index, word) in words.enumerate() {
            memory.store(Words::place(index), word);
        }
        let number = self.control.load(TABLES_AT);
        self.use_tables(memory, generation);
        if let Some(tables) = &mut self.tables {
            tables.memory.store(Words::place(tables.last()), number);
            tables.seal(0..tables.cells());
        }
    }

    /// Does again what was committed and not done.
    pub(crate) fn redo(&mut self) -> Result<(), StorageError> {
        let Some(words) = self.committed()? else { return Ok(()) };
        if !words.iter().all(|&(address, _)| self.holds(address)) {
            let fault = Fault::at(PAIRS * 8, "words that the files hold");
            return Err(self.corrupt(Kind::Intent, 0, fault));
        }
        if self.zoo.has(Bug::RecoveryNotIdempotent) {
            self.intent.store(STATE, state(IDLE, self.commits));
        }
        self.carry_out(&words);
        Ok(())
    }

    /// Verifies the first control words, so many, and gives those behind them, which mean nothing
    /// yet, checksums: a process may have been killed while it made room.
    pub(crate) fn verify_control(&mut self, words: usize) -> Result<(), StorageError> {
        let (used, cells) = (words.div_ceil(CELL_WORDS), self.control.cells());
        if used > cells {
            let length = self.control.memory.len();
            let what = format!("{used} pages behind the first; the file ends");
            return Err(self.corrupt(Kind::Control, 0, Fault::at(length, what)));
        }
        self.control.verify(used).map_err(|fault| self.corrupt(Kind::Control, 0, fault))?;
        self.control.seal(used..cells);
        Ok(())
    }

    /// Whether the tables are so many bytes behind their first page.
    pub(crate) fn check_tables(&self, generation: u64, bytes: u64) -> Result<(), StorageError> {
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

    /// Verifies the tables.
    pub(crate) fn verify_tables(&self, generation: u64) -> Result<(), StorageError> {
        let Some(tables) = &self.tables else { return Ok(()) };
        let verified = tables.verify(tables.cells()).and_then(|()| {
            let (expected, found) = (self.control.load(TABLES_AT), tables.load(tables.last()));
            if expected == found {
                return Ok(());
            }
            let what = format!("the tables of commit {expected}, not of {found}");
            Err(Fault::at(Words::place(tables.last()) * 8, what))
        });
        verified.map_err(|fault| self.corrupt(Kind::Tables, generation, fault))
    }

    fn corrupt(&self, kind: Kind, generation: u64, fault: Fault) -> StorageError {
        self.arena.place.corrupt(&file_name(kind, generation), fault)
    }

    /// Whether the files have such a place behind their first pages; checksums are places too.
    fn holds(&self, address: Address) -> bool {
        let (file, place) = match address {
            Address::Control(place) => (Some(&self.control), place),
            Address::Tables(place) => (self.tables.as_ref(), place),
        };
        let words = |file: &Words| PAGE_BYTES / 8..file.memory.len() / 8;
        file.is_some_and(|file| words(file).contains(&place))
    }

    /// How many words the control file holds.
    pub(crate) fn control_words(&self) -> usize {
        self.control.cells() * CELL_WORDS
    }

    /// Makes room for so many control words. What is new is zeros, and means nothing yet.
    pub(crate) fn grow_control(&mut self, words: usize) -> Result<(), StorageError> {
        let cells = self.control.cells();
        let need = words.div_ceil(CELL_WORDS);
        if need <= cells {
            return Ok(());
        }
        let path = self.arena.place.path(&file_name(Kind::Control, 0));
        let doing = "reserve space for";
        let grown = self.control.memory.grow((need + 1) * PAGE_BYTES);
        grown.map_err(|source| StorageError::Io { doing, path, source })?;
        self.control.seal(cells..need);
        Ok(())
    }

    pub(crate) fn load(&self, address: Address) -> u64 {
        match address {
            Address::Control(index) => self.control.load(index),
            Address::Tables(index) => self.tables.as_ref().map_or(0, |tables| tables.load(index)),
        }
    }

    /// Puts a word into the transaction. Each word is staged once.
    pub(crate) fn stage(&mut self, address: Address, value: u64) {
        if self.load(address) != value {
            self.staged.push((address, value));
        }
    }

    /// How many more words the transaction has room for.
    pub(crate) fn room(&self) -> usize {
        // Each word may need its cell's checksum beside it.
        ((self.intent.len() / 8 - PAIRS) / 4).saturating_sub(self.staged.len() + NUMBERS)
    }

    /// Makes the transaction visible, whole, together with every block that was written before;
    /// false if there is nothing in it.
    pub(crate) fn commit(&mut self) -> bool {
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
        if !self.zoo.has(Bug::MissingFence) {
            fence();
        }
        self.intent.store(STATE, state);
        self.carry_out(&words);
        true
    }

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

    /// Gives the transaction its number, and the files that it changes.
    fn number(&mut self) {
        self.commits = self.commits.wrapping_add(1);
        let number = self.commits;
        let tables = self.staged.iter().any(|(address, _)| matches!(address, Address::Tables(_)));
        if let Some(last) = self.tables.as_ref().map(Words::last).filter(|_| tables) {
            self.stage(Address::Control(TABLES_AT), number);
            self.stage(Address::Tables(last), number);
        }
        self.stage(Address::Control(COMMITS), number);
    }

    /// The staged words and the checksums that go with them, at their places in the files.
    fn words_of_transaction(&mut self) -> Vec<(Address, u64)> {
        let mut staged = std::mem::take(&mut self.staged);
        staged.sort_unstable();
        let mut words: Vec<(Address, u64)> = Vec::with_capacity(staged.len() + 8);
        let mut checksum: Option<(Address, u64)> = None;
        for (address, value) in staged {
            let (file, index): (fn(usize) -> Address, usize) = match address {
                Address::Control(index) => (Address::Control, index),
                Address::Tables(index) => (Address::Tables, index),
            };
            let change = Words::share(index, self.load(address)) ^ Words::share(index, value);
            let sum_at = Words::checksum_place(index / CELL_WORDS);
            let sum_at = file(sum_at);
            match &mut checksum {
                Some((at, sum)) if *at == sum_at => *sum ^= change,
                _ => {
                    words.extend(checksum.take());
                    checksum = Some((sum_at, self.at_place(sum_at) ^ change));
                }
            }
            words.push((file(Words::place(index)), value));
        }
        words.extend(checksum);
        words
    }

    /// A word by its place in its file.
    fn at_place(&self, address: Address) -> u64 {
        match address {
            Address::Control(place) => self.control.memory.load(place),
            Address::Tables(place) => {
                self.tables.as_ref().map_or(0, |tables| tables.memory.load(place))
            }
        }
    }

    /// Stores the words of a committed intent where they belong, and makes it idle.
    fn carry_out(&mut self, words: &[(Address, u64)]) {
        for &(address, value) in words {
            match address {
                Address::Control(place) => self.control.memory.store(place, value),
                Address::Tables(place) => {
                    if let Some(tables) = &mut self.tables {
                        tables.memory.store(place, value);
                    }
                }
            }
        }
        self.intent.store(STATE, state(IDLE, self.commits));
    }
}

fn encode_address(address: Address) -> u64 {
    match address {
        Address::Control(place) => place as u64,
        Address::Tables(place) => place as u64 | TABLES,
    }
}

fn decode_address(word: u64) -> Address {
    let place = usize::try_from(word & !TABLES).unwrap_or(usize::MAX);
    if word & TABLES == 0 { Address::Control(place) } else { Address::Tables(place) }
}

/// Gives what a file of words, or an intent that is committed, was made to say the checksum that
/// belongs to it.
#[cfg(test)]
pub(crate) fn reseal(bytes: &mut [u8], arena: u64, kind: Kind, generation: u64) {
    let copy = |bytes: &[u8]| {
        let mut memory = Memory::anonymous(bytes.len()).unwrap();
        memory.write(0, bytes);
        memory
    };
    let mut words = Words::new(copy(bytes), arena, kind, generation);
    if kind != Kind::Intent {
        words.seal(0..words.cells());
        return bytes.copy_from_slice(words.memory.bytes());
    }
    let place = crate::arena::Place::Anonymous;
    let stamp = crate::layout::Stamp { shard: Default::default(), arena };
    let control = Words::new(copy(&[]), arena, Kind::Control, 0);
    let (arena, intent, zoo) = (Arena { place, stamp }, words.memory, Zoo::default());
    let journal =
        Journal { arena, control, tables: None, intent, staged: Vec::new(), commits: 0, zoo };
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
    use crate::arena::Place;
    use crate::arena::shelf::Shelf;
    use crate::layout::Stamp;

    fn arena(place: Place) -> Arena {
        Arena { place, stamp: Stamp { shard: Default::default(), arena: 77 } }
    }

    fn journal(arena: &Arena) -> Journal {
        let control = arena.create(Kind::Control, 0, 2 * PAGE_BYTES as u64).unwrap();
        let mut journal = Journal::create(arena, control, 4000, Zoo::default()).unwrap();
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
        let mut journal = journal(&arena(Place::Anonymous));
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
    fn every_flipped_bit_of_a_cell_is_found() {
        let shelf = Shelf::default();
        let mut journal = journal(&arena(Place::Shelf(shelf)));
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
