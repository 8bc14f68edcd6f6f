//! Which elements of a stretch share a scale.

use super::BLOCK;

/// The block boundaries in a stretch: every [`BLOCK`] elements, or every [`BLOCK`] within each row.
///
/// Rows of embeddings differ much in size, so two rows never share a scale. Of the encodings for
/// rows, only [`Encoding::Int8`] has blocks.
///
/// [`Encoding::Int8`]: super::Encoding::Int8
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleBlocks {
    /// The number of elements in a row; at least 1.
    width: usize,
    /// The number of elements of the first row that precede the stretch.
    before: usize,
}

impl ScaleBlocks {
    /// The blocks of elements without rows: only the last block may be shorter.
    pub const THROUGH: ScaleBlocks = ScaleBlocks { width: usize::MAX, before: 0 };

    /// The blocks of rows of `width` elements; each row has its own.
    ///
    /// The first `before` elements of the first row precede the stretch. The last row may be
    /// incomplete.
    pub const fn of_rows(width: usize, before: usize) -> ScaleBlocks {
        let width = if width == 0 { 1 } else { width };
        ScaleBlocks { width, before: before % width }
    }

    /// Returns the lengths of the blocks of `elements` elements.
    pub(super) fn lengths(self, elements: usize) -> impl Iterator<Item = usize> {
        let mut row = self.width - self.before;
        let mut left = elements;
        std::iter::from_fn(move || {
            let length = BLOCK.min(row).min(left);
            left -= length;
            row -= length;
            if row == 0 {
                row = self.width;
            }
            (length > 0).then_some(length)
        })
    }

    /// Returns the number of blocks of `elements` elements.
    pub(super) const fn count(self, elements: usize) -> usize {
        let first = self.width - self.before;
        if elements <= first {
            return elements.div_ceil(BLOCK);
        }
        let rest = elements - first;
        first.div_ceil(BLOCK)
            + rest / self.width * self.width.div_ceil(BLOCK)
            + (rest % self.width).div_ceil(BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_at_row_boundaries() {
        let lengths = |blocks: ScaleBlocks, elements| blocks.lengths(elements).collect::<Vec<_>>();
        assert_eq!(lengths(ScaleBlocks::THROUGH, 600), [256, 256, 88]);
        assert_eq!(lengths(ScaleBlocks::of_rows(3, 0), 7), [3, 3, 1]);
        assert_eq!(lengths(ScaleBlocks::of_rows(3, 2), 5), [1, 3, 1]);
        assert_eq!(lengths(ScaleBlocks::of_rows(300, 10), 600), [256, 34, 256, 44, 10]);
        assert_eq!(lengths(ScaleBlocks::of_rows(0, 9), 2), [1, 1]);
        for width in [1, 2, 5, 255, 256, 257, 600] {
            for before in [0, 1, 4, 300, 599] {
                for elements in [0, 1, 255, 256, 257, 511, 1300] {
                    let blocks = ScaleBlocks::of_rows(width, before);
                    let lengths = lengths(blocks, elements);
                    assert_eq!(lengths.len(), blocks.count(elements), "{blocks:?}, {elements}");
                    assert_eq!(lengths.iter().sum::<usize>(), elements);
                }
            }
        }
    }
}
