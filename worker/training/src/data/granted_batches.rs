//! [`GrantedBatches`]: reads the batches of granted tokens, and the next one ahead.

use std::collections::VecDeque;

use pushpull_common::data_set::{DataSet, SampleRange};

use super::{Batch, DataError, Loader};

/// Reads the batches of the samples that tokens grant, and the next batch ahead.
///
/// While the caller computes with one batch, the threads of the loader read the samples that the
/// worker will probably be granted next ([`Token::samples_ahead`]). Samples that another worker is
/// granted instead were read in vain: [`GrantedBatches::wasted`] counts them.
///
/// Reading ahead needs at least one thread ([`Pipeline::threads`]) and room for two batches
/// ([`Pipeline::prefetch`]).
///
/// ```
/// use pushpull_training::data::{GrantedBatches, Pipeline, SampleRange, SliceSource};
///
/// let source = SliceSource::new("letters", ('a'..='z').collect::<Vec<char>>());
/// let mut batches = GrantedBatches::new(Pipeline::new(source).batch(2).loader()?);
/// // In a training loop: `batches.blocking_load(token.samples()?, token.samples_ahead())`.
/// let range = |start| SampleRange { epoch: 0, start, len: 2 };
/// let batch = batches.blocking_load(range(4), Some(range(8)))?;
/// assert_eq!(batch.samples, ['e', 'f']);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Token::samples_ahead`]: pushpull_worker::Token::samples_ahead
/// [`Pipeline::threads`]: super::Pipeline::threads
/// [`Pipeline::prefetch`]: super::Pipeline::prefetch
#[derive(Debug)]
pub struct GrantedBatches<T> {
    loader: Loader<T>,
    /// The ranges that the loader reads or has read, in the order of their batches.
    submitted: VecDeque<SampleRange>,
    wasted: u64,
}

/// The use of the loader's next batch.
enum NextBatch {
    /// The batch has other samples than the granted ones.
    Discard,
    Return,
}

impl<T> GrantedBatches<T> {
    /// The declaration of the data.
    pub fn data_set(&self) -> &DataSet {
        self.loader.data_set()
    }
}

