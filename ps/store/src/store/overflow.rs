//! Overflows: values that a change makes infinite or NaN although its input is finite.
//!
//! The loops that write shadows scan the values as they write them. Values changed in place are
//! scanned right after, while they are in cache. Both scans only detect that a range may contain an
//! overflow; the range is then searched. Values that were non-finite before are no overflow, or
//! such a variable could not be changed any more.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::finite::{Exponents, first_non_finite};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;

use super::Store;
use crate::change::Change;
use crate::undo::RowLocation;

/// A value that a change has made infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overflow {
    /// The variable.
    pub variable: VariableId,
    /// The index in the whole variable; for a growing table, in its row.
    pub element: u64,
    /// The value.
    pub value: f64,
}

impl Overflow {
    /// Describes an overflow at this byte offset in the layout.
    fn at(layout: &ShardLayout, at: u64, value: f64) -> Overflow {
        let partition = layout.at(at);
        let element = (at - partition.offset) / partition.dtype.size() as u64;
        let element = partition.elements.start + element;
        Overflow { variable: partition.variable, element, value }
    }
}

/// Finds the first element that is non-finite now and was not before. Without `before`, finds the
/// first non-finite element. Returns its byte offset and value.
pub(super) fn first_new_overflow(
    dtype: DType,
    before: Option<&[u8]>,
    after: &[u8],
) -> Option<(usize, f64)> {
    let size = dtype.size();
    let mut from = 0;
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
    /// Returns the first overflow of the current change.
    pub fn overflow(&self) -> Option<Overflow> {
        self.overflow
    }

    /// Returns the first overflow of the current change, and clears it.
    pub fn take_overflow(&mut self) -> Option<Overflow> {
        self.overflow.take()
    }

    /// Records an overflow at an offset from this position in the layout, unless one is recorded.
    pub(super) fn record_overflow(&mut self, start: u64, found: Option<(usize, f64)>) {
        if let (None, Some((offset, value))) = (self.overflow, found) {
            self.overflow = Some(Overflow::at(&self.layout, start + offset as u64, value));
        }
    }

    /// Records an overflow at an offset within a row of a table, unless one is recorded.
    pub(super) fn record_table_overflow(&mut self, table: usize, found: Option<(usize, f64)>) {
        if let (None, Some((offset, value))) = (self.overflow, found) {
            let partition = self.tables[table].partition();
            let element = (offset / partition.dtype.size()) as u64;
            self.overflow = Some(Overflow { variable: partition.variable, element, value });
        }
    }

    /// Returns whether values in a block must be scanned after a change in place. They need not be
    /// if an overflow is recorded, and cannot be if some are non-finite already.
    pub(super) fn needs_overflow_check(
        &self,
        change: Change<'_>,
        block: u32,
        within: &Range<usize>,
    ) -> bool {
        let values = &self.values.blocks.read(block)[within.clone()];
        let exponents = change.computed_dtype().map(Exponents::of);
        self.overflow.is_none() && exponents.is_some_and(|these| !these.are_full_in(values))
    }

    /// Scans a range of a block after a change. `start` is its position in the layout; `before` is
    /// the block with the old values, and `None` means that they were all finite.
    pub(super) fn check_overflow(
        &mut self,
        change: Change<'_>,
        block: u32,
        start: u64,
        within: Range<usize>,
        before: Option<u32>,
    ) {
        let (Some(dtype), None) = (change.computed_dtype(), self.overflow) else { return };
        let after = &self.values.blocks.read(block)[within.clone()];
        if Exponents::of(dtype).are_full_in(after) {
            let before = before.map(|before| &self.values.blocks.read(before)[within]);
            let found = first_new_overflow(dtype, before, after);
            self.record_overflow(start, found);
        }
    }

    /// Scans rows after a change in place. Each starts at one of these positions in the layout.
    pub(super) fn check_overflow_of_rows(
        &mut self,
        change: Change<'_>,
        rows: impl Iterator<Item = u64>,
        locations: &[RowLocation],
        row_bytes: usize,
    ) {
        let (Some(dtype), None) = (change.computed_dtype(), self.overflow) else { return };
        let exponents = Exponents::of(dtype);
        for (logical, (location, start)) in locations.iter().zip(rows).enumerate() {
            let within = location.start as usize..location.start as usize + row_bytes;
            let after = &self.values.blocks.read(location.value)[within];
            if exponents.are_full_in(after) {
                let old = self.undo.last_values(locations.len(), row_bytes, 1 + change.slots());
                let before = &old[logical * row_bytes..][..row_bytes];
                let found = first_new_overflow(dtype, Some(before), after);
                self.record_overflow(start, found);
            }
        }
    }

    /// Abandons the current change and rolls back what it has changed in place. Returns false if
    /// that is impossible, because it changes rows of tables in place.
    pub fn abandon_change(&mut self) -> bool {
        if self.tables_in_place || self.in_place && !self.roll_back_in_place() {
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
    fn values_that_were_non_finite_before_are_no_overflow() {
        let [inf, nan] = [f32::INFINITY, f32::NAN];
        let bytes = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        let after = bytes(&[0.0, nan, inf, -inf]);
        let found = |before: &[f32]| first_new_overflow(DType::F32, Some(&bytes(before)), &after);
        assert_eq!(found(&[inf, 1.0, nan, f32::MAX]).map(|found| found.0), Some(4));
        assert_eq!(found(&[0.0, inf, 1.0, 1.0]), Some((8, f64::INFINITY)));
        assert_eq!(found(&[0.0, inf, inf, 1.0]), Some((12, f64::NEG_INFINITY)));
        assert_eq!(found(&[0.0, inf, inf, inf]), None);
        assert_eq!(first_new_overflow(DType::F32, None, &after).map(|found| found.0), Some(4));
        assert_eq!(first_new_overflow(DType::I64, None, &[0xff; 16]), None);
    }
}
