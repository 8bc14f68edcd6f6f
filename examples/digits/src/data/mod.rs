//! Labelled images in memory, split into a training set and a held-out test set.

mod batches;
mod error;
mod idx;

use std::path::Path;

pub(crate) use batches::{Batch, Batches};
pub(crate) use error::DataError;

use crate::model::Samples;
use crate::random::SplitMix64;

/// Labelled samples of equal width. Every label is below `classes`, and `features` has `width`
/// values per label.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dataset {
    /// The samples one after another, `width` values each, scaled to 0..=1.
    pub features: Vec<f32>,
    /// Number of values in one sample: the pixels of an image, row by row.
    pub width: usize,
    /// The class of each sample.
    pub labels: Vec<u8>,
    /// Number of classes; labels run from 0 to one less.
    pub classes: usize,
}

impl Dataset {
    /// Returns the 1,797 real handwritten digits of 8 x 8 pixels (the test part of "Optical
    /// Recognition of Handwritten Digits", UCI) that are compiled into the `smartcore` crate.
    pub(crate) fn digits() -> Dataset {
        let digits = smartcore::dataset::digits::load_dataset();
        Dataset {
            features: digits.data.iter().map(|pixel| pixel / DIGITS_PIXEL_MAX).collect(),
            width: digits.num_features,
            labels: digits.target.iter().map(|&label| label as u8).collect(),
            classes: CLASSES,
        }
    }

    /// Returns the number of samples.
    pub(crate) fn rows(&self) -> usize {
        self.labels.len()
    }

    /// Returns all samples.
    pub(crate) fn samples(&self) -> Samples<'_> {
        Samples { features: &self.features, labels: &self.labels }
    }

    /// Returns the values of one sample.
    ///
    /// # Panics
    ///
    /// If `row` is not below [`rows`](Dataset::rows).
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.features[row * self.width..(row + 1) * self.width]
    }

    /// Holds out `test_rows` samples, each class in proportion to its size; the rest is for
    /// training. Both parts keep the order of the samples. Fractional quotas are rounded by the
    /// largest remainder; of equal remainders the lower class comes first.
    ///
    /// `split_seed` alone decides which samples are held out. It is not the training seed:
    /// otherwise runs with different seeds would be measured on different test sets.
    pub(crate) fn split(&self, test_rows: usize, split_seed: u64) -> Split {
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); self.classes];
        for (row, &label) in self.labels.iter().enumerate() {
            members[usize::from(label)].push(row);
        }
        let sizes: Vec<usize> = members.iter().map(Vec::len).collect();
        let mut held_out = vec![false; self.rows()];
        for (class, quota) in quotas(&sizes, test_rows).into_iter().enumerate() {
            SplitMix64::stream(split_seed, class as u64).shuffle(&mut members[class]);
            for &row in &members[class][..quota] {
                held_out[row] = true;
            }
        }
        Split { train: self.select(|row| !held_out[row]), test: self.select(|row| held_out[row]) }
    }

    fn select(&self, chosen: impl Fn(usize) -> bool) -> Dataset {
        let mut part = Dataset {
            features: Vec::new(),
            width: self.width,
            labels: Vec::new(),
            classes: self.classes,
        };
        for row in (0..self.rows()).filter(|&row| chosen(row)) {
            part.features.extend_from_slice(self.row(row));
            part.labels.push(self.labels[row]);
        }
        part
    }
}

/// A training set and a test set with the same width and the same classes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Split {
    /// The samples that workers draw their batches from.
    pub train: Dataset,
    /// The samples that the accuracy is measured on.
    pub test: Dataset,
}

impl Split {
    /// Returns the digits of [`Dataset::digits`] with 20 % held out: 1,437 samples to train on and
    /// 360 to test on, the same ones in every run.
    pub(crate) fn digits() -> Split {
        let digits = Dataset::digits();
        let test_rows = digits.rows().div_ceil(5);
        digits.split(test_rows, SPLIT_SEED)
    }

