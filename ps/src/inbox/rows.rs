//! The rows that a push contains of sparse partitions: their validation and their bytes.

use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::protocol::Refusal;
use pushpull_common::rows::{self, Numbers};

use super::{Extents, Inbox};

/// The rows of a partition in a whole push.
#[derive(Clone, Debug)]
pub(crate) struct PushedRows<'a> {
    numbers: Numbers<'a>,
    /// The bytes of the rows, without gaps.
    pub(crate) values: &'a [u8],
    /// The factor of the rows.
    pub(crate) factor: f64,
}

impl PushedRows<'_> {
    /// Returns the rows with this factor.
    pub(crate) fn times(self, factor: f64) -> Self {
        PushedRows { factor, ..self }
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Returns their row numbers in the partition, or their ids, in ascending order.
    pub(crate) fn numbers(&self) -> Numbers<'_> {
        self.numbers.clone()
    }

    /// Returns the row number or id at this index.
    pub(crate) fn number(&self, index: usize) -> u64 {
        self.numbers.at(index)
    }

    /// Returns the index of the first row whose number is at least `number`.
    pub(crate) fn first_from(&self, number: u64) -> usize {
        let mut low = 0;
        let mut high = self.len();
        while low < high {
            let middle = low.midpoint(high);
            match self.number(middle) < number {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}

impl Extents {
    /// Returns whether a push touches a sparse partition.
    pub(super) fn touches(&self, partition: &Partition) -> bool {
        let values = self.bytes_within(partition.offset..partition.end());
        values > 0 || self.bytes_within(index_of(partition, partition.row_count())) > 0
    }

    /// Adds the extents of `count` rows of a partition.
    pub(super) fn add_rows(&mut self, partition: &Partition, count: u64) {
        let values = rows::values_bytes(partition, count);
        if values > 0 {
            self.add(partition.offset..partition.offset + values);
        }
        self.add(index_of(partition, count));
    }
}

fn index_of(partition: &Partition, rows: u64) -> Range<u64> {
    let start = partition.index.unwrap_or(0);
    start..start + rows::index_bytes(partition, rows)
}

impl Inbox {
    /// Validates the rows of a push whose parts have all been received. Each partition that it
    /// touches must have as many rows as announced, and their numbers must be ascending and in
    /// range.
    pub(crate) fn check_rows(&self, number: u32, layout: &ShardLayout) -> Result<(), Refusal> {
        let Some(push) = self.arrival(number) else {
            return Err(Refusal::PushSlotTaken { push_slot: number });
        };
        for partition in layout.sparse().filter(|partition| push.extents.touches(partition)) {
            let all = index_of(partition, partition.row_count());
            let bytes = push.extents.bytes_within(all.clone());
            let incomplete = |bytes, expected| {
                Err(Refusal::Incomplete { partition: partition.id, bytes, expected })
            };
            let index = self.bytes(number, all).unwrap_or_default();
            let index = index.get(..bytes as usize).unwrap_or_default();
            if bytes == 0 {
                return incomplete(bytes, rows::index_bytes(partition, 0));
            }
            let count = rows::count(index, partition)?;
            let expected = rows::index_bytes(partition, count);
            if bytes != expected {
                return incomplete(bytes, expected);
            }
            let bytes = push.extents.bytes_within(partition.offset..partition.end());
            let expected = rows::values_bytes(partition, count);
            if bytes != expected {
                return incomplete(bytes, expected);
            }
            rows::check(rows::numbers(index, partition, count), partition)?;
        }
        Ok(())
    }

    /// Returns the rows that a whole push has of a sparse partition; `None` if it has none.
    pub(crate) fn rows(&self, number: u32, partition: &Partition) -> Option<PushedRows<'_>> {
        if !self.arrival(number)?.extents.touches(partition) {
            return None;
        }
        let index = self.bytes(number, index_of(partition, partition.row_count()))?;
        // The index was validated, and nothing else writes to this slot.
        let count = rows::count(index, partition).ok()?;
        let bytes = count * partition.row_bytes();
        let values = self.bytes(number, partition.offset..partition.offset + bytes)?;
        Some(PushedRows { numbers: rows::numbers(index, partition, count), values, factor: 1.0 })
    }
}
