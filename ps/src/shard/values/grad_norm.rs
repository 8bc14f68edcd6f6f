//! Computes the squared norm of a gradient before this shard reports it as held, where gradients
//! are clipped by their global norm.

use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::Sums;

use super::SLICE_BYTES;
use super::variables::Variables;
use crate::inbox::Inbox;

/// Adds up the squares of a gradient's elements, slice by slice, in the order of the layout.
#[derive(Debug)]
pub(in crate::shard) struct NormJob {
    pub(in crate::shard) push_slot: u32,
    /// The number of the push among complete pushes. Its slot may hold another one.
    pub(in crate::shard) order: u64,
    /// The index of the current partition, and the bytes of the push in it that are done.
    partition: usize,
    done: usize,
    sums: Sums,
}

impl NormJob {
    pub(in crate::shard) fn new(push_slot: u32, order: u64) -> NormJob {
        NormJob { push_slot, order, partition: 0, done: 0, sums: Sums::default() }
    }

    /// Returns the sum of the squares.
    pub(in crate::shard) fn squares(&self) -> f64 {
        let [squares, ..] = self.sums.totals();
        squares
    }

    /// Adds up a slice; returns whether the sum is complete. `tile` is scratch memory.
    pub(in crate::shard) fn slice(
        &mut self,
        inbox: &Inbox,
        variables: &Variables,
        tile: &mut Vec<u64>,
    ) -> bool {
        let Some(store) = variables.store() else { return true };
        // The push may have been dropped since, and its slot may hold another.
        let push = inbox.arrival(self.push_slot).filter(|push| push.order == self.order);
        let (Some(push), Some(source)) = (push, inbox.source(self.push_slot)) else {
            return true;
        };
        let mut budget = SLICE_BYTES as usize;
        while let Some(partition) = store.layout().all().get(self.partition) {
            let range = partition.offset..partition.offset + partition.bytes;
            let bytes = match partition.is_sparse() {
                true => inbox.rows(self.push_slot, partition).map(|rows| rows.values.len()),
                false => {
                    let has = push.extents.bytes_within(range.clone()) > 0;
                    has.then_some(partition.bytes as usize)
                }
            };
            if let Some(bytes) = bytes {
                if budget == 0 {
                    return false;
                }
                let part = range.start + self.done as u64
                    ..range.start + bytes.min(self.done + budget) as u64;
                // Rows are at the start of their partition's range, and never in a push buffer.
                if let Some((piece, _)) = source.piece(part, tile) {
                    match partition.dtype {
                        DType::F32 => add_squares::<f32>(&mut self.sums, piece),
                        DType::F64 => add_squares::<f64>(&mut self.sums, piece),
                        _ => {}
                    }
                    self.done += piece.len();
                    // Whole words, so that the next slice ends between two elements of any type.
                    budget = budget.saturating_sub(piece.len().next_multiple_of(8));
                    if self.done < bytes {
                        continue;
                    }
                }
            }
            self.partition += 1;
            self.done = 0;
        }
        true
    }
}

fn add_squares<T: Element + Into<f64>>(sums: &mut Sums, bytes: &[u8]) {
    let values: &[T] = bytemuck::cast_slice(bytes);
    sums.add(values.len(), |at| {
        let value: f64 = values[at].into();
        [value * value]
    });
}
