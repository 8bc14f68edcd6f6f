//! [`StreamSource`]: the records of a pipe or a socket.

use std::io::Read;
use std::path::PathBuf;

use bytes::Bytes;

use super::file_bytes::FileBytes;
use super::spool::Spool;
use super::stream_records::{END_MARK, StreamRecords};
use super::{Source, SourceError, StreamError};

/// The records of a stream, such as the standard input or a socket, as samples.
///
/// Another program writes each record with its length, and an end mark with their number. All
/// numbers are in little-endian order:
///
/// | bytes | content |
/// | --- | --- |
/// | 4 | length of the record: less than `0xffff_ffff` |
/// | length | the record |
/// | ... | the other records |
/// | 4 | `0xffff_ffff`: the end mark |
/// | 8 | number of records |
///
/// [`StreamSource::read`] reads the whole stream before it returns, and keeps the records: in memory
/// up to a limit, and beyond it in a file without a name ([`StreamLimits`]). So samples are read in
/// any order, and in any number of epochs. A stream without its end mark is an error, never a shorter
/// data set.
///
/// A stream is usually one worker's share of the data. Such a worker declares no data set to the
/// servers, and trains on the whole of its share: `pipeline.shard(0, 1)`.
///
/// ```
/// use pushpull_training::data::{Source, StreamSource};
///
/// let mut stream = Vec::new();
/// for record in [&b"first"[..], b"second"] {
///     stream.extend((record.len() as u32).to_le_bytes());
///     stream.extend(record);
/// }
/// stream.extend(u32::MAX.to_le_bytes());
/// stream.extend(2_u64.to_le_bytes());
///
/// let source = StreamSource::read("share", &stream[..])?;
/// assert_eq!((source.len(), &source.get(1)?[..]), (2, &b"second"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamSource {
    name: String,
    bytes: FileBytes,
    /// For each record, the end of its bytes.
    ends: Vec<u64>,
}

impl StreamSource {
    /// Reads a stream to its end, within the default [`StreamLimits`].
    ///
    /// # Errors
    /// The errors of [`StreamLimits::read`].
    pub fn read(name: impl Into<String>, input: impl Read) -> Result<StreamSource, StreamError> {
        StreamLimits::new().read(name, input)
    }
}

impl Source for StreamSource {
    type Sample = Bytes;

    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.ends.len() as u64
    }

    fn get(&self, index: u64) -> Result<Bytes, SourceError> {
        let at = usize::try_from(index).ok().filter(|&at| at < self.ends.len());
        let Some(at) = at else {
            return Err(SourceError::Index { name: self.name.clone(), index, len: self.len() });
        };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        self.bytes.read(start, (self.ends[at] - start) as usize)
    }
}

/// The limits of a stream, and where its records are kept.
///
/// ```
/// use pushpull_training::data::StreamLimits;
///
/// let limits = StreamLimits::new()
///     .record_bytes_max(64 << 10)
///     .memory_bytes_max(256 << 20)
///     .spool_directory(std::env::temp_dir());
/// let empty = [255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
/// limits.read("share", &empty[..])?;
/// # Ok::<(), pushpull_training::data::StreamError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StreamLimits {
    record_bytes_max: u32,
    records_max: u64,
    bytes_max: u64,
    memory_bytes_max: u64,
    spool_directory: Option<PathBuf>,
}

impl Default for StreamLimits {
    fn default() -> StreamLimits {
        StreamLimits::new()
    }
}

impl StreamLimits {
    /// Records of at most 16 MiB, at most 2^28 of them and 64 GiB in all; at most 1 GiB in memory,
    /// and no file.
    pub fn new() -> StreamLimits {
        StreamLimits {
            record_bytes_max: 16 << 20,
            records_max: 1 << 28,
            bytes_max: 64 << 30,
            memory_bytes_max: 1 << 30,
            spool_directory: None,
        }
    }

