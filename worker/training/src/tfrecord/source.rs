//! The records of TFRecord files as samples.

use std::path::PathBuf;
use std::sync::Arc;

use pushpull_common::read_at::ReadAt;

use super::error::TfRecordError;
use super::reader::TfRecordReader;
use crate::data::{Source, SourceError};

/// The records of one or several TFRecord files, one file after the other.
///
/// A sample is the bytes of a record. Each read is one system call and checks the record's
/// checksum. The index takes 8 bytes of memory for each record.
///
/// ```
/// use pushpull_training::data::Pipeline;
/// use pushpull_training::tfrecord::{TfRecordSource, TfRecordWriter};
///
/// # let directory = std::env::temp_dir().join(format!("tfrecord-source-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let path = directory.join("train.tfrecord");
/// let mut writer = TfRecordWriter::create(&path)?;
/// for number in 0..10_u32 {
///     writer.append(&number.to_le_bytes())?;
/// }
/// writer.flush()?;
///
/// let source = TfRecordSource::open([&path])?;
/// let pipeline = Pipeline::new(source).shuffle(7).batch(4).map(|record: Vec<u8>| {
///     u32::from_le_bytes(record[..4].try_into().unwrap_or_default())
/// });
/// let first = pipeline.shard(0, 1)?.next().ok_or("there are three batches")??;
/// assert_eq!(first.samples.len(), 4);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TfRecordSource {
    name: String,
    files: Vec<TfRecordReader>,
    /// For each file, the number of records in it and in those before.
    ends: Vec<u64>,
}

impl TfRecordSource {
    /// Opens files, and builds the index of their records. The order of the files counts: all
    /// workers must name them in the same one.
    ///
    /// # Errors
    /// If a file cannot be opened or is damaged ([`TfRecordReader::open`]), or if it ends with an
    /// incomplete record ([`TfRecordError::Torn`]): other workers may have all of it.
    pub fn open(
        paths: impl IntoIterator<Item = impl Into<PathBuf>>,
    ) -> Result<TfRecordSource, TfRecordError> {
        TfRecordSource::of_readers(paths.into_iter().map(TfRecordReader::open))
    }

    /// Uses open inputs of another storage, such as objects of an object store, in place of files.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn of_inputs(
        inputs: impl IntoIterator<Item = Arc<dyn ReadAt>>,
    ) -> Result<TfRecordSource, TfRecordError> {
        TfRecordSource::of_readers(inputs.into_iter().map(TfRecordReader::of_input))
    }

    fn of_readers(
        readers: impl Iterator<Item = Result<TfRecordReader, TfRecordError>>,
    ) -> Result<TfRecordSource, TfRecordError> {
        let mut files = Vec::<TfRecordReader>::new();
        let mut ends = Vec::new();
        let mut end = 0;
        for file in readers {
            let file = file?;
            if let Some(tail) = file.torn_tail() {
                return Err(TfRecordError::Torn { path: file.path().to_owned(), tail });
            }
            end += file.len();
            ends.push(end);
            files.push(file);
        }
        let first = files.first().and_then(|file| file.path().file_name());
        let name = first.unwrap_or_default().to_string_lossy().into_owned();
        Ok(TfRecordSource { name, files, ends })
    }

    /// Sets the name of the data set. Default: the name of the first file.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> TfRecordSource {
        TfRecordSource { name: name.into(), ..self }
    }

    /// Sets the longest record that is read; see [`TfRecordReader::record_bytes_max`].
    #[must_use]
    pub fn record_bytes_max(mut self, bytes: u64) -> TfRecordSource {
        self.files = self.files.into_iter().map(|file| file.record_bytes_max(bytes)).collect();
        self
    }
}

