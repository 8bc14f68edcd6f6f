//! The geometry of shared values: the position of each block.

use std::ops::Range;

/// A number in a peer's description of shared values that is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} of shared values cannot be {found}")]
pub struct InvalidGeometry {
    /// The name of the number.
    pub what: &'static str,
    /// The value.
    pub found: u64,
}

/// The positions and the number of blocks. Lengths and offsets are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    /// The offset of the first block.
    pub offset: u64,
    /// The length of a block, which is the length of a logical block: a power of two.
    pub block_bytes: u64,
    /// The distance between the starts of two blocks: at least one word more than a block's length.
    pub stride: u64,
    /// The number of blocks.
    pub blocks: u32,
    /// The number of logical blocks.
    pub logical_blocks: u32,
}

impl Geometry {
    /// Checks that `bytes` bytes hold these blocks and that all offsets are word-aligned. Fails
    /// with the first number that is wrong.
    pub fn check(&self, bytes: u64) -> Result<(), InvalidGeometry> {
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
            ("the number of logical blocks", logical_blocks.into(), logical_blocks <= blocks),
        ];
        match numbers.into_iter().find(|(_, _, sound)| !sound) {
            Some((what, found, _)) => Err(InvalidGeometry { what, found }),
            None => Ok(()),
        }
    }

    /// Returns the offset of a block.
    pub fn start(&self, block: u32) -> u64 {
        self.offset + u64::from(block) * self.stride
    }

    /// Returns the index of the owner generation's word: in the gap behind the first block.
    ///
    /// It counts the processes that have owned the values. A process that takes them over from
    /// another, for example a server that recovers after a kill, raises it before it writes
    /// anything.
    pub fn owner_generation_word(&self) -> usize {
        ((self.offset + self.block_bytes) / 8) as usize
    }

    /// Splits a range of the layout at the ends of logical blocks: returns each logical block and
    /// the range within it, in order.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> + use<> {
        let block_bytes = self.block_bytes;
        let mut start = range.start;
        std::iter::from_fn(move || {
            (start < range.end).then(|| {
                let logical = start / block_bytes;
                let within = start % block_bytes;
                let bytes = (block_bytes - within).min(range.end - start);
                start += bytes;
                // Fits: logical blocks are numbered by 32 bits.
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
    fn impossible_numbers_are_named() {
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
            (Geometry { logical_blocks: 11, ..SOUND }, "the number of logical blocks"),
        ];
        for (geometry, what) in cases {
            assert_eq!(geometry.check(4096 + 720).unwrap_err().what, what, "{geometry:?}");
        }
    }

    #[test]
    fn a_range_is_split_at_block_boundaries() {
        let pieces = |range| SOUND.pieces(range).collect::<Vec<_>>();
        assert_eq!(pieces(8..136), [(0, 8..64), (1, 0..64), (2, 0..8)]);
        assert_eq!(pieces(64..128), [(1, 0..64)]);
        assert_eq!(pieces(40..40), []);
    }
}
