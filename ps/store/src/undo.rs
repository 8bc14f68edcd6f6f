//! The undo file, which makes changes in place reversible.
//!
//! A change of a few bytes does not copy a block for each of them. It records the old bytes, marks
//! the record as prepared, and then updates the bytes in place. Rows are handled one tile at a
//! time, while the tile is in cache. The commit makes the change permanent. A process that is
//! killed before the commit leaves the old bytes, which can be restored any number of times.

use crate::arena::Memory;
use crate::change::SLOTS_MAX;
use crate::layout::{Fault, PAGE_BYTES};

/// The default number of old bytes that a change in place may record, used where no variable is
/// sparse. Larger changes use shadow blocks.
pub(crate) const UNDO_BYTES: usize = 256 << 10;

// Word indices of the fields after the first page.
const STATE: usize = PAGE_BYTES / 8;
const VERSION: usize = STATE + 1;
const LENGTH: usize = STATE + 2;
const TILES: usize = (STATE + 3) * 8;
const IDLE: u64 = 0x5a5a_a5a5_0ff0_f00f;
const PREPARED: u64 = 0xa5a5_5a5a_f00f_0ff0;

/// The header of a tile: the number of rows, the bytes of a row, the number of streams and the
/// table, and the checksum. Then follow the locations of the rows, then the old contents of each
/// stream, row by row, in whole words.
const HEAD_BYTES: usize = 16;
const LOCATION_BYTES: usize = 16;
/// The position of the checksum in the header. It covers the header and the locations. The old
/// contents are covered by the checksums of their blocks, if blocks have any.
const SUM: std::ops::Range<usize> = 12..16;
/// The number of lower bits that hold the number of streams. The upper bits hold the table's number
/// plus 1.
const STREAM_BITS: u32 = 8;

/// The location of a row: the block of its values, the block of its slots, and the offset in both.
/// A record of a table is a row of one stream, in the block with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLocation {
    pub(crate) value: u32,
    pub(crate) slot: u32,
    pub(crate) start: u32,
}

/// The old contents of a row in one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndoRow {
    /// The table of the record; `None` for a row in the store's blocks.
    pub table: Option<u16>,
    /// 0 for values, then the slots.
    pub stream: usize,
    /// The number of the block, or of the record of a table.
    pub block: u32,
    /// The offset in the block; for a slot, in the slot's part of the block.
    pub start: usize,
    /// The old contents.
    pub bytes: Vec<u8>,
}

/// The old contents of the current change's rows.
#[derive(Debug)]
pub(crate) struct Undo {
    memory: Memory,
    version: u64,
    end: usize,
    /// The checksum of the last tile, which the checksum of the next one continues.
    sum: u32,
}

impl Undo {
    /// Returns the size of the file after its first page, for `rows` old bytes in total.
    pub(crate) const fn bytes(rows: usize) -> u64 {
        (TILES - PAGE_BYTES + 2 * rows).next_multiple_of(PAGE_BYTES) as u64
    }

    /// Returns the size of a tile.
    pub(crate) const fn need(rows: usize, row_bytes: usize, streams: usize) -> usize {
        HEAD_BYTES + rows * LOCATION_BYTES + streams * (rows * row_bytes).next_multiple_of(8)
    }

    /// Creates an idle undo in new memory.
    pub(crate) fn create(mut memory: Memory) -> Undo {
        memory.store(STATE, IDLE);
        Undo::open(memory)
    }

    /// Opens the memory of an earlier process.
    pub(crate) fn open(memory: Memory) -> Undo {
        Undo { memory, version: 0, end: TILES, sum: 0 }
    }

    /// Returns whether tiles of this total size fit.
    pub(crate) fn fits(&self, bytes: usize) -> bool {
        bytes <= self.memory.len() - self.end
    }

    /// Returns the total size of the tiles.
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> usize {
        self.end - TILES
    }

    /// Begins to record for the change that makes `version`.
    pub(crate) fn begin(&mut self, version: u64) {
        self.memory.store(VERSION, version);
        self.version = version;
        self.sum = first_sum(version);
    }

