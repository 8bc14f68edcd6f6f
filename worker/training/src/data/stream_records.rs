//! [`StreamRecords`]: the records of a stream in their order, each checked before it is passed on.

use std::io::{self, BufReader, Read};

use pushpull_common::file_kind::{FIRST_BYTES, FileKind};

use super::StreamError;

/// Reads the records of a stream up to its end.
///
/// A record is a length, 4 bytes in little-endian order, then that number of bytes. The length `0xffff_ffff`
/// is the end mark. The number of records follows it, 8 bytes, and the stream ends there.
pub(super) struct StreamRecords<'a, R> {
    name: &'a str,
    input: BufReader<R>,
    /// The position of the next byte.
    at: u64,
    /// The number of whole records so far.
    records: u64,
    record_bytes_max: u32,
}

impl<'a, R: Read> StreamRecords<'a, R> {
    /// Begins a stream whose records have at most `record_bytes_max` bytes.
    pub(super) fn new(name: &'a str, input: R, record_bytes_max: u32) -> StreamRecords<'a, R> {
        let input = BufReader::with_capacity(BUFFER_BYTES, input);
        StreamRecords { name, input, at: 0, records: 0, record_bytes_max }
    }

    /// Replaces the contents of `record` by the next record. Returns its position, or nothing at the
    /// end of the stream.
    pub(super) fn next(&mut self, record: &mut Vec<u8>) -> Result<Option<u64>, StreamError> {
        let at = self.at;
        let length = u32::from_le_bytes(self.word()?);
        if length == END_MARK {
            self.end(at)?;
            return Ok(None);
        }
        if length > self.record_bytes_max {
            return Err(self.long_record(at, length));
        }
        self.fill(record, u64::from(length))?;
        self.records += 1;
        Ok(Some(at))
    }

    /// Checks the end of the stream behind the length of the mark, which is at `at`.
    fn end(&mut self, at: u64) -> Result<(), StreamError> {
        let stream = || self.name.to_owned();
        let found = self.records;
        let announced = u64::from_le_bytes(self.word()?);
        if announced != found {
            return Err(StreamError::Count { stream: stream(), at, announced, found });
        }
        // A second stream behind the first would be left out silently.
        match self.read_up_to(&mut Vec::new(), 1)? {
            0 => Ok(()),
            _ => Err(StreamError::Trailing { stream: self.name.to_owned(), at: self.at - 1 }),
        }
    }

    /// Reads a number.
    fn word<const N: usize>(&mut self) -> Result<[u8; N], StreamError> {
        let mut bytes = Vec::with_capacity(N);
        self.fill(&mut bytes, N as u64)?;
        let mut word = [0; N];
        word.copy_from_slice(&bytes);
        Ok(word)
    }

    /// Replaces the contents of `out` by the next `bytes` bytes.
    fn fill(&mut self, out: &mut Vec<u8>, bytes: u64) -> Result<(), StreamError> {
        if self.read_up_to(out, bytes)? == bytes {
            return Ok(());
        }
        Err(StreamError::Cut { stream: self.name.to_owned(), at: self.at, records: self.records })
    }

    /// Replaces the contents of `out` by the next bytes, fewer than asked for at the end. Memory is
    /// allocated for bytes that have come, never for an announced length.
    fn read_up_to(&mut self, out: &mut Vec<u8>, bytes: u64) -> Result<u64, StreamError> {
        out.clear();
        let result = self.input.by_ref().take(bytes).read_to_end(out);
        self.at += out.len() as u64;
        match result {
            Ok(read) => Ok(read as u64),
            Err(source) => {
                Err(StreamError::Read { stream: self.name.to_owned(), at: self.at, source })
            }
        }
    }

    /// Returns the error of a record that is too long. A stream that begins with one may be a file of
    /// another format.
    fn long_record(&mut self, at: u64, length: u32) -> StreamError {
        let stream = self.name.to_owned();
        if at == 0 {
            let mut first = length.to_le_bytes().to_vec();
            let rest = (FIRST_BYTES - first.len()) as u64;
            // The format is told by the bytes that there are, even if others cannot be read.
            let _: io::Result<usize> = self.input.by_ref().take(rest).read_to_end(&mut first);
            if let Some(kind) = FileKind::of(&first) {
                return StreamError::OtherFormat { stream, found: kind.into_text() };
            }
        }
        StreamError::LongRecord {
            stream,
            at,
            record: self.records,
            bytes: u64::from(length),
            bytes_max: u64::from(self.record_bytes_max),
        }
    }
}

/// The length that no record has.
pub(super) const END_MARK: u32 = u32::MAX;

/// The bytes that are read at once.
const BUFFER_BYTES: usize = 1 << 16;
