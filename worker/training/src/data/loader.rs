//! [`Loader`]: reads the batches of given ranges ahead of the training loop.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};

use pushpull_common::data_set::{DataSet, SampleRange};

use super::batch_reader::BatchReader;
use super::loader_threads::LoaderThreads;
use super::{Batch, DataError};

/// Reads the batches of given ranges, ahead of the training loop.
///
/// [`Loader::submit`] asks for a batch, [`Loader::take`] and [`Loader::blocking_take`] return the
/// batches in the order in which they were submitted. At most [`Pipeline::prefetch`] batches are
/// under way: submitted, and not taken. So the memory is bounded, and a slow training loop holds
/// the threads up (back-pressure).
///
/// **Errors** concern one batch, and are returned in its place. The batches after it are read.
///
/// **Dropping** a loader stops and joins its threads. Batches that are not taken are lost. A thread
/// finishes the sample that it reads, then ends. So the drop lasts as long as the longest
/// [`Source::get`](super::Source::get) and functions of one sample: a source that waits for a
/// network needs a timeout of its own.
///
/// ```
/// use pushpull_training::data::{Pipeline, SampleRange, SliceSource};
///
/// let source = SliceSource::new("letters", ('a'..='z').collect::<Vec<char>>());
/// let mut loader = Pipeline::new(source).batch(3).prefetch(2).loader()?;
/// loader.submit(SampleRange { epoch: 0, start: 6, len: 3 })?;
/// loader.submit(SampleRange { epoch: 0, start: 0, len: 3 })?;
/// assert!(!loader.has_room(), "take one first");
/// let batch = loader.blocking_take().ok_or("two are under way")??;
/// assert_eq!((batch.samples, batch.indices), (vec!['g', 'h', 'i'], vec![6, 7, 8]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Pipeline::prefetch`]: super::Pipeline::prefetch
#[must_use = "a loader stops when it is dropped"]
pub struct Loader<T> {
    prefetch: usize,
    work: LoaderMode<T>,
}

/// The threads that read batches: those of the loader, or the caller's.
enum LoaderMode<T> {
    /// Reads on the thread that takes the batches.
    Caller { reader: BatchReader<T>, ranges: VecDeque<SampleRange> },
    /// Reads on threads of the loader.
    Threads(LoaderThreads<T>),
}

impl<T: Send + 'static> Loader<T> {
    pub(super) fn start(
        reader: BatchReader<T>,
        threads: usize,
        prefetch: usize,
    ) -> Result<Loader<T>, DataError> {
        let work = match threads {
            0 => LoaderMode::Caller { reader, ranges: VecDeque::new() },
            threads => LoaderMode::Threads(LoaderThreads::start(reader, threads, prefetch)?),
        };
        Ok(Loader { prefetch, work })
    }
}

impl<T> Loader<T> {
    /// The declaration of the data, as of the start of the loader.
    pub fn data_set(&self) -> &DataSet {
        &self.reader().data_set
    }

    /// The number of batches under way: submitted, and not taken.
    pub fn pending(&self) -> usize {
        match &self.work {
            LoaderMode::Caller { ranges, .. } => ranges.len(),
            LoaderMode::Threads(threads) => threads.pending(),
        }
    }

    /// Whether batches are read on threads of the loader, while the caller computes.
    pub(super) fn has_threads(&self) -> bool {
        matches!(self.work, LoaderMode::Threads(_))
    }

    /// Whether another range can be submitted before a batch is taken.
    pub fn has_room(&self) -> bool {
        self.pending() < self.prefetch
    }

    /// Asks for the batch of a range. Never waits.
    ///
    /// # Errors
    /// - [`DataError::Range`] if the range is not part of the data set.
    /// - [`DataError::Full`] if there is no room: see [`Loader::has_room`].
    /// - [`DataError::Stopped`] if all threads have ended.
    pub fn submit(&mut self, range: SampleRange) -> Result<(), DataError> {
        self.reader().check(range)?;
        if !self.has_room() {
            let data_set = self.reader().name();
            return Err(DataError::Full { data_set, prefetch: self.prefetch });
        }
        match &mut self.work {
            LoaderMode::Caller { ranges, .. } => ranges.push_back(range),
            LoaderMode::Threads(threads) => threads.submit(range)?,
        }
        Ok(())
    }

    /// Waits for the batch that was submitted first, and returns it; `None` if none is under way.
    ///
    /// Dropping the future loses nothing: the next call returns the batch. With 0 threads the first
    /// poll reads the batch.
    ///
    /// # Errors
    /// See [`DataError`]. The batch is lost, and counts as taken.
    pub fn take(&mut self) -> TakeBatch<'_, T> {
        TakeBatch { loader: self }
    }

    /// Polls [`Loader::take`]. The task of the last call is woken.
    pub fn poll_take(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Batch<T>, DataError>>> {
        match &mut self.work {
            LoaderMode::Caller { reader, ranges } => Poll::Ready(read_first(reader, ranges)),
            LoaderMode::Threads(threads) => threads.poll_take(context),
        }
    }

    /// Blocks the thread until [`Loader::take`] is ready. Do not call it from within an async
    /// runtime.
    ///
    /// # Errors
    /// See [`Loader::take`].
    pub fn blocking_take(&mut self) -> Option<Result<Batch<T>, DataError>> {
        match &mut self.work {
            LoaderMode::Caller { reader, ranges } => read_first(reader, ranges),
            LoaderMode::Threads(threads) => threads.blocking_take(),
        }
    }

    fn reader(&self) -> &BatchReader<T> {
        match &self.work {
            LoaderMode::Caller { reader, .. } => reader,
            LoaderMode::Threads(threads) => threads.reader(),
        }
    }
}

impl<T> fmt::Debug for Loader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("data_set", self.data_set())
            .field("prefetch", &self.prefetch)
            .field("pending", &self.pending())
            .finish()
    }
}

/// The first batch under way, from [`Loader::take`]: a future.
#[derive(Debug)]
#[must_use = "a batch is taken when the future is awaited"]
pub struct TakeBatch<'a, T> {
    loader: &'a mut Loader<T>,
}

impl<T> Future for TakeBatch<'_, T> {
    type Output = Option<Result<Batch<T>, DataError>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.loader.poll_take(context)
    }
}

fn read_first<T>(
    reader: &BatchReader<T>,
    ranges: &mut VecDeque<SampleRange>,
) -> Option<Result<Batch<T>, DataError>> {
    let range = ranges.pop_front()?;
    Some(reader.read(range, &AtomicBool::new(false)))
}
