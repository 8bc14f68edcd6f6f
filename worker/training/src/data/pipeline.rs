//! [`Pipeline`]: the steps from samples to batches.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use pushpull_common::data_set::DataSet;

use super::batch_reader::BatchReader;
use super::samples::{MappedSamples, SampleReader};
use super::{DataError, Loader, Source, StaticSplit};

/// The steps from the samples of a [`Source`] to batches: their order, their number, and the
/// functions that map them.
///
/// A pipeline reads nothing. [`Pipeline::loader`] starts to read the ranges of a training session,
/// and [`Pipeline::shard`] reads one worker's share of the data without a session. Both check the
/// settings. A clone shares the source and the functions.
///
/// ```
/// use pushpull_training::data::{Pipeline, SliceSource};
///
/// let source = SliceSource::new("numbers", (0..10).collect::<Vec<u32>>());
/// let pipeline = Pipeline::new(source)
///     .shuffle(7) // another order in each epoch
///     .batch(4) // 4, 4 and 2 samples
///     .epochs(3)
///     .map(|number| number as f32 / 10.0)
///     .threads(1)
///     .prefetch(2); // batches that are read ahead
/// assert_eq!(pipeline.data_set()?.batches(), 3);
/// let batches = pipeline.shard(0, 1)?.collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches.len(), 9);
/// # Ok::<(), pushpull_training::data::DataError>(())
/// ```
pub struct Pipeline<T> {
    samples: Arc<dyn SampleReader<T>>,
    seed: Option<u64>,
    batch: u32,
    epochs: Option<u64>,
    drop_remainder: bool,
    threads: usize,
    prefetch: usize,
}

