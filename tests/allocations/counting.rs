//! Allocations, counted for the thread that makes them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whose thread it is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    /// Not known yet.
    New,
    /// The caller's, or the session's.
    Worker,
    Server,
    /// Anything else: the harness, other tests.
    Other,
}

/// Allocations of the two sides while they are counted.
static COUNTED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Held by the test that counts: all count together.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits until no other test counts; the caller's thread is a worker's from then on.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    SIDE.set(Side::Worker);
    alone
}

/// Whether allocations are counted.
static ARMED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SIDE: Cell<Side> = const { Cell::new(Side::New) };
}

struct Counting;

// SAFETY: every call is handed on to the system's allocator as it is; what is done beside it allocates
// nothing that is not handed on in turn.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
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

fn count() {
    if ARMED.load(Ordering::Relaxed) == 0 {
        return;
    }
    // A thread that ends has no side any more.
    let _ = SIDE.try_with(|side| {
        if side.get() == Side::New {
            // Asking for the name may allocate: that is not counted.
            side.set(Side::Other);
            side.set(match std::thread::current().name() {
                Some(name) if name.starts_with("worker-") => Side::Worker,
                Some(name) if name.starts_with("ps-") => Side::Server,
                _ => Side::Other,
            });
        }
        match side.get() {
            Side::Worker => _ = COUNTED[0].fetch_add(1, Ordering::Relaxed),
            Side::Server => _ = COUNTED[1].fetch_add(1, Ordering::Relaxed),
            Side::New | Side::Other => {}
        }
    });
}

/// Checks that allocations are seen on both sides, where there are some.
pub(crate) fn seen<R>(run: impl FnOnce() -> R) -> R {
    COUNTED.iter().for_each(|counted| counted.store(0, Ordering::Relaxed));
    ARMED.store(1, Ordering::SeqCst);
    let result = run();
    ARMED.store(0, Ordering::SeqCst);
    let counts = [0, 1].map(|side| COUNTED[side].load(Ordering::Relaxed));
    assert!(counts.iter().all(|&count| count > 0), "none seen: {counts:?}");
    result
}

/// What worker and servers allocate while a step is taken so many times, for each. Again if it is something,
/// a few times: what is kept grows to its end, and what a step takes is taken in all of them.
pub(crate) fn counted(steps: usize, mut step: impl FnMut()) -> [f64; 2] {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..ROUNDS_MAX {
        COUNTED.iter().for_each(|counted| counted.store(0, Ordering::Relaxed));
        ARMED.store(1, Ordering::SeqCst);
        (0..steps).for_each(|_| step());
        ARMED.store(0, Ordering::SeqCst);
        let counts = [0, 1].map(|side| COUNTED[side].load(Ordering::Relaxed) as f64 / steps as f64);
        if counts.iter().sum::<f64>() < least.iter().sum::<f64>() {
            least = counts;
        }
        if least.iter().all(|&count| count <= ONCE_IN_A_WHILE) {
            break;
        }
    }
    least
}

/// Steps that fill most of what is kept; rounds that are counted fill the rest.
pub(crate) const WARM_UP: usize = 25;

/// How often steps are counted at the most.
const ROUNDS_MAX: usize = 5;

/// What is kept may have to grow once more, when threads meet as they have not met before.
pub(crate) const ONCE_IN_A_WHILE: f64 = 0.01;
