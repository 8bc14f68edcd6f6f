//! Counts bulk allocations by the thread that makes them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An allocation of this many bytes counts: a steady step has pooled every larger buffer.
const BULK_BYTES: usize = 4 << 10;

/// The side that a thread belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    /// The side is not determined yet.
    New,
    /// The caller's thread or the session's.
    Worker,
    Server,
    /// Any other: the harness, other tests.
    Other,
}

/// All allocations of the two sides while they are counted, and those of at least [`BULK_BYTES`].
static ALLOCATIONS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
static BULK: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Held by the test that counts: the counters are global.
static COUNTING_LOCK: Mutex<()> = Mutex::new(());

/// Waits until no other test counts, and marks the caller's thread as a worker's.
pub(crate) fn exclusive() -> MutexGuard<'static, ()> {
    let exclusive = COUNTING_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    SIDE.set(Side::Worker);
    exclusive
}

/// Whether allocations are counted.
static ARMED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SIDE: Cell<Side> = const { Cell::new(Side::New) };
}

struct Counting;

// SAFETY: every call is passed to the system's allocator unchanged. Counting allocates only through
// this allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) {
    if ARMED.load(Ordering::Relaxed) == 0 {
        return;
    }
    // A thread that is ending has lost its thread-local values.
    let _ = SIDE.try_with(|side| {
        if side.get() == Side::New {
            // Reading the name may allocate, which is not counted.
            side.set(Side::Other);
            side.set(match std::thread::current().name() {
                Some(name) if name.starts_with("worker-") => Side::Worker,
                Some(name) if name.starts_with("ps-") => Side::Server,
                _ => Side::Other,
            });
        }
        let side = match side.get() {
            Side::Worker => 0,
            Side::Server => 1,
            Side::New | Side::Other => return,
        };
        ALLOCATIONS[side].fetch_add(1, Ordering::Relaxed);
        if bytes >= BULK_BYTES {
            BULK[side].fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Runs a function that allocates on both sides, and checks that the allocator counts it.
pub(crate) fn check_counting<R>(run: impl FnOnce() -> R) -> R {
    ALLOCATIONS.iter().for_each(|check_counting| check_counting.store(0, Ordering::Relaxed));
    ARMED.store(1, Ordering::SeqCst);
    let result = run();
    ARMED.store(0, Ordering::SeqCst);
    let counts = [0, 1].map(|side| ALLOCATIONS[side].load(Ordering::Relaxed));
    assert!(counts.iter().all(|&count| count > 0), "no allocation was counted: {counts:?}");
    result
}

/// Returns the bulk allocations of worker and servers per step: the least of at most [`ROUNDS_MAX`]
/// rounds. A pool may still grow in one round; an allocation that every step makes occurs in all of
/// them.
pub(crate) fn counted(steps: usize, mut step: impl FnMut()) -> [f64; 2] {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..ROUNDS_MAX {
        BULK.iter().for_each(|counted| counted.store(0, Ordering::Relaxed));
        ARMED.store(1, Ordering::SeqCst);
        (0..steps).for_each(|_| step());
        ARMED.store(0, Ordering::SeqCst);
        let counts = [0, 1].map(|side| BULK[side].load(Ordering::Relaxed) as f64 / steps as f64);
        if counts.iter().sum::<f64>() < least.iter().sum::<f64>() {
            least = counts;
        }
        if least.iter().all(|&count| count <= RARE) {
            break;
        }
    }
    least
}

/// Steps that fill the pools before any is counted.
pub(crate) const WARM_UP: usize = 25;

/// The most rounds in which steps are counted.
const ROUNDS_MAX: usize = 5;

/// The bulk allocations per step that are tolerated: a pool grows once more when threads interleave
/// in a new order.
pub(crate) const RARE: f64 = 0.01;
