//! Static splits: every sample of an epoch belongs to one worker.

use proptest::prelude::*;

use super::test_source::TestSource;
use crate::data::{Batch, Permutation, Pipeline, SourceError};

fn pipeline(samples: u64, batch: u32) -> Pipeline<u64> {
    Pipeline::new(TestSource::new(samples, Ok)).batch(batch)
}

/// Returns the batches of every worker.
fn split(pipeline: &Pipeline<u64>, count: u64) -> Vec<Vec<Batch<u64>>> {
    let worker = |index| {
        let split = pipeline.shard(index, count).unwrap();
        split.collect::<Result<Vec<_>, _>>().unwrap()
    };
    (0..count).map(worker).collect()
}

/// Checks that the workers read every sample of each epoch once, and equally many batches.
fn assert_split(samples: u64, batch: u32, epochs: u64, count: u64, drop: bool, threads: usize) {
    let what = format!("{samples} samples by {batch}, {count} workers, drop {drop}");
    let pipeline = pipeline(samples, batch).shuffle(5).epochs(epochs).drop_remainder(drop);
    let workers = split(&pipeline.threads(threads).prefetch(3), count);
    let most = |counts: &[usize]| counts.iter().max().unwrap() - counts.iter().min().unwrap();
    let counts: Vec<usize> = workers.iter().map(Vec::len).collect();
    assert!(most(&counts) <= 1, "{what}: {counts:?}");
    for epoch in 0..epochs {
        let of_epoch = |worker: &Vec<Batch<u64>>| {
            worker.iter().filter(|batch| batch.range.epoch == epoch).cloned().collect::<Vec<_>>()
        };
        let parts: Vec<Vec<Batch<u64>>> = workers.iter().map(of_epoch).collect();
        let counts: Vec<usize> = parts.iter().map(Vec::len).collect();
        assert!(most(&counts) <= 1, "{what}, epoch {epoch}: {counts:?}");
        let mut read: Vec<u64> = parts.iter().flatten().flat_map(|b| b.samples.clone()).collect();
        read.sort_unstable();
        let order = Permutation::new(5, epoch, samples);
        let end = if drop { samples - samples % u64::from(batch) } else { samples };
        let mut expected: Vec<u64> = (0..end).filter_map(|at| order.index(at)).collect();
        expected.sort_unstable();
        assert_eq!(read, expected, "{what}, epoch {epoch}");
    }
}

#[test]
fn every_sample_of_an_epoch_belongs_to_one_worker() {
    for (samples, batch) in [(1, 1), (10, 1), (10, 3), (12, 3), (10, 10), (101, 7)] {
        for count in [1, 2, 3, 4, 7, 200] {
            for drop in [false, true] {
                for threads in [0, 2] {
                    assert_split(samples, batch, 3, count, drop, threads);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_split_is_complete(
        samples in 1_u64..200, batch in 1_u32..20, epochs in 1_u64..4, count in 1_u64..9, drop: bool,
    ) {
        let batch = batch.min(samples as u32);
        assert_split(samples, batch, epochs, count, drop, 0);
    }
}

#[test]
fn a_worker_reads_every_count_th_batch_of_the_order() {
    let workers = split(&pipeline(10, 2).epochs(2), 3);
    let starts = |worker: &Vec<Batch<u64>>| {
        worker.iter().map(|b| (b.range.epoch, b.range.start)).collect::<Vec<_>>()
    };
    // Five batches an epoch, numbered through.
    assert_eq!(starts(&workers[0]), [(0, 0), (0, 6), (1, 2), (1, 8)]);
    assert_eq!(starts(&workers[1]), [(0, 2), (0, 8), (1, 4)]);
    assert_eq!(starts(&workers[2]), [(0, 4), (1, 0), (1, 6)]);
}

#[test]
fn endless_data_and_extreme_workers_are_possible() {
    let split = pipeline(4, 2).repeat().shard(1, 3).unwrap();
    let epochs = split.take(200).map(|batch| batch.unwrap().range.epoch);
    // Two batches an epoch, and this worker's are numbers 1, 4, 7 and so on.
    assert!(epochs.eq((0..200_u64).map(|batch| (3 * batch).div_ceil(2))));
    let far = pipeline(4, 2).repeat().shard((1 << 55) + 1, u64::MAX).unwrap();
    let epochs: Vec<u64> = far.map(|batch| batch.unwrap().range.epoch).collect();
    assert_eq!(epochs, [1 << 54], "there is one batch");
    assert!(pipeline(4, 2).epochs(9).shard(u64::MAX - 1, u64::MAX).unwrap().next().is_none());
}

#[test]
fn a_worker_that_does_not_exist_is_refused() {
    for (index, count) in [(0, 0), (3, 3), (u64::MAX, 3)] {
        let error = pipeline(10, 1).shard(index, count).unwrap_err().to_string();
        let expected =
            format!("cannot split \"test\": worker {index} is not below the {count} workers");
        assert_eq!(error, expected);
    }
}

#[test]
fn an_error_stands_for_its_batch() {
    let source = TestSource::new(6, |index| match index {
        2 => Err(SourceError::other("gone")),
        index => Ok(index),
    });
    let split = Pipeline::new(source).batch(2).shard(0, 1).unwrap();
    let outcomes: Vec<bool> = split.map(|batch| batch.is_ok()).collect();
    assert_eq!(outcomes, [true, false, true]);
}
