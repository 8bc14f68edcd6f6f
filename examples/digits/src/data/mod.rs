//! Labelled images, split into samples to train on and samples to test on.

mod split_error;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushpull::compute::Samples;
use pushpull::training::data::{IdxSource, Pipeline, SliceSource, Source};

pub(crate) use split_error::SplitError;

use crate::random::SplitMix64;

/// An image, scaled to 0..=1, and its class.
pub(crate) type Sample = (Vec<f32>, u32);

/// Labelled samples of equal width in memory. Every label is below [`CLASSES`], and `features` has
/// `width` values per label.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Dataset {
    /// The samples one after another, `width` values each, scaled to 0..=1.
    pub(crate) features: Vec<f32>,
    /// Number of values in one sample: the pixels of an image, row by row.
    pub(crate) width: usize,
    /// The class of each sample.
    pub(crate) labels: Vec<u32>,
}

impl Dataset {
    /// Returns the 1,797 real handwritten digits of 8 x 8 pixels (the test part of "Optical
    /// Recognition of Handwritten Digits", UCI) that are compiled into the `smartcore` crate.
    pub(crate) fn digits() -> Dataset {
        let digits = smartcore::dataset::digits::load_dataset();
        Dataset {
            features: digits.data.iter().map(|pixel| pixel / DIGITS_PIXEL_MAX).collect(),
            width: digits.num_features,
            labels: digits.target.iter().map(|&label| label as u32).collect(),
        }
    }

    /// Joins the samples of a batch.
    pub(crate) fn of(samples: &[Sample]) -> Dataset {
        let mut dataset = Dataset::default();
        dataset.extend(samples);
        dataset
    }

    /// Reads all samples of a pipeline.
    fn read(pipeline: Pipeline<Sample>) -> Result<Dataset, SplitError> {
        let mut dataset = Dataset::default();
        for batch in pipeline.shard(0, 1)? {
            dataset.extend(&batch?.samples);
        }
        Ok(dataset)
    }

    fn extend(&mut self, samples: &[Sample]) {
        for (pixels, label) in samples {
            self.width = pixels.len();
            self.features.extend_from_slice(pixels);
            self.labels.push(*label);
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
    fn row(&self, row: usize) -> &[f32] {
        &self.features[row * self.width..(row + 1) * self.width]
    }

    /// Holds out `test_rows` samples, each class in proportion to its size. Returns the rest, which
    /// is for training, and the samples held out. Both keep the order of the samples. Fractional
    /// quotas are rounded by the largest remainder; of equal remainders the lower class comes
    /// first.
    ///
    /// `split_seed` alone decides which samples are held out. It is not the training seed:
    /// otherwise runs with different seeds would be measured on different test sets.
    fn split(&self, test_rows: usize, split_seed: u64) -> (Dataset, Dataset) {
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); CLASSES];
        for (row, &label) in self.labels.iter().enumerate() {
            members[label as usize].push(row);
        }
        let sizes: Vec<usize> = members.iter().map(Vec::len).collect();
        let mut held_out = vec![false; self.rows()];
        for (class, quota) in quotas(&sizes, test_rows).into_iter().enumerate() {
            SplitMix64::stream(split_seed, class as u64).shuffle(&mut members[class]);
            for &row in &members[class][..quota] {
                held_out[row] = true;
            }
        }
        (self.select(|row| !held_out[row]), self.select(|row| held_out[row]))
    }

    fn select(&self, chosen: impl Fn(usize) -> bool) -> Dataset {
        let mut part = Dataset { width: self.width, ..Dataset::default() };
        for row in (0..self.rows()).filter(|&row| chosen(row)) {
            part.features.extend_from_slice(self.row(row));
            part.labels.push(self.labels[row]);
        }
        part
    }
}

/// Samples to train on and samples to test on, of the same width.
#[derive(Debug)]
pub(crate) struct Split {
    /// The samples that workers train on. Clones share them.
    pub(crate) train: Pipeline<Sample>,
    /// The number of samples to train on.
    pub(crate) train_rows: usize,
    /// The samples that the accuracy is measured on.
    pub(crate) test: Arc<Dataset>,
}

impl Split {
    /// Returns the digits of [`Dataset::digits`] with 20 % held out: 1,437 samples to train on and
    /// 360 to test on, the same ones in every run.
    ///
    /// # Errors
    ///
    /// [`SplitError::Source`] if the digits have no pixels.
    pub(crate) fn digits() -> Result<Split, SplitError> {
        let digits = Dataset::digits();
        let (train, test) = digits.split(digits.rows().div_ceil(5), SPLIT_SEED);
        let train_rows = train.rows();
        let source = SliceSource::rows(TRAIN, &train.features, train.labels)?;
        let train = Pipeline::new(source).map(|(pixels, label)| (pixels.to_vec(), label));
        Ok(Split { train, train_rows, test: Arc::new(test) })
    }