    /// Sets the most bytes of a record. Default: 16 MiB. The longest possible has 4 GiB - 2 bytes.
    #[must_use]
    pub fn record_bytes_max(self, bytes: u32) -> StreamLimits {
        StreamLimits { record_bytes_max: bytes.min(END_MARK - 1), ..self }
    }

    /// Sets the most records of a stream. Default: 2^28. Each takes 8 bytes of memory beside its own.
    #[must_use]
    pub fn records_max(self, records: u64) -> StreamLimits {
        StreamLimits { records_max: records, ..self }
    }

    /// Sets the most bytes of all records. Default: 64 GiB.
    #[must_use]
    pub fn bytes_max(self, bytes: u64) -> StreamLimits {
        StreamLimits { bytes_max: bytes, ..self }
    }

    /// Sets the most bytes of records that are kept in memory. Default: 1 GiB.
    #[must_use]
    pub fn memory_bytes_max(self, bytes: u64) -> StreamLimits {
        StreamLimits { memory_bytes_max: bytes, ..self }
    }

    /// Keeps the records of a stream that exceeds the limit in memory in a file of this directory.
    /// The file has no name, and is deleted with the source, also after a kill. Default: none, so a
    /// longer stream is refused.
    #[must_use]
    pub fn spool_directory(self, directory: impl Into<PathBuf>) -> StreamLimits {
        StreamLimits { spool_directory: Some(directory.into()), ..self }
    }

    /// Reads a stream to its end. `name` is the name of the data set: 1 to 128 bytes.
    ///
    /// The call waits as long as a read of `input` does; [`StreamInput`](super::StreamInput) bounds
    /// that time. The writer must close its side behind the end mark.
    ///
    /// # Errors
    /// [`StreamError::Cut`] if the end mark is absent, [`StreamError::Trailing`] if something follows
    /// it, and [`StreamError::Count`] if it counts other records; [`StreamError::OtherFormat`] and
    /// those of the limits; those of reading the stream and of writing the file.
    pub fn read(
        &self,
        name: impl Into<String>,
        input: impl Read,
    ) -> Result<StreamSource, StreamError> {
        let name = name.into();
        let mut records = StreamRecords::new(&name, input, self.record_bytes_max);
        let mut spool = Spool::new();
        let mut ends = Vec::new();
        let mut record = Vec::new();
        while let Some(at) = records.next(&mut record)? {
            if ends.len() as u64 == self.records_max {
                let records_max = self.records_max;
                return Err(StreamError::ManyRecords { stream: name, at, records_max });
            }
            self.keep(&mut spool, &record, &name, at)?;
            ends.push(spool.len());
        }
        let bytes = spool.finish(PathBuf::from(&name));
        let bytes = bytes.map_err(|source| self.spool_failed(&name, source))?;
        Ok(StreamSource { name, bytes, ends })
    }

    /// Appends a record at this position of the stream to the spool.
    fn keep(
        &self,
        spool: &mut Spool,
        record: &[u8],
        name: &str,
        at: u64,
    ) -> Result<(), StreamError> {
        let bytes = spool.len() + record.len() as u64;
        if bytes > self.bytes_max {
            let bytes_max = self.bytes_max;
            return Err(StreamError::ManyBytes { stream: name.to_owned(), at, bytes_max });
        }
        if bytes > self.memory_bytes_max && spool.is_in_memory() {
            let Some(directory) = &self.spool_directory else {
                let bytes_max = self.memory_bytes_max;
                let stream = name.to_owned();
                return Err(StreamError::ManyBytesInMemory { stream, at, bytes_max });
            };
            let moved = spool.move_to_file(directory);
            moved.map_err(|source| self.spool_failed(name, source))?;
        }
        spool.append(record).map_err(|source| self.spool_failed(name, source))
    }

    fn spool_failed(&self, name: &str, source: std::io::Error) -> StreamError {
        let directory = self.spool_directory.clone().unwrap_or_default();
        StreamError::Spool { stream: name.to_owned(), directory, source }
    }
}