    /// Appends a tile for a table, or for the store's own blocks. `fill` is called with each stream
    /// to write the old contents of the rows. The tile is valid once it is
    /// [prepared](Undo::prepare).
    ///
    /// # Panics
    /// If the tile does not fit.
    pub(crate) fn record(
        &mut self,
        table: Option<u16>,
        locations: &[RowLocation],
        row_bytes: usize,
        streams: usize,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) {
        let end = self.end + Undo::need(locations.len(), row_bytes, streams);
        let (head, rest) = self.memory.stretch_mut(self.end..end).split_at_mut(HEAD_BYTES);
        let (encoded_locations, old) = rest.split_at_mut(locations.len() * LOCATION_BYTES);
        for (location, encoded) in
            locations.iter().zip(encoded_locations.chunks_exact_mut(LOCATION_BYTES))
        {
            encoded.copy_from_slice(
                words([location.value, location.slot, location.start, 0]).as_flattened(),
            );
        }
        let of = table.map_or(0, |table| (u32::from(table) + 1) << STREAM_BITS);
        let words_of_head = words([locations.len() as u32, row_bytes as u32, streams as u32 | of]);
        self.sum = sum_of(self.sum, words_of_head.as_flattened(), encoded_locations);
        head[..SUM.start].copy_from_slice(words_of_head.as_flattened());
        head[SUM].copy_from_slice(&self.sum.to_le_bytes());
        let length = locations.len() * row_bytes;
        let stride = old.len() / streams;
        for (stream, old) in old.chunks_exact_mut(stride).enumerate() {
            fill(stream, &mut old[..length]);
        }
        self.end = end;
    }

    /// Returns the old contents of the last tile's first stream. The arguments are those of the
    /// tile.
    pub(crate) fn last_values(&self, rows: usize, row_bytes: usize, streams: usize) -> &[u8] {
        let start = self.end - Undo::need(rows, row_bytes, streams);
        let old = start + HEAD_BYTES + rows * LOCATION_BYTES;
        &self.memory.bytes()[old..old + rows * row_bytes]
    }

    /// Returns the rows recorded for the current, uncommitted change.
    pub(crate) fn uncommitted_rows(&self) -> Result<Vec<UndoRow>, Fault> {
        self.rows(self.version.saturating_sub(1))
    }

    /// Marks all recorded tiles as valid. The rows may be changed after that.
    pub(crate) fn prepare(&mut self) {
        // A process that finds this word finds all tiles, because they were written before it.
        self.memory.store(LENGTH, length_word(self.end - TILES, self.version));
        if self.memory.load(STATE) != PREPARED {
            self.memory.store(STATE, PREPARED);
        }
    }

    /// Discards the rows.
    pub(crate) fn clear(&mut self) {
        if self.memory.load(STATE) != IDLE {
            self.memory.store(STATE, IDLE);
        }
        self.end = TILES;
    }

    /// Returns whether rows are prepared.
    pub(crate) fn is_prepared(&self) -> Result<bool, Fault> {
        match self.memory.load(STATE) {
            IDLE => Ok(false),
            PREPARED => Ok(true),
            other => {
                let what = format!("an idle or prepared state, not {other:#018x}");
                Err(Fault::at(STATE * 8, what))
            }
        }
    }

    /// Returns the rows to restore, given the version of the last commit. The caller restores them
    /// in reverse order and then clears the undo.
    pub(crate) fn rows(&self, version: u64) -> Result<Vec<UndoRow>, Fault> {
        if !self.is_prepared()? {
            return Ok(Vec::new());
        }
        let prepared = self.memory.load(VERSION);
        let word = self.memory.load(LENGTH);
        let length = word as u32 as usize;
        let expected = length_word(length, prepared);
        if expected != word || length > self.memory.len() - TILES {
            let what = format!("the length of rows that fit the file, not {word:#018x}");
            return Err(Fault::at(LENGTH * 8, what));
        }
        let rows = self.decode(length, prepared)?;
        match prepared.checked_sub(version) {
            // The change was committed.
            None | Some(0) => Ok(Vec::new()),
            Some(1) => Ok(rows),
            Some(_) => {
                let what = format!("rows of version {} at most, not {prepared}", version + 1);
                Err(Fault::at(VERSION * 8, what))
            }
        }
    }

