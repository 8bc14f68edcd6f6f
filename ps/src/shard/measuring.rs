//! The norm of a gradient that lies whole, before the step owner is told that it is held here: where
//! steps are made of gradients that are clipped by their global norm.

use std::time::Instant;

use pushpull_common::tensor::{DType, Element};

use super::Shard;
use super::work::SLICE_BYTES;
use crate::optimizer::Sums;

/// The squares of a gradient's elements, added up slice by slice in the order of the layout.
#[derive(Debug)]
pub(super) struct MeasureJob {
    room: u32,
    /// The partition under way, and how many bytes of what the push has of it are done.
    partition: usize,
    done: usize,
    sums: Sums,
}

impl MeasureJob {
    pub(super) fn new(room: u32) -> MeasureJob {
        MeasureJob { room, partition: 0, done: 0, sums: Sums::default() }
    }
}

impl Shard {
    /// What the squares of the gradient in a room come to here; `None` if that is still to be added
    /// up.
    pub(super) fn squares_of(&self, room: u32) -> Option<f64> {
        if self.config.clip_by_global_norm.is_none() {
            return Some(0.0);
        }
        self.inbox.as_ref()?.arrival(room)?.squares
    }

    /// A slice of the work on a gradient; whether it is done.
    pub(super) fn work_on_measure(&mut self, job: &mut MeasureJob) -> bool {
        let (Some(inbox), Some(store)) = (&self.inbox, self.store()) else { return true };
        // It may have been dropped meanwhile, and its room be another's: numbers do not repeat.
        let Some(push) = inbox.arrival(job.room) else { return true };
        let mut budget = SLICE_BYTES as usize;
        while let Some(partition) = store.layout().all().get(job.partition) {
            let values = match partition.is_sparse() {
                true => inbox.rows(job.room, partition).map(|rows| rows.values),
                false => {
                    let range = partition.offset..partition.offset + partition.bytes;
                    let has = push.extents.bytes_within(range.clone()) > 0;
                    inbox.bytes(job.room, range).filter(|_| has)
                }
            };
            if let Some(values) = values {
                if budget == 0 {
                    return false;
                }
                let slice = &values[job.done..values.len().min(job.done + budget)];
                match partition.dtype {
                    DType::F32 => add_squares::<f32>(&mut job.sums, slice),
                    DType::F64 => add_squares::<f64>(&mut job.sums, slice),
                    _ => {}
                }
                job.done += slice.len();
                // In whole words, so that the next slice ends between two elements of any type.
                budget = budget.saturating_sub(slice.len().next_multiple_of(8));
                if job.done < values.len() {
                    continue;
                }
            }
            (job.partition, job.done) = (job.partition + 1, 0);
        }
        true
    }

    /// The norm of a gradient is known: now the step owner is told that it is held.
    pub(super) fn measured(&mut self, now: Instant, job: &MeasureJob) {
        let [squares, ..] = job.sums.totals();
        let Some(inbox) = &mut self.inbox else { return };
        let Some(token) = inbox.set_squares(job.room, squares) else { return };
        let own = self.index_of(self.id);
        match self.admission_mut().zip(own) {
            // One that is over has been dropped.
            Some((admission, own)) => _ = admission.held(own, token.0, squares.into()),
            None => self.report_held(token),
        }
        self.decide(now);
    }
}

fn add_squares<T: Element + Into<f64>>(sums: &mut Sums, bytes: &[u8]) {
    let values: &[T] = bytemuck::cast_slice(bytes);
    sums.add(values.len(), |at| {
        let value: f64 = values[at].into();
        [value * value]
    });
}
