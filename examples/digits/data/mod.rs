//! Labelled images in memory, split into what is trained on and what is held out.

mod batches;
mod error;
mod idx;

use std::path::Path;

pub(crate) use batches::{Batch, Batches};
pub(crate) use error::DataError;

use crate::model::Samples;
use crate::random::SplitMix64;

/// Labelled samples of equal width. Every label is below `classes`, and `features` holds `width`
/// values for each label.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dataset {
    /// The samples one after another, `width` values each, scaled to 0..=1.
    pub features: Vec<f32>,
    /// Values in one sample: the pixels of an image, row by row.
    pub width: usize,
    /// The class of each sample.
    pub labels: Vec<u8>,
    /// How many classes there are; labels run from 0 to one less.
    pub classes: usize,
}

impl Dataset {
    /// The 1,797 real handwritten digits of 8 x 8 pixels (the test part of "Optical Recognition of
    /// Handwritten Digits", UCI) that are compiled into the `smartcore` crate.
    pub(crate) fn digits() -> Dataset {
        let digits = smartcore::dataset::digits::load_dataset();
        Dataset {
            features: digits.data.iter().map(|pixel| pixel / DIGITS_PIXEL_MAX).collect(),
            width: digits.num_features,
            labels: digits.target.iter().map(|&label| label as u8).collect(),
            classes: CLASSES,
        }
    }

    /// The number of samples.
    pub(crate) fn rows(&self) -> usize {
        self.labels.len()
    }

    /// All of them.
    pub(crate) fn samples(&self) -> Samples<'_> {
        Samples { features: &self.features, labels: &self.labels }
    }

    /// The values of one sample.
    ///
    /// # Panics
    ///
    /// If `row` is not below [`rows`](Dataset::rows).
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.features[row * self.width..(row + 1) * self.width]
    }

    /// Holds out `test_rows` samples, each class in proportion to its size; the rest is for
    /// training. Both parts keep the order of the samples. Shares that are not whole are rounded
    /// by the largest remainder, the lower class first where remainders are equal.
    ///
    /// `split_seed` alone decides which samples these are. It is not the seed of the training: if
    /// it were, runs with different seeds would be judged by different exams.
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

/// Samples to learn from, and samples that are never learned from; both have the same width and
/// the same classes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Split {
    /// What the workers draw their batches from.
    pub train: Dataset,
    /// What the accuracy is measured on.
    pub test: Dataset,
}

impl Split {
    /// The handwritten digits of [`Dataset::digits`], 20 % of them held out: 1,437 samples to train
    /// on and 360 to test on, the same ones in every run.
    pub(crate) fn digits() -> Split {
        let digits = Dataset::digits();
        let test_rows = digits.rows().div_ceil(5);
        digits.split(test_rows, SPLIT_SEED)
    }

    /// Reads the four IDX files of MNIST or Fashion-MNIST in `directory`, plain or with the suffix
    /// `.gz`: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte`. A plain file is preferred where both are there.
    ///
    /// # Errors
    ///
    /// A [`DataError`] that names the file, the offset in the (unpacked) file and what was expected
    /// there. The files are not trusted: memory grows with the bytes that arrive, up to a limit.
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

/// How many of `total` items each group gives, in proportion to its size, by largest remainder.
/// They add up to `total`, or to all there are.
fn quotas(sizes: &[usize], total: usize) -> Vec<usize> {
    let all: usize = sizes.iter().sum();
    if all == 0 {
        return vec![0; sizes.len()];
    }
    let total = total.min(all);
    let share = |size: usize| size as u128 * total as u128;
    let mut quotas: Vec<usize> =
        sizes.iter().map(|&size| (share(size) / all as u128) as usize).collect();
    let missing = total - quotas.iter().sum::<usize>();
    let mut groups: Vec<usize> = (0..sizes.len()).collect();
    // The sort is stable, so equal remainders stay in the order of the groups.
    groups.sort_by_key(|&group| std::cmp::Reverse(share(sizes[group]) % all as u128));
    for &group in &groups[..missing] {
        quotas[group] += 1;
    }
    quotas
}

/// Digits and Fashion-MNIST both have ten classes.
const CLASSES: usize = 10;

/// A pixel of the 8 x 8 digits counts the dark points in a square of 4 x 4.
const DIGITS_PIXEL_MAX: f32 = 16.0;

/// Decides which digits are held out, for good; see [`Dataset::split`].
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
    fn the_digits_are_whole_and_scaled() {
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
