//! Partitioners: the number of row ranges that a variable is cut into, and their boundaries.
//!
//! A variable is cut along its first axis only. Rows are divided by TensorFlow's "div" rule: with
//! `d` rows in `n` parts, the first `d mod n` parts have one more row.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

use crate::tensor::{DType, Shape};

/// Decides from a variable's shape and type how many parts it is cut into.
///
/// A scalar is never cut, and no part is without rows.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Partitioner {
    /// One part, unless the placement strategy cuts large variables, as
    /// [`PlacementStrategy::Balanced`] does.
    ///
    /// [`PlacementStrategy::Balanced`]: crate::placement::PlacementStrategy::Balanced
    #[default]
    Automatic,
    /// One part.
    None,
    /// A fixed number of parts, or one per row if there are fewer rows.
    #[doc(alias = "fixed_size_partitioner")]
    #[doc(alias = "FixedShardsPartitioner")]
    Fixed {
        /// The number of parts, at least 1.
        shards: u32,
    },
    /// As many parts as possible above a minimum size: see [`min_size_parts`].
    #[doc(alias = "min_max_variable_partitioner")]
    #[doc(alias = "MinSizePartitioner")]
    MinSize {
        /// The smallest part in bytes, at least 1; TensorFlow's default is 256 KiB.
        bytes_min: u64,
        /// The most parts, at least 1; TensorFlow's default is 1.
        shards_max: u32,
        /// Enforces the minimum exactly; TensorFlow's rule may make parts up to half as small.
        strict: bool,
    },
    /// As few parts as possible below a maximum size: see [`max_size_parts`].
    #[doc(alias = "variable_axis_size_partitioner")]
    #[doc(alias = "MaxSizePartitioner")]
    MaxSize {
        /// The largest part in bytes, at least 1. A part has at least one row, however large.
        bytes_max: u64,
        /// The most parts, at least 1; takes precedence over `bytes_max`.
        shards_max: Option<u32>,
    },
    /// A user-defined function of shape and type; see [`Partitioner::custom`].
    Custom(CustomPartitioner),
}

/// A function from shape and type to a number of parts.
#[derive(Clone)]
pub struct CustomPartitioner(Arc<Count>);

type Count = dyn Fn(&Shape, DType) -> u32 + Send + Sync;

/// The reason why a variable cannot be partitioned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// An argument, or the result of a custom function, is zero.
    #[error("cannot partition by {partitioner}: {argument} must be at least 1")]
    Zero {
        /// The partitioner, in words.
        partitioner: String,
        /// The argument's name.
        argument: &'static str,
    },
    /// There are more parts than [`Partitioner::PARTS_MAX`].
    #[error("cannot partition into {parts} parts: the limit is {}", Partitioner::PARTS_MAX)]
    TooMany {
        /// The number of parts requested.
        parts: u64,
    },
}

impl Partitioner {
    /// The largest number of parts of one variable.
    pub const PARTS_MAX: u32 = 1 << 16;

    /// Creates a partitioner from a function, which must be deterministic.
    ///
    /// The function must return at least 1; a result above the number of rows is clipped.
    pub fn custom(function: impl Fn(&Shape, DType) -> u32 + Send + Sync + 'static) -> Partitioner {
        Partitioner::Custom(CustomPartitioner(Arc::new(function)))
    }

    /// Returns the number of parts for a variable of this shape and type: at least 1, at most one
    /// per row. Sizes in bytes are those of the type that servers store.
    pub fn parts(&self, shape: &Shape, dtype: DType) -> Result<u32, PartitionError> {
        // Both factors are within a shape's limits, so the product is below 2^52.
        let row_bytes = shape.row_elements() * dtype.master().size() as u64;
        self.parts_of(shape, dtype, shape.rows(), row_bytes)
    }

    /// Returns the number of parts for `rows` rows of `row_bytes` bytes each; see
    /// [`Partitioner::parts`].
    pub(crate) fn parts_of(
        &self,
        shape: &Shape,
        dtype: DType,
        rows: u64,
        row_bytes: u64,
    ) -> Result<u32, PartitionError> {
        self.check()?;
        if shape.rank() == 0 {
            return Ok(1);
        }
        let parts = match *self {
            Partitioner::Automatic | Partitioner::None => 1,
            Partitioner::Fixed { shards } => u64::from(shards),
            Partitioner::MinSize { bytes_min, shards_max, strict } => {
                min_size_parts(rows, row_bytes, bytes_min, shards_max, strict)
            }
            Partitioner::MaxSize { bytes_max, shards_max } => {
                max_size_parts(rows, row_bytes, bytes_max, shards_max)
            }
            Partitioner::Custom(ref function) => u64::from(function.parts(shape, dtype)),
        };
        if parts == 0 {
            return Err(self.zero("its result"));
        }
        let parts = parts.min(shape.rows()).max(1);
        match u32::try_from(parts) {
            Ok(parts) if parts <= Partitioner::PARTS_MAX => Ok(parts),
            _ => Err(PartitionError::TooMany { parts }),
        }
    }

