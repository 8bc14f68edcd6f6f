//! Changes in place, which can be undone.
//!
//! A change of a few bytes does not copy a block for each of them. It keeps what they were, says so,
//! and then changes them where they lie; so it does with one tile of rows after the other, while they
//! are in cache. The commit makes the change good; a process that is killed before it leaves what is
//! needed to put the old bytes back, as often as it takes.

use super::SLOTS_MAX;
use crate::arena::Memory;
use crate::layout::{Fault, PAGE_BYTES};

/// What the rows of one change may hold together where no variable is sparse; a larger change is made
/// in other blocks.
pub(crate) const UNDO_BYTES: usize = 256 << 10;

// In words behind the first page.
const STATE: usize = PAGE_BYTES / 8;
const VERSION: usize = STATE + 1;
const LENGTH: usize = STATE + 2;
const TILES: usize = (STATE + 3) * 8;
const IDLE: u64 = 0x5a5a_a5a5_0ff0_f00f;
const PREPARED: u64 = 0xa5a5_5a5a_f00f_0ff0;

/// A tile: how many rows, the bytes of each, of how many streams and of which table, the checksum; then
/// where each lies; then what each stream held, row by row, in whole words.
const HEAD_BYTES: usize = 16;
const LOCATION_BYTES: usize = 16;
/// Where in it the checksum is: of the head and of where the rows lie. What they held has that of
/// their blocks, if blocks have any.
const SUM: std::ops::Range<usize> = 12..16;
/// The lower bits of the word of streams; the upper ones have the number of the table and one.
const STREAM_BITS: u32 = 8;

/// Where a row lies: the block of its values, that of its slots, and where in both. A record of a table
/// is a row of one stream, in the block of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLocation {
    pub(crate) value: u32,
    pub(crate) slot: u32,
    pub(crate) start: u32,
}

/// What a row held of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The table whose record it is; nothing if it lies in the blocks of the store.
    pub(crate) table: Option<u16>,
    /// 0 for values, then the slots.
    pub(crate) stream: usize,
    pub(crate) block: u32,
    /// Where in the block; of a slot, where in its part of it.
    pub(crate) start: usize,
    pub(crate) bytes: Vec<u8>,
}

/// The rows of the change under way.
#[derive(Debug)]
pub(crate) struct Undo {
    memory: Memory,
    version: u64,
    end: usize,
    /// The checksum of the last tile, which that of the next goes on from.
    sum: u32,
}

impl Undo {
    /// The bytes of its file behind the first page, for rows that hold so many together.
    pub(crate) const fn bytes(rows: usize) -> u64 {
        (TILES - PAGE_BYTES + 2 * rows).next_multiple_of(PAGE_BYTES) as u64
    }

    /// What a tile of so many rows takes.
    pub(crate) const fn need(rows: usize, row_bytes: usize, streams: usize) -> usize {
        HEAD_BYTES + rows * LOCATION_BYTES + streams * (rows * row_bytes).next_multiple_of(8)
    }

    /// In new memory.
    pub(crate) fn create(mut memory: Memory) -> Undo {
        memory.store(STATE, IDLE);
        Undo::open(memory)
    }

    /// In memory that an earlier process left.
    pub(crate) fn open(memory: Memory) -> Undo {
        Undo { memory, version: 0, end: TILES, sum: 0 }
    }

