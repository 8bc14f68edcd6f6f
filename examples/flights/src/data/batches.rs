//! The batches of one epoch, distributed over workers.

use std::num::NonZeroUsize;

use super::{FIELDS, FlightData};
use crate::model::FlightSamples;
use crate::random::SplitMix64;

/// A permutation of all rows of a dataset, cut into batches.
///
/// It depends on its arguments alone, so every worker computes it. Worker `i` of `n` takes the
/// batches `i`, `i + n`, `i + 2n` and so on. Together they take each batch once; some take one more
/// than others. The last batch may be short.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    order: Vec<u32>,
    batch_rows: NonZeroUsize,
}

impl Epoch {
    /// Creates the epoch of this index: an order of `rows` rows in batches of `batch_rows`.
    pub(crate) fn new(rows: usize, batch_rows: NonZeroUsize, seed: u64, index: u64) -> Epoch {
        let mut order: Vec<u32> = (0..rows as u32).collect();
        SplitMix64::stream(seed, index).shuffle(&mut order);
        Epoch { order, batch_rows }
    }

    /// Returns the batches of one worker as row indices. Empty for some workers if there are fewer
    /// batches than workers.
    ///
    /// # Panics
    ///
    /// If there are no workers.
    pub(crate) fn share(&self, worker: usize, workers: usize) -> impl Iterator<Item = &[u32]> {
        self.order.chunks(self.batch_rows.get()).skip(worker).step_by(workers)
    }
}

/// A batch of samples and its distinct ids. Its buffers are reused from batch to batch.
#[derive(Clone, Debug)]
pub(crate) struct FlightBatch {
    /// Distinct ids in the order of their first appearance.
    pub(crate) ids: Vec<u64>,
    /// Index in `ids` of each field of each sample.
    places: Vec<u32>,
    late: Vec<bool>,
    /// By id: its index in `ids` plus one, or 0 if it is not in the batch.
    slots: Vec<u32>,
}

impl FlightBatch {
    /// Creates an empty batch for samples whose ids are below `ids`.
    pub(crate) fn new(ids: usize) -> FlightBatch {
        FlightBatch { ids: Vec::new(), places: Vec::new(), late: Vec::new(), slots: vec![0; ids] }
    }

    /// Replaces the samples by these rows of a dataset. The time depends on the rows, not on the
    /// number of all ids.
    ///
    /// # Panics
    ///
    /// If a row does not exist, or an id is not below the bound of this batch.
    pub(crate) fn fill(&mut self, dataset: &FlightData, rows: &[u32]) {
        for id in self.ids.drain(..) {
            self.slots[id as usize] = 0;
        }
        self.places.clear();
        self.late.clear();
        for &row in rows {
            let row = row as usize;
            self.late.push(dataset.late[row]);
            for &id in &dataset.ids[row * FIELDS..(row + 1) * FIELDS] {
                let slot = &mut self.slots[id as usize];
                if *slot == 0 {
                    self.ids.push(u64::from(id));
                    *slot = self.ids.len() as u32;
                }
                self.places.push(*slot - 1);
            }
        }
    }

    /// Returns the samples, whose places are indices in [`ids`](Batch::ids).
    pub(crate) fn samples(&self) -> FlightSamples<'_> {
        FlightSamples { places: &self.places, late: &self.late }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(rows: usize, batch_rows: usize, index: u64) -> Epoch {
        Epoch::new(rows, NonZeroUsize::new(batch_rows).unwrap(), 5, index)
    }

    #[test]
    fn workers_together_take_every_row_once() {
        for (rows, batch_rows) in [(100, 7), (100, 10), (5, 10), (1, 1), (0, 3)] {
            let epoch = epoch(rows, batch_rows, 0);
            let all: Vec<&[u32]> = epoch.share(0, 1).collect();
            assert_eq!(all.len(), rows.div_ceil(batch_rows));
            let mut taken = all.concat();
            taken.sort_unstable();
            assert!(taken.into_iter().eq(0..rows as u32));
            for workers in 1..=4 {
                let mut shares: Vec<_> =
                    (0..workers).map(|worker| epoch.share(worker, workers)).collect();
                for (index, &batch) in all.iter().enumerate() {
                    assert_eq!(shares[index % workers].next(), Some(batch));
                }
                assert!(shares.iter_mut().all(|share| share.next().is_none()));
            }
        }
    }

    #[test]
    fn the_order_is_reproducible_and_differs_between_epochs() {
        assert_eq!(epoch(50, 5, 1).order, epoch(50, 5, 1).order);
        assert_ne!(epoch(50, 5, 1).order, epoch(50, 5, 2).order);
    }

    #[test]
    fn a_batch_names_each_id_once() {
        let ids = [[3, 1, 0, 0, 4, 2, 9], [3, 7, 0, 0, 4, 2, 9], [8, 1, 0, 5, 4, 2, 9]];
        let dataset = FlightData { ids: ids.concat(), late: vec![true, false, false] };
        let mut batch = FlightBatch::new(10);
        for rows in [&[1, 2, 0][..], &[2], &[], &[0, 0]] {
            batch.fill(&dataset, rows);
            let samples = batch.samples();
            let found: Vec<u32> = samples
                .places
                .iter()
                .map(|&place| u32::try_from(batch.ids[place as usize]).unwrap())
                .collect();
            let expected: Vec<u32> = rows.iter().flat_map(|&row| ids[row as usize]).collect();
            assert_eq!(found, expected);
            let late: Vec<bool> = rows.iter().map(|&row| row == 0).collect();
            assert_eq!(samples.late, late);
            let mut distinct = batch.ids.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), batch.ids.len());
        }
        assert_eq!(batch.ids, [3, 1, 0, 4, 2, 9]);
    }
}
