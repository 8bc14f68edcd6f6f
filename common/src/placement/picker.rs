//! The running state of a strategy: whose turn it is, and how much each place holds.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::PlacementStrategy;

/// Draws positions from a fixed number of places by one of the built-in strategies.
#[derive(Clone, Debug)]
pub(super) struct Picker {
    strategy: PlacementStrategy,
    drawn: u64,
    loads: Loads,
}

impl Picker {
    /// Starts with empty places; there is at least one.
    pub(super) fn new(strategy: PlacementStrategy, places: usize) -> Picker {
        Picker { strategy, drawn: 0, loads: Loads::new(places) }
    }

    /// Takes the next slot. The position is below the number of places.
    ///
    /// A custom strategy chooses elsewhere; here it only takes a slot, as in a round robin.
    pub(super) fn draw(&mut self, hash: u64) -> usize {
        let places = self.loads.bytes.len() as u64;
        let position = match self.strategy {
            PlacementStrategy::GreedyBytes => return self.loads.lightest(),
            PlacementStrategy::HashName => hash % places,
            PlacementStrategy::RoundRobin | PlacementStrategy::Custom(_) => self.drawn % places,
        };
        self.drawn = self.drawn.wrapping_add(1);
        position as usize
    }

    /// Counts what was put there.
    pub(super) fn add(&mut self, position: usize, bytes: u64) {
        self.loads.add(position, bytes);
    }
}

/// The bytes at each place, and the places in order of bytes.
///
/// The order makes finding the lightest cheap even with thousands of places and partitions.
#[derive(Clone, Debug)]
struct Loads {
    bytes: Vec<u64>,
    order: BTreeSet<(u64, usize)>,
}

impl Loads {
    fn new(places: usize) -> Loads {
        Loads { bytes: vec![0; places], order: (0..places).map(|place| (0, place)).collect() }
    }

    fn lightest(&self) -> usize {
        self.order.first().map_or(0, |&(_, place)| place)
    }

    fn add(&mut self, place: usize, bytes: u64) {
        let Some(load) = self.bytes.get_mut(place) else {
            return;
        };
        self.order.remove(&(*load, place));
        *load = load.saturating_add(bytes);
        self.order.insert((*load, place));
    }
}

/// Two independent hashes of a part: one to choose the task, one the shard within it.
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
    fn turns_go_round() {
        let mut picker = Picker::new(PlacementStrategy::RoundRobin, 3);
        assert_eq!([0; 4].map(|hash| picker.draw(hash)), [0, 1, 2, 0]);
        let mut picker = Picker::new(PlacementStrategy::HashName, 3);
        assert_eq!([7, 3, 5].map(|hash| picker.draw(hash)), [1, 0, 2]);
    }

    #[test]
    fn the_lightest_place_is_found() {
        let mut picker = Picker::new(PlacementStrategy::GreedyBytes, 3);
        let mut places = Vec::new();
        for bytes in [10, 3, 5, 0, 1, 9, 2] {
            places.push(picker.draw(0));
            picker.add(places[places.len() - 1], bytes);
        }
        assert_eq!(places, [0, 1, 2, 1, 1, 1, 2]);
        picker.add(2, u64::MAX);
        assert_eq!(picker.loads.bytes[2], u64::MAX);
        picker.add(9, 1);
    }

    /// A change of these numbers moves the variables of every cluster placed by name: do not.
    #[test]
    fn hashes_are_stable() {
        let expected = (4_222_708_473_782_727_499, 12_153_217_713_332_493_379);
        assert_eq!(name_hashes("w", 0), expected);
        assert_ne!(name_hashes("w", 0), name_hashes("w", 1));
    }
}