impl<T: Send + 'static> Pipeline<T> {
    /// The most threads of [`Pipeline::threads`].
    pub const THREADS_MAX: usize = 1024;
    /// The most batches of [`Pipeline::prefetch`].
    pub const PREFETCH_MAX: usize = 1 << 16;

    /// Reads the samples of a source in the order of their indices: one epoch, batches of 1 sample,
    /// 1 thread, 2 batches ahead.
    pub fn new<S: Source<Sample = T> + 'static>(source: S) -> Pipeline<T> {
        Pipeline {
            samples: Arc::new(source),
            seed: None,
            batch: 1,
            epochs: Some(1),
            drop_remainder: false,
            threads: 1,
            prefetch: 2,
        }
    }

    /// Visits the samples of each epoch in another random order, a
    /// [`Permutation`](super::Permutation) of `seed` and the epoch. Default: the order of the
    /// indices.
    pub fn shuffle(self, seed: u64) -> Pipeline<T> {
        Pipeline { seed: Some(seed), ..self }
    }

    /// Sets the number of samples of a batch. Default: 1.
    pub fn batch(self, samples: u32) -> Pipeline<T> {
        Pipeline { batch: samples, ..self }
    }

    /// Ends the data after this many epochs. Default: 1.
    pub fn epochs(self, epochs: u64) -> Pipeline<T> {
        Pipeline { epochs: Some(epochs), ..self }
    }

    /// Repeats the epochs without an end.
    pub fn repeat(self) -> Pipeline<T> {
        Pipeline { epochs: None, ..self }
    }

    /// Whether a last batch that would be shorter is left out of every epoch. Default: no.
    pub fn drop_remainder(self, drop: bool) -> Pipeline<T> {
        Pipeline { drop_remainder: drop, ..self }
    }

    /// Maps each sample by a function, on the threads that read the samples.
    ///
    /// A panic of the function fails the batch: [`DataError::Panicked`].
    pub fn map<U: Send + 'static>(
        self,
        map: impl Fn(T) -> U + Send + Sync + 'static,
    ) -> Pipeline<U> {
        self.mapped(move |sample| Ok(map(sample)))
    }

    /// Maps each sample by a function that may fail, on the threads that read the samples.
    ///
    /// An error of the function fails the batch: [`DataError::Map`] names the sample.
    ///
    /// ```
    /// use pushpull_common::error::Chain;
    /// use pushpull_training::data::{Pipeline, SliceSource};
    ///
    /// let source = SliceSource::new("texts", ["1", "2", "three"]);
    /// let mut batches = Pipeline::new(source).try_map(str::parse::<u32>).shard(0, 1)?;
    /// let errors = batches.filter_map(Result::err);
    /// let texts: Vec<String> = errors.map(|error| Chain(&error).to_string()).collect();
    /// assert_eq!(
    ///     texts,
    ///     ["cannot map sample 2 of \"texts\" in epoch 0: invalid digit found in string"]
    /// );
    /// # Ok::<(), pushpull_training::data::DataError>(())
    /// ```
    pub fn try_map<U: Send + 'static, E: Into<Box<dyn StdError + Send + Sync>>>(
        self,
        map: impl Fn(T) -> Result<U, E> + Send + Sync + 'static,
    ) -> Pipeline<U> {
        self.mapped(move |sample| map(sample).map_err(Into::into))
    }

    /// Sets the number of threads that read and map samples, each one batch at a time. Default: 1.
    ///
    /// With 0 threads a batch is read on the thread that takes it. More threads than
    /// [`Pipeline::prefetch`] have nothing to do and are not started.
    pub fn threads(self, threads: usize) -> Pipeline<T> {
        Pipeline { threads, ..self }
    }

    /// Sets how many batches are in memory at most: submitted, and not taken yet. Default: 2.
    pub fn prefetch(self, batches: usize) -> Pipeline<T> {
        Pipeline { prefetch: batches, ..self }
    }

    /// Returns the declaration of the data, on which all workers must agree.
    ///
    /// # Errors
    /// [`DataError::DataSet`] if the batch is empty or longer than the data, or a limit is
    /// exceeded.
    pub fn data_set(&self) -> Result<DataSet, DataError> {
        let data_set = DataSet::new(self.samples.name(), self.samples.len(), self.batch)?
            .drop_remainder(self.drop_remainder);
        let data_set = match self.seed {
            Some(seed) => data_set.shuffle(seed),
            None => data_set,
        };
        let data_set = match self.epochs {
            Some(epochs) => data_set.epochs(epochs),
            None => data_set,
        };
        data_set.validate()?;
        Ok(data_set)
    }

    /// Starts the threads that read the batches of given ranges.
    ///
    /// # Errors
    /// The errors of [`Pipeline::data_set`], and [`DataError::Threads`], [`DataError::Prefetch`]
    /// and [`DataError::Thread`].
    pub fn loader(&self) -> Result<Loader<T>, DataError> {
        let data_set = self.data_set()?;
        let name = || data_set.name().to_owned();
        let threads = self.threads;
        let prefetch = self.prefetch;
        let threads_max = Self::THREADS_MAX;
        let prefetch_max = Self::PREFETCH_MAX;
        if threads > threads_max {
            return Err(DataError::Threads { data_set: name(), threads, max: threads_max });
        }
        if !(1..=prefetch_max).contains(&prefetch) {
            return Err(DataError::Prefetch { data_set: name(), prefetch, max: prefetch_max });
        }
        let reader = BatchReader { samples: self.samples.clone(), data_set };
        Loader::start(reader, threads.min(prefetch), prefetch)
    }

    /// Reads one worker's share of every epoch, without a session: see [`StaticSplit`].
    ///
    /// # Errors
    /// The errors of [`Pipeline::loader`], and [`DataError::Split`] if `index` is not below
    /// `count`.
    pub fn shard(&self, index: u64, count: u64) -> Result<StaticSplit<T>, DataError> {
        StaticSplit::start(self.loader()?, index, count)
    }

    fn mapped<U, F>(self, map: F) -> Pipeline<U>
    where
        F: Fn(T) -> Result<U, Box<dyn StdError + Send + Sync>> + Send + Sync + 'static,
    {
        let Pipeline { samples, seed, batch, epochs, drop_remainder, threads, prefetch } = self;
        let samples = Arc::new(MappedSamples { samples, map });
        Pipeline { samples, seed, batch, epochs, drop_remainder, threads, prefetch }
    }
}

impl<T> Clone for Pipeline<T> {
    fn clone(&self) -> Pipeline<T> {
        Pipeline { samples: self.samples.clone(), ..*self }
    }
}

impl<T> fmt::Debug for Pipeline<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline")
            .field("name", &self.samples.name())
            .field("samples", &self.samples.len())
            .field("seed", &self.seed)
            .field("batch", &self.batch)
            .field("epochs", &self.epochs)
            .field("drop_remainder", &self.drop_remainder)
            .field("threads", &self.threads)
            .field("prefetch", &self.prefetch)
            .finish()
    }
}
