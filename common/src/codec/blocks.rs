//! Which elements of a stretch share a scale.

use super::BLOCK;

/// Where the blocks of a stretch lie: [`BLOCK`] elements each, through all of it or within each row.
///
/// Rows of embeddings differ much in size, so none shares its scale with another. Of the encodings
/// that rows have, [`Encoding::Int8`] alone has blocks.
///
/// [`Encoding::Int8`]: super::Encoding::Int8
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The elements of a row; at least 1.
    width: usize,
    /// How many of the first row the stretch leaves out.
    before: usize,
}

impl Blocks {
    /// Of elements that are no rows: only the last block may be shorter.
    pub const THROUGH: Blocks = Blocks { width: usize::MAX, before: 0 };

    /// Of rows of so many elements, `before` of the first of which lie before the stretch; the last
    /// row need not be whole either. Each row has blocks of its own.
    pub const fn of_rows(width: usize, before: usize) -> Blocks {
        let width = if width == 0 { 1 } else { width };
        Blocks { width, before: before % width }
    }

    /// The lengths of the blocks of so many elements.
    pub(super) fn lengths(self, elements: usize) -> impl Iterator<Item = usize> {
        let (mut row, mut left) = (self.width - self.before, elements);
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

    /// How many blocks so many elements have.
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
    fn blocks_end_with_their_rows() {
        let lengths = |blocks: Blocks, elements| blocks.lengths(elements).collect::<Vec<_>>();
        assert_eq!(lengths(Blocks::THROUGH, 600), [256, 256, 88]);
        assert_eq!(lengths(Blocks::of_rows(3, 0), 7), [3, 3, 1]);
        assert_eq!(lengths(Blocks::of_rows(3, 2), 5), [1, 3, 1]);
        assert_eq!(lengths(Blocks::of_rows(300, 10), 600), [256, 34, 256, 44, 10]);
        assert_eq!(lengths(Blocks::of_rows(0, 9), 2), [1, 1]);
        for width in [1, 2, 5, 255, 256, 257, 600] {
            for before in [0, 1, 4, 300, 599] {
                for elements in [0, 1, 255, 256, 257, 511, 1300] {
                    let blocks = Blocks::of_rows(width, before);
                    let lengths = lengths(blocks, elements);
                    assert_eq!(lengths.len(), blocks.count(elements), "{blocks:?}, {elements}");
                    assert_eq!(lengths.iter().sum::<usize>(), elements);
                }
            }
        }
    }
}
