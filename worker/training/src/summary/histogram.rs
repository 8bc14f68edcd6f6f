//! [`SummaryHistogram`]: the distribution of values over buckets.

use std::ops::Range;

use thiserror::Error;

use super::exponential_buckets::ExponentialBuckets;

/// A histogram: the number of values in each of a list of buckets.
///
/// A bucket has an upper limit, which it excludes; the limit of the bucket before is in it.
///
/// ```
/// use pushpull_training::summary::SummaryHistogram;
///
/// let weights = [0.5_f32, 0.5, -0.25, f32::NAN];
/// let histogram = SummaryHistogram::of(weights.iter().copied());
/// assert_eq!((histogram.count(), histogram.non_finite()), (3.0, 1));
/// assert_eq!((histogram.min(), histogram.max(), histogram.sum()), (-0.25, 0.5, 0.75));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SummaryHistogram {
    min: f64,
    max: f64,
    count: f64,
    sum: f64,
    sum_squares: f64,
    non_finite: u64,
    /// The upper limit of each bucket, ascending.
    limits: Vec<f64>,
    counts: Vec<f64>,
}

impl SummaryHistogram {
    /// Counts values in the classic buckets of TensorFlow: their limits are 0, powers of 1.1 from
    /// 1e-12 to 1e20, and the same below 0. Empty neighbours become one bucket.
    ///
    /// NaN and infinities are in no bucket and no sum; [`non_finite`](Self::non_finite) counts
    /// them. The cost of a value does not depend on the number of buckets, 1551.
    pub fn of<T: Into<f64>>(values: impl IntoIterator<Item = T>) -> SummaryHistogram {
        let buckets = ExponentialBuckets::new();
        let limits = buckets.limits();
        let mut counts = vec![0.0; limits.len()];
        let mut histogram = SummaryHistogram::without_buckets();
        for value in values {
            let value = value.into();
            if histogram.add(value) {
                counts[buckets.index(value)] += 1.0;
            }
        }
        histogram.merge_empty(limits, &counts);
        histogram
    }

    /// Takes counts that a program has made. `limits[i]` is the upper limit of bucket `i`. Minimum
    /// and maximum bound the first and the last bucket that is not empty.
    ///
    /// # Errors
    /// If the lists differ in length or are empty, if a limit is not finite or not above the one
    /// before, if a count is negative or not finite, or if a statistic is not finite.
    pub fn from_buckets(
        limits: Vec<f64>,
        counts: Vec<f64>,
        statistics: HistogramStatistics,
    ) -> Result<SummaryHistogram, HistogramError> {
        check_buckets(&limits, &counts)?;
        let HistogramStatistics { min, max, sum, sum_squares } = statistics;
        let named = [("min", min), ("max", max), ("sum", sum), ("sum_squares", sum_squares)];
        for (name, value) in named {
            if !value.is_finite() {
                return Err(HistogramError::Statistic { name, value });
            }
        }
        let count = counts.iter().sum();
        let histogram =
            SummaryHistogram { min, max, count, sum, sum_squares, non_finite: 0, limits, counts };
        match histogram.is_bounded() {
            true => Ok(histogram),
            false => Err(HistogramError::Bounds { min, max }),
        }
    }

    /// Returns the smallest finite value, or 0 without values.
    pub fn min(&self) -> f64 {
        self.min
    }

    /// Returns the largest finite value, or 0 without values.
    pub fn max(&self) -> f64 {
        self.max
    }

    /// Returns the number of finite values.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Returns the sum of the finite values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// Returns the sum of the squares of the finite values.
    pub fn sum_squares(&self) -> f64 {
        self.sum_squares
    }

    /// Returns the number of values that were NaN or infinite.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Returns the upper limits of the buckets.
    pub fn limits(&self) -> &[f64] {
        &self.limits
    }

    /// Returns the number of values in each bucket.
    pub fn counts(&self) -> &[f64] {
        &self.counts
    }

