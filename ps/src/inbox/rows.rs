//! The rows that a push has of sparse partitions: whether they are whole and sound, and their bytes.

use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::protocol::Refusal;
use pushpull_common::rows::{self, Numbers};

use super::Inbox;
use super::extents::Extents;

/// The rows of a partition in a push that is whole.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    numbers: Numbers<'a>,
    /// The rows, one behind the other.
    pub(crate) values: &'a [u8],
    /// What they are multiplied by.
    pub(crate) factor: f64,
}

impl Rows<'_> {
    /// The same, to be multiplied by this.
    pub(crate) fn times(self, factor: f64) -> Self {
        Rows { factor, ..self }
    }

    /// How many they are.
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Their numbers within the partition, or their ids, which rise.
    pub(crate) fn numbers(&self) -> Numbers<'_> {
        self.numbers.clone()
    }

    /// The number of one of them.
    pub(crate) fn number(&self, place: usize) -> u64 {
        self.numbers.at(place)
    }

    /// The place of the first whose number is not below this one.
    pub(crate) fn first_from(&self, number: u64) -> usize {
        let (mut low, mut high) = (0, self.len());
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
    /// Whether a push touches a sparse partition.
    pub(super) fn touches(&self, partition: &Partition) -> bool {
        let values = self.bytes_within(partition.offset..partition.end());
        values > 0 || self.bytes_within(index_of(partition, partition.row_count())) > 0
    }

    /// Adds what so many rows of a partition are.
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
    /// Checks the rows of a push of which all parts have come: each partition it touches has as many
    /// as it says, and their numbers rise and are its own.
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

    /// The rows that a push, which is whole, has of a sparse partition; `None` if it has nothing of
    /// it.
    pub(crate) fn rows(&self, number: u32, partition: &Partition) -> Option<Rows<'_>> {
        if !self.arrival(number)?.extents.touches(partition) {
            return None;
        }
        let index = self.bytes(number, index_of(partition, partition.row_count()))?;
        // It was checked, and nobody else writes here.
        let count = rows::count(index, partition).ok()?;
        let bytes = count * partition.row_bytes();
        let values = self.bytes(number, partition.offset..partition.offset + bytes)?;
        Some(Rows { numbers: rows::numbers(index, partition, count), values, factor: 1.0 })
    }
}
