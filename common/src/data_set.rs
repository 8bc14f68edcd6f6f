//! [`DataSet`]: what all workers must agree on about the data that a training consumes.
//!
//! The step owner grants a [`SampleRange`] with each token, so that every sample of an epoch counts
//! exactly once. It knows numbers only: which sample an index names, and in which order an epoch
//! visits the samples, is the workers' business.

use thiserror::Error;

pub use crate::protocol::SampleRange;
use crate::protocol::limits::DATA_NAME_BYTES_MAX;

/// The most batches of a data set that are free or held at one time: the control file of a shard has
/// a word for each. A client that would need another one waits.
pub const UNSPENT_BATCHES_MAX: usize = 2_000;

/// The declaration of the data that a training consumes.
///
/// The epochs are cut into batches of consecutive indices. The last batch of an epoch is shorter if
/// the length is not a multiple of the batch size, or left out.
///
/// ```
/// use pushpull_common::data_set::{DataSet, SampleRange};
/// let train = DataSet::new("train", 1_000, 128)?.shuffle(7).epochs(3);
/// assert_eq!(train.batches(), 8);
/// assert_eq!(train.range(2 * 8 + 7), SampleRange { epoch: 2, start: 896, len: 104 });
/// # Ok::<(), pushpull_common::data_set::DataSetError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DataSet {
    name: String,
    samples: u64,
    batch: u32,
    seed: Option<u64>,
    epochs: Option<u64>,
    drop_remainder: bool,
}

/// The reason why a data set cannot be declared. The caller's configuration is at fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DataSetError {
    /// The name is empty, or longer than [`DataSet::NAME_BYTES_MAX`].
    #[error(
        "cannot declare the data set {name:?}: a name has 1 to {} bytes",
        DataSet::NAME_BYTES_MAX
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The batch is empty, or longer than the data.
    #[error("cannot declare {name:?} with batches of {batch}: it has {samples} samples")]
    Batch {
        /// The name of the data set.
        name: String,
        /// The number of samples of a batch.
        batch: u32,
        /// The number of samples of the data set.
        samples: u64,
    },
    /// There are no epochs, or they have more than [`DataSet::BATCHES_MAX`] batches.
    #[error(
        "cannot declare {name:?} with {epochs} epochs of {batches} batches: 1 to {} are countable",
        DataSet::BATCHES_MAX
    )]
    Epochs {
        /// The name of the data set.
        name: String,
        /// The number of epochs.
        epochs: u64,
        /// The number of batches of an epoch.
        batches: u64,
    },
}

impl DataSet {
    /// The limit of the name in bytes.
    pub const NAME_BYTES_MAX: usize = DATA_NAME_BYTES_MAX;
    /// The limit of the batches of all epochs together. No training is long enough to reach it.
    pub const BATCHES_MAX: u64 = 1 << 56;

    /// Declares `samples` samples that are consumed in batches of `batch`, in the order of their
    /// indices, epoch after epoch without an end.
    pub fn new(name: impl Into<String>, samples: u64, batch: u32) -> Result<DataSet, DataSetError> {
        DataSet::of_fields(name, samples, batch, None, None, false)
    }

    /// Declares a data set by all its fields, which come from a message or a file.
    pub fn of_fields(
        name: impl Into<String>,
        samples: u64,
        batch: u32,
        seed: Option<u64>,
        epochs: Option<u64>,
        drop_remainder: bool,
    ) -> Result<DataSet, DataSetError> {
        let set = DataSet { name: name.into(), samples, batch, seed, epochs, drop_remainder };
        set.validate().map(|()| set)
    }

    /// Visits the samples of each epoch in another random order, a function of `seed` and the
    /// epoch.
    pub fn shuffle(self, seed: u64) -> DataSet {
        DataSet { seed: Some(seed), ..self }
    }

    /// Ends the data after this many epochs.
    pub fn epochs(self, epochs: u64) -> DataSet {
        DataSet { epochs: Some(epochs), ..self }
    }

