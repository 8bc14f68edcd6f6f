//! [`IdxSource`]: samples and labels from files in the IDX format of MNIST.
//!
//! An IDX file is a header of big-endian words, and the elements:
//!
//! ```text
//! 0x00, 0x00, type of an element, number of dimensions; the length of each dimension; the elements
//! ```
//!
//! The first dimension counts the samples. The type is 0x08, an unsigned byte; others are refused.

use std::io::Read;
use std::path::Path;

use bytes::Bytes;

use super::data_file::{DataFile, MEMORY_BYTES_MAX};
use super::file_bytes::FileBytes;
use super::{Source, SourceError};
use crate::file_kind::FileKind;

/// The samples of one IDX file, with the labels of another.
///
/// A sample is its bytes (28 rows of 28 pixels for MNIST) and its label. Both files may be packed
/// with gzip (feature `gz`); their first bytes tell. Files of up to 1 GiB are kept in memory, and
/// samples share this memory: a sample that is kept keeps all of it. A longer plain file stays on
/// the disk, which costs a system call for each sample. A longer packed file is refused.
///
/// ```no_run
/// use pushpull_worker::training::data::{IdxSource, Pipeline};
///
/// let source = IdxSource::open("train-images-idx3-ubyte", "train-labels-idx1-ubyte")?;
/// assert_eq!(source.shape(), [28, 28]);
/// let pipeline = Pipeline::new(source).shuffle(1).batch(100).map(|(pixels, digit)| {
///     let pixels: Vec<f32> = pixels.iter().map(|&pixel| f32::from(pixel) / 255.0).collect();
///     (pixels, digit)
/// });
/// # Ok::<(), pushpull_worker::training::data::SourceError>(())
/// ```
#[derive(Debug)]
pub struct IdxSource {
    name: String,
    samples: IdxFile,
    labels: IdxFile,
}

impl IdxSource {
    /// Opens a file of samples and the file of their labels.
    ///
    /// The lengths in the headers are compared with the files before memory is allocated.
    ///
    /// # Errors
    /// [`SourceError::Header`], [`SourceError::Length`] and [`SourceError::Counts`] if the files
    /// are damaged or do not belong together; those of reading files.
    pub fn open(
        samples: impl AsRef<Path>,
        labels: impl AsRef<Path>,
    ) -> Result<IdxSource, SourceError> {
        IdxSource::open_within(samples, labels, MEMORY_BYTES_MAX)
    }

    /// Opens two files like [`IdxSource::open`], and keeps each in memory if it has at most
    /// `memory_bytes_max` bytes unpacked.
    ///
    /// # Errors
    /// Those of [`IdxSource::open`].
    pub fn open_within(
        samples: impl AsRef<Path>,
        labels: impl AsRef<Path>,
        memory_bytes_max: u64,
    ) -> Result<IdxSource, SourceError> {
        let path = samples.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let samples = IdxFile::open(path, 4, memory_bytes_max)?;
        let labels = IdxFile::open(labels.as_ref(), 1, memory_bytes_max)?;
        if samples.count != labels.count {
            return Err(SourceError::Counts {
                file: samples.bytes.path().to_owned(),
                samples: samples.count,
                labels_file: labels.bytes.path().to_owned(),
                labels: labels.count,
            });
        }
        Ok(IdxSource { name, samples, labels })
    }

    /// Sets the name of the data set. Default: the name of the file of samples.
    pub fn named(self, name: impl Into<String>) -> IdxSource {
        IdxSource { name: name.into(), ..self }
    }

    /// The dimensions of a sample, such as rows and columns.
    pub fn shape(&self) -> &[usize] {
        &self.samples.shape
    }
}

impl Source for IdxSource {
    type Sample = (Bytes, u8);

    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.samples.count
    }

    fn get(&self, index: u64) -> Result<(Bytes, u8), SourceError> {
        if index >= self.len() {
            return Err(SourceError::Index { name: self.name.clone(), index, len: self.len() });
        }
        let label = self.labels.sample(index)?.first().copied().unwrap_or_default();
        Ok((self.samples.sample(index)?, label))
    }
}

