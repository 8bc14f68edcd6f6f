//! Reproducible random choices: every choice of a run follows from its seed.
//!
//! Each consumer has its own stream, named by a label. A consumer that draws more, less or not at
//! all does not change what the others draw.

use std::time::Duration;

/// The SplitMix64 sequence of Steele, Lea and Flood, 2014.
#[derive(Clone, Debug)]
pub(crate) struct SimChance(u64);

impl SimChance {
    /// Returns the stream of one consumer of a seed. `who` is its label.
    pub(crate) fn of(seed: u64, who: &str) -> SimChance {
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
        SimChance(SimChance(seed ^ fnv(who)).next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Returns true with this probability, in percent.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// Draws a duration between two bounds in microseconds, both included.
    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low, high))
    }

    /// Draws a duration between two bounds in milliseconds, with a resolution of 1 us.
    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.micros(low * 1000, high * 1000)
    }

    /// Draws one element; `None` if there is none.
    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        if of.is_empty() { None } else { of.get((self.next() % of.len() as u64) as usize) }
    }

    /// Draws one of several named items; `None` if there is none.
    ///
    /// The item with the highest hash of draw and name is chosen. So the same draw chooses the same
    /// item whether or not other items, which it did not choose, are present.
    pub(crate) fn pick_named<T>(&mut self, of: impl Iterator<Item = (String, T)>) -> Option<T> {
        let draw = self.next();
        of.max_by_key(|(name, _)| SimChance(draw ^ fnv(name)).next()).map(|(_, one)| one)
    }
}

/// FNV-1a.
fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