    /// Whether a last batch that would be shorter is left out of every epoch. Default: no.
    pub fn drop_remainder(self, drop: bool) -> DataSet {
        DataSet { drop_remainder: drop, ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The number of samples of a batch.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// The seed of the order of epochs; `None` for the order of the indices.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// The number of epochs; `None` if the data have no end.
    pub fn epoch_limit(&self) -> Option<u64> {
        self.epochs
    }

    /// Whether a last batch that would be shorter is left out of every epoch.
    pub fn drops_remainder(&self) -> bool {
        self.drop_remainder
    }

    /// The number of batches of an epoch.
    pub fn batches(&self) -> u64 {
        let batch = u64::from(self.batch);
        match self.drop_remainder {
            true => self.samples / batch,
            false => self.samples.div_ceil(batch),
        }
    }

    /// The number of batches of all epochs together; [`DataSet::BATCHES_MAX`] if the data have no
    /// end.
    pub fn all_batches(&self) -> u64 {
        self.epochs.map_or(DataSet::BATCHES_MAX, |epochs| epochs * self.batches())
    }

    /// Returns the samples of a batch, by its number among the batches of all epochs.
    pub fn range(&self, number: u64) -> SampleRange {
        let epoch = number / self.batches();
        let index = number % self.batches();
        let start = index * u64::from(self.batch);
        let len = u64::from(self.batch).min(self.samples - start);
        SampleRange { epoch, start, len: len as u32 }
    }

    /// Checks every limit. The builder methods do not: a declaration is validated once it is
    /// complete.
    pub fn validate(&self) -> Result<(), DataSetError> {
        let name = self.name.clone();
        if !(1..=DataSet::NAME_BYTES_MAX).contains(&name.len()) {
            return Err(DataSetError::Name { name });
        }
        if self.batch == 0 || u64::from(self.batch) > self.samples {
            let batch = self.batch;
            let samples = self.samples;
            return Err(DataSetError::Batch { name, batch, samples });
        }
        let epochs = self.epochs.unwrap_or(1);
        let batches = self.batches();
        let all = epochs.checked_mul(batches);
        match all.is_some_and(|all| (1..=DataSet::BATCHES_MAX).contains(&all)) {
            true => Ok(()),
            false => Err(DataSetError::Epochs { name, epochs, batches }),
        }
    }

    /// Describes the first difference in what a sample range means, `self` first: the name, the
    /// number of samples or the seed of the order. `None` if a reader of `other` reads the samples
    /// that `self` grants.
    pub fn difference_of_order(&self, other: &DataSet) -> Option<String> {
        let name = other.name.clone();
        let samples = other.samples;
        let seed = other.seed;
        self.difference(&DataSet { name, samples, seed, ..self.clone() })
    }

    /// Describes the first difference between two data sets, `self` first; `None` if they are
    /// equal.
    pub fn difference(&self, other: &DataSet) -> Option<String> {
        let text = |value: Option<u64>| value.map_or("none".to_owned(), |value| value.to_string());
        let fields = [
            ("name", format!("{:?}", self.name), format!("{:?}", other.name)),
            ("samples", self.samples.to_string(), other.samples.to_string()),
            ("batch", self.batch.to_string(), other.batch.to_string()),
            ("seed", text(self.seed), text(other.seed)),
            ("epochs", text(self.epochs), text(other.epochs)),
            ("drop_remainder", self.drop_remainder.to_string(), other.drop_remainder.to_string()),
        ];
        let mut differing = fields.into_iter().filter(|(_, ours, theirs)| ours != theirs);
        differing.next().map(|(field, ours, theirs)| format!("{field} is {ours}, not {theirs}"))
    }

    /// Returns whether this is `other` with more epochs, so that a training with that one can
    /// continue with this one.
    pub fn extends(&self, other: &DataSet) -> bool {
        let has_more = match (self.epochs, other.epochs) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(ours), Some(theirs)) => ours > theirs,
        };
        has_more && DataSet { epochs: other.epochs, ..self.clone() } == *other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batches_of_an_epoch_cover_its_samples_once() {
        for (samples, batch, drop) in [(10, 3, false), (10, 3, true), (9, 3, false), (1, 1, true)] {
            let set = DataSet::new("d", samples, batch).unwrap().drop_remainder(drop);
            let ranges = (0..set.batches()).map(|index| set.range(4 * set.batches() + index));
            let covered: Vec<u64> =
                ranges.flat_map(|range| range.start..range.start + u64::from(range.len)).collect();
            let end = if drop { samples - samples % u64::from(batch) } else { samples };
            assert_eq!(covered, (0..end).collect::<Vec<u64>>(), "{set:?}");
        }
    }

    #[test]
    fn a_data_set_extends_another_with_fewer_epochs_and_nothing_else() {
        let set = || DataSet::new("train", 100, 10).unwrap();
        for (ours, theirs, extends) in [
            (set().epochs(3), set().epochs(2), true),
            (set(), set().epochs(2), true),
            (set().epochs(2), set().epochs(2), false),
            (set().epochs(1), set().epochs(2), false),
            (set().epochs(3), set(), false),
            (set().epochs(3).drop_remainder(true), set().epochs(2), false),
            (DataSet::new("train", 101, 10).unwrap().epochs(3), set().epochs(2), false),
        ] {
            assert_eq!(ours.extends(&theirs), extends, "{ours:?} {theirs:?}");
        }
    }

    #[test]
    fn a_data_set_that_cannot_be_counted_is_refused_by_name() {
        let text = |set: Result<DataSet, DataSetError>| set.unwrap_err().to_string();
        assert_eq!(
            text(DataSet::new("", 1, 1)),
            "cannot declare the data set \"\": a name has 1 to 128 bytes"
        );
        assert_eq!(
            text(DataSet::new("train", 100, 101)),
            "cannot declare \"train\" with batches of 101: it has 100 samples"
        );
        assert!(text(DataSet::new("train", 100, 0)).contains("batches of 0"));
        let set = DataSet::new("train", 100, 10).unwrap();
        assert_eq!(
            text(set.clone().epochs(0).validate().map(|()| set.clone())),
            "cannot declare \"train\" with 0 epochs of 10 batches: 1 to 72057594037927936 are countable"
        );
        assert!(set.clone().epochs((1 << 56) / 10 + 1).validate().is_err());
        assert!(set.clone().epochs(u64::MAX).validate().is_err());
        assert!(set.epochs((1 << 56) / 10).validate().is_ok());
        assert!(DataSet::new("train", u64::MAX, 1).is_err());
    }

    #[test]
    fn the_first_difference_is_named() {
        let set = DataSet::new("train", 100, 10).unwrap();
        assert_eq!(set.difference(&set.clone()), None);
        let table = [
            (DataSet::new("test", 100, 10).unwrap(), "name is \"train\", not \"test\""),
            (DataSet::new("train", 99, 10).unwrap(), "samples is 100, not 99"),
            (set.clone().shuffle(1), "seed is none, not 1"),
            (set.clone().epochs(2), "epochs is none, not 2"),
            (set.clone().drop_remainder(true), "drop_remainder is false, not true"),
        ];
        for (other, expected) in table {
            assert_eq!(set.difference(&other).as_deref(), Some(expected));
        }
        let batches = DataSet::new("train", 100, 7).unwrap().epochs(3);
        assert_eq!(set.difference_of_order(&batches), None);
        let order = set.difference_of_order(&batches.shuffle(1));
        assert_eq!(order.as_deref(), Some("seed is none, not 1"));
    }
}
