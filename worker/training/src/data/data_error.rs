//! [`DataError`]: the errors of a pipeline's start and of its batches.

use std::error::Error as StdError;
use std::io;

use pushpull_common::data_set::{DataSetError, SampleRange};
use thiserror::Error;

use super::SourceError;

/// The reason why a pipeline cannot be started, or a batch cannot be read.
///
/// - [`DataError::DataSet`], [`DataError::Threads`], [`DataError::Prefetch`] and
///   [`DataError::Split`] are faults of the program, found at the start.
/// - [`DataError::Full`] and [`DataError::Range`] refuse a range. Nothing is read.
/// - The others are the outcome of one batch. Later batches are not affected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The pipeline does not make a data set.
    #[error(transparent)]
    DataSet(#[from] DataSetError),
    /// More threads than a loader starts.
    #[error("cannot load {data_set:?} with {threads} threads: the limit is {max}")]
    Threads {
        /// The name of the data set.
        data_set: String,
        /// The number of threads that was asked for.
        threads: usize,
        /// The limit, [`Pipeline::THREADS_MAX`](super::Pipeline::THREADS_MAX).
        max: usize,
    },
    /// The prefetch is 0, or above the limit of a loader.
    #[error("cannot load {data_set:?} with a prefetch of {prefetch}: 1 to {max} batches are kept")]
    Prefetch {
        /// The name of the data set.
        data_set: String,
        /// The number of batches that was asked for.
        prefetch: usize,
        /// The limit, [`Pipeline::PREFETCH_MAX`](super::Pipeline::PREFETCH_MAX).
        max: usize,
    },
    /// The worker of a static split is not among its workers.
    #[error("cannot split {data_set:?}: worker {index} is not below the {count} workers")]
    Split {
        /// The name of the data set.
        data_set: String,
        /// The index of the worker.
        index: u64,
        /// The number of workers of the split.
        count: u64,
    },
    /// The operating system did not start a thread.
    #[error("cannot load {data_set:?}: a thread did not start")]
    Thread {
        /// The name of the data set.
        data_set: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The loader is full: it keeps `prefetch` submitted batches that were not taken. Take one
    /// first.
    #[error("cannot submit a range of {data_set:?}: {prefetch} batches are not taken yet")]
    Full {
        /// The name of the data set.
        data_set: String,
        /// The number of batches that the loader keeps.
        prefetch: usize,
    },
    /// The range is empty, longer than a batch, or outside of the data set.
    #[error(
        "cannot read {} samples of {data_set:?} from {} in epoch {}: it has {samples} samples in \
         batches of {batch}, and {} epochs",
        range.len,
        range.start,
        range.epoch,
        epochs.map_or("endless".to_owned(), |epochs| epochs.to_string())
    )]
    Range {
        /// The name of the data set.
        data_set: String,
        /// The range that was submitted.
        range: SampleRange,
        /// The number of samples in the data set.
        samples: u64,
        /// The number of samples of a batch.
        batch: u32,
        /// The number of epochs; `None` if the data have no end.
        epochs: Option<u64>,
    },
    /// The source has another length than when the loader was started.
    #[error("cannot read {data_set:?}: it had {declared} samples at the start, now {found}")]
    LengthChanged {
        /// The name of the data set.
        data_set: String,
        /// The number of samples at the start.
        declared: u64,
        /// The number of samples now.
        found: u64,
    },
    /// The source cannot read a sample.
    #[error("cannot read sample {index} of {data_set:?} in epoch {epoch}")]
    Source {
        /// The name of the data set.
        data_set: String,
        /// The epoch, counted from 0.
        epoch: u64,
        /// The index of the sample.
        index: u64,
        /// The error of the source.
        source: SourceError,
    },
    /// A function of [`Pipeline::try_map`](super::Pipeline::try_map) failed.
    #[error("cannot map sample {index} of {data_set:?} in epoch {epoch}")]
    Map {
        /// The name of the data set.
        data_set: String,
        /// The epoch, counted from 0.
        epoch: u64,
        /// The index of the sample.
        index: u64,
        /// The error of the function.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The source, or a function that maps its samples, panicked.
    #[error("cannot load sample {index} of {data_set:?} in epoch {epoch}: a panic: {message}")]
    Panicked {
        /// The name of the data set.
        data_set: String,
        /// The epoch, counted from 0.
        epoch: u64,
        /// The index of the sample.
        index: u64,
        /// The message of the panic.
        message: String,
    },
    /// The step has no samples: the worker has declared no data set.
    #[error(
        "cannot load {data_set:?}: the worker has not declared it, so its steps have no samples"
    )]
    NotGranted {
        /// The name of the data set.
        data_set: String,
    },
    /// The loader reads another data set than the worker has declared, or in another order: the
    /// granted positions would be other samples.
    #[error("cannot load {data_set:?}: of the declared data set and that of the loader, {differs}")]
    Differs {
        /// The name of the loader's data set.
        data_set: String,
        /// The first difference, the declared data set first.
        differs: String,
    },
    /// The threads of the loader have ended.
    #[error("cannot load {data_set:?}: the loader has stopped")]
    Stopped {
        /// The name of the data set.
        data_set: String,
    },
}
