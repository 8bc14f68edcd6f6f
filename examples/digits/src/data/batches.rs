//! The endless, shuffled stream of batches that one worker trains on.

use super::{DataError, Dataset};
use crate::model::Samples;
use crate::random::SplitMix64;

/// A batch of contiguous samples. Its buffers are reused from batch to batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Batch {
    /// The samples one after another, as in [`Dataset::features`].
    pub features: Vec<f32>,
    /// The class of each sample.
    pub labels: Vec<u8>,
}

impl Batch {
    /// Returns all samples of the batch.
    pub(crate) fn samples(&self) -> Samples<'_> {
        Samples { features: &self.features, labels: &self.labels }
    }
}

/// Draws batches from a worker's share of a dataset, without end.
///
/// Worker `i` of `n` owns the rows `r` with `r % n == i`: the shares are disjoint and cover all
/// rows. Each row is drawn once per round, in a new order every round. A batch always has the same
/// number of rows and may span two rounds.
#[derive(Clone, Debug)]
pub(crate) struct Batches {
    share: Vec<usize>,
    drawn: usize,
    batch_rows: usize,
    random: SplitMix64,
}

impl Batches {
    /// Creates the batches of `batch_rows` rows for `worker` of `workers` out of `rows` rows. Their
    /// order depends on `seed` and `worker` alone.
    ///
    /// # Errors
    ///
    /// [`DataError::EmptyShare`] if a batch or the worker's share would have no rows.
    pub(crate) fn new(
        rows: usize,
        worker: usize,
        workers: usize,
        batch_rows: usize,
        seed: u64,
    ) -> Result<Batches, DataError> {
        if worker >= workers || worker >= rows || batch_rows == 0 {
            return Err(DataError::EmptyShare { worker, workers, rows, batch_rows });
        }
        let mut random = SplitMix64::stream(seed, worker as u64);
        let mut share: Vec<usize> = (worker..rows).step_by(workers).collect();
        random.shuffle(&mut share);
        Ok(Batches { share, drawn: 0, batch_rows, random })
    }

    /// Replaces the contents of `batch` by the next rows of `dataset`.
    ///
    /// # Panics
    ///
    /// If `dataset` has fewer rows than these batches were created for.
    pub(crate) fn next_into(&mut self, dataset: &Dataset, batch: &mut Batch) {
        batch.features.clear();
        batch.labels.clear();
        for _ in 0..self.batch_rows {
            let row = self.next_row();
            batch.features.extend_from_slice(dataset.row(row));
            batch.labels.push(dataset.labels[row]);
        }
    }

    fn next_row(&mut self) -> usize {
        if self.drawn == self.share.len() {
            self.random.shuffle(&mut self.share);
            self.drawn = 0;
        }
        self.drawn += 1;
        self.share[self.drawn - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns ten samples of two values, each of which identifies its row.
    fn numbered() -> Dataset {
        Dataset {
            features: (0..10).flat_map(|row| [row as f32, -(row as f32)]).collect(),
            width: 2,
            labels: (0..10).collect(),
            classes: 10,
        }
    }

    fn labels(worker: usize, workers: usize, batch_rows: usize, batches: usize) -> Vec<u8> {
        let mut stream = Batches::new(10, worker, workers, batch_rows, 5).unwrap();
        let mut batch = Batch::default();
        let mut labels = Vec::new();
        for _ in 0..batches {
            stream.next_into(&numbered(), &mut batch);
            assert_eq!(batch.labels.len(), batch_rows);
            for (row, &label) in batch.labels.iter().enumerate() {
                let expected = [f32::from(label), -f32::from(label)];
                assert_eq!(batch.features[row * 2..row * 2 + 2], expected);
            }
            labels.extend_from_slice(&batch.labels);
        }
        labels
    }

    #[test]
    fn a_round_draws_every_row_of_the_share_once() {
        for workers in 1..=10 {
            let mut all = Vec::new();
            for worker in 0..workers {
                let share = (worker..10).step_by(workers).count();
                let drawn = labels(worker, workers, share, 3);
                for round in drawn.chunks(share) {
                    let mut round = round.to_vec();
                    round.sort_unstable();
                    assert!(round.iter().all(|&row| usize::from(row) % workers == worker));
                    round.dedup();
                    assert_eq!(round.len(), share);
                }
                all.extend_from_slice(&drawn[..share]);
            }
            all.sort_unstable();
            assert!(all.into_iter().eq(0..10));
        }
    }

    #[test]
    fn batches_may_span_rounds_and_exceed_shares() {
        let drawn = labels(0, 1, 7, 10);
        for row in 0..10 {
            assert_eq!(drawn.iter().filter(|&&drawn| drawn == row).count(), 7);
        }
        assert_eq!(labels(3, 4, 9, 1).len(), 9);
    }

    #[test]
    fn the_order_is_reproducible_and_differs_between_rounds() {
        let drawn = labels(0, 1, 10, 2);
        assert_eq!(drawn, labels(0, 1, 10, 2));
        assert_ne!(drawn[..10], drawn[10..]);
    }

    #[test]
    fn empty_shares_are_refused() {
        for (rows, worker, workers, batch_rows) in
            [(10, 2, 2, 4), (10, 0, 0, 4), (3, 3, 4, 4), (0, 0, 1, 4), (10, 0, 1, 0)]
        {
            let refused = Batches::new(rows, worker, workers, batch_rows, 0);
            assert!(matches!(refused, Err(DataError::EmptyShare { .. })));
        }
    }
}
