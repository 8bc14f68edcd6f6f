//! [`Batch`]: the samples of one range.

use pushpull_common::data_set::SampleRange;

/// The samples of one [`SampleRange`], in the order of their epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Batch<T> {
    /// The range of the epoch's order that the batch covers.
    pub range: SampleRange,
    /// The index of each sample in the source: where the epoch's order puts the range.
    pub indices: Vec<u64>,
    /// The mapped samples, in the order of `indices`.
    pub samples: Vec<T>,
}

impl<T> Batch<T> {
    /// The number of samples: the last batch of an epoch may have fewer.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are no samples. Batches of a loader have at least one.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }
}