impl<T: Send + 'static> GrantedBatches<T> {
    /// Reads batches by this loader, to which nothing was submitted.
    pub fn new(loader: Loader<T>) -> GrantedBatches<T> {
        GrantedBatches { loader, submitted: VecDeque::new(), wasted: 0 }
    }

    /// The number of batches that were read ahead and not granted.
    pub fn wasted(&self) -> u64 {
        self.wasted
    }

    /// Returns the batch of the granted samples, and begins to read those `ahead`.
    ///
    /// # Errors
    /// The errors of the source and of the functions of the pipeline, for a sample of this batch;
    /// [`DataError::Range`] if the samples are not part of the data set. The next call can succeed.
    ///
    /// Dropping the future loses nothing: the batch is read, for a later call with these samples.
    pub async fn load(
        &mut self,
        samples: SampleRange,
        ahead: Option<SampleRange>,
    ) -> Result<Batch<T>, DataError> {
        loop {
            let next = self.prepare(samples, ahead)?;
            let taken = self.loader.take().await;
            if let Some(batch) = self.taken(next, taken) {
                return batch;
            }
        }
    }

    /// Returns the batch of the granted samples, as [`GrantedBatches::load`] does, and blocks the
    /// thread until it is read.
    pub fn blocking_load(
        &mut self,
        samples: SampleRange,
        ahead: Option<SampleRange>,
    ) -> Result<Batch<T>, DataError> {
        loop {
            let next = self.prepare(samples, ahead)?;
            let taken = self.loader.blocking_take();
            if let Some(batch) = self.taken(next, taken) {
                return batch;
            }
        }
    }

    /// Submits what is not under way, and tells what the loader's next batch is for.
    fn prepare(
        &mut self,
        samples: SampleRange,
        ahead: Option<SampleRange>,
    ) -> Result<NextBatch, DataError> {
        match self.submitted.front() {
            Some(front) if *front != samples => return Ok(NextBatch::Discard),
            Some(_) => {}
            None => self.submit(samples)?,
        }
        let ahead = ahead.filter(|ahead| !self.submitted.contains(ahead));
        if let Some(ahead) = ahead.filter(|_| self.loader.has_threads() && self.loader.has_room()) {
            self.submit(ahead)?;
        }
        Ok(NextBatch::Return)
    }

    /// Handles the loader's next batch, and returns it if it is the granted one.
    fn taken(
        &mut self,
        next: NextBatch,
        taken: Option<Result<Batch<T>, DataError>>,
    ) -> Option<Result<Batch<T>, DataError>> {
        self.submitted.pop_front();
        match (next, &taken) {
            (NextBatch::Return, Some(_)) => return taken,
            (NextBatch::Discard, _) => self.wasted += 1,
            // Nothing is under way.
            (NextBatch::Return, None) => self.submitted.clear(),
        }
        None
    }

    fn submit(&mut self, range: SampleRange) -> Result<(), DataError> {
        self.loader.submit(range)?;
        self.submitted.push_back(range);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Waker};

    use super::super::{Pipeline, SliceSource};
    use super::*;

    fn range(start: u64) -> SampleRange {
        SampleRange { epoch: 0, start, len: 2 }
    }

    /// Returns the batches of 20 numbers, and counts the samples that are read.
    fn batches(threads: usize, prefetch: usize) -> (GrantedBatches<u64>, Arc<AtomicU64>) {
        let read = Arc::new(AtomicU64::new(0));
        let count = read.clone();
        let source = SliceSource::new("numbers", (0..20).collect::<Vec<u64>>());
        let pipeline = Pipeline::new(source).batch(2).threads(threads).prefetch(prefetch);
        let pipeline = pipeline.map(move |number| {
            count.fetch_add(1, Ordering::Relaxed);
            number
        });
        (GrantedBatches::new(pipeline.loader().unwrap()), read)
    }

    #[test]
    fn a_batch_that_was_read_ahead_is_not_read_again() {
        let (mut batches, read) = batches(1, 2);
        for start in [0, 2, 4, 6] {
            let batch = batches.blocking_load(range(start), Some(range(start + 2))).unwrap();
            assert_eq!(batch.samples, [start, start + 1]);
        }
        drop(batches);
        assert!(read.load(Ordering::Relaxed) <= 10, "each once, and the last ahead");
    }

    #[test]
    fn a_batch_that_another_worker_is_granted_is_discarded() {
        let (mut batches, _) = batches(1, 4);
        batches.blocking_load(range(0), Some(range(2))).unwrap();
        let batch = batches.blocking_load(range(8), Some(range(10))).unwrap();
        assert_eq!((batch.samples, batches.wasted()), (vec![8, 9], 1));
        let batch = batches.blocking_load(range(10), None).unwrap();
        assert_eq!((batch.samples, batches.wasted()), (vec![10, 11], 1));
    }

    #[test]
    fn a_dropped_future_does_not_pass_its_batch_for_another() {
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock().unwrap();
        let source = SliceSource::new("numbers", (0..20).collect::<Vec<u64>>());
        let waits = gate.clone();
        let pipeline = Pipeline::new(source).batch(2).threads(1).prefetch(2).map(move |number| {
            drop(waits.lock());
            number
        });
        let mut batches = GrantedBatches::new(pipeline.loader().unwrap());
        {
            let mut load = pin!(batches.load(range(0), None));
            let mut context = Context::from_waker(Waker::noop());
            assert!(load.as_mut().poll(&mut context).is_pending());
        }
        drop(closed);
        let batch = batches.blocking_load(range(4), None).unwrap();
        assert_eq!((batch.samples, batches.wasted()), (vec![4, 5], 1));
    }

    #[test]
    fn nothing_is_read_ahead_without_threads_or_room() {
        for (threads, prefetch) in [(0, 4), (1, 1)] {
            let (mut batches, read) = batches(threads, prefetch);
            for start in [0, 6] {
                batches.blocking_load(range(start), Some(range(start + 2))).unwrap();
            }
            assert_eq!((read.load(Ordering::Relaxed), batches.wasted()), (4, 0));
        }
    }

    #[test]
    fn a_range_of_other_data_is_refused_and_the_next_is_read() {
        let (mut batches, _) = batches(1, 2);
        let error = batches.blocking_load(range(20), None).unwrap_err();
        assert!(matches!(error, DataError::Range { .. }), "{error}");
        assert_eq!(batches.blocking_load(range(18), None).unwrap().samples, [18, 19]);
    }
}
