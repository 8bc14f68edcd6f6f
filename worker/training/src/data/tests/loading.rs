//! Loaders: order, bounds, errors, panics, wakers and the end.

use std::panic::panic_any;
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use pushpull_common::error::Chain;

use super::test_source::TestSource;
use crate::data::{
    Batch, DataError, Loader, Permutation, Pipeline, SampleRange, SliceSource, Source, SourceError,
};

/// Stops a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn range(start: u64, len: u32) -> SampleRange {
    SampleRange { epoch: 0, start, len }
}

/// A source of 100 samples with a gate: `get` of sample 0 announces itself, and waits for a permit.
fn gated() -> (TestSource, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (entered, entries) = mpsc::channel();
    let (permit, permits) = mpsc::channel();
    let entered = Mutex::new(entered);
    let permits = Mutex::new(permits);
    let source = TestSource::new(100, move |index| {
        if index == 0 {
            // A test that has seen enough no longer receives.
            let _ = entered.lock().unwrap().send(());
            permits.lock().unwrap().recv_timeout(LIMIT).map_err(SourceError::other)?;
        }
        Ok(index)
    });
    (source, entries, permit)
}

fn taken(loader: &mut Loader<u64>) -> Vec<u64> {
    loader.blocking_take().expect("a batch is under way").unwrap().samples
}

#[test]
fn batches_come_in_the_order_of_submission() {
    let (source, _entries, permit) = gated();
    let (last, last_read) = mpsc::channel();
    let pipeline = Pipeline::new(source).batch(10).threads(2).prefetch(4).map(move |sample| {
        if sample == 39 {
            last.send(()).unwrap();
        }
        sample
    });
    let mut loader = pipeline.loader().unwrap();
    for start in [0, 10, 20, 30] {
        loader.submit(range(start, 10)).unwrap();
    }
    // The second thread reads all that follows while the first waits.
    last_read.recv_timeout(LIMIT).unwrap();
    permit.send(()).unwrap();
    for start in [0, 10, 20, 30] {
        assert_eq!(taken(&mut loader), (start..start + 10).collect::<Vec<u64>>());
    }
    assert!(loader.blocking_take().is_none());
    assert!(poll(&mut loader, Waker::noop()).is_ready());
}

#[test]
fn threads_read_at_the_same_time() {
    let meeting = Barrier::new(3);
    let source = TestSource::new(3, move |index| {
        meeting.wait();
        Ok(index)
    });
    let mut loader = Pipeline::new(source).threads(3).prefetch(3).loader().unwrap();
    (0..3).for_each(|start| loader.submit(range(start, 1)).unwrap());
    assert_eq!([0, 1, 2].map(|_| taken(&mut loader)[0]), [0, 1, 2]);
}

#[test]
fn without_threads_the_caller_reads_when_it_takes() {
    let readers: Arc<Mutex<Vec<ThreadId>>> = Arc::default();
    let source = TestSource::new(8, {
        let readers = readers.clone();
        move |index| {
            readers.lock().unwrap().push(std::thread::current().id());
            Ok(index)
        }
    });
    let mut loader = Pipeline::new(source).batch(2).threads(0).loader().unwrap();
    loader.submit(range(2, 2)).unwrap();
    loader.submit(range(0, 2)).unwrap();
    assert!(readers.lock().unwrap().is_empty());
    assert_eq!(taken(&mut loader), [2, 3]);
    assert_eq!(*readers.lock().unwrap(), [std::thread::current().id(); 2]);
    assert!(matches!(poll(&mut loader, Waker::noop()), Poll::Ready(Some(Ok(_)))));
    assert!(matches!(poll(&mut loader, Waker::noop()), Poll::Ready(None)));
}

