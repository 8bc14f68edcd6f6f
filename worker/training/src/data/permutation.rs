//! [`Permutation`]: the order in which an epoch visits the samples.

/// A random-looking order of the numbers below a length, which is computed and never stored.
///
/// The order is a function of the seed, the epoch and the length, and the same on every platform.
/// It is a keyed bijection: a Feistel network whose two halves are the digits of a number in a
/// mixed radix. The network permutes a domain that is slightly longer than the length. A result
/// outside of the length is permuted again until it is inside (cycle walking), less than twice on
/// average.
///
/// ```
/// use pushpull_training::data::Permutation;
///
/// let order = Permutation::new(7, 0, 1_000);
/// let mut indices: Vec<u64> = (0..1_000).filter_map(|position| order.index(position)).collect();
/// indices.sort_unstable();
/// assert!(indices.into_iter().eq(0..1_000), "each index once");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    /// The radix of the high digit, at least the root of the length; at most 2^32.
    high_radix: u64,
    /// The radix of the low digit. The product of both is the domain, at most 2^64.
    low_radix: u64,
    /// A key for each round.
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Makes the order of an epoch of `len` samples.
    pub fn new(seed: u64, epoch: u64, len: u64) -> Permutation {
        let root = len.isqrt();
        let high_radix = (if root * root < len { root + 1 } else { root }).max(1);
        let low_radix = len.div_ceil(high_radix).max(1);
        let base = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(epoch));
        let key = |round: usize| mix(base.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1)));
        Permutation { len, high_radix, low_radix, keys: std::array::from_fn(key) }
    }

    /// Returns the number of samples that are permuted.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the index of the sample at a position of the epoch, in constant time on average;
    /// `None` if the position is not below the length.
    pub fn index(&self, position: u64) -> Option<u64> {
        if position >= self.len {
            return None;
        }
        // The cycle of a position returns to the position, so it ends inside at the latest there.
        let mut index = self.permute(position);
        while index >= self.len {
            index = self.permute(index);
        }
        Some(index)
    }

    /// Permutes the whole domain. Each round adds a function of one digit to the other, which can
    /// be undone.
    fn permute(&self, number: u64) -> u64 {
        let mut high = number / self.low_radix;
        let mut low = number % self.low_radix;
        for pair in self.keys.chunks_exact(2) {
            high = add(high, below(mix(low ^ pair[0]), self.high_radix), self.high_radix);
            low = add(low, below(mix(high ^ pair[1]), self.low_radix), self.low_radix);
        }
        high * self.low_radix + low
    }
}

/// Adds two digits modulo their radix, at most 2^32.
fn add(a: u64, b: u64, radix: u64) -> u64 {
    let sum = a + b;
    if sum >= radix { sum - radix } else { sum }
}

/// Scales a random word to a digit.
fn below(word: u64, radix: u64) -> u64 {
    ((u128::from(word) * u128::from(radix)) >> 64) as u64
}

/// Spreads each bit over the word: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The rounds of the network, in pairs: four make a random-looking order, and two are a margin.
const ROUNDS: usize = 6;