    /// Whether there is room for tiles of so many bytes.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        bytes <= self.memory.len() - self.end
    }

    /// The bytes of the tiles.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.end - TILES
    }

    /// What is kept from now on is about to be changed by the push that makes `version`.
    pub(crate) fn begin(&mut self, version: u64) {
        self.memory.store(VERSION, version);
        (self.version, self.sum) = (version, first_sum(version));
    }

    /// Writes a tile of so many streams down, of this table or of the store's own: `fill` is asked for what
    /// the rows hold of each. It counts once it is [prepared](Undo::prepare).
    ///
    /// # Panics
    /// If there is no room for it.
    pub(crate) fn keep(
        &mut self,
        table: Option<u16>,
        locations: &[RowLocation],
        row_bytes: usize,
        streams: usize,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) {
        let end = self.end + Undo::need(locations.len(), row_bytes, streams);
        let (head, rest) = self.memory.stretch_mut(self.end..end).split_at_mut(HEAD_BYTES);
        let (logical_blocks, kept) = rest.split_at_mut(locations.len() * LOCATION_BYTES);
        for (location, logical) in
            locations.iter().zip(logical_blocks.chunks_exact_mut(LOCATION_BYTES))
        {
            logical.copy_from_slice(
                words([location.value, location.slot, location.start, 0]).as_flattened(),
            );
        }
        let of = table.map_or(0, |table| (u32::from(table) + 1) << STREAM_BITS);
        let said = words([locations.len() as u32, row_bytes as u32, streams as u32 | of]);
        self.sum = sum_of(self.sum, said.as_flattened(), logical_blocks);
        head[..SUM.start].copy_from_slice(said.as_flattened());
        head[SUM].copy_from_slice(&self.sum.to_le_bytes());
        let (length, stride) = (locations.len() * row_bytes, kept.len() / streams);
        for (stream, kept) in kept.chunks_exact_mut(stride).enumerate() {
            fill(stream, &mut kept[..length]);
        }
        self.end = end;
    }

    /// What the rows of the last tile held of the first stream, by its numbers.
    pub(super) fn last(&self, rows: usize, row_bytes: usize, streams: usize) -> &[u8] {
        let start = self.end - Undo::need(rows, row_bytes, streams);
        let kept = start + HEAD_BYTES + rows * LOCATION_BYTES;
        &self.memory.bytes()[kept..kept + rows * row_bytes]
    }

    /// The rows that were kept for the change under way, which is not committed.
    pub(super) fn kept(&self) -> Result<Vec<Row>, Fault> {
        self.rows(self.version.saturating_sub(1))
    }

    /// Says that the rows that were kept are about to be changed.
    pub(crate) fn prepare(&mut self) {
        // Whoever finds this word finds all of the tiles: they were written as words are, in order.
        self.memory.store(LENGTH, length_word(self.end - TILES, self.version));
        if self.memory.load(STATE) != PREPARED {
            self.memory.store(STATE, PREPARED);
        }
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        if self.memory.load(STATE) != IDLE {
            self.memory.store(STATE, IDLE);
        }
        self.end = TILES;
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
    /// back, those first that were kept last, and then clears.
    pub(crate) fn rows(&self, version: u64) -> Result<Vec<Row>, Fault> {
        if !self.is_prepared()? {
            return Ok(Vec::new());
        }
        let (prepared, word) = (self.memory.load(VERSION), self.memory.load(LENGTH));
        let length = word as u32 as usize;
        let expected = length_word(length, prepared);
        if expected != word || length > self.memory.len() - TILES {
            let what = format!("the length of rows that end in the file, not {word:#018x}");
            return Err(Fault::at(LENGTH * 8, what));
        }
        let rows = self.decode(length, prepared)?;
        match prepared.checked_sub(version) {
            // The commit was made: the change is good.
            None | Some(0) => Ok(Vec::new()),
            Some(1) => Ok(rows),
            Some(_) => {
                let what = format!("rows of version {} at most, not of {prepared}", version + 1);
                Err(Fault::at(VERSION * 8, what))
            }
        }
    }

    fn decode(&self, length: usize, version: u64) -> Result<Vec<Row>, Fault> {
        let mut tiles = &self.memory.bytes()[TILES..TILES + length];
        let (mut rows, mut sum) = (Vec::new(), first_sum(version));
        while !tiles.is_empty() {
            let at = TILES + length - tiles.len();
            let tile = Tile::parse(tiles).ok_or_else(|| Fault::at(at, "rows"))?;
            sum = tile.sum(sum);
            if sum != tile.found {
                let what = format!("the checksum {sum:#x} of rows, not {:#x}", tile.found);
                return Err(Fault::at(at + SUM.start, what));
            }
            tile.append_to(&mut rows);
            tiles = &tiles[tile.bytes..];
        }
        Ok(rows)
    }
}