    /// Returns the number of parts along each axis, as TensorFlow does: 1 for all axes but the
    /// first.
    pub fn parts_per_axis(&self, shape: &Shape, dtype: DType) -> Result<Vec<u32>, PartitionError> {
        let first = self.parts(shape, dtype)?;
        Ok((0..shape.rank()).map(|axis| if axis == 0 { first } else { 1 }).collect())
    }

    fn check(&self) -> Result<(), PartitionError> {
        match *self {
            Partitioner::Fixed { shards: 0 } => Err(self.zero("shards")),
            Partitioner::MinSize { bytes_min: 0, .. } => Err(self.zero("bytes_min")),
            Partitioner::MinSize { shards_max: 0, .. } => Err(self.zero("shards_max")),
            Partitioner::MaxSize { bytes_max: 0, .. } => Err(self.zero("bytes_max")),
            Partitioner::MaxSize { shards_max: Some(0), .. } => Err(self.zero("shards_max")),
            _ => Ok(()),
        }
    }

    fn zero(&self, argument: &'static str) -> PartitionError {
        PartitionError::Zero { partitioner: format!("{self:?}"), argument }
    }
}

impl CustomPartitioner {
    fn parts(&self, shape: &Shape, dtype: DType) -> u32 {
        (self.0)(shape, dtype)
    }
}

impl fmt::Debug for CustomPartitioner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_")
    }
}

