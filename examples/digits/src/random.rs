//! Reproducible pseudo-random numbers without a dependency.

/// The SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014). Its state is eight bytes, and its output is the same on every machine. It
/// suffices to shuffle rows and is not cryptographic.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// Creates a generator that depends on `seed` alone.
    pub(crate) fn new(seed: u64) -> SplitMix64 {
        SplitMix64 { state: seed }
    }

    /// Creates the generator of stream `index` under `seed`. Each worker and each tensor has a
    /// stream of its own.
    pub(crate) fn stream(seed: u64, index: u64) -> SplitMix64 {
        let mut outer = SplitMix64::new(seed);
        let mut inner = SplitMix64::new(outer.next_u64() ^ index);
        SplitMix64::new(inner.next_u64())
    }

    /// Returns the next 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number in `0..bound`, or 0 for a bound of 0. The bias is below `bound / 2^64`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Shuffles `items` (Fisher and Yates); every order is equally likely.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let chosen = self.below(last + 1);
            items.swap(last, chosen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_matches_the_published_numbers() {
        let mut random = SplitMix64::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([random.next_u64(), random.next_u64()], expected);
    }

    #[test]
    fn numbers_stay_below_the_bound() {
        let mut random = SplitMix64::new(7);
        assert_eq!(random.below(0), 0);
        let mut drawn = [false; 5];
        for _ in 0..1000 {
            drawn[random.below(5)] = true;
        }
        assert_eq!(drawn, [true; 5]);
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        SplitMix64::stream(1, 2).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert!(items.into_iter().eq(0..100));
    }

    #[test]
    fn streams_differ() {
        let first = SplitMix64::stream(1, 0).next_u64();
        assert_ne!(first, SplitMix64::stream(1, 1).next_u64());
        assert_ne!(first, SplitMix64::stream(2, 0).next_u64());
        assert_eq!(first, SplitMix64::stream(1, 0).next_u64());
    }
}