#[test]
fn the_order_of_an_epoch_is_its_permutation() {
    let source = TestSource::new(50, Ok);
    let mut loader = Pipeline::new(source).shuffle(7).repeat().batch(50).loader().unwrap();
    for epoch in [0, 1, 1 << 40] {
        loader.submit(SampleRange { epoch, start: 5, len: 20 }).unwrap();
        let batch = loader.blocking_take().unwrap().unwrap();
        let order = Permutation::new(7, epoch, 50);
        let expected: Vec<u64> = (5..25).map(|position| order.index(position).unwrap()).collect();
        assert_eq!((batch.len(), batch.is_empty(), batch.range.epoch), (20, false, epoch));
        assert_eq!((&batch.indices, &batch.samples), (&expected, &expected));
    }
}

#[test]
fn no_more_batches_are_under_way_than_prefetched() {
    for threads in [0, 1, 5] {
        let source = TestSource::new(10, Ok);
        let pipeline = Pipeline::new(source).threads(threads).prefetch(3);
        let mut loader = pipeline.loader().unwrap();
        for start in 0..3 {
            assert!(loader.has_room());
            loader.submit(range(start, 1)).unwrap();
        }
        assert!(!loader.has_room());
        let error = loader.submit(range(3, 1)).unwrap_err().to_string();
        assert_eq!(error, "cannot submit a range of \"test\": 3 batches are not taken yet");
        assert_eq!((loader.pending(), taken(&mut loader)), (3, vec![0]));
        loader.submit(range(9, 1)).unwrap();
        assert_eq!([1, 2, 9].map(|_| taken(&mut loader)[0]), [1, 2, 9]);
    }
}

#[test]
fn ranges_outside_of_the_data_are_refused() {
    let pipeline = Pipeline::new(TestSource::new(10, Ok)).batch(4).epochs(2);
    let mut loader = pipeline.loader().unwrap();
    let table = [
        (0, 0, 0),
        (0, 0, 5),
        (0, 8, 3),
        (0, 10, 1),
        (2, 0, 4),
        (u64::MAX, 0, 4),
        (0, u64::MAX, 4),
        (0, u64::MAX - 3, 4),
    ];
    for (epoch, start, len) in table {
        let error = loader.submit(SampleRange { epoch, start, len }).unwrap_err().to_string();
        let expected = format!(
            "cannot read {len} samples of \"test\" from {start} in epoch {epoch}: it has 10 \
             samples in batches of 4, and 2 epochs"
        );
        assert_eq!(error, expected);
    }
    assert_eq!(loader.pending(), 0);
    // Ranges may begin anywhere: returned ranges are granted again as they are.
    loader.submit(SampleRange { epoch: 1, start: 7, len: 3 }).unwrap();
    assert_eq!(taken(&mut loader), [7, 8, 9]);
}

#[test]
fn settings_are_checked_at_the_start() {
    let pipeline = || Pipeline::new(TestSource::new(10, Ok));
    let text = |pipeline: Pipeline<u64>| pipeline.loader().unwrap_err().to_string();
    let table = [
        (pipeline().batch(11), "cannot declare \"test\" with batches of 11: it has 10 samples"),
        (pipeline().batch(0), "cannot declare \"test\" with batches of 0: it has 10 samples"),
        (
            pipeline().epochs(0),
            "cannot declare \"test\" with 0 epochs of 10 batches: 1 to 72057594037927936 are countable",
        ),
        (
            pipeline().prefetch(0),
            "cannot load \"test\" with a prefetch of 0: 1 to 65536 batches are kept",
        ),
        (
            pipeline().prefetch(usize::MAX),
            "cannot load \"test\" with a prefetch of 18446744073709551615: 1 to 65536 batches are \
             kept",
        ),
        (
            pipeline().threads(usize::MAX),
            "cannot load \"test\" with 18446744073709551615 threads: the limit is 1024",
        ),
    ];
    for (pipeline, expected) in table {
        assert_eq!(text(pipeline), expected);
    }
    let empty = Pipeline::new(SliceSource::new("none", Vec::<u8>::new()));
    let expected = "cannot declare \"none\" with batches of 1: it has 0 samples";
    assert_eq!(empty.loader().unwrap_err().to_string(), expected);
    let unnamed = Pipeline::new(SliceSource::new("", [1]));
    let expected = "cannot declare the data set \"\": a name has 1 to 128 bytes";
    assert_eq!(unnamed.loader().unwrap_err().to_string(), expected);
}

