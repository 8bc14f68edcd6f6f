//! [`ThreadPool`]: threads that compute the parts of one operation at the same time.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use crossbeam_deque::{Injector, Steal};

use crate::error::ComputeError;

/// Elements of one part of an elementwise operation. The parts of a sum, and with them its
/// rounding, follow from this number alone.
pub(crate) const ELEMENTS_AT_ONCE: usize = 1 << 15;

/// Threads that compute the parts of one operation at the same time.
///
/// The calling thread computes parts too, so a pool of one thread starts none. Several threads may
/// call one pool at once.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    shared: Arc<PartQueue>,
    helpers: Vec<JoinHandle<()>>,
}

/// The parts that no thread has taken, and the signal that wakes the helpers for them.
#[derive(Debug, Default)]
struct PartQueue {
    parts: Injector<OperationPart>,
    calls: Mutex<PoolCalls>,
    called: Condvar,
}

#[derive(Debug, Default)]
struct PoolCalls {
    count: u64,
    ended: bool,
}

/// A part of an operation that is not finished.
#[derive(Debug)]
struct OperationPart {
    operation: Arc<ParallelOperation>,
    index: usize,
}

/// The shared state of one call of [`ThreadPool::run`], its parts included.
struct ParallelOperation {
    /// Valid while a part is unfinished.
    compute: *const (dyn Fn(usize) + Sync),
    unfinished: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

// SAFETY: `compute` points to a function that is `Sync`. The other fields are both by themselves.
unsafe impl Send for ParallelOperation {}
// SAFETY: As above.
unsafe impl Sync for ParallelOperation {}

impl ThreadPool {
    /// Starts a pool of this many threads, the caller's included.
    pub(crate) fn start(threads: usize) -> Result<ThreadPool, ComputeError> {
        let mut pool = ThreadPool { shared: Arc::default(), helpers: Vec::new() };
        for index in 1..threads {
            let shared = pool.shared.clone();
            let builder = thread::Builder::new().name(format!("pushpull-cpu-{index}"));
            let helper = builder.spawn(move || shared.help());
            let reason = |error: std::io::Error| error.to_string();
            let helper =
                helper.map_err(|error| ComputeError::Spawn { index, reason: reason(error) })?;
            pool.helpers.push(helper);
        }
        Ok(pool)
    }

    /// Returns the number of threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `compute` once for each index below `parts`, and returns after the last call. A panic
    /// of `compute` continues here, after the other parts.
    pub(crate) fn run(&self, parts: usize, compute: &(dyn Fn(usize) + Sync)) {
        if parts <= 1 || self.helpers.is_empty() {
            return (0..parts).for_each(compute);
        }
        // SAFETY: Only the lifetime changes. The function lives until this call returns, and the
        // loop below ends after the last use.
        let compute = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(
                compute,
            )
        };
        let operation = Arc::new(ParallelOperation {
            compute,
            unfinished: AtomicUsize::new(parts),
            panic: Mutex::new(None),
            caller: thread::current(),
        });
        for index in 1..parts {
            self.shared.parts.push(OperationPart { operation: operation.clone(), index });
        }
        self.shared.call();
        operation.compute(0);
        while operation.unfinished.load(Ordering::Acquire) > 0 {
            match self.shared.next() {
                Some(part) => part.operation.compute(part.index),
                None => thread::park(),
            }
        }
        let panic = operation.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `compute` with each chunk of `values` and its index. All chunks but the last have
    /// `length` elements.
    pub(crate) fn for_chunks<T: Send>(
        &self,
        values: &mut [T],
        length: usize,
        compute: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let chunks: Vec<_> = values.chunks_mut(length.max(1)).map(Mutex::new).collect();
        self.run(chunks.len(), &|index| {
            // No other call has this index.
            let mut chunk = chunks[index].lock().unwrap_or_else(PoisonError::into_inner);
            compute(index, &mut chunk);
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.calls.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.shared.called.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper does not panic.
            let _ = helper.join();
        }
    }
}

impl PartQueue {
    /// Wakes the helper threads for new parts.
    fn call(&self) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.count += 1;
        drop(calls);
        self.called.notify_all();
    }

    fn next(&self) -> Option<OperationPart> {
        loop {
            match self.parts.steal() {
                Steal::Success(part) => return Some(part),
                Steal::Empty => return None,
                Steal::Retry => {}
            }
        }
    }

    /// Computes parts until the pool ends.
    fn help(&self) {
        let mut seen = 0;
        loop {
            while let Some(part) = self.next() {
                part.operation.compute(part.index);
            }
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            while calls.count == seen && !calls.ended {
                calls = self.called.wait(calls).unwrap_or_else(PoisonError::into_inner);
            }
            if calls.ended {
                return;
            }
            seen = calls.count;
        }
    }
}

impl ParallelOperation {
    /// Computes an unfinished part, and counts it.
    fn compute(&self, index: usize) {
        // SAFETY: This part is unfinished, so `ThreadPool::run` has not returned, and the function
        // that it borrows is alive. It is not used after the count.
        let compute = unsafe { &*self.compute };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| compute(index))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.caller.unpark();
        }
    }
}

impl std::fmt::Debug for ParallelOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelOperation")
            .field("unfinished", &self.unfinished)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPool::start(threads).unwrap()
    }

    #[test]
    fn every_part_is_computed_once_on_any_number_of_threads() {
        for threads in 1..=5 {
            let pool = pool(threads);
            assert_eq!(pool.threads(), threads);
            for parts in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(parts, &|index| _ = counts[index].fetch_add(1, Ordering::Relaxed));
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn parts_are_computed_at_the_same_time() {
        let pool = pool(3);
        let all = Barrier::new(3);
        // A part returns only while two others run.
        pool.run(3, &|_| _ = all.wait());
    }

    #[test]
    fn several_threads_share_a_pool() {
        let pool = pool(2);
        thread::scope(|scope| {
            for caller in 0..4_u64 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        let mut values = vec![0; 37];
                        pool.for_chunks(&mut values, 5, |chunk, values| {
                            values.fill(caller + round + chunk as u64);
                        });
                        let expected = (0..37).map(|index| caller + round + index / 5);
                        assert!(values.into_iter().eq(expected));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_of_a_part_reaches_the_caller_after_the_other_parts() {
        let pool = pool(2);
        let computed = AtomicUsize::new(0);
        let run = || {
            pool.run(8, &|index| {
                assert_ne!(index, 5, "part 5 fails");
                computed.fetch_add(1, Ordering::Relaxed);
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        assert_eq!(computed.load(Ordering::Relaxed), 7);
        pool.run(8, &|_| _ = computed.fetch_add(1, Ordering::Relaxed));
        assert_eq!(computed.load(Ordering::Relaxed), 15, "the pool goes on");
    }
}
