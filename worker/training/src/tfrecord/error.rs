//! Errors of TFRecord files.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::reader::TornTail;

/// The reason why a TFRecord file cannot be written or read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TfRecordError {
    /// The file cannot be created.
    #[error("cannot create {path}")]
    Create {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The file cannot be opened, or its size is unknown.
    #[error("cannot open {path}")]
    Open {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The path is a directory, a pipe or a device.
    #[error("cannot open {path}: it is {found}, expected a regular file")]
    NotRegular {
        /// The path that was opened.
        path: PathBuf,
        /// The kind of file that was found, as the rest of a sentence.
        found: &'static str,
    },
    /// The buffered records cannot be written. They remain in the buffer.
    #[error("cannot write records to {path}")]
    Write {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The written records cannot be made durable. The system may have dropped them.
    #[error("cannot make the records of {path} durable")]
    Sync {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The writer accepts nothing more, because an earlier sync has failed.
    #[error("cannot write records to {path}: an earlier sync of it failed")]
    AfterFailedSync {
        /// The path of the file.
        path: PathBuf,
    },
    /// The record is longer than a writer accepts.
    #[error("cannot append a record of {bytes} bytes to {path}: at most {bytes_max} are possible")]
    TooLongToAppend {
        /// The path of the file.
        path: PathBuf,
        /// Length of the record.
        bytes: u64,
        /// The most bytes of a record.
        bytes_max: u64,
    },
    /// A record cannot be read.
    #[error("cannot read record {record} at byte {offset} of {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// The offset in bytes at which its frame begins.
        offset: u64,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The first bytes are those of another format.
    #[error("cannot read {path}: it is {found}, expected a TFRecord file")]
    OtherFormat {
        /// The path of the file.
        path: PathBuf,
        /// The format that was found, as the rest of a sentence.
        found: String,
    },
    /// A record begins as another format: files were joined, or the disk has lost the data.
    #[error("cannot read record {record} at byte {offset} of {path}: it is {found}")]
    OtherData {
        /// The path of the file.
        path: PathBuf,
        /// Index of the record, and the number of records before it.
        record: u64,
        /// The offset in bytes at which its frame begins.
        offset: u64,
        /// The bytes that begin there, as the rest of a sentence.
        found: String,
    },
    /// The length of a record differs from its checksum. The records behind it cannot be found.
    #[error(
        "cannot read record {record} at byte {offset} of {path}: its length does not match its checksum"
    )]
    DamagedLength {
        /// The path of the file.
        path: PathBuf,
        /// Index of the record, and the number of records before it.
        record: u64,
        /// The offset in bytes at which its frame begins.
        offset: u64,
    },
    /// The data of a record differ from their checksum.
    #[error(
        "cannot read record {record} at byte {offset} of {path}: its data differ from the checksum"
    )]
    DamagedData {
        /// The path of the file.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// The offset in bytes at which its frame begins.
        offset: u64,
    },
    /// A record is longer than the reader accepts.
    #[error(
        "cannot read record {record} at byte {offset} of {path}: it has {bytes} bytes, and at most \
         {bytes_max} are accepted"
    )]
    TooLongToRead {
        /// The path of the file.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// The offset in bytes at which its frame begins.
        offset: u64,
        /// Length of the record.
        bytes: u64,
        /// The most bytes of a record.
        bytes_max: u64,
    },
    /// The file ends with an incomplete record.
    #[error(
        "cannot use {path}: behind {} record{} it ends with {} byte{} of another",
        tail.records,
        if tail.records == 1 { "" } else { "s" },
        tail.bytes,
        if tail.bytes == 1 { "" } else { "s" },
    )]
    Torn {
        /// The path of the file.
        path: PathBuf,
        /// The incomplete record.
        tail: TornTail,
    },
    /// The file has no record with this index.
    #[error("cannot read record {record} of {path}: it has {records} records")]
    NoRecord {
        /// The path of the file.
        path: PathBuf,
        /// The index of the record, counted from 0.
        record: u64,
        /// The number of records in the file.
        records: u64,
    },
}