#[test]
fn a_pipeline_declares_its_data() {
    let pipeline = Pipeline::new(Arc::new(TestSource::new(10, Ok)));
    let set = pipeline.clone().data_set().unwrap();
    assert_eq!((set.name(), set.samples(), set.batch()), ("test", 10, 1));
    assert_eq!((set.seed(), set.epoch_limit(), set.drops_remainder()), (None, Some(1), false));
    // The functions that follow change none of the settings.
    let mapped = pipeline.shuffle(3).batch(4).repeat().drop_remainder(true).threads(0).prefetch(1);
    let mapped = mapped
        .map(|sample| sample as f32)
        .try_map(|sample| Ok::<_, SourceError>(format!("{sample:.1}")));
    let set = mapped.data_set().unwrap();
    assert_eq!((set.seed(), set.epoch_limit(), set.drops_remainder()), (Some(3), None, true));
    assert_eq!(set.batch(), 4);
    let mut loader = mapped.loader().unwrap();
    loader.submit(range(0, 1)).unwrap();
    assert!(!loader.has_room());
    let Batch { samples, indices, .. } = loader.blocking_take().unwrap().unwrap();
    assert_eq!(samples, [format!("{}.0", indices[0])]);
    assert_eq!(
        format!("{mapped:?}"),
        "Pipeline { name: \"test\", samples: 10, seed: Some(3), batch: 4, epochs: None, \
         drop_remainder: true, threads: 0, prefetch: 1 }"
    );
}

/// A value whose drop panics, thrown as a panic.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the drop of a bomb");
    }
}

#[test]
fn errors_and_panics_name_the_sample_and_fail_one_batch() {
    let faulty = TestSource::new(20, |index| match index {
        3 => Err(SourceError::other("no signal")),
        5 => panic!("at {index}"),
        7 => panic!("a fixed text"),
        9 => panic_any(Bomb),
        index => Ok(index),
    });
    let faulty = Pipeline::new(faulty).batch(2).epochs(5).prefetch(10);
    let faulty = faulty.try_map(|sample| match sample {
        11 => Err("too dark"),
        13 => panic!("map {sample}"),
        sample => Ok(sample),
    });
    let table = [
        (3, "cannot read sample 3 of \"test\" in epoch 4: no signal"),
        (5, "cannot load sample 5 of \"test\" in epoch 4: a panic: at 5"),
        (7, "cannot load sample 7 of \"test\" in epoch 4: a panic: a fixed text"),
        (9, "cannot load sample 9 of \"test\" in epoch 4: a panic: without a message"),
        (11, "cannot map sample 11 of \"test\" in epoch 4: too dark"),
        (13, "cannot load sample 13 of \"test\" in epoch 4: a panic: map 13"),
    ];
    for threads in [0, 1, 3] {
        let mut loader = faulty.clone().threads(threads).loader().unwrap();
        for batch in 0..10 {
            loader.submit(SampleRange { epoch: 4, start: 2 * batch, len: 2 }).unwrap();
        }
        for batch in 0..10 {
            let found = loader.blocking_take().unwrap();
            let expected = table.iter().find(|(index, _)| index / 2 == batch);
            match expected {
                Some((_, expected)) => {
                    assert_eq!(Chain(&found.unwrap_err()).to_string(), *expected)
                }
                None => assert_eq!(found.unwrap().indices, [2 * batch, 2 * batch + 1]),
            }
        }
    }
}

