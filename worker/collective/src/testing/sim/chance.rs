//! [`SimChance`]: reproducible random choices.

use std::time::Duration;

/// The SplitMix64 sequence of Steele, Lea and Flood, 2014.
#[derive(Clone, Debug)]
pub(super) struct SimChance(u64);

impl SimChance {
    /// Creates the stream of one consumer of a seed.
    pub(super) fn new(seed: u64, consumer: u64) -> SimChance {
        let mut chance = SimChance(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ consumer);
        SimChance(chance.next())
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number from `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Returns true with this probability, in percent.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// Draws a duration, in microseconds.
    pub(super) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low, high))
    }
}
