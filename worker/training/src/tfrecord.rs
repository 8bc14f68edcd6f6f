//! TFRecord files: sequences of byte records with checksums.
//!
//! TensorFlow stores training data and TensorBoard stores events in this format. A record is any
//! bytes; this module neither interprets nor compresses them. Each record is framed, with integers
//! in little-endian order:
//!
//! | bytes | content |
//! | --- | --- |
//! | 8 | length of the data |
//! | 4 | masked CRC32C of the length |
//! | length | data |
//! | 4 | masked CRC32C of the data |
//!
//! ```
//! use pushpull_training::tfrecord::{TfRecordReader, TfRecordWriter};
//!
//! # let directory = std::env::temp_dir().join(format!("tfrecord-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory)?;
//! let path = directory.join("train.tfrecord");
//! let mut writer = TfRecordWriter::create(&path)?;
//! writer.append(b"first")?;
//! writer.append(b"second")?;
//! writer.sync()?;
//!
//! let reader = TfRecordReader::open(&path)?;
//! assert_eq!(reader.len(), 2);
//! assert_eq!(reader.get(1)?, b"second");
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod reader;
mod source;
mod writer;

pub use error::TfRecordError;
pub use reader::{TfRecordReader, TornTail};
pub use source::TfRecordSource;
pub use writer::TfRecordWriter;

/// The longest record that a reader or writer accepts by default: 1 GiB.
pub const RECORD_BYTES_MAX: u64 = 1 << 30;
