//! The data position in a manifest.

use pushpull_common::data_set::DataSet;
use serde::{Deserialize, Serialize};

/// The declared data set, and which of its batches the values of the checkpoint contain: all before
/// `next`, except for the `unspent` ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataEntry {
    name: String,
    samples: u64,
    batch: u32,
    seed: Option<u64>,
    epochs: Option<u64>,
    drop_remainder: bool,
    /// The number of batches, of all epochs, that were granted or reserved at least once.
    pub next: u64,
    /// The numbers of those whose gradients are not in the values, in ascending order.
    pub unspent: Vec<u64>,
}

impl DataEntry {
    /// Creates the entry of a data set: the first batch that was neither granted nor reserved, and
    /// the batches before it whose gradients are not in the values.
    pub fn new(set: &DataSet, next: u64, unspent: Vec<u64>) -> DataEntry {
        DataEntry {
            name: set.name().to_owned(),
            samples: set.samples(),
            batch: set.batch(),
            seed: set.seed(),
            epochs: set.epoch_limit(),
            drop_remainder: set.drops_remainder(),
            next,
            unspent,
        }
    }

    /// Returns the data set. An error is what a manifest must have, and what it has.
    pub fn set(&self) -> Result<DataSet, (String, String)> {
        let &DataEntry { ref name, samples, batch, seed, epochs, drop_remainder, .. } = self;
        let set = DataSet::of_fields(name, samples, batch, seed, epochs, drop_remainder);
        set.map_err(|error| ("a data set".to_owned(), error.to_string()))
    }

    /// Checks everything. An error is what a manifest must have, and what it has.
    pub(crate) fn check(&self, unspent_max: usize) -> Result<(), (String, String)> {
        let set = self.set()?;
        if self.next > set.all_batches() {
            let expected = format!("at most {} batches", set.all_batches());
            return Err((expected, self.next.to_string()));
        }
        if self.unspent.len() > unspent_max {
            let expected = format!("at most {unspent_max} unspent batches");
            return Err((expected, self.unspent.len().to_string()));
        }
        let last = self.unspent.last().is_none_or(|&last| last < self.next);
        match last && self.unspent.is_sorted_by(|a, b| a < b) {
            true => Ok(()),
            false => {
                let expected = format!("unspent batches below {} in order", self.next);
                Err((expected, format!("{:?}", self.unspent)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_position_is_refused_by_what_is_wrong() {
        let set = DataSet::new("train", 10, 3).unwrap().shuffle(7).epochs(2);
        let entry = DataEntry::new(&set, 5, vec![1, 3]);
        assert_eq!((entry.set(), entry.check(2)), (Ok(set), Ok(())));
        let refused = |change: &dyn Fn(&mut DataEntry)| {
            let mut entry = entry.clone();
            change(&mut entry);
            entry.check(2).unwrap_err().0
        };
        assert_eq!(refused(&|entry| entry.batch = 0), "a data set");
        assert_eq!(refused(&|entry| entry.next = 9), "at most 8 batches");
        assert_eq!(refused(&|entry| entry.unspent.push(4)), "at most 2 unspent batches");
        for unspent in [vec![3, 1], vec![1, 1], vec![1, 5]] {
            let refused = refused(&|entry| entry.unspent = unspent.clone());
            assert_eq!(refused, "unspent batches below 5 in order");
        }
    }
}