    /// Returns the range of buckets without the empty ones at both ends, or all if all are empty.
    pub(super) fn filled(&self) -> Range<usize> {
        let first = self.counts.iter().position(|&count| count > 0.0);
        let last = self.counts.iter().rposition(|&count| count > 0.0);
        match (first, last) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..self.counts.len(),
        }
    }

    /// Whether minimum and maximum can be the outer limits of the filled buckets.
    fn is_bounded(&self) -> bool {
        let filled = self.filled();
        let first = self.limits[filled.start];
        let last = filled.end - 1;
        let is_empty = self.count == 0.0;
        let is_above = last == filled.start || self.max >= self.limits[last - 1];
        self.min <= self.max && (is_empty || self.min <= first && is_above)
    }

    fn without_buckets() -> SummaryHistogram {
        SummaryHistogram {
            min: 0.0,
            max: 0.0,
            count: 0.0,
            sum: 0.0,
            sum_squares: 0.0,
            non_finite: 0,
            limits: Vec::new(),
            counts: Vec::new(),
        }
    }

    /// Adds a value to the statistics, if it is finite.
    fn add(&mut self, value: f64) -> bool {
        if !value.is_finite() {
            self.non_finite += 1;
            return false;
        }
        let is_first = self.count == 0.0;
        self.min = if is_first { value } else { self.min.min(value) };
        self.max = if is_first { value } else { self.max.max(value) };
        self.count += 1.0;
        self.sum += value;
        self.sum_squares += value * value;
        true
    }

    /// Takes the buckets; of neighbours that are empty it takes the last.
    fn merge_empty(&mut self, limits: &[f64], counts: &[f64]) {
        for (index, (&limit, &count)) in limits.iter().zip(counts).enumerate() {
            let is_next_empty = counts.get(index + 1) == Some(&0.0);
            if count > 0.0 || !is_next_empty {
                self.limits.push(limit);
                self.counts.push(count);
            }
        }
    }
}

/// Statistics of the values behind ready buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistogramStatistics {
    /// The smallest of the values.
    pub min: f64,
    /// The largest of the values.
    pub max: f64,
    /// The sum of the values.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
}

/// The reason why ready buckets do not form a histogram.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum HistogramError {
    /// There are no buckets, or not one count for each limit.
    #[error(
        "cannot make a histogram of {limits} limits and {counts} counts: both must be the same and above 0"
    )]
    Lengths {
        /// The number of limits that were given.
        limits: usize,
        /// The number of counts that were given.
        counts: usize,
    },
    /// A limit is not finite, or not above the one before.
    #[error(
        "cannot make a histogram: limit {index} is {limit}, which is not finite or not above the one before"
    )]
    Limit {
        /// Index of the bucket.
        index: usize,
        /// The upper limit of the bucket.
        limit: f64,
    },
    /// A count is negative or not finite.
    #[error("cannot make a histogram: the count of bucket {index} is {count}")]
    Count {
        /// Index of the bucket.
        index: usize,
        /// The count of the bucket.
        count: f64,
    },
    /// A statistic is not finite.
    #[error("cannot make a histogram: its {name} is {value}")]
    Statistic {
        /// Name of the field.
        name: &'static str,
        /// The value of the field.
        value: f64,
    },
    /// The minimum is above the maximum or above the first bucket with values, or the maximum is
    /// below the last.
    #[error("cannot make a histogram of values from {min} to {max}: the buckets have others")]
    Bounds {
        /// The minimum that was given.
        min: f64,
        /// The maximum that was given.
        max: f64,
    },
}

