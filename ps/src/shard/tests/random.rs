//! A seeded random number generator, and the switches of random suites.

/// SplitMix64.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, or 0 if `limit` is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub(super) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Whether the suites run in full (`PUSHPULL_THOROUGH`) instead of on a sample.
pub(super) fn is_thorough() -> bool {
    std::env::var_os("PUSHPULL_THOROUGH").is_some()
}

/// Prints its seed if the test panics while this value is in scope.
pub(super) struct PrintSeedOnPanic(pub(super) u64);

impl Drop for PrintSeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {0}: repeat with PUSHPULL_SEED={0}", self.0);
        }
    }
}
