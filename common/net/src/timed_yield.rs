//! [`timed_yield`]: offers the processor to other threads, and tells whether one took it.

use std::time::{Duration, Instant};

/// Lets another thread run on this processor, if one waits for it. Returns how long that took.
pub fn timed_yield() -> Duration {
    let begun = Instant::now();
    std::thread::yield_now();
    begun.elapsed()
}
