//! Histograms with buckets that double in width.

use std::fmt;
use std::ops::RangeInclusive;

use super::Counter;

/// The number of buckets: 0, 1, 2-3, 4-7 and so on. The last one is open.
const BUCKETS: usize = 16;

/// Returns the bucket of a number.
fn bucket(value: u64) -> usize {
    let bits = (u64::BITS - value.leading_zeros()) as usize;
    bits.min(BUCKETS - 1)
}

/// Returns the range of a bucket.
fn range(bucket: usize) -> RangeInclusive<u64> {
    let from = if bucket == 0 { 0 } else { 1 << (bucket - 1) };
    let to = if bucket == BUCKETS - 1 { u64::MAX } else { (1 << bucket) - 1 };
    from..=to
}

/// A histogram written by one thread and read by any.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [Counter; BUCKETS],
    sum: Counter,
}

impl Histogram {
    pub(crate) fn add(&self, value: u64) {
        self.counts[bucket(value)].add(1);
        self.sum.add(value);
    }

    /// Adds the counts of this histogram to `all`.
    pub(super) fn add_to(&self, all: &mut StalenessHistogram) {
        for (count, counter) in all.counts.iter_mut().zip(&self.counts) {
            *count += counter.read();
        }
        all.sum = all.sum.wrapping_add(self.sum.read());
    }
}

/// The staleness of the gradients that shards applied in asynchronous mode, in buckets that double
/// in width.
///
/// The staleness of a gradient on a shard is the number of gradients that the shard applied between
/// the pull of the values it was computed from and the gradient itself. A gradient for several
/// shards counts on each. The display form lists the non-empty buckets: `0: 12, 1: 40, 2-3: 7`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StalenessHistogram {
    counts: [u64; BUCKETS],
    sum: u64,
}

impl StalenessHistogram {
    /// Returns the buckets in ascending order: the range of staleness, and the number of gradients.
    /// The ranges are 0, 1, 2-3, 4-7 and so on to 8192-16383, and everything above.
    pub fn buckets(&self) -> impl Iterator<Item = (RangeInclusive<u64>, u64)> + '_ {
        self.counts.iter().enumerate().map(|(bucket, &count)| (range(bucket), count))
    }

    /// Returns the number of gradients.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the exact mean staleness; `None` if the histogram is empty.
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// Returns a staleness that at least a share (0 to 1) of the gradients did not exceed; `None`
    /// if the histogram is empty.
    ///
    /// This is the end of a bucket: less than twice the true quantile, or `u64::MAX` in the last
    /// bucket.
    pub fn quantile_at_most(&self, share: f64) -> Option<u64> {
        let count = self.count();
        let due = ((share.clamp(0.0, 1.0) * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut passed = 0;
        let mut buckets = self.buckets();
        let reached = buckets.find(|(_, count)| {
            passed += count;
            passed >= due
        });
        reached.map(|(range, _)| *range.end())
    }
}

impl fmt::Display for StalenessHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (range, count) in self.buckets().filter(|&(_, count)| count > 0) {
            let (from, to) = range.into_inner();
            match to {
                to if to == from => write!(f, "{between}{from}: {count}")?,
                u64::MAX => write!(f, "{between}{from}-: {count}")?,
                to => write!(f, "{between}{from}-{to}: {count}")?,
            }
            between = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(values: impl IntoIterator<Item = u64>) -> StalenessHistogram {
        let histogram = Histogram::default();
        let mut all = StalenessHistogram::default();
        values.into_iter().for_each(|value| histogram.add(value));
        histogram.add_to(&mut all);
        all
    }

    #[test]
    fn buckets_double_and_cover_all_numbers() {
        let all = StalenessHistogram::default();
        let ranges: Vec<_> = all.buckets().map(|(range, _)| range).collect();
        assert_eq!(ranges[..4], [0..=0, 1..=1, 2..=3, 4..=7]);
        assert_eq!(ranges[14..], [8192..=16383, 16384..=u64::MAX]);
        for (before, after) in ranges.iter().zip(&ranges[1..]) {
            assert_eq!(before.end() + 1, *after.start());
        }
        for value in (0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit]).chain([u64::MAX]) {
            let all = counted([value]);
            let (range, _) = all.buckets().find(|&(_, count)| count == 1).unwrap();
            assert!(range.contains(&value), "{value} in {range:?}");
        }
    }

    #[test]
    fn histograms_are_summed() {
        let a = Histogram::default();
        let b = Histogram::default();
        let mut all = Default::default();
        [0, 3].into_iter().for_each(|value| a.add(value));
        [2, 7, 8].into_iter().for_each(|value| b.add(value));
        a.add_to(&mut all);
        b.add_to(&mut all);
        assert_eq!(all, counted([0, 3, 2, 7, 8]));
        assert_eq!((all.count(), all.mean()), (5, Some(4.0)));
        assert_eq!(all.to_string(), "0: 1, 2-3: 2, 4-7: 1, 8-15: 1");
        assert_eq!(counted([1, 1 << 20]).to_string(), "1: 1, 16384-: 1");
    }

    #[test]
    fn a_quantile_is_bounded_by_the_end_of_its_bucket() {
        let none = StalenessHistogram::default();
        assert_eq!((none.mean(), none.quantile_at_most(0.5)), (None, None));
        let all = counted([0, 0, 1, 2, 3, 4, 5, 6, 20_000, 20_000]);
        for (share, bound) in [
            (-1.0, 0),
            (0.2, 0),
            (0.21, 1),
            (0.3, 1),
            (0.5, 3),
            (0.51, 7),
            (0.8, 7),
            (0.9, u64::MAX),
            (1.0, u64::MAX),
            (f64::NAN, 0),
        ] {
            assert_eq!(all.quantile_at_most(share), Some(bound), "{share}");
        }
    }
}
