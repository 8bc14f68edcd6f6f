//! [`LoaderThreads`]: threads that read batches, which are taken in the order of their ranges.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, JoinHandle};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use pushpull_common::data_set::SampleRange;

use super::batch_reader::BatchReader;
use super::{Batch, DataError};

/// Threads that read batches.
///
/// Invariants:
/// - The ranges under way are numbered without a gap: `expected.len()` of them, from `first`.
/// - There are at most as many as either channel has places, so no thread waits to send.
/// - A number is answered exactly once: a thread catches every panic of a read.
///
/// Dropping it joins the threads. Each finishes at most the sample that it reads.
pub(super) struct LoaderThreads<T> {
    reader: Arc<BatchReader<T>>,
    /// `None` once the threads are to end.
    orders: Option<Sender<LoadOrder>>,
    answers: Receiver<LoadedBatch<T>>,
    /// The batches of the ranges under way, as far as they have been received.
    expected: VecDeque<Option<Result<Batch<T>, DataError>>>,
    /// The number of the first of them.
    first: u64,
    signals: Arc<LoaderSignals>,
    threads: Vec<JoinHandle<()>>,
}

/// A range to read, with its number.
struct LoadOrder {
    number: u64,
    range: SampleRange,
}

/// The outcome of an order, with its number.
struct LoadedBatch<T> {
    number: u64,
    batch: Result<Batch<T>, DataError>,
}

/// The state that the threads and the caller share beside the channels.
#[derive(Default)]
struct LoaderSignals {
    /// Tells the threads to end.
    is_stopped: AtomicBool,
    /// The task that waits for an answer.
    waker: Mutex<Option<Waker>>,
}

impl<T: Send + 'static> LoaderThreads<T> {
    /// Starts `threads` threads for at most `ranges_max` ranges under way.
    pub(super) fn start(
        reader: BatchReader<T>,
        threads: usize,
        ranges_max: usize,
    ) -> Result<LoaderThreads<T>, DataError> {
        let (orders, received) = bounded(ranges_max);
        let (answer, answers) = bounded(ranges_max);
        // If a thread does not start, dropping this ends those before it.
        let mut started = LoaderThreads {
            reader: Arc::new(reader),
            orders: Some(orders),
            answers,
            expected: VecDeque::new(),
            first: 0,
            signals: Arc::default(),
            threads: Vec::with_capacity(threads),
        };
        for _ in 0..threads {
            let received = received.clone();
            let answer = answer.clone();
            let reader = started.reader.clone();
            let signals = started.signals.clone();
            let run = move || run(&reader, &received, &answer, &signals);
            let thread = Builder::new().name("pushpull-data".to_owned()).spawn(run);
            let data_set = || started.reader.name();
            started
                .threads
                .push(thread.map_err(|source| DataError::Thread { data_set: data_set(), source })?);
        }
        Ok(started)
    }
}

impl<T> LoaderThreads<T> {
    /// The reader of all threads.
    pub(super) fn reader(&self) -> &BatchReader<T> {
        &self.reader
    }

    /// The number of ranges under way.
    pub(super) fn pending(&self) -> usize {
        self.expected.len()
    }

    /// Has a range read. The caller keeps the number of ranges under way below their maximum.
    pub(super) fn submit(&mut self, range: SampleRange) -> Result<(), DataError> {
        let number = self.first + self.expected.len() as u64;
        let sent = self.orders.as_ref().is_some_and(|orders| {
            // A full channel is excluded by the maximum.
            orders.try_send(LoadOrder { number, range }).is_ok()
        });
        if !sent {
            return Err(self.stopped());
        }
        self.expected.push_back(None);
        Ok(())
    }

    /// Waits for the first batch under way; `None` if there is none.
    pub(super) fn blocking_take(&mut self) -> Option<Result<Batch<T>, DataError>> {
        loop {
            if let Some(batch) = self.expected.front_mut()?.take() {
                return Some(self.pop(batch));
            }
            match self.answers.recv() {
                Ok(answer) => self.keep(answer),
                Err(_) => return Some(self.pop(Err(self.stopped()))),
            }
        }
    }