/// Two partitioners are equal only if they share one function value.
impl PartialEq for CustomPartitioner {
    fn eq(&self, other: &CustomPartitioner) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Returns the number of parts of at least `bytes_min` that a variable makes, at most `shards_max`.
///
/// TensorFlow's rule divides the whole size and rounds up, so a variable of 1000 bytes with a
/// minimum of 999 becomes two parts of 500. `strict` counts whole rows and rounds down, so no part
/// is below the minimum unless the whole variable is.
pub fn min_size_parts(
    rows: u64,
    row_bytes: u64,
    bytes_min: u64,
    shards_max: u32,
    strict: bool,
) -> u64 {
    let bytes_min = bytes_min.max(1);
    let parts = match strict {
        true => rows / bytes_min.div_ceil(row_bytes.max(1)),
        false => rows.saturating_mul(row_bytes).div_ceil(bytes_min),
    };
    parts.min(u64::from(shards_max)).min(rows).max(1)
}

/// Returns the number of parts of at most `bytes_max` that a variable needs, at most `shards_max`.
///
/// A part has at least one row, and `shards_max` takes precedence, so a part may be larger.
pub fn max_size_parts(rows: u64, row_bytes: u64, bytes_max: u64, shards_max: Option<u32>) -> u64 {
    // Rows of zero bytes all fit into one part.
    let rows_per_part = bytes_max.checked_div(row_bytes).unwrap_or(u64::MAX).max(1);
    let parts = rows.div_ceil(rows_per_part);
    parts.min(shards_max.map_or(u64::MAX, u64::from)).max(1)
}

/// Cuts `rows` into `parts` ranges: the first `rows mod parts` have one more row.
///
/// The ranges are in order and cover all rows. None is empty, except that zero rows make one empty
/// range. The number of parts is clipped to the number of rows, and zero parts become one.
pub fn split_rows(rows: u64, parts: u32) -> Vec<Range<u64>> {
    let parts = u64::from(parts).min(rows).max(1);
    let base = rows / parts;
    let more = rows % parts;
    let start = |part: u64| part * base + part.min(more);
    (0..parts).map(|part| start(part)..start(part + 1)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(partitioner: Partitioner, extents: &[u64]) -> Result<u32, PartitionError> {
        partitioner.parts(&Shape::new(extents).unwrap(), DType::F32)
    }

    #[test]
    fn strict_keeps_the_minimum() {
        let size = |bytes_min, strict| Partitioner::MinSize { bytes_min, shards_max: 10, strict };
        assert_eq!(parts(size(999, false), &[10, 25]), Ok(2));
        assert_eq!(parts(size(999, true), &[10, 25]), Ok(1));
        // Rows are never cut, so four parts would have 300, 300, 200 and 200 bytes.
        assert_eq!(parts(size(250, true), &[10, 25]), Ok(3));
        assert_eq!(parts(size(5000, true), &[10, 25]), Ok(1));
    }

    #[test]
    fn unusual_shapes_are_partitioned() {
        let fixed = || Partitioner::Fixed { shards: 4 };
        let small = || Partitioner::MaxSize { bytes_max: 1, shards_max: None };
        assert_eq!(parts(fixed(), &[]), Ok(1));
        assert_eq!(parts(fixed(), &[0, 5]), Ok(1));
        assert_eq!(parts(small(), &[5, 0]), Ok(1));
        assert_eq!(parts(fixed(), &[5, 0]), Ok(4));
        assert_eq!(parts(Partitioner::None, &[1 << 40]), Ok(1));
        assert_eq!(parts(Partitioner::default(), &[1 << 40]), Ok(1));
        assert_eq!(fixed().parts_per_axis(&Shape::scalar(), DType::F32), Ok(vec![]));
    }

    #[test]
    fn a_custom_result_is_clipped_to_the_rows() {
        let custom = |n: u32| Partitioner::custom(move |_, _| n);
        assert_eq!(parts(custom(3), &[10]), Ok(3));
        assert_eq!(parts(custom(30), &[10]), Ok(10));
        assert_eq!(
            parts(custom(0), &[10]).unwrap_err().to_string(),
            "cannot partition by Custom(_): its result must be at least 1"
        );
        let one = custom(3);
        assert_eq!(one, one.clone());
        assert_ne!(one, custom(3));
        assert_ne!(one, Partitioner::None);
        assert_ne!(Partitioner::Fixed { shards: 1 }, Partitioner::Fixed { shards: 2 });
    }

    #[test]
    fn arguments_are_at_least_one() {
        let bad = [
            Partitioner::Fixed { shards: 0 },
            Partitioner::MinSize { bytes_min: 0, shards_max: 1, strict: false },
            Partitioner::MinSize { bytes_min: 1, shards_max: 0, strict: true },
            Partitioner::MaxSize { bytes_max: 0, shards_max: None },
            Partitioner::MaxSize { bytes_max: 1, shards_max: Some(0) },
        ];
        for partitioner in bad {
            assert!(matches!(parts(partitioner, &[]), Err(PartitionError::Zero { .. })));
        }
        let error = parts(Partitioner::Fixed { shards: 0 }, &[2]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot partition by Fixed { shards: 0 }: shards must be at least 1"
        );
        let most = Partitioner::PARTS_MAX;
        assert_eq!(parts(Partitioner::Fixed { shards: most }, &[1 << 20]), Ok(most));
        let error = parts(Partitioner::MaxSize { bytes_max: 1, shards_max: None }, &[1 << 20]);
        assert_eq!(error, Err(PartitionError::TooMany { parts: 1 << 20 }));
    }

    proptest! {
        #[test]
        fn ranges_cover_all_rows_once(rows in 0u64..5000, parts in 0u32..300) {
            let ranges = split_rows(rows, parts);
            prop_assert_eq!(ranges.len() as u64, u64::from(parts).min(rows).max(1));
            let mut next = 0;
            for range in &ranges {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end > range.start || rows == 0);
                next = range.end;
            }
            prop_assert_eq!(next, rows);
            let sizes: Vec<u64> = ranges.iter().map(|range| range.end - range.start).collect();
            prop_assert!(sizes.is_sorted_by(|one, two| one >= two));
            prop_assert!(sizes[0] - sizes[sizes.len() - 1] <= 1);
        }

        #[test]
        fn strict_parts_are_large_enough(rows in 1u64..500, row in 1u64..200, min in 1u64..9000) {
            let parts = min_size_parts(rows, row, min, u32::MAX, true);
            prop_assert!(parts == 1 || rows / parts * row >= min);
        }

        #[test]
        fn nothing_overflows(rows: u64, row: u64, bytes in 1u64.., shards in 1u32..) {
            for parts in [
                min_size_parts(rows, row, bytes, shards, true),
                min_size_parts(rows, row, bytes, shards, false),
                max_size_parts(rows, row, bytes, Some(shards)),
            ] {
                prop_assert!(parts >= 1 && parts <= u64::from(shards));
            }
            prop_assert!(max_size_parts(rows, row, bytes, None) >= 1);
            if let Some(last) = split_rows(rows, shards % 1000).last() {
                prop_assert_eq!(last.end, rows);
            }
        }
    }
}
