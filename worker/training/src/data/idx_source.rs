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
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::file_kind::{FileKind, idx_samples};
use pushpull_common::read_at::ReadAt;

use super::data_file::{DataFile, MEMORY_BYTES_MAX};
use super::file_bytes::FileBytes;
use super::{Source, SourceError};

/// The samples of one IDX file, with the labels of another.
///
/// A sample is its bytes (28 rows of 28 pixels for MNIST) and its label. Both files may be packed
/// with gzip (feature `gz`); their first bytes tell. Files of up to 1 GiB are kept in memory, and
/// samples share this memory: a sample that is kept keeps all of it. A longer plain file stays on
/// the disk, which costs a system call for each sample. A longer packed file is refused.
///
/// ```no_run
/// use pushpull_training::data::{IdxSource, Pipeline};
///
/// let source = IdxSource::open("train-images-idx3-ubyte", "train-labels-idx1-ubyte")?;
/// assert_eq!(source.shape(), [28, 28]);
/// let pipeline = Pipeline::new(source).shuffle(1).batch(100).map(|(pixels, digit)| {
///     let pixels: Vec<f32> = pixels.iter().map(|&pixel| f32::from(pixel) / 255.0).collect();
///     (pixels, digit)
/// });
/// # Ok::<(), pushpull_training::data::SourceError>(())
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
    /// [`SourceError::OtherFormat`] says what a file is, and [`SourceError::Exchanged`] that the
    /// first has the labels; [`SourceError::SameFile`], [`SourceError::Header`],
    /// [`SourceError::Length`] and [`SourceError::Counts`] if the files are damaged or do not belong
    /// together; those of reading files.
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
    /// The errors of [`IdxSource::open`].
    pub fn open_within(
        samples: impl AsRef<Path>,
        labels: impl AsRef<Path>,
        memory_bytes_max: u64,
    ) -> Result<IdxSource, SourceError> {
        let samples = DataFile::open(samples.as_ref())?;
        let labels = DataFile::open(labels.as_ref())?;
        IdxSource::of_files(samples, labels, memory_bytes_max)
    }

    /// Reads two open inputs, such as objects of an object store, as [`IdxSource::open_within`] reads
    /// files. A longer plain input stays in its storage, which costs a read for each sample.
    ///
    /// # Errors
    /// The errors of [`IdxSource::open`].
    pub fn of_inputs(
        samples: Arc<dyn ReadAt>,
        labels: Arc<dyn ReadAt>,
        memory_bytes_max: u64,
    ) -> Result<IdxSource, SourceError> {
        let samples = DataFile::of_input(samples)?;
        let labels = DataFile::of_input(labels)?;
        IdxSource::of_files(samples, labels, memory_bytes_max)
    }

    fn of_files(
        samples: DataFile,
        labels: DataFile,
        memory_bytes_max: u64,
    ) -> Result<IdxSource, SourceError> {
        let name = samples.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let samples = IdxHead::read(samples)?;
        let labels = IdxHead::read(labels)?;
        check_pair(&samples, &labels)?;
        let samples = samples.load(memory_bytes_max)?;
        let labels = labels.load(memory_bytes_max)?;
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

/// One IDX file of unsigned bytes, plain or packed.
#[derive(Debug)]
struct IdxFile {
    bytes: FileBytes,
    /// The length of the header.
    header: u64,
    /// The number of samples, from the first extent in the header.
    count: u64,
    /// The dimensions of a sample.
    shape: Vec<usize>,
    /// The bytes of a sample: the product of its dimensions.
    sample: usize,
}

impl IdxFile {
    /// Reads the bytes of a sample, whose index is below the count.
    fn sample(&self, index: u64) -> Result<Bytes, SourceError> {
        // The product is less than the length of the file.
        self.bytes.read(self.header + index * self.sample as u64, self.sample)
    }
}

/// A file of 1 to [`DIMENSIONS_MAX`] dimensions whose header has been read.
struct IdxHead {
    file: DataFile,
    /// The dimensions: the number of samples, and those of a sample.
    extents: Vec<u32>,
    /// The length of the header.
    header: u64,
    /// The bytes of a sample: the product of its dimensions.
    sample: u64,
    /// The length of the file.
    total: u64,
}

impl IdxHead {
    fn read(file: DataFile) -> Result<IdxHead, SourceError> {
        check_format(&file)?;
        let mut header = IdxHeader { file: &file, reader: file.reader()?, len: 0 };
        let magics = MAGIC_OF_BYTES + 1..=MAGIC_OF_BYTES + DIMENSIONS_MAX;
        let magic = header.word()?;
        if !magics.contains(&magic) {
            let order = match magics.contains(&magic.swap_bytes()) {
                true => " in big-endian order",
                false => "",
            };
            let expected = format!("{} to {}{order}", magics.start(), magics.end());
            return Err(header.impossible("the magic number", magic.into(), expected));
        }
        let count = header.dimension("the number of samples")?;
        let dimensions = (1..magic - MAGIC_OF_BYTES).map(|_| header.dimension("a dimension"));
        let shape = dimensions.collect::<Result<Vec<u32>, _>>()?;
        let len = header.len;
        let sample =
            shape.iter().try_fold(1_u64, |bytes, &extent| bytes.checked_mul(extent.into()));
        let sample = sample.filter(|&bytes| isize::try_from(bytes).is_ok());
        let total = sample.and_then(|sample| sample.checked_mul(count.into())?.checked_add(len));
        let (Some(sample), Some(total)) = (sample, total) else {
            let expected = format!("samples of {shape:?} bytes in fewer than 2^64");
            return Err(header.impossible("the number of samples", count.into(), expected));
        };
        drop(header);
        let extents = [&[count], &shape[..]].concat();
        Ok(IdxHead { file, extents, header: len, sample, total })
    }

    /// Whether a sample is one byte, as a label is.
    fn is_labels(&self) -> bool {
        self.extents.len() == 1
    }

    /// Says what the file has, such as "60000 labels".
    fn contents(&self) -> String {
        idx_samples(&self.extents, "unsigned bytes")
    }

    fn load(self, memory_bytes_max: u64) -> Result<IdxFile, SourceError> {
        let IdxHead { file, extents, header, sample, total } = self;
        let bytes = file.load(Some(total), memory_bytes_max)?;
        let count = extents[0].into();
        let shape = extents[1..].iter().map(|&extent| extent as usize).collect();
        Ok(IdxFile { bytes, header, count, shape, sample: sample as usize })
    }
}

/// Refuses two files of which the second has no labels, or that are one file.
fn check_pair(samples: &IdxHead, labels: &IdxHead) -> Result<(), SourceError> {
    let file = samples.file.path().to_owned();
    let labels_file = labels.file.path().to_owned();
    if samples.file.is_same(&labels.file)? {
        return Err(SourceError::SameFile { file, labels_file, found: labels.contents() });
    }
    match (samples.is_labels(), labels.is_labels()) {
        (_, true) => Ok(()),
        (true, false) => {
            let found = samples.contents();
            let labels_found = labels.contents();
            Err(SourceError::Exchanged { file, found, labels_file, labels_found })
        }
        (false, false) => {
            let found = format!("an IDX file of {}", labels.contents());
            let expected = "an IDX file of labels".to_owned();
            Err(SourceError::OtherFormat { file: labels_file, found, expected })
        }
    }
}

/// Refuses a file that is known to be another one than an IDX file of unsigned bytes.
fn check_format(file: &DataFile) -> Result<(), SourceError> {
    let first = file.first_bytes()?;
    let dimensions = first.strip_prefix(&[0, 0, 8]).map(|rest| rest.first().copied());
    let expected = match dimensions {
        None => "an IDX file of unsigned bytes".to_owned(),
        Some(dimensions) if dimensions.is_none_or(|found| u32::from(found) <= DIMENSIONS_MAX) => {
            return Ok(());
        }
        Some(_) => format!("an IDX file of at most {DIMENSIONS_MAX} dimensions"),
    };
    FileKind::of(&first).map_or(Ok(()), |kind| Err(file.other_format(kind, expected)))
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
    fn dimension(&mut self, field: &'static str) -> Result<u32, SourceError> {
        match self.word()? {
            0 => Err(self.impossible(field, 0, "at least 1".to_owned())),
            dimension => Ok(dimension),
        }
    }

    fn impossible(&self, field: &'static str, found: u64, expected: String) -> SourceError {
        SourceError::Header { file: self.file.path().to_owned(), field, found, expected }
    }
}

/// The first word of a file of unsigned bytes, without its number of dimensions.
const MAGIC_OF_BYTES: u32 = 0x0000_0800;

/// The most dimensions, with that of the samples.
const DIMENSIONS_MAX: u32 = 4;