#[test]
fn a_source_may_not_change_its_length() {
    let source = TestSource::new(10, Ok);
    let mut loader = Pipeline::new(source.clone()).batch(2).loader().unwrap();
    for (len, is_refused) in [(10, false), (9, true), (11, true), (10, false)] {
        source.set_len(len);
        loader.submit(range(0, 2)).unwrap();
        let batch = loader.blocking_take().unwrap();
        let expected = format!("cannot read \"test\": it had 10 samples at the start, now {len}");
        match is_refused {
            true => assert_eq!(batch.unwrap_err().to_string(), expected),
            false => assert_eq!(batch.unwrap().samples, [0, 1]),
        }
    }
    assert_eq!(loader.data_set().samples(), 10);
}

/// A source of any length: no memory may be reserved for samples that are not read yet.
#[test]
fn a_huge_batch_reserves_no_memory_before_it_is_read() {
    let source = TestSource::new(1 << 50, |_| Err(SourceError::other("far away")));
    let mut loader = Pipeline::new(source).batch(u32::MAX).loader().unwrap();
    loader.submit(range(0, u32::MAX)).unwrap();
    assert!(matches!(loader.blocking_take(), Some(Err(DataError::Source { index: 0, .. }))));
}

/// Sends its name when it is woken.
struct NamedWaker(&'static str, Mutex<mpsc::Sender<&'static str>>);

impl Wake for NamedWaker {
    fn wake(self: Arc<Self>) {
        // A waker may be woken after its test has ended.
        let _ = self.1.lock().unwrap().send(self.0);
    }
}

fn poll(loader: &mut Loader<u64>, waker: &Waker) -> Poll<Option<Result<Batch<u64>, DataError>>> {
    // Each call makes a future and drops it.
    std::pin::pin!(loader.take()).poll(&mut Context::from_waker(waker))
}

#[test]
fn the_task_that_polled_last_is_woken_and_a_dropped_future_loses_nothing() {
    let (source, entries, permit) = gated();
    let mut loader = Pipeline::new(source).batch(3).loader().unwrap();
    loader.submit(range(0, 3)).unwrap();
    entries.recv_timeout(LIMIT).unwrap();
    let (woken, wakes) = mpsc::channel();
    let waker = |name| Waker::from(Arc::new(NamedWaker(name, Mutex::new(woken.clone()))));
    assert!(poll(&mut loader, &waker("first")).is_pending());
    assert!(poll(&mut loader, &waker("second")).is_pending());
    permit.send(()).unwrap();
    assert_eq!(wakes.recv_timeout(LIMIT), Ok("second"));
    let Poll::Ready(Some(Ok(batch))) = poll(&mut loader, Waker::noop()) else {
        panic!("the batch was ready");
    };
    assert_eq!(batch.samples, [0, 1, 2]);
    assert!(matches!(poll(&mut loader, Waker::noop()), Poll::Ready(None)));
}

#[tokio::test]
async fn batches_can_be_awaited() {
    let source = TestSource::new(1000, Ok);
    let mut loader = Pipeline::new(source).batch(4).threads(2).prefetch(3).loader().unwrap();
    let mut starts = (0..1000).step_by(4);
    let mut seen = Vec::new();
    loop {
        while loader.has_room()
            && let Some(start) = starts.next()
        {
            loader.submit(range(start, 4)).unwrap();
        }
        match loader.take().await {
            Some(batch) => seen.extend(batch.unwrap().samples),
            None => break,
        }
    }
    assert!(seen.into_iter().eq(0..1000));
}

#[test]
fn an_idle_loader_ends_and_lets_its_source_go() {
    let source = Arc::new(TestSource::new(10, Ok));
    for threads in [0, 1, 4] {
        let pipeline = Pipeline::new(source.clone()).threads(threads).prefetch(4);
        let mut loader = pipeline.loader().unwrap();
        drop(pipeline);
        assert_eq!(source.len(), 10);
        for start in 0..4 {
            loader.submit(range(start, 1)).unwrap();
        }
        drop(loader);
        assert_eq!(Arc::strong_count(&source), 1, "{threads} threads");
    }
}
