//! Reproducible random numbers: the SplitMix64 sequence of Steele, Lea and Flood, 2014.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A random sequence that follows from its seed.
#[derive(Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// Returns a seed that differs from run to run.
    pub(crate) fn any_seed() -> u64 {
        RandomState::new().build_hasher().finish()
    }

    /// Draws a number in `0..bound`. The bias of the remainder does not matter here.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    /// Returns true once in `times`.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