/// A tile as it is read.
struct Tile<'a> {
    /// Of all of it.
    bytes: usize,
    row_bytes: usize,
    table: Option<u16>,
    head: &'a [u8],
    found: u32,
    locations: &'a [u8],
    streams: &'a [u8],
}

impl Tile<'_> {
    /// The first of these.
    fn parse(bytes: &[u8]) -> Option<Tile<'_>> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let [rows, row_bytes, streams, found] = word_array(head);
        let table = match streams >> STREAM_BITS {
            0 => None,
            number => Some(u16::try_from(number - 1).ok()?),
        };
        let streams = (streams & ((1 << STREAM_BITS) - 1)) as usize;
        let (rows, row_bytes) = (rows as usize, row_bytes as usize);
        // Far from where the sums below overflow.
        let sound = rows.checked_mul(row_bytes)? <= rest.len() && rows <= rest.len();
        if !sound || rows == 0 || row_bytes == 0 || !(1..=1 + SLOTS_MAX).contains(&streams) {
            return None;
        }
        let body = rest.get(..Undo::need(rows, row_bytes, streams) - HEAD_BYTES)?;
        let (locations, streams) = body.split_at(rows * LOCATION_BYTES);
        let (bytes, head) = (HEAD_BYTES + body.len(), &head[..SUM.start]);
        Some(Tile { bytes, row_bytes, table, head, found, locations, streams })
    }

    /// Its checksum, behind a tile of this one.
    fn sum(&self, before: u32) -> u32 {
        sum_of(before, self.head, self.locations)
    }

    fn append_to(&self, rows: &mut Vec<Row>) {
        let locations = self.locations.chunks_exact(LOCATION_BYTES);
        let stride = (locations.len() * self.row_bytes).next_multiple_of(8);
        for (stream, kept) in self.streams.chunks_exact(stride).enumerate() {
            for (location, bytes) in locations.clone().zip(kept.chunks_exact(self.row_bytes)) {
                let [value, slot, start, _] = word_array(location);
                let block = if stream == 0 { value } else { slot };
                let (table, start) = (self.table, start as usize);
                rows.push(Row { table, stream, block, start, bytes: bytes.to_vec() });
            }
        }
    }
}

fn words<const N: usize>(words: [u32; N]) -> [[u8; 4]; N] {
    words.map(u32::to_le_bytes)
}

fn word_array(bytes: &[u8]) -> [u32; 4] {
    let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    [0, 4, 8, 12].map(|at| u32::from_le_bytes(word(at)))
}

/// What the checksum of the first tile goes on from.
fn first_sum(version: u64) -> u32 {
    crc32c::crc32c(&version.to_le_bytes())
}

fn sum_of(before: u32, head: &[u8], locations: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(before, head), locations)
}

/// The length of the tiles in the lower half; the checksum of that and the version in the upper.
fn length_word(length: usize, version: u64) -> u64 {
    let head = [version.to_le_bytes(), (length as u64).to_le_bytes()];
    length as u64 | u64::from(crc32c::crc32c(head.as_flattened())) << 32
}

