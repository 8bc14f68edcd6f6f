//! Values that a change has made infinite or NaN, though what it was made with was finite.
//!
//! The loops that write values elsewhere look at them as they do; what is changed where it lies is looked
//! at right after, while it is in cache. Both only tell whether something may be wrong with a stretch: then
//! it is searched. What was not finite before is passed over, or no change of such a variable could be
//! made any more.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::finite::{Exponents, first_non_finite};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;

use super::undo::RowLocation;
use super::{Change, Store};

/// A value that a change has made infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overflow {
    pub(crate) variable: VariableId,
    /// Counted over the whole variable; of a table that grows, within its row.
    pub(crate) element: u64,
    pub(crate) value: f64,
}

impl Overflow {
    /// Of the element that lies here in the layout.
    fn at(layout: &ShardLayout, at: u64, value: f64) -> Overflow {
        let partition = layout.at(at);
        let element = (at - partition.offset) / partition.dtype.size() as u64;
        let element = partition.elements.start + element;
        Overflow { variable: partition.variable, element, value }
    }
}

/// Where the first element is that is not finite and was, or whose like was not asked for, and what it is.
pub(super) fn first_made(
    dtype: DType,
    before: Option<&[u8]>,
    after: &[u8],
) -> Option<(usize, f64)> {
    let (size, mut from) = (dtype.size(), 0);
    loop {
        let (index, value) = first_non_finite(dtype, &after[from..])?;
        let at = from + index * size;
        let was = before.map(|before| &before[at..at + size]);
        if was.is_none_or(|was| first_non_finite(dtype, was).is_none()) {
            return Some((at, value));
        }
        from = at + size;
    }
}

impl Store {
    /// The first value that the change under way has made infinite or NaN.
    pub(crate) fn overflow(&self) -> Option<Overflow> {
        self.overflow
    }

    /// The same, which is not told again.
    pub(crate) fn take_overflow(&mut self) -> Option<Overflow> {
        self.overflow.take()
    }

    /// Notes what was found so far behind this place of the layout, unless something was before.
    pub(super) fn note_overflow(&mut self, start: u64, found: Option<(usize, f64)>) {
        if let (None, Some((behind, value))) = (self.overflow, found) {
            self.overflow = Some(Overflow::at(&self.layout, start + behind as u64, value));
        }
    }

    /// The same of a table.
    pub(super) fn note_overflow_of(&mut self, table: usize, found: Option<(usize, f64)>) {
        if let (None, Some((behind, value))) = (self.overflow, found) {
            let partition = self.tables[table].partition();
            let element = (behind / partition.dtype.size()) as u64;
            self.overflow = Some(Overflow { variable: partition.variable, element, value });
        }
    }

    /// Whether values of a block are to be looked at after a change: nothing was found yet, and they are all
    /// finite before it.
    pub(super) fn looks_at(&self, change: Change<'_>, block: u32, within: &Range<usize>) -> bool {
        let values = &self.values.blocks.read(block)[within.clone()];
        let exponents = change.written().map(Exponents::of);
        self.overflow.is_none() && exponents.is_some_and(|these| !these.are_full_in(values))
    }

    /// Looks at values of a block after a change, which lie here in the layout; they are of `before` if that is
    /// known.
    pub(super) fn look_at(
        &mut self,
        change: Change<'_>,
        (block, start): (u32, u64),
        within: Range<usize>,
        before: Option<u32>,
    ) {
        let (Some(dtype), None) = (change.written(), self.overflow) else { return };
        let after = &self.values.blocks.read(block)[within.clone()];
        if Exponents::of(dtype).are_full_in(after) {
            let before = before.map(|before| &self.values.blocks.read(before)[within]);
            let found = first_made(dtype, before, after);
            self.note_overflow(start, found);
        }
    }

    /// Looks at rows after they were changed where they lie; each begins here in the layout.
    pub(super) fn look_at_rows(
        &mut self,
        change: Change<'_>,
        rows: impl Iterator<Item = u64>,
        locations: &[RowLocation],
        row_bytes: usize,
    ) {
        let (Some(dtype), None) = (change.written(), self.overflow) else { return };
        let exponents = Exponents::of(dtype);
        for (logical, (location, start)) in locations.iter().zip(rows).enumerate() {
            let within = location.start as usize..location.start as usize + row_bytes;
            let after = &self.values.blocks.read(location.value)[within];
            if exponents.are_full_in(after) {
                let kept = self.undo.last(locations.len(), row_bytes, 1 + change.slots());
                let before = &kept[logical * row_bytes..][..row_bytes];
                let found = first_made(dtype, Some(before), after);
                self.note_overflow(start, found);
            }
        }
    }

    /// Forgets the change under way, wherever it is made; false if it cannot be, as rows of tables are changed
    /// where they lie.
    pub(crate) fn give_up(&mut self) -> bool {
        if self.tables_in_place || self.in_place && !self.put_back_kept() {
            return false;
        }
        self.in_place = false;
        self.discard();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_finite_before_is_passed_over() {
        let [inf, nan] = [f32::INFINITY, f32::NAN];
        let bytes = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        let after = bytes(&[0.0, nan, inf, -inf]);
        let found = |before: &[f32]| first_made(DType::F32, Some(&bytes(before)), &after);
        assert_eq!(found(&[inf, 1.0, nan, f32::MAX]).map(|found| found.0), Some(4));
        assert_eq!(found(&[0.0, inf, 1.0, 1.0]), Some((8, f64::INFINITY)));
        assert_eq!(found(&[0.0, inf, inf, 1.0]), Some((12, f64::NEG_INFINITY)));
        assert_eq!(found(&[0.0, inf, inf, inf]), None);
        assert_eq!(first_made(DType::F32, None, &after).map(|found| found.0), Some(4));
        assert_eq!(first_made(DType::I64, None, &[0xff; 16]), None);
    }
}