    fn decode(&self, length: usize, version: u64) -> Result<Vec<UndoRow>, Fault> {
        let mut tiles = &self.memory.bytes()[TILES..TILES + length];
        let mut rows = Vec::new();
        let mut sum = first_sum(version);
        while !tiles.is_empty() {
            let at = TILES + length - tiles.len();
            let tile = UndoTile::parse(tiles).ok_or_else(|| Fault::at(at, "rows"))?;
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

/// A decoded tile.
struct UndoTile<'a> {
    /// The size of the whole tile.
    bytes: usize,
    row_bytes: usize,
    table: Option<u16>,
    head: &'a [u8],
    found: u32,
    locations: &'a [u8],
    streams: &'a [u8],
}

impl UndoTile<'_> {
    /// Parses the first tile.
    fn parse(bytes: &[u8]) -> Option<UndoTile<'_>> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let [rows, row_bytes, streams, found] = word_array(head);
        let table = match streams >> STREAM_BITS {
            0 => None,
            number => Some(u16::try_from(number - 1).ok()?),
        };
        let streams = (streams & ((1 << STREAM_BITS) - 1)) as usize;
        let rows = rows as usize;
        let row_bytes = row_bytes as usize;
        // The sums below cannot overflow.
        let sound = rows.checked_mul(row_bytes)? <= rest.len() && rows <= rest.len();
        if !sound || rows == 0 || row_bytes == 0 || !(1..=1 + SLOTS_MAX).contains(&streams) {
            return None;
        }
        let body = rest.get(..Undo::need(rows, row_bytes, streams) - HEAD_BYTES)?;
        let (locations, streams) = body.split_at(rows * LOCATION_BYTES);
        let bytes = HEAD_BYTES + body.len();
        let head = &head[..SUM.start];
        Some(UndoTile { bytes, row_bytes, table, head, found, locations, streams })
    }

    /// Returns the tile's checksum, which continues that of the tile before it.
    fn sum(&self, before: u32) -> u32 {
        sum_of(before, self.head, self.locations)
    }