/// Gives rows that were made to say something the checksums that belong to it.
#[cfg(test)]
pub(crate) fn reseal(bytes: &mut [u8]) {
    if bytes.len() < TILES {
        return;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let (version, length) = (word(VERSION * 8), word(LENGTH * 8) as u32 as usize);
    bytes[LENGTH * 8..TILES].copy_from_slice(&length_word(length, version).to_le_bytes());
    let (mut at, mut sum) = (TILES, first_sum(version));
    while let Some(tile) = Tile::parse(&bytes[at..]) {
        let next = at + tile.bytes;
        sum = tile.sum(sum);
        bytes[at..][SUM].copy_from_slice(&sum.to_le_bytes());
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn undo() -> Undo {
        let memory = Memory::anonymous(PAGE_BYTES + Undo::bytes(UNDO_BYTES) as usize).unwrap();
        Undo::create(memory)
    }

    const LOCATIONS: [RowLocation; 2] =
        [RowLocation { value: 3, slot: 4, start: 8 }, RowLocation { value: 5, slot: 6, start: 24 }];

    fn row(stream: usize, block: u32, start: usize, bytes: Vec<u8>) -> Row {
        Row { table: None, stream, block, start, bytes }
    }

    /// Keeps rows of so many bytes, whose streams hold these.
    fn keep(undo: &mut Undo, locations: &[RowLocation], row_bytes: usize, streams: &[&[u8]]) {
        undo.keep(None, locations, row_bytes, streams.len(), |stream, kept| {
            kept.copy_from_slice(streams[stream]);
        });
    }

    #[test]
    fn rows_are_put_back_unless_the_commit_was_made() {
        let mut undo = undo();
        undo.begin(7);
        let values = [[1; 12], [2; 12]].concat();
        let slots = [[3; 12], [4; 12]].concat();
        keep(&mut undo, &LOCATIONS, 12, &[&values, &slots]);
        assert_eq!(undo.rows(6), Ok(Vec::new()), "they are not prepared");
        undo.prepare();
        let tile = vec![
            row(0, 3, 8, vec![1; 12]),
            row(0, 5, 24, vec![2; 12]),
            row(1, 4, 8, vec![3; 12]),
            row(1, 6, 24, vec![4; 12]),
        ];
        assert_eq!(undo.rows(6).unwrap(), tile);
        keep(&mut undo, &LOCATIONS[..1], 5, &[&[9; 5]]);
        assert_eq!(undo.rows(6).unwrap(), tile, "the next tile is not prepared");
        undo.prepare();
        let all = [tile, vec![row(0, 3, 8, vec![9; 5])]].concat();
        assert_eq!(undo.rows(6).unwrap(), all);
        assert_eq!(undo.rows(6).unwrap(), all, "as often as it takes");
        assert_eq!(undo.rows(7), Ok(Vec::new()), "the change is good");
        assert_eq!(undo.rows(5).unwrap_err().offset, VERSION as u64 * 8);
        undo.clear();
        assert_eq!(undo.rows(6), Ok(Vec::new()));
        let all = undo.memory.len() - TILES;
        assert!(undo.has_room(all) && !undo.has_room(all + 1), "it has its bounds");
    }

    #[test]
    fn a_tile_takes_what_was_said_it_would() {
        for (rows, row_bytes, streams) in [(1, 4, 1), (2, 12, 3), (1, 5, 9), (2, 4, 2)] {
            let mut undo = undo();
            undo.begin(1);
            let stream = vec![0; rows * row_bytes];
            keep(&mut undo, &LOCATIONS[..rows], row_bytes, &vec![&stream[..]; streams]);
            undo.prepare();
            assert_eq!(undo.end - TILES, Undo::need(rows, row_bytes, streams));
            assert_eq!(undo.rows(0).unwrap().len(), rows * streams);
        }
    }

    /// Each tile goes on from the one before, and the first from the version.
    #[test]
    fn any_other_bit_that_says_where_rows_lie_is_found() {
        let mut undo = undo();
        undo.begin(7);
        for byte in 1..4 {
            keep(&mut undo, &LOCATIONS, 8, &[&[byte; 16], &[!byte; 16]]);
            undo.prepare();
        }
        let tile = Undo::need(LOCATIONS.len(), 8, 2);
        for byte in STATE * 8..undo.end {
            let held = byte >= TILES && (byte - TILES) % tile >= HEAD_BYTES + 2 * LOCATION_BYTES;
            let right = undo.memory.bytes()[byte];
            for bit in 0..8 {
                undo.memory.write(byte, &[right ^ 1 << bit]);
                assert_eq!(undo.rows(6).is_err(), !held, "bit {bit} of byte {byte}");
            }
            undo.memory.write(byte, &[right]);
        }
        // What is left of an older change is not of this one, whatever its length says.
        let (end, left) = (undo.end, undo.memory.bytes().to_vec());
        undo.clear();
        undo.begin(8);
        keep(&mut undo, &LOCATIONS, 8, &[&[9; 16], &[9; 16]]);
        undo.prepare();
        let one = undo.end;
        undo.memory.write(one, &left[one..end]);
        undo.memory.store(LENGTH, length_word(end - TILES, 8));
        assert_eq!(undo.rows(7).unwrap_err().offset, (one + SUM.start) as u64);
    }
}
