//! Where blocks lie in the values that are lent.

use std::ops::Range;

/// What a side says of its memory that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} of shared values cannot be {found}")]
pub struct Unsound {
    /// Which number.
    pub what: &'static str,
    /// What it is.
    pub found: u64,
}

/// Where blocks lie, and how many there are. All numbers are of bytes but those of blocks and places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    /// Where the first block starts.
    pub offset: u64,
    /// The length of a block, which is that of a place of the shard's layout: a power of two.
    pub block_bytes: u64,
    /// From the start of a block to that of the next: at least a word more than its length.
    pub stride: u64,
    /// How many blocks there are.
    pub blocks: u32,
    /// How many places of the layout they hold.
    pub logical_blocks: u32,
}

impl Geometry {
    /// Whether so many bytes hold these blocks, and all in them lies where words do; the first number
    /// that is wrong otherwise.
    pub fn check(&self, bytes: u64) -> Result<(), Unsound> {
        let Geometry { offset, block_bytes, stride, blocks, logical_blocks } = *self;
        let fits = u64::from(blocks)
            .checked_mul(stride)
            .and_then(|all| all.checked_add(offset))
            .is_some_and(|end| end <= bytes);
        let numbers = [
            ("the offset", offset, offset.is_multiple_of(8)),
            ("the length of a block", block_bytes, block_bytes >= 8),
            ("the length of a block", block_bytes, block_bytes.is_power_of_two()),
            ("the stride", stride, stride.is_multiple_of(8)),
            ("the stride", stride, stride.checked_sub(block_bytes).is_some_and(|gap| gap >= 8)),
            ("the number of blocks", blocks.into(), blocks > 0 && fits),
            ("the number of places", logical_blocks.into(), logical_blocks <= blocks),
        ];
        match numbers.into_iter().find(|(_, _, sound)| !sound) {
            Some((what, found, _)) => Err(Unsound { what, found }),
            None => Ok(()),
        }
    }

    /// Where a block starts.
    pub fn start(&self, block: u32) -> u64 {
        self.offset + u64::from(block) * self.stride
    }

    /// The word of the values that counts the processes which have had them: right behind the first
    /// block, in the gap before the next. One that takes them over from another, as a server does
    /// that goes on after a kill, raises it before it writes anything.
    pub fn owner_generation_word(&self) -> usize {
        ((self.offset + self.block_bytes) / 8) as usize
    }

    /// What a range of the layout is of each place that it lies in, in order: the place, and where in
    /// it.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> + use<> {
        let (block_bytes, mut start) = (self.block_bytes, range.start);
        std::iter::from_fn(move || {
            (start < range.end).then(|| {
                let (logical, within) = (start / block_bytes, start % block_bytes);
                let bytes = (block_bytes - within).min(range.end - start);
                start += bytes;
                // Of a layout whose places are numbered by 32 bits.
                (logical as u32, within..within + bytes)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: Geometry =
        Geometry { offset: 4096, block_bytes: 64, stride: 72, blocks: 10, logical_blocks: 4 };

    #[test]
    fn numbers_that_cannot_be_are_named() {
        assert_eq!(SOUND.check(4096 + 720), Ok(()));
        assert_eq!((SOUND.start(9), SOUND.owner_generation_word()), (4096 + 648, 520));
        let cases = [
            (Geometry { offset: 4097, ..SOUND }, "the offset"),
            (Geometry { offset: u64::MAX - 7, ..SOUND }, "the number of blocks"),
            (Geometry { block_bytes: 48, ..SOUND }, "the length of a block"),
            (Geometry { block_bytes: 0, ..SOUND }, "the length of a block"),
            (Geometry { block_bytes: 128, ..SOUND }, "the stride"),
            (Geometry { stride: 64, ..SOUND }, "the stride"),
            (Geometry { stride: 77, ..SOUND }, "the stride"),
            (Geometry { stride: u64::MAX - 7, ..SOUND }, "the number of blocks"),
            (Geometry { blocks: 0, ..SOUND }, "the number of blocks"),
            (Geometry { blocks: 11, ..SOUND }, "the number of blocks"),
            (Geometry { logical_blocks: 11, ..SOUND }, "the number of places"),
        ];
        for (geometry, what) in cases {
            assert_eq!(geometry.check(4096 + 720).unwrap_err().what, what, "{geometry:?}");
        }
    }

    #[test]
    fn a_range_is_cut_where_places_end() {
        let pieces = |range| SOUND.pieces(range).collect::<Vec<_>>();
        assert_eq!(pieces(8..136), [(0, 8..64), (1, 0..64), (2, 0..8)]);
        assert_eq!(pieces(64..128), [(1, 0..64)]);
        assert_eq!(pieces(40..40), []);
    }
}