    /// Reads the four IDX files of MNIST or Fashion-MNIST in `directory`, plain or with the suffix
    /// `.gz`: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte`. A plain file is preferred if both exist.
    ///
    /// # Errors
    ///
    /// A [`SplitError`] that names the file and the value. The files are not trusted. A label of a
    /// sample to train on is checked when the sample is read.
    pub(crate) fn open(directory: &Path) -> Result<Split, SplitError> {
        Split::of_parts(directory, &|part| {
            let images = find(directory, &format!("{part}-images-idx3-ubyte"))?;
            let labels = find(directory, &format!("{part}-labels-idx1-ubyte"))?;
            Ok(IdxSource::open(images, labels)?)
        })
    }

    /// Reads the four files at a URL, as [`Split::open`] reads those of a directory. No file of this
    /// machine is read or written.
    ///
    /// # Errors
    ///
    /// The errors of [`Split::open`], and those of the storage.
    #[cfg(feature = "remote")]
    pub(crate) fn open_url(url: &str) -> Result<Split, SplitError> {
        use pushpull::remote::{RemoteFiles, RemoteOptions};
        let options = RemoteOptions::from_lookup(|name| std::env::var(name).ok());
        let files = RemoteFiles::new(url, options)?;
        let listed = files.list()?;
        let place = Path::new(url);
        let open = |name: String| {
            let names = [name.clone(), format!("{name}.gz")];
            let found = names.iter().find(|name| listed.iter().any(|file| file.path == **name));
            let not_found = || SplitError::NotFound { directory: place.to_owned(), name };
            Ok::<_, SplitError>(Arc::new(files.open(found.ok_or_else(not_found)?)?))
        };
        Split::of_parts(place, &|part| {
            let images = open(format!("{part}-images-idx3-ubyte"))?;
            let labels = open(format!("{part}-labels-idx1-ubyte"))?;
            Ok(IdxSource::of_inputs(images, labels, INPUT_BYTES_MAX)?)
        })
    }

    /// Refuses a URL: the parser of `--data` does, in a program without the feature of its scheme.
    ///
    /// # Errors
    ///
    /// [`SplitError::NotFound`], always.
    #[cfg(not(feature = "remote"))]
    pub(crate) fn open_url(url: &str) -> Result<Split, SplitError> {
        let name = "train-images-idx3-ubyte".to_owned();
        Err(SplitError::NotFound { directory: url.into(), name })
    }

    /// Reads the part to train on and the part to test on, by a function that opens a part.
    fn of_parts(
        directory: &Path,
        source: &dyn Fn(&str) -> Result<IdxSource, SplitError>,
    ) -> Result<Split, SplitError> {
        let (train, train_rows, train_width) = samples_of(source("train")?, "train");
        let (test, _, test_width) = samples_of(source("t10k")?, "t10k");
        if train_width != test_width {
            return Err(SplitError::Width {
                directory: directory.to_path_buf(),
                train: train_width,
                test: test_width,
            });
        }
        Ok(Split { train, train_rows, test: Arc::new(Dataset::read(test)?) })
    }

    /// Returns the number of values in one sample.
    pub(crate) fn width(&self) -> usize {
        self.test.width
    }
}

/// Returns the samples of one part, their number and their width.
fn samples_of(source: IdxSource, part: &str) -> (Pipeline<Sample>, usize, usize) {
    // The files of another worker may be packed and have other names.
    let source = source.named(part);
    let rows = source.len() as usize;
    let width = source.shape().iter().product();
    let pipeline = Pipeline::new(source).try_map(|(pixels, label)| match usize::from(label) {
        0..CLASSES => {
            Ok((pixels.iter().map(|&pixel| f32::from(pixel) / 255.0).collect(), label.into()))
        }
        _ => Err(SplitError::Label { found: label.into(), classes: CLASSES }),
    });
    (pipeline, rows, width)
}

