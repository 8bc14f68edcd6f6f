//! [`StreamError`]: why a stream of records cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// The reason why a stream of records cannot be used.
///
/// Positions are counted in bytes from the start of the stream, records from 0.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The address of a stream is none of the known forms.
    #[error("cannot read {address:?}: expected -, unix:PATH or tcp:HOST:PORT")]
    Address {
        /// The text that was given.
        address: String,
    },
    /// The stream cannot be opened.
    #[error("cannot open the stream {address}")]
    Open {
        /// The address.
        address: String,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The stream cannot be read, or was silent for too long.
    #[error("cannot read the stream {stream:?} from byte {at} on")]
    Read {
        /// The name of the data set.
        stream: String,
        /// The number of bytes before the failure.
        at: u64,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The stream ends without its end mark: its writer has failed, or the connection is lost.
    #[error(
        "cannot use the stream {stream:?}: it ends at byte {at} without its end mark, behind {records} \
         whole records"
    )]
    Cut {
        /// The name of the data set.
        stream: String,
        /// The number of bytes in the stream.
        at: u64,
        /// The number of whole records.
        records: u64,
    },
    /// The first bytes are those of another format.
    #[error("cannot use the stream {stream:?}: it is {found}, expected records with their lengths")]
    OtherFormat {
        /// The name of the data set.
        stream: String,
        /// The format that was found, as the rest of a sentence.
        found: String,
    },
    /// A record is longer than the limit, or the stream has other bytes in the place of a length.
    #[error(
        "cannot use the stream {stream:?}: record {record} at byte {at} has {bytes} bytes, of {bytes_max} \
         at most"
    )]
    LongRecord {
        /// The name of the data set.
        stream: String,
        /// The position of the record's length.
        at: u64,
        /// The number of the record.
        record: u64,
        /// The announced length.
        bytes: u64,
        /// The most bytes of a record.
        bytes_max: u64,
    },
    /// The stream has more records than the limit.
    #[error(
        "cannot use the stream {stream:?}: at byte {at} it has more than {records_max} records"
    )]
    ManyRecords {
        /// The name of the data set.
        stream: String,
        /// The position of the first record beyond the limit.
        at: u64,
        /// The most records of a stream.
        records_max: u64,
    },
    /// The records have more bytes than the limit.
    #[error(
        "cannot use the stream {stream:?}: at byte {at} its records have more than {bytes_max} bytes"
    )]
    ManyBytes {
        /// The name of the data set.
        stream: String,
        /// The position of the first record beyond the limit.
        at: u64,
        /// The most bytes of all records.
        bytes_max: u64,
    },
    /// The records have more bytes than may be kept in memory, and no directory for a file is set.
    #[error(
        "cannot use the stream {stream:?}: at byte {at} its records have more than {bytes_max} bytes, \
         the limit in memory; a longer stream needs a directory for its file"
    )]
    ManyBytesInMemory {
        /// The name of the data set.
        stream: String,
        /// The position of the first record beyond the limit.
        at: u64,
        /// The most bytes that are kept in memory.
        bytes_max: u64,
    },
    /// The end mark counts another number of records than the stream has.
    #[error(
        "cannot use the stream {stream:?}: its end mark at byte {at} counts {announced} records, and it \
         has {found}"
    )]
    Count {
        /// The name of the data set.
        stream: String,
        /// The position of the end mark.
        at: u64,
        /// The number in the end mark.
        announced: u64,
        /// The number of records before it.
        found: u64,
    },
    /// There are bytes behind the end mark, such as a second stream.
    #[error("cannot use the stream {stream:?}: at byte {at} it goes on behind its end mark")]
    Trailing {
        /// The name of the data set.
        stream: String,
        /// The position of the first byte behind the end mark.
        at: u64,
    },
    /// The file that keeps the records cannot be created or written.
    #[error("cannot keep the stream {stream:?} in a file of {}", directory.display())]
    Spool {
        /// The name of the data set.
        stream: String,
        /// The directory of the file.
        directory: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
}