    /// Polls for the first batch under way; `None` if there is none.
    pub(super) fn poll_take(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Batch<T>, DataError>>> {
        let mut is_registered = false;
        loop {
            let Some(front) = self.expected.front_mut() else { return Poll::Ready(None) };
            if let Some(batch) = front.take() {
                return Poll::Ready(Some(self.pop(batch)));
            }
            match self.answers.try_recv() {
                Ok(answer) => self.keep(answer),
                Err(TryRecvError::Disconnected) => {
                    return Poll::Ready(Some(self.pop(Err(self.stopped()))));
                }
                Err(TryRecvError::Empty) if is_registered => return Poll::Pending,
                // An answer that comes before the registration wakes nobody: receive again.
                Err(TryRecvError::Empty) => {
                    self.signals.register(context.waker());
                    is_registered = true;
                }
            }
        }
    }

    fn pop(&mut self, batch: Result<Batch<T>, DataError>) -> Result<Batch<T>, DataError> {
        self.expected.pop_front();
        self.first += 1;
        batch
    }

    fn keep(&mut self, answer: LoadedBatch<T>) {
        let place = answer.number.checked_sub(self.first);
        let place = place.and_then(|place| self.expected.get_mut(place as usize));
        if let Some(place) = place {
            *place = Some(answer.batch);
        }
    }

    fn stopped(&self) -> DataError {
        DataError::Stopped { data_set: self.reader.name() }
    }
}

impl<T> Drop for LoaderThreads<T> {
    fn drop(&mut self) {
        self.signals.is_stopped.store(true, Ordering::Relaxed);
        // A thread that waits for an order wakes.
        self.orders = None;
        for thread in self.threads.drain(..) {
            // The panic of a thread has nobody left who could handle it.
            let _ = thread.join();
        }
    }
}

impl LoaderSignals {
    fn register(&self, waker: &Waker) {
        let mut registered = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        match registered.as_mut() {
            Some(registered) => registered.clone_from(waker),
            None => *registered = Some(waker.clone()),
        }
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Reads ranges until there are no more, or the loader stops.
fn run<T>(
    reader: &BatchReader<T>,
    orders: &Receiver<LoadOrder>,
    answers: &Sender<LoadedBatch<T>>,
    signals: &LoaderSignals,
) {
    while let Ok(LoadOrder { number, range }) = orders.recv() {
        if signals.is_stopped.load(Ordering::Relaxed) {
            return;
        }
        let batch = reader.read(range, &signals.is_stopped);
        if answers.send(LoadedBatch { number, batch }).is_err() {
            return;
        }
        signals.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc;
    use std::time::Duration;

    use pushpull_common::data_set::DataSet;

    use super::super::{Source, SourceError};
    use super::*;

    /// Stops a test that hangs.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A source whose samples wait for a permit each.
    struct SlowSource {
        entered: Mutex<mpsc::Sender<u64>>,
        permits: Mutex<mpsc::Receiver<()>>,
        returned: AtomicU64,
    }

    impl Source for SlowSource {
        type Sample = u64;

        fn name(&self) -> &str {
            "slow"
        }

        fn len(&self) -> u64 {
            100
        }

        fn get(&self, index: u64) -> Result<u64, SourceError> {
            self.entered.lock().unwrap().send(index).unwrap();
            self.permits.lock().unwrap().recv_timeout(LIMIT).map_err(SourceError::other)?;
            self.returned.fetch_add(1, Ordering::SeqCst);
            Ok(index)
        }
    }

    #[test]
    fn a_drop_waits_for_the_sample_that_is_read_and_no_longer() {
        let (entered, entries) = mpsc::channel();
        let (permit, permits) = mpsc::channel();
        let entered = Mutex::new(entered);
        let permits = Mutex::new(permits);
        let returned = AtomicU64::new(0);
        let source = Arc::new(SlowSource { entered, permits, returned });
        let data_set = DataSet::new("slow", 100, 50).unwrap();
        let reader = BatchReader { samples: Arc::new(source.clone()), data_set };
        let mut threads = LoaderThreads::start(reader, 2, 3).unwrap();
        for start in [0, 50, 20] {
            threads.submit(SampleRange { epoch: 0, start, len: 50 }).unwrap();
        }
        let mut first = [(); 2].map(|()| entries.recv_timeout(LIMIT).unwrap());
        first.sort_unstable();
        assert_eq!(first, [0, 50], "both threads read");

        let signals = threads.signals.clone();
        let dropping = std::thread::spawn(move || drop(threads));
        while !signals.is_stopped.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        assert!(!dropping.is_finished(), "neither sample has been read");
        (0..100).for_each(|_| permit.send(()).unwrap());
        dropping.join().unwrap();
        assert_eq!(source.returned.load(Ordering::SeqCst), 2, "one sample a thread");
        assert!(entries.try_recv().is_err());
        assert_eq!(Arc::strong_count(&source), 1);
    }

    #[test]
    fn the_end_of_all_threads_is_an_error_of_every_batch() {
        let source = super::super::SliceSource::new("some", (0..9).collect::<Vec<u32>>());
        let data_set = DataSet::new("some", 9, 1).unwrap();
        let reader = BatchReader { samples: Arc::new(source), data_set };
        let mut threads = LoaderThreads::start(reader, 2, 4).unwrap();
        threads.signals.is_stopped.store(true, Ordering::Relaxed);
        let expected = "cannot load \"some\": the loader has stopped";
        for start in 0..2 {
            // A thread may have ended before.
            let _ = threads.submit(SampleRange { epoch: 0, start, len: 1 });
        }
        while let Some(batch) = threads.blocking_take() {
            assert_eq!(batch.unwrap_err().to_string(), expected);
        }
        let refused = threads.submit(SampleRange { epoch: 0, start: 2, len: 1 });
        assert_eq!(refused.unwrap_err().to_string(), expected);
        assert!(threads.poll_take(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}