/// Returns the path of a file, plain or packed.
fn find(directory: &Path, name: &str) -> Result<PathBuf, SplitError> {
    let paths = [directory.join(name), directory.join(format!("{name}.gz"))];
    let not_found =
        || SplitError::NotFound { directory: directory.to_path_buf(), name: name.to_owned() };
    paths.into_iter().find(|path| path.exists()).ok_or_else(not_found)
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

/// Bytes of a file of a URL that are kept in memory, unpacked.
#[cfg(feature = "remote")]
const INPUT_BYTES_MAX: u64 = 1 << 30;

/// Number of classes of the digits and of Fashion-MNIST. Labels run from 0 to one less.
pub(crate) const CLASSES: usize = 10;

/// Name of the data set to train on, on which all workers agree.
const TRAIN: &str = "train";

/// Maximum pixel of the 8 x 8 digits, which counts the dark points in a square of 4 x 4.
const DIGITS_PIXEL_MAX: f32 = 16.0;

/// Seed of the held-out digits, the same for all runs; see [`Dataset::split`].
const SPLIT_SEED: u64 = 20;

#[cfg(test)]
mod tests {
    use std::fs;

    use pushpull::error::Chain;

    use super::*;

    fn counts(dataset: &Dataset) -> Vec<usize> {
        let mut counts = vec![0; CLASSES];
        for &label in &dataset.labels {
            counts[label as usize] += 1;
        }
        counts
    }

    #[test]
    fn the_digits_are_complete_and_scaled() {
        let digits = Dataset::digits();
        assert_eq!((digits.rows(), digits.width), (1797, 64));
        assert_eq!(digits.features.len(), 1797 * 64);
        assert!(digits.features.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
        assert!(digits.features.contains(&1.0));
        assert_eq!(digits.labels[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_fifth_of_every_class_is_held_out() {
        let digits = Dataset::digits();
        let split = Split::digits().unwrap();
        assert_eq!((split.train_rows, split.test.rows(), split.width()), (1437, 360, 64));
        assert_eq!(split.test.features.len(), 360 * 64);
        for (all, held_out) in counts(&digits).into_iter().zip(counts(&split.test)) {
            let exact = all as f64 * 360.0 / 1797.0;
            assert!((held_out as f64 - exact).abs() < 1.0, "{held_out} of {all}");
        }
        let again = Split::digits().unwrap();
        assert_eq!(split.test, again.test);
        let train = Dataset::read(split.train).unwrap();
        assert_eq!((train.rows(), &train), (1437, &Dataset::read(again.train).unwrap()));
    }

    #[test]
    fn the_parts_of_a_split_are_disjoint_and_complete() {
        let numbered = Dataset {
            features: (0..90).map(|row| row as f32).collect(),
            width: 1,
            labels: (0..90).map(|row| row % 3).collect(),
        };
        let (train, test) = numbered.split(20, 1);
        let mut rows = [train.features, test.features.clone()].concat();
        rows.sort_by(f32::total_cmp);
        assert_eq!(rows, numbered.features);
        assert_eq!(counts(&test)[..4], [7, 7, 6, 0]);
        assert_ne!(numbered.split(20, 2).1, test);
    }

    #[test]
    fn quotas_round_by_the_largest_remainder() {
        assert_eq!(quotas(&[10, 10, 10], 10), [4, 3, 3]);
        assert_eq!(quotas(&[7, 2, 1], 5), [4, 1, 0]);
        assert_eq!(quotas(&[3, 0, 1], 100), [3, 0, 1]);
        assert_eq!(quotas(&[0, 0], 5), [0, 0]);
        assert_eq!(quotas(&[], 5), [0; 0]);
    }

    /// Writes a file with these header words and this payload.
    fn write(directory: &Path, name: &str, header: &[u32], payload: &[u8]) {
        let header = header.iter().flat_map(|word| word.to_be_bytes());
        let bytes: Vec<u8> = header.chain(payload.iter().copied()).collect();
        fs::write(directory.join(name), bytes).unwrap();
    }

    /// Writes three images of 2 x 2 pixels and their labels, for both parts.
    fn write_all(directory: &Path) {
        for part in ["train", "t10k"] {
            let images = [0, 51, 102, 153, 204, 255, 0, 0, 0, 0, 0, 255];
            let name = |kind| format!("{part}-{kind}-ubyte");
            write(directory, &name("images-idx3"), &[0x803, 3, 2, 2], &images);
            write(directory, &name("labels-idx1"), &[0x801, 3], &[9, 0, 4]);
        }
    }

    #[test]
    fn idx_files_are_read_completely() {
        let directory = tempfile::tempdir().unwrap();
        write_all(directory.path());
        let split = Split::open(directory.path()).unwrap();
        assert_eq!((split.train_rows, split.width()), (3, 4));
        assert_eq!(split.test.labels, [9, 0, 4]);
        assert_eq!(split.test.row(0), [0.0, 0.2, 0.4, 0.6]);
        assert_eq!(split.test.row(2), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!(Dataset::read(split.train).unwrap(), *split.test);
    }

    #[test]
    fn refusals_name_the_file_and_the_value() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let refusal = || Chain(&Split::open(path).unwrap_err()).to_string();
        let expected = "cannot find train-images-idx3-ubyte or train-images-idx3-ubyte.gz in ";
        assert!(refusal().starts_with(expected), "{}", refusal());
        write_all(path);
        write(path, "t10k-images-idx3-ubyte", &[0x803, 3, 1, 2], &[0; 6]);
        let widths = "images to train on have 4 pixels and images to test on 2, expected equal";
        assert!(refusal().contains(widths), "{}", refusal());
        write_all(path);
        write(path, "t10k-labels-idx1-ubyte", &[0x801, 3], &[9, 10, 4]);
        let label = "cannot map sample 1 of \"t10k\" in epoch 0: the label is 10, expected less";
        assert!(refusal().starts_with(label), "{}", refusal());
        write(path, "t10k-labels-idx1-ubyte", &[0x801, 2], &[9, 4]);
        assert!(refusal().contains("t10k-labels-idx1-ubyte"), "{}", refusal());
    }
}