/// One IDX file of unsigned bytes.
#[derive(Debug)]
struct IdxFile {
    bytes: FileBytes,
    /// The length of the header.
    header: u64,
    /// The number of samples.
    count: u64,
    /// The dimensions of a sample.
    shape: Vec<usize>,
    /// The bytes of a sample: the product of its dimensions.
    sample: usize,
}

impl IdxFile {
    /// Opens a file of 1 to `dimensions_max` dimensions.
    fn open(
        path: &Path,
        dimensions_max: u32,
        memory_bytes_max: u64,
    ) -> Result<IdxFile, SourceError> {
        let file = DataFile::open(path)?;
        check_format(&file)?;
        let mut header = IdxHeader { file: &file, reader: file.reader()?, len: 0 };
        let magics = MAGIC_OF_BYTES + 1..=MAGIC_OF_BYTES + dimensions_max;
        let magic = header.word()?;
        if !magics.contains(&magic) {
            let (low, high) = magics.into_inner();
            let expected = if low == high { low.to_string() } else { format!("{low} to {high}") };
            return Err(header.impossible("the magic number", magic.into(), expected));
        }
        let count = header.dimension("the number of samples")?;
        let dimensions = (1..magic - MAGIC_OF_BYTES).map(|_| header.dimension("a dimension"));
        let shape = dimensions.collect::<Result<Vec<u64>, _>>()?;
        let product = |factors: &[u64]| factors.iter().try_fold(1_u64, |a, &b| a.checked_mul(b));
        let len = header.len;
        let sample = product(&shape).filter(|&bytes| isize::try_from(bytes).is_ok());
        let total = sample.and_then(|sample| sample.checked_mul(count)?.checked_add(len));
        let (Some(sample), Some(total)) = (sample, total) else {
            let expected = format!("samples of {shape:?} bytes in fewer than 2^64");
            return Err(header.impossible("the number of samples", count, expected));
        };
        drop(header);
        let bytes = file.load(Some(total), memory_bytes_max)?;
        let shape = shape.into_iter().map(|dimension| dimension as usize).collect();
        Ok(IdxFile { bytes, header: len, count, shape, sample: sample as usize })
    }

    /// Reads the bytes of a sample, whose index is below the count.
    fn sample(&self, index: u64) -> Result<Bytes, SourceError> {
        // The product is less than the length of the file.
        self.bytes.read(self.header + index * self.sample as u64, self.sample)
    }
}

/// Refuses a file that is known to be another one than an IDX file of unsigned bytes.
fn check_format(file: &DataFile) -> Result<(), SourceError> {
    let first = file.first_bytes()?;
    match FileKind::of(&first).filter(|_| !first.starts_with(&[0, 0, 8])) {
        None => Ok(()),
        Some(kind) => Err(file.other_format(kind, "an IDX file of unsigned bytes".to_owned())),
    }
}

/// The header of a file, read word by word.
struct IdxHeader<'a> {
    file: &'a DataFile,
    reader: Box<dyn Read + 'a>,
    /// The bytes read so far.
    len: u64,
}

impl IdxHeader<'_> {
    fn word(&mut self) -> Result<u32, SourceError> {
        let mut bytes = Vec::with_capacity(4);
        let read = self.reader.by_ref().take(4).read_to_end(&mut bytes);
        read.map_err(|source| self.file.failed(source))?;
        let word = <[u8; 4]>::try_from(&bytes[..]).map_err(|_| SourceError::Length {
            file: self.file.path().to_owned(),
            found: self.len + bytes.len() as u64,
            expected: self.len + 4,
        })?;
        self.len += 4;
        Ok(u32::from_be_bytes(word))
    }

    /// Reads a dimension, which is not 0.
    fn dimension(&mut self, field: &'static str) -> Result<u64, SourceError> {
        match self.word()? {
            0 => Err(self.impossible(field, 0, "at least 1".to_owned())),
            dimension => Ok(dimension.into()),
        }
    }

    fn impossible(&self, field: &'static str, found: u64, expected: String) -> SourceError {
        SourceError::Header { file: self.file.path().to_owned(), field, found, expected }
    }
}

/// The first word of a file of unsigned bytes, without its number of dimensions.
const MAGIC_OF_BYTES: u32 = 0x0000_0800;