/// The odd number nearest to 2^64 divided by the golden ratio: the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(seed: u64, epoch: u64, len: u64) -> Vec<u64> {
        let permutation = Permutation::new(seed, epoch, len);
        let order = (0..len).map(|position| permutation.index(position).unwrap()).collect();
        assert_eq!(permutation.index(len), None);
        order
    }

    #[track_caller]
    fn assert_bijection(seed: u64, epoch: u64, len: u64) {
        let mut is_visited = vec![false; len as usize];
        for index in order(seed, epoch, len) {
            let before = std::mem::replace(&mut is_visited[index as usize], true);
            assert!(!before, "seed {seed}, epoch {epoch}, length {len}: {index} comes twice");
        }
    }

    #[test]
    fn an_order_visits_each_index_once() {
        for len in (0..=300).chain([1023, 1024, 1025, 4095, 4096, 65_535, 65_536, 99_999, 100_000])
        {
            for (seed, epoch) in [(0, 0), (7, 1), (u64::MAX, u64::MAX)] {
                assert_bijection(seed, epoch, len);
            }
        }
    }

    #[test]
    fn the_longest_data_have_an_order() {
        for len in [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) + 1, 1 << 62, (1 << 32) + 1] {
            let permutation = Permutation::new(3, 4, len);
            for position in [0, 1, len / 2, len - 1] {
                assert!(permutation.index(position).unwrap() < len);
            }
            assert_eq!(permutation.index(len), None);
        }
    }

    proptest! {
        #[test]
        fn any_length_is_permuted(seed: u64, epoch: u64, len in 0_u64..=100_000) {
            assert_bijection(seed, epoch, len);
        }

        #[test]
        fn another_seed_or_epoch_gives_another_order(
            seed: u64, epoch: u64, other: u64, len in 32_u64..500,
        ) {
            // Two random orders of 32 numbers are equal with a chance of 1 in 10^35.
            let first = order(seed, epoch, len);
            prop_assert_ne!(&first, &order(seed, epoch.wrapping_add(1), len));
            prop_assert_ne!(&first, &order(seed.wrapping_add(1), epoch, len));
            if other != seed {
                prop_assert_ne!(&first, &order(other, epoch, len));
            }
        }
    }

    /// Returns the chi-squared statistic of counts that should be equal.
    fn chi_squared(counts: &[u64]) -> f64 {
        let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        counts.iter().map(|&count| (count as f64 - mean).powi(2) / mean).sum()
    }

    /// The statistic of `cells` cells has this mean and deviation; five deviations are allowed.
    #[track_caller]
    fn assert_uniform(counts: &[u64], freedom: f64, what: &str) {
        let statistic = chi_squared(counts);
        let distance = (statistic - freedom) / (2.0 * freedom).sqrt();
        assert!(distance.abs() < 5.0, "{what}: {distance} deviations from uniform");
    }

    #[test]
    fn every_index_comes_equally_often_at_every_position() {
        for len in [2_u64, 3, 5, 8, 16, 31, 64] {
            let mut counts = vec![0; (len * len) as usize];
            for trial in 0..200 * len {
                for (position, index) in order(trial % 16, trial / 16, len).into_iter().enumerate()
                {
                    counts[position * len as usize + index as usize] += 1;
                }
            }
            let freedom = ((len - 1) * (len - 1)) as f64;
            assert_uniform(&counts, freedom, &format!("positions of {len}"));
        }
    }

    #[test]
    fn neighbours_are_at_every_distance() {
        for len in [97_u64, 100, 1000] {
            let mut counts = vec![0; len as usize - 1];
            for epoch in 0..200 {
                for pair in order(7, epoch, len).windows(2) {
                    counts[((pair[1] + len - pair[0]) % len) as usize - 1] += 1;
                }
            }
            assert_uniform(&counts, (len - 2) as f64, &format!("distances in {len}"));
        }
    }

    #[test]
    fn small_orders_are_all_reached() {
        let mut orders: Vec<Vec<u64>> = (0..2000).map(|epoch| order(7, epoch, 4)).collect();
        orders.sort_unstable();
        orders.dedup();
        assert_eq!(orders.len(), 24, "4! orders");
    }

    /// Pins the orders: a change would give workers of two versions different samples.
    #[test]
    fn the_orders_are_pinned() {
        assert_eq!(order(0, 0, 1), [0]);
        assert_eq!(order(7, 0, 10), GOLDEN_ORDERS[0]);
        assert_eq!(order(7, 1, 10), GOLDEN_ORDERS[1]);
        assert_eq!(order(8, 0, 10), GOLDEN_ORDERS[2]);
        let index = |seed, epoch, len, position| {
            Permutation::new(seed, epoch, len).index(position).unwrap()
        };
        for (position, expected) in [(0, 19_007), (1, 3_470), (59_999, 19_089)] {
            assert_eq!(index(42, 3, 60_000, position), expected);
        }
        assert_eq!(index(u64::MAX, 1 << 40, u64::MAX, 1 << 50), 9_420_007_638_421_197_270);
    }

    const GOLDEN_ORDERS: [[u64; 10]; 3] = [
        [2, 8, 0, 5, 6, 3, 4, 1, 7, 9],
        [0, 4, 1, 5, 3, 9, 6, 2, 7, 8],
        [1, 0, 5, 8, 3, 2, 4, 6, 9, 7],
    ];
}
