//! The state of a placement strategy: the next turn, and the load of each bin.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::PlacementStrategy;

/// Draws bins (tasks, or shards of a task) by one of the built-in strategies.
#[derive(Clone, Debug)]
pub(super) struct Picker {
    strategy: PlacementStrategy,
    drawn: u64,
    loads: Loads,
}

impl Picker {
    /// Creates a picker for a number of empty bins, at least one.
    pub(super) fn new(strategy: PlacementStrategy, bins: usize) -> Picker {
        Picker { strategy, drawn: 0, loads: Loads::new(bins) }
    }

    /// Returns a picker for parts of another kind: of equally full bins, the lightest of the
    /// earlier kinds comes first.
    pub(super) fn next_kind(&self) -> Picker {
        Picker { strategy: self.strategy.clone(), drawn: 0, loads: self.loads.next_kind() }
    }

    /// Draws the next bin; the result is below the number of bins.
    ///
    /// A custom strategy chooses by itself; here it only takes a turn, as in a round robin.
    pub(super) fn draw(&mut self, hash: u64) -> usize {
        let bins = self.loads.bytes.len() as u64;
        let position = match self.strategy {
            PlacementStrategy::Balanced | PlacementStrategy::GreedyBytes => {
                return self.loads.lightest();
            }
            PlacementStrategy::HashName => hash % bins,
            PlacementStrategy::RoundRobin | PlacementStrategy::Custom(_) => self.drawn % bins,
        };
        self.drawn = self.drawn.wrapping_add(1);
        position as usize
    }

    /// Adds the bytes of a part to a bin.
    pub(super) fn add(&mut self, position: usize, bytes: u64) {
        self.loads.add(position, bytes);
    }
}

/// The bytes of each bin, and the bins in order of bytes.
///
/// The order makes it cheap to find the lightest of thousands of bins.
#[derive(Clone, Debug)]
struct Loads {
    bytes: Vec<u64>,
    /// The bytes of parts of earlier kinds, which decide between equally full bins.
    earlier: Vec<u64>,
    order: BTreeSet<(u64, u64, usize)>,
}

impl Loads {
    fn new(bins: usize) -> Loads {
        Loads::after(vec![0; bins])
    }

    fn after(earlier: Vec<u64>) -> Loads {
        let order = earlier.iter().enumerate().map(|(bin, &bytes)| (0, bytes, bin)).collect();
        Loads { bytes: vec![0; earlier.len()], earlier, order }
    }

    fn next_kind(&self) -> Loads {
        let sums = self.bytes.iter().zip(&self.earlier);
        Loads::after(sums.map(|(bytes, earlier)| bytes.saturating_add(*earlier)).collect())
    }

    fn lightest(&self) -> usize {
        self.order.first().map_or(0, |&(.., bin)| bin)
    }

    fn add(&mut self, bin: usize, bytes: u64) {
        let Some(load) = self.bytes.get_mut(bin) else {
            return;
        };
        self.order.remove(&(*load, self.earlier[bin], bin));
        *load = load.saturating_add(bytes);
        self.order.insert((*load, self.earlier[bin], bin));
    }
}

/// Returns two independent hashes of a part: one to choose the task, one the shard within it.
pub(super) fn name_hashes(name: &str, part: u32) -> (u64, u64) {
    let mut hasher = Sha256::new();
    hasher.update(b"pushpull placement 1\0");
    hasher.update(part.to_le_bytes());
    hasher.update(name.as_bytes());
    let digest: [u8; 32] = hasher.finalize().into();
    let word = |start| u64::from_le_bytes(std::array::from_fn(|byte| digest[start + byte]));
    (word(0), word(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_and_hashes_wrap_around() {
        let mut picker = Picker::new(PlacementStrategy::RoundRobin, 3);
        assert_eq!([0; 4].map(|hash| picker.draw(hash)), [0, 1, 2, 0]);
        let mut picker = Picker::new(PlacementStrategy::HashName, 3);
        assert_eq!([7, 3, 5].map(|hash| picker.draw(hash)), [1, 0, 2]);
    }

    #[test]
    fn greedy_bytes_draws_the_lightest_bin() {
        let mut picker = Picker::new(PlacementStrategy::GreedyBytes, 3);
        let mut bins = Vec::new();
        for bytes in [10, 3, 5, 0, 1, 9, 2] {
            bins.push(picker.draw(0));
            picker.add(bins[bins.len() - 1], bytes);
        }
        assert_eq!(bins, [0, 1, 2, 1, 1, 1, 2]);
        picker.add(2, u64::MAX);
        assert_eq!(picker.loads.bytes[2], u64::MAX);
        picker.add(9, 1);
    }

    #[test]
    fn parts_of_another_kind_start_on_the_lightest_bin() {
        let mut picker = Picker::new(PlacementStrategy::Balanced, 3);
        for (bin, bytes) in [(0, 7), (1, 3), (2, 5)] {
            picker.add(bin, bytes);
        }
        for expected in [[1, 2, 0], [1, 2, 0]] {
            picker = picker.next_kind();
            for bin in expected {
                assert_eq!(picker.draw(0), bin);
                picker.add(bin, 10);
            }
        }
    }

    /// Must not change: it would move the variables of every cluster placed by name.
    #[test]
    fn hashes_are_stable() {
        let expected = (4_222_708_473_782_727_499, 12_153_217_713_332_493_379);
        assert_eq!(name_hashes("w", 0), expected);
        assert_ne!(name_hashes("w", 0), name_hashes("w", 1));
    }
}