    /// Reads the four IDX files of MNIST or Fashion-MNIST in `directory`, plain or with the suffix
    /// `.gz`: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte`. A plain file is preferred if both exist.
    ///
    /// # Errors
    ///
    /// A [`DataError`] that names the file, the offset in the unpacked file and the expectation.
    /// The files are not trusted: memory grows with the bytes that arrive, up to a limit.
    pub(crate) fn open(directory: &Path) -> Result<Split, DataError> {
        let train = idx::load(directory, "train-images-idx3-ubyte", "train-labels-idx1-ubyte")?;
        let test = idx::load(directory, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")?;
        if train.width != test.width {
            return Err(DataError::WidthMismatch {
                directory: directory.to_path_buf(),
                train: train.width,
                test: test.width,
            });
        }
        Ok(Split { train, test })
    }
}

/// Returns the number of items that each group contributes to `total`, in proportion to its size,
/// by largest remainder. They add up to `total`, or to all items if there are fewer.
fn quotas(sizes: &[usize], total: usize) -> Vec<usize> {
    let all: usize = sizes.iter().sum();
    if all == 0 {
        return vec![0; sizes.len()];
    }
    let total = total.min(all);
    let share = |size: usize| size as u128 * total as u128;
    let mut quotas: Vec<usize> =
        sizes.iter().map(|&size| (share(size) / all as u128) as usize).collect();
    let remainder = total - quotas.iter().sum::<usize>();
    let mut groups: Vec<usize> = (0..sizes.len()).collect();
    // The sort is stable, so equal remainders keep the order of the groups.
    groups.sort_by_key(|&group| std::cmp::Reverse(share(sizes[group]) % all as u128));
    for &group in &groups[..remainder] {
        quotas[group] += 1;
    }
    quotas
}

/// Number of classes of the digits and of Fashion-MNIST.
const CLASSES: usize = 10;

/// Maximum pixel of the 8 x 8 digits, which counts the dark points in a square of 4 x 4.
const DIGITS_PIXEL_MAX: f32 = 16.0;

/// Seed of the held-out digits, the same for all runs; see [`Dataset::split`].
const SPLIT_SEED: u64 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(dataset: &Dataset) -> Vec<usize> {
        let mut counts = vec![0; dataset.classes];
        for &label in &dataset.labels {
            counts[usize::from(label)] += 1;
        }
        counts
    }

    #[test]
    fn the_digits_are_complete_and_scaled() {
        let digits = Dataset::digits();
        assert_eq!((digits.rows(), digits.width, digits.classes), (1797, 64, 10));
        assert_eq!(digits.features.len(), 1797 * 64);
        assert!(digits.features.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
        assert!(digits.features.contains(&1.0));
        assert_eq!(digits.labels[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_fifth_of_every_class_is_held_out() {
        let digits = Dataset::digits();
        let split = Split::digits();
        assert_eq!((split.train.rows(), split.test.rows()), (1437, 360));
        assert_eq!(split.test.features.len(), 360 * 64);
        for (all, held_out) in counts(&digits).into_iter().zip(counts(&split.test)) {
            let exact = all as f64 * 360.0 / 1797.0;
            assert!((held_out as f64 - exact).abs() < 1.0, "{held_out} of {all}");
        }
        assert_eq!(split, Split::digits());
    }

    #[test]
    fn the_parts_of_a_split_are_disjoint_and_complete() {
        let numbered = Dataset {
            features: (0..90).map(|row| row as f32).collect(),
            width: 1,
            labels: (0..90).map(|row| row % 3).collect(),
            classes: 3,
        };
        let split = numbered.split(20, 1);
        let mut rows = [split.train.features.clone(), split.test.features.clone()].concat();
        rows.sort_by(f32::total_cmp);
        assert_eq!(rows, numbered.features);
        assert_eq!(counts(&split.test), [7, 7, 6]);
        assert_ne!(numbered.split(20, 2).test, split.test);
    }

    #[test]
    fn quotas_round_by_the_largest_remainder() {
        assert_eq!(quotas(&[10, 10, 10], 10), [4, 3, 3]);
        assert_eq!(quotas(&[7, 2, 1], 5), [4, 1, 0]);
        assert_eq!(quotas(&[3, 0, 1], 100), [3, 0, 1]);
        assert_eq!(quotas(&[0, 0], 5), [0, 0]);
        assert_eq!(quotas(&[], 5), [0; 0]);
    }
}
