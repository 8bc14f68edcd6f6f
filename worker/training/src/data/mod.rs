//! The data pipeline: batches of samples, read on threads ahead of the training loop.
//!
//! A [`Source`] gives samples by their index: an array ([`SliceSource`]), an IDX file
//! ([`IdxSource`]), a CSV file (`CsvSource`, feature `csv`), a pipe or a socket ([`StreamSource`]), or
//! a type of your own. The files may be objects of an object store, or any other [`ReadAt`]. A
//! [`Pipeline`] says in which order and in which batches an epoch visits the samples, and what is done
//! with each. Batches are read by one of two types:
//!
//! - [`Loader`] reads the ranges that it is given. A training session grants them, so that every
//!   sample of an epoch counts exactly once.
//! - [`StaticSplit`] needs no session: worker `i` of `n` reads every n-th batch.
//!
//! ```
//! use pushpull_training::data::{Pipeline, SliceSource};
//!
//! let source = SliceSource::labelled("digits", vec![0.5_f32, 1.5, 2.5], vec![0_u8, 1, 1])?;
//! let pipeline = Pipeline::new(source).shuffle(7).batch(2).epochs(2);
//! for batch in pipeline.shard(0, 1)? {
//!     let batch = batch?;
//!     println!("epoch {}, samples {:?}", batch.range.epoch, batch.indices);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod batch_reader;
#[cfg(feature = "csv")]
mod csv_row;
#[cfg(feature = "csv")]
mod csv_scanner;
#[cfg(feature = "csv")]
mod csv_source;
mod data_error;
mod data_file;
mod file_bytes;
mod granted_batches;
mod idx_source;
mod loader;
mod loader_threads;
mod permutation;
mod pipeline;
#[cfg(feature = "csv")]
mod row_mark;
mod samples;
mod slice_source;
mod source;
mod source_error;
mod spool;
mod static_split;
mod stream_address;
mod stream_error;
mod stream_records;
mod stream_source;
#[cfg(feature = "csv")]
mod suspect_delimiter;
#[cfg(test)]
mod tests;

pub use batch::Batch;
#[cfg(feature = "csv")]
pub use csv_row::CsvRow;
#[cfg(feature = "csv")]
pub use csv_source::{CsvFormat, CsvSource};
pub use data_error::DataError;
pub use granted_batches::GrantedBatches;
pub use idx_source::IdxSource;
pub use loader::{Loader, TakeBatch};
pub use permutation::Permutation;
pub use pipeline::Pipeline;
pub use pushpull_common::data_set::{DataSet, DataSetError, SampleRange};
pub use pushpull_common::read_at::ReadAt;
pub use slice_source::SliceSource;
pub use source::Source;
pub use source_error::SourceError;
pub use static_split::StaticSplit;
pub use stream_address::{StreamAddress, StreamInput};
pub use stream_error::StreamError;
pub use stream_source::{StreamLimits, StreamSource};
