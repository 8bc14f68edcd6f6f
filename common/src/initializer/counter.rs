//! The random numbers of the initializers: a stateless hash of (seed, name, index).

use sha2::{Digest, Sha256};

/// The key of a variable's random numbers, derived from a seed and the variable's name.
///
/// The words are cut from the SHA-256 of a version, the seed and the name, so similar seeds and
/// names give unrelated keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitialKey {
    start: u64,
    mask: u64,
}

impl InitialKey {
    /// Derives the key.
    pub fn new(seed: u64, name: &str) -> InitialKey {
        let mut hasher = Sha256::new();
        hasher.update(b"pushpull initial value 1\0");
        hasher.update(seed.to_le_bytes());
        hasher.update(name.as_bytes());
        let digest: [u8; 32] = hasher.finalize().into();
        let word = |start| u64::from_le_bytes(std::array::from_fn(|byte| digest[start + byte]));
        InitialKey { start: word(0), mask: word(8) }
    }

    /// Returns 64 random bits for an index.
    ///
    /// The first mixing is SplitMix64 (Steele, Lea and Flood, 2014). On its own, all keys would
    /// share one sequence of 2^64 numbers with different starts, and two large variables could
    /// overlap. The mask and the second mixing give each key its own sequence.
    pub(super) fn bits(self, index: u64) -> u64 {
        mix(mix(self.start.wrapping_add(index.wrapping_mul(GOLDEN))) ^ self.mask)
    }

    /// Returns a number uniformly distributed over (0, 1) for a row and one of the gradients of the
    /// training, by its number. Equal on every machine and in every layout.
    pub fn draw(self, id: u64, count: u64) -> f64 {
        self.unit(mix(mix(id ^ self.mask) ^ count))
    }

    /// Returns a number uniformly distributed over (0, 1), without either end.
    ///
    /// It has 52 random bits plus one half: the largest is 1 - 2^-53, which a 53rd bit would round
    /// to 1.
    pub(super) fn unit(self, index: u64) -> f64 {
        ((self.bits(index) >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
    }
}

/// Stafford's variant 13 of the 64-bit finalizer, as in SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 2^64 over the golden ratio, odd: SplitMix64's increment.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixing_is_splitmix() {
        // The first outputs of SplitMix64 from the states 0 and 1234567, as published.
        assert_eq!(mix(GOLDEN), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(1_234_567u64.wrapping_add(GOLDEN)), 6_457_827_717_110_365_317);
    }

    #[test]
    fn units_are_uniform_and_exclude_the_ends() {
        let key = InitialKey::new(1, "w");
        let mut counts = [0u32; 16];
        for index in 0..160_000 {
            let unit = key.unit(index);
            assert!(unit > 0.0 && unit < 1.0);
            counts[(unit * 16.0) as usize] += 1;
        }
        // 10,000 expected in each; five standard deviations are 484.
        assert!(counts.iter().all(|&n| n.abs_diff(10_000) < 484), "{counts:?}");
        let largest = ((u64::MAX >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64);
        assert_eq!(largest, 1.0 - f64::EPSILON / 2.0);
    }

    #[test]
    fn draws_differ_by_key_id_and_count() {
        let draws = |key: InitialKey, ids: u64| {
            (0..1000).map(move |n| key.draw(n % ids, n / ids)).filter(|&drawn| drawn < 0.5).count()
        };
        // 500 expected in each; five standard deviations are 79.
        for (seed, ids) in [(1, 1), (1, 1000), (2, 30)] {
            let found = draws(InitialKey::new(seed, "t"), ids);
            assert!(found.abs_diff(500) < 79, "{found} for seed {seed} and {ids} ids");
        }
        assert_ne!(InitialKey::new(1, "t").draw(7, 3), InitialKey::new(1, "u").draw(7, 3));
    }

    #[test]
    fn keys_with_related_starts_have_distinct_sequences() {
        let one = InitialKey { start: 5, mask: 1 };
        let two = InitialKey { start: 5u64.wrapping_add(GOLDEN), mask: 2 };
        assert!((0..1000).all(|index| one.bits(index + 1) != two.bits(index)));
    }
}