fn check_buckets(limits: &[f64], counts: &[f64]) -> Result<(), HistogramError> {
    if limits.len() != counts.len() || limits.is_empty() {
        return Err(HistogramError::Lengths { limits: limits.len(), counts: counts.len() });
    }
    let mut before = f64::NEG_INFINITY;
    for (index, (&limit, &count)) in limits.iter().zip(counts).enumerate() {
        if !limit.is_finite() || limit <= before {
            return Err(HistogramError::Limit { index, limit });
        }
        if !count.is_finite() || count < 0.0 {
            return Err(HistogramError::Count { index, count });
        }
        before = limit;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the buckets that are not empty, as lower limit, upper limit and count.
    fn filled(histogram: &SummaryHistogram) -> Vec<(f64, f64, f64)> {
        let lower = [f64::MIN].into_iter().chain(histogram.limits().iter().copied());
        let buckets = lower.zip(histogram.limits()).zip(histogram.counts());
        let buckets = buckets.map(|((lower, &upper), &count)| (lower, upper, count));
        buckets.filter(|bucket| bucket.2 > 0.0).collect()
    }

    #[test]
    fn values_on_a_limit_are_above_it() {
        let table = [
            (0.0, 0.0, 1e-12),
            (-0.0, 0.0, 1e-12),
            (1e-12, 1e-12, 1e-12 * 1.1),
            (-1e-12, -1e-12, 0.0),
            (5e-13, 0.0, 1e-12),
            (-5e-13, -1e-12, 0.0),
        ];
        for (value, lower, upper) in table {
            let histogram = SummaryHistogram::of([value]);
            assert_eq!(filled(&histogram), [(lower, upper, 1.0)], "{value}");
        }
    }

    #[test]
    fn the_largest_values_have_buckets() {
        let histogram = SummaryHistogram::of([f64::MAX, f64::MIN, 1e30, -1e30]);
        assert_eq!(filled(&histogram).iter().map(|bucket| bucket.2).sum::<f64>(), 4.0);
        assert_eq!((histogram.min(), histogram.max()), (f64::MIN, f64::MAX));
    }

    #[test]
    fn without_values_there_is_one_empty_bucket() {
        let histogram = SummaryHistogram::of([f32::NAN, f32::INFINITY]);
        assert_eq!((histogram.limits(), histogram.counts()), (&[f64::MAX][..], &[0.0][..]));
        assert_eq!((histogram.count(), histogram.non_finite()), (0.0, 2));
        assert_eq!((histogram.min(), histogram.max(), histogram.sum()), (0.0, 0.0, 0.0));
    }

    proptest! {
        #[test]
        fn every_finite_value_is_in_its_bucket(
            values in proptest::collection::vec(any::<f64>(), 0..50),
        ) {
            let histogram = SummaryHistogram::of(values.iter().copied());
            let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
            prop_assert_eq!(histogram.count(), finite.len() as f64);
            prop_assert_eq!(histogram.counts().iter().sum::<f64>(), finite.len() as f64);
            prop_assert_eq!(histogram.non_finite() as usize, values.len() - finite.len());
            for (lower, upper, count) in filled(&histogram) {
                let is_last = upper == f64::MAX;
                let within = finite.iter().filter(|&&value| {
                    lower <= value && (value < upper || is_last)
                }).count();
                prop_assert_eq!(within as f64, count);
            }
            // No two empty buckets are neighbours.
            prop_assert!(histogram.counts().windows(2).all(|pair| pair != [0.0, 0.0]));
            let read = SummaryHistogram::from_buckets(
                histogram.limits().to_vec(),
                histogram.counts().to_vec(),
                HistogramStatistics {
                    min: histogram.min(),
                    max: histogram.max(),
                    ..HistogramStatistics::default()
                },
            );
            prop_assert!(read.is_ok_and(|read| read.count() == histogram.count()));
        }
    }

    #[test]
    fn invalid_buckets_are_refused() {
        let statistics = HistogramStatistics::default();
        let refused = |limits: &[f64], counts: &[f64], statistics| {
            let made = SummaryHistogram::from_buckets(limits.to_vec(), counts.to_vec(), statistics);
            made.unwrap_err().to_string()
        };
        let bounds = |min, max| HistogramStatistics { min, max, ..statistics };
        let sum = HistogramStatistics { sum: f64::NAN, ..statistics };
        let table = [
            (refused(&[], &[], statistics), "0 limits and 0 counts"),
            (refused(&[1.0, 2.0], &[1.0], statistics), "2 limits and 1 counts"),
            (refused(&[1.0, 1.0], &[1.0, 1.0], statistics), "limit 1 is 1"),
            (refused(&[f64::NAN], &[1.0], statistics), "limit 0 is NaN"),
            (refused(&[f64::INFINITY], &[1.0], statistics), "limit 0 is inf"),
            (refused(&[1.0], &[-1.0], statistics), "the count of bucket 0 is -1"),
            (refused(&[1.0], &[f64::INFINITY], statistics), "the count of bucket 0 is inf"),
            (refused(&[1.0], &[0.0], bounds(2.0, 1.0)), "values from 2 to 1"),
            (refused(&[1.0, 2.0], &[0.0, 1.0], bounds(2.5, 3.0)), "values from 2.5 to 3"),
            (refused(&[1.0, 2.0], &[1.0, 1.0], bounds(0.0, 0.5)), "values from 0 to 0.5"),
            (refused(&[1.0], &[1.0], sum), "its sum is NaN"),
        ];
        for (text, part) in table {
            assert!(text.starts_with("cannot make a histogram") && text.contains(part), "{text}");
        }
    }
}
