//! [`Layout`]: offsets of variables that share a memory.

use std::ops::Range;

use super::syntax::Variable;

/// Offsets of variables that share a memory.
///
/// Variables in shared and local memory are kept apart by a gap that belongs to none, so that an
/// index one past the end of an array is not an access of its neighbour.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// The bytes that belong to variables.
    pub(crate) ranges: Vec<Range<usize>>,
    end: usize,
}

const GAP: usize = 64;

impl Layout {
    /// Places a variable, and returns its offset.
    pub(crate) fn place(&mut self, variable: &Variable) -> usize {
        let gap = if self.ranges.is_empty() { 0 } else { GAP };
        let at = (self.end + gap).next_multiple_of(variable.align.max(1));
        self.ranges.push(at..at + variable.size);
        self.end = at + variable.size;
        at
    }

    /// Places a variable directly after the one before it, as parameters are.
    pub(crate) fn append(&mut self, variable: &Variable) -> usize {
        let at = self.end.next_multiple_of(variable.align.max(1));
        self.end = at + variable.size;
        at
    }

    /// The size of the memory with its gaps.
    pub(crate) fn size(&self) -> usize {
        self.end
    }

    /// Returns the offset of the dynamic shared memory, whose size the launch gives.
    pub(crate) fn dynamic_start(&self) -> usize {
        let gap = if self.ranges.is_empty() { 0 } else { GAP };
        (self.end + gap).next_multiple_of(16)
    }
}
