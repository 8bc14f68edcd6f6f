//! The classic buckets of a histogram.

/// Buckets whose limits are 0, the powers of 1.1 from 1e-12 to 1e20, and their negatives.
///
/// The limits are those of TensorFlow, to the bit: each is the one before times 1.1, rounded.
///
/// A search for a value takes a constant time. The exponent and the upper 4 bits of the mantissa
/// select an interval whose ends differ by at most a factor of 17/16. So at most one limit is in
/// it, and one comparison decides.
#[derive(Debug)]
pub(super) struct ExponentialBuckets {
    /// The upper limits of the buckets, ascending.
    limits: Vec<f64>,
    /// For each interval, the number of positive limits below it.
    below: Vec<u16>,
    /// The interval of the smallest positive limit.
    first_interval: u64,
}

impl ExponentialBuckets {
    pub(super) fn new() -> ExponentialBuckets {
        let mut positive = Vec::with_capacity(POSITIVE);
        let mut limit = SMALLEST;
        while limit < LARGEST {
            positive.push(limit);
            limit *= GROWTH;
        }
        positive.push(f64::MAX);
        let first_interval = interval(SMALLEST);
        let mut below = Vec::new();
        let mut count = 0;
        // The last interval begins above all limits but the largest number.
        for at in first_interval..=interval(LARGEST * GROWTH) {
            while positive[usize::from(count)] < start(at) {
                count += 1;
            }
            below.push(count);
        }
        let negative = positive.iter().rev().map(|limit| -limit);
        let limits = negative.chain([0.0]).chain(positive.iter().copied()).collect();
        ExponentialBuckets { limits, below, first_interval }
    }

    /// Returns the upper limits of the buckets.
    pub(super) fn limits(&self) -> &[f64] {
        &self.limits
    }

    /// Returns the bucket of a finite number: the first whose limit is above it. The largest number
    /// of all is in the last bucket.
    pub(super) fn index(&self, value: f64) -> usize {
        let positive = &self.limits[POSITIVE + 1..];
        let size = value.abs();
        let at = interval(size).saturating_sub(self.first_interval) as usize;
        let below = usize::from(self.below[at.min(self.below.len() - 1)]);
        let limit = positive[below];
        match value >= 0.0 {
            true => (POSITIVE + 1 + below + usize::from(limit <= size)).min(2 * POSITIVE),
            false => POSITIVE - below - usize::from(limit < size),
        }
    }
}

/// Returns the interval of a number that is not negative.
fn interval(size: f64) -> u64 {
    size.to_bits() >> (MANTISSA_BITS - INTERVAL_BITS)
}

/// Returns the smallest number in an interval.
fn start(interval: u64) -> f64 {
    f64::from_bits(interval << (MANTISSA_BITS - INTERVAL_BITS))
}

/// Bits of the mantissa of an `f64`.
const MANTISSA_BITS: u32 = 52;

/// Bits of the mantissa that tell the intervals of an exponent apart.
const INTERVAL_BITS: u32 = 4;

/// The smallest positive limit of a bucket.
const SMALLEST: f64 = 1e-12;

/// The bound of all limits but the last.
const LARGEST: f64 = 1e20;

/// The factor between two limits.
const GROWTH: f64 = 1.1;

/// Number of positive limits.
const POSITIVE: usize = 775;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Finds the bucket by its definition.
    fn expected(buckets: &ExponentialBuckets, value: f64) -> usize {
        let above = buckets.limits.partition_point(|&limit| limit <= value);
        above.min(buckets.limits.len() - 1)
    }

    #[test]
    fn the_limits_are_the_classic_ones() {
        let buckets = ExponentialBuckets::new();
        let limits = buckets.limits();
        assert_eq!(limits.len(), 2 * POSITIVE + 1);
        assert_eq!(limits[POSITIVE], 0.0);
        assert_eq!(limits[POSITIVE + 1..][..2], [1e-12, 1e-12 * 1.1]);
        assert_eq!((limits[0], limits[2 * POSITIVE]), (-f64::MAX, f64::MAX));
        assert!(limits.is_sorted_by(|a, b| a < b));
        assert!(limits.iter().rev().zip(limits).all(|(a, b)| *a == -b));
    }

    #[test]
    fn values_at_and_beside_a_limit_have_their_bucket() {
        let buckets = ExponentialBuckets::new();
        let starts = (0..buckets.below.len() as u64).map(|at| start(buckets.first_interval + at));
        let values: Vec<f64> = buckets.limits.iter().copied().chain(starts).collect();
        for value in values {
            for value in
                [value, value.next_down(), value.next_up()].map(|v| v.clamp(f64::MIN, f64::MAX))
            {
                for value in [value, -value] {
                    assert_eq!(buckets.index(value), expected(&buckets, value), "{value:e}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_value_has_its_bucket(bits in any::<u64>(), scale in -60_i32..80, unit in -1.0..1.0) {
            let buckets = ExponentialBuckets::new();
            for value in [f64::from_bits(bits), unit * 2.0_f64.powi(scale)] {
                if value.is_finite() {
                    prop_assert_eq!(buckets.index(value), expected(&buckets, value));
                }
            }
        }
    }
}