    fn append_to(&self, rows: &mut Vec<UndoRow>) {
        let locations = self.locations.chunks_exact(LOCATION_BYTES);
        let stride = (locations.len() * self.row_bytes).next_multiple_of(8);
        for (stream, old) in self.streams.chunks_exact(stride).enumerate() {
            for (location, bytes) in locations.clone().zip(old.chunks_exact(self.row_bytes)) {
                let [value, slot, start, _] = word_array(location);
                let block = if stream == 0 { value } else { slot };
                let table = self.table;
                let start = start as usize;
                rows.push(UndoRow { table, stream, block, start, bytes: bytes.to_vec() });
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

/// Returns the checksum that the first tile continues.
fn first_sum(version: u64) -> u32 {
    crc32c::crc32c(&version.to_le_bytes())
}

fn sum_of(before: u32, head: &[u8], locations: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(before, head), locations)
}

/// Returns the length of the tiles in the lower half, and the checksum of the length and the
/// version in the upper half.
fn length_word(length: usize, version: u64) -> u64 {
    let head = [version.to_le_bytes(), (length as u64).to_le_bytes()];
    length as u64 | u64::from(crc32c::crc32c(head.as_flattened())) << 32
}

/// Recomputes the checksums of a forged undo file.
#[cfg(any(test, feature = "simulation"))]
pub fn reseal(bytes: &mut [u8]) {
    if bytes.len() < TILES {
        return;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let version = word(VERSION * 8);
    let length = word(LENGTH * 8) as u32 as usize;
    bytes[LENGTH * 8..TILES].copy_from_slice(&length_word(length, version).to_le_bytes());
    let mut at = TILES;
    let mut sum = first_sum(version);
    while let Some(tile) = UndoTile::parse(&bytes[at..]) {
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

    fn row(stream: usize, block: u32, start: usize, bytes: Vec<u8>) -> UndoRow {
        UndoRow { table: None, stream, block, start, bytes }
    }

    /// Records rows with these old contents, one slice for each stream.
    fn record(undo: &mut Undo, locations: &[RowLocation], row_bytes: usize, streams: &[&[u8]]) {
        undo.record(None, locations, row_bytes, streams.len(), |stream, old| {
            old.copy_from_slice(streams[stream]);
        });
    }

    #[test]
    fn undo_rows_are_returned_unless_the_change_was_committed() {
        let mut undo = undo();
        undo.begin(7);
        let values = [[1; 12], [2; 12]].concat();
        let slots = [[3; 12], [4; 12]].concat();
        record(&mut undo, &LOCATIONS, 12, &[&values, &slots]);
        assert_eq!(undo.rows(6), Ok(Vec::new()), "they are not prepared");
        undo.prepare();
        let tile = vec![
            row(0, 3, 8, vec![1; 12]),
            row(0, 5, 24, vec![2; 12]),
            row(1, 4, 8, vec![3; 12]),
            row(1, 6, 24, vec![4; 12]),
        ];
        assert_eq!(undo.rows(6).unwrap(), tile);
        record(&mut undo, &LOCATIONS[..1], 5, &[&[9; 5]]);
        assert_eq!(undo.rows(6).unwrap(), tile, "the next tile is not prepared");
        undo.prepare();
        let all = [tile, vec![row(0, 3, 8, vec![9; 5])]].concat();
        assert_eq!(undo.rows(6).unwrap(), all);
        assert_eq!(undo.rows(6).unwrap(), all, "reading changes nothing");
        assert_eq!(undo.rows(7), Ok(Vec::new()), "the change is committed");
        assert_eq!(undo.rows(5).unwrap_err().offset, VERSION as u64 * 8);
        undo.clear();
        assert_eq!(undo.rows(6), Ok(Vec::new()));
        let all = undo.memory.len() - TILES;
        assert!(undo.fits(all) && !undo.fits(all + 1), "the file is bounded");
    }

    #[test]
    fn a_tile_takes_the_bytes_that_were_computed() {
        for (rows, row_bytes, streams) in [(1, 4, 1), (2, 12, 3), (1, 5, 9), (2, 4, 2)] {
            let mut undo = undo();
            undo.begin(1);
            let stream = vec![0; rows * row_bytes];
            record(&mut undo, &LOCATIONS[..rows], row_bytes, &vec![&stream[..]; streams]);
            undo.prepare();
            assert_eq!(undo.end - TILES, Undo::need(rows, row_bytes, streams));
            assert_eq!(undo.rows(0).unwrap().len(), rows * streams);
        }
    }

    /// Each tile continues the checksum of the one before, and the first continues that of the
    /// version.
    #[test]
    fn a_flipped_bit_of_a_location_or_head_is_detected() {
        let mut undo = undo();
        undo.begin(7);
        for byte in 1..4 {
            record(&mut undo, &LOCATIONS, 8, &[&[byte; 16], &[!byte; 16]]);
            undo.prepare();
        }
        let tile = Undo::need(LOCATIONS.len(), 8, 2);
        for byte in STATE * 8..undo.end {
            let is_old_content =
                byte >= TILES && (byte - TILES) % tile >= HEAD_BYTES + 2 * LOCATION_BYTES;
            let right = undo.memory.bytes()[byte];
            for bit in 0..8 {
                undo.memory.write(byte, &[right ^ 1 << bit]);
                assert_eq!(undo.rows(6).is_err(), !is_old_content, "bit {bit} of byte {byte}");
            }
            undo.memory.write(byte, &[right]);
        }
        // A tile that is left of an older change is rejected, even if the length covers it.
        let end = undo.end;
        let left = undo.memory.bytes().to_vec();
        undo.clear();
        undo.begin(8);
        record(&mut undo, &LOCATIONS, 8, &[&[9; 16], &[9; 16]]);
        undo.prepare();
        let one = undo.end;
        undo.memory.write(one, &left[one..end]);
        undo.memory.store(LENGTH, length_word(end - TILES, 8));
        assert_eq!(undo.rows(7).unwrap_err().offset, (one + SUM.start) as u64);
    }
}