impl Source for TfRecordSource {
    type Sample = Vec<u8>;

    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: u64) -> Result<Vec<u8>, SourceError> {
        let file = self.ends.partition_point(|&end| end <= index);
        let Some(reader) = self.files.get(file) else {
            return Err(SourceError::Index { name: self.name.clone(), index, len: self.len() });
        };
        let before = self.ends[file] - reader.len();
        reader.get(index - before).map_err(SourceError::other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io;
    use std::sync::atomic::{AtomicU32, Ordering};

    use pushpull_common::error::Chain;

    use super::*;
    use crate::tfrecord::TfRecordWriter;

    /// Writes files with these numbers of records; a record is its number over all files.
    fn files(directory: &tempfile::TempDir, counts: &[u8]) -> Vec<PathBuf> {
        let mut next = 0_u8;
        let write = |(file, &count): (usize, &u8)| {
            let path = directory.path().join(format!("train-{file}"));
            let mut writer = TfRecordWriter::create(&path).unwrap();
            (next..next + count).for_each(|record| writer.append(&[record]).unwrap());
            next += count;
            path
        };
        counts.iter().enumerate().map(write).collect()
    }

    #[test]
    fn files_follow_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let source = TfRecordSource::open(files(&directory, &[2, 0, 3, 0, 0, 1])).unwrap();
        assert_eq!((source.name(), source.len()), ("train-0", 6));
        for index in 0..6 {
            assert_eq!(source.get(index).unwrap(), [index as u8]);
        }
        for index in [6, u64::MAX] {
            let error = Chain(&source.get(index).unwrap_err()).to_string();
            let text = format!("cannot read sample {index} of \"train-0\": it has 6 samples");
            assert_eq!(error, text);
        }
        assert_eq!(source.named("digits").name(), "digits");
    }

    /// A file in memory that counts its reads.
    #[derive(Debug)]
    struct CountedInput {
        bytes: Vec<u8>,
        reads: AtomicU32,
    }

    impl ReadAt for CountedInput {
        fn name(&self) -> &str {
            "s3://bucket/train.tfrecord"
        }

        fn bytes(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            let end = offset as usize + out.len();
            let bytes = self.bytes.get(offset as usize..end).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(bytes);
            Ok(())
        }
    }

    #[test]
    fn inputs_are_read_as_files_by_few_requests() {
        let mut bytes = Vec::new();
        let mut writer = TfRecordWriter::with_output("train", &mut bytes);
        for record in 0..100_000_u32 {
            writer.append(&record.to_le_bytes()).unwrap();
        }
        writer.flush().unwrap();
        drop(writer);
        let input = Arc::new(CountedInput { bytes, reads: AtomicU32::new(0) });
        let source = TfRecordSource::of_inputs([input.clone() as Arc<dyn ReadAt>]).unwrap();
        assert_eq!((source.name(), source.len()), ("train.tfrecord", 100_000));
        assert_eq!(input.reads.load(Ordering::Relaxed), 2, "2 MB by MiB");
        assert_eq!(source.get(99_999).unwrap(), 99_999_u32.to_le_bytes());
        assert_eq!(input.reads.load(Ordering::Relaxed), 3);

        let torn = input.bytes[..input.bytes.len() - 1].to_vec();
        let input = Arc::new(CountedInput { bytes: torn, reads: AtomicU32::new(0) });
        let error = TfRecordSource::of_inputs([input as Arc<dyn ReadAt>]).unwrap_err();
        let text =
            "cannot use s3://bucket/train.tfrecord: behind 99999 records it ends with 19 bytes";
        assert!(Chain(&error).to_string().starts_with(text), "{}", Chain(&error));
    }

    #[test]
    fn without_files_there_are_no_samples() {
        let source = TfRecordSource::open(Vec::<PathBuf>::new()).unwrap();
        assert_eq!((source.len(), source.get(0).is_err()), (0, true));
    }

    #[test]
    fn a_torn_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let paths = files(&directory, &[2, 3]);
        OpenOptions::new().write(true).open(&paths[1]).unwrap().set_len(50).unwrap();
        let error = Chain(&TfRecordSource::open(&paths).unwrap_err()).to_string();
        let path = paths[1].display();
        assert_eq!(
            error,
            format!("cannot use {path}: behind 2 records it ends with 16 bytes of another")
        );
    }

    #[test]
    fn damage_is_an_error_of_its_sample() {
        let directory = tempfile::tempdir().unwrap();
        let paths = files(&directory, &[1, 2]);
        let mut bytes = fs::read(&paths[1]).unwrap();
        bytes[12] ^= 1;
        fs::write(&paths[1], bytes).unwrap();
        let source = TfRecordSource::open(&paths).unwrap();
        let error = Chain(&source.get(1).unwrap_err()).to_string();
        let path = paths[1].display();
        let text = format!("cannot read record 0 at byte 0 of {path}: its data differ");
        assert!(error.starts_with(&text), "{error}");
        assert_eq!(source.get(2).unwrap(), [2]);
        let error = Chain(&source.record_bytes_max(0).get(2).unwrap_err()).to_string();
        assert!(error.contains("at most 0 are accepted"), "{error}");
    }
}
