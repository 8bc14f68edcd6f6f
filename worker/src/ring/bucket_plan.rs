//! [`BucketPlan`]: the variables whose gradients are reduced together, in which order.

use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;

use crate::gradients::sharding_plan::ShardingPlan;

/// The most bytes of several variables that are reduced together. A larger variable is a bucket of
/// its own. Larger buckets leave less to reduce during the backward pass, smaller ones have more
/// passes.
const BUCKET_BYTES_MAX: usize = 4 << 20;

/// The buckets of a model, in the order in which they are reduced: a backward pass computes the
/// gradient of the last layer first.
///
/// Invariants: each trainable variable is in one bucket. All ranks with the same variables have the
/// same plan: the order of a program does not matter.
#[derive(Debug)]
pub(super) struct BucketPlan {
    buckets: Vec<Bucket>,
    /// The bucket of each variable; `None` for one without gradients.
    places: Vec<Option<usize>>,
}

/// Variables of one type that are neighbours in the memory of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    /// Its variables, ascending.
    pub(super) variables: Vec<VariableId>,
    /// Their bytes in the memory of all gradients, with the padding between them.
    pub(super) range: Range<usize>,
    pub(super) dtype: DType,
    /// Whether it is a bucket of its own, because it travels encoded.
    is_single: bool,
}

impl BucketPlan {
    /// Plans the buckets of a model. A variable that is single is joined with no other.
    pub(super) fn new(plan: &ShardingPlan, is_single: impl Fn(VariableId) -> bool) -> BucketPlan {
        let variables = plan.catalogue().variables();
        let ids = (0..variables.len() as u32).map(VariableId);
        let trainable = ids.filter(|id| variables[id.0 as usize].is_trainable());
        let singles = trainable.map(|id| Bucket {
            variables: vec![id],
            range: plan.range(id),
            dtype: variables[id.0 as usize].dtype(),
            is_single: is_single(id),
        });
        let buckets = joined(singles.collect(), BUCKET_BYTES_MAX);
        let mut places = vec![None; variables.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            for id in &bucket.variables {
                places[id.0 as usize] = Some(index);
            }
        }
        BucketPlan { buckets, places }
    }

    /// Returns the buckets in the order in which they are reduced.
    pub(super) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Returns the bucket of a variable; `None` if it has no gradients.
    pub(super) fn place(&self, id: VariableId) -> Option<usize> {
        self.places.get(id.0 as usize).copied().flatten()
    }
}

impl Bucket {
    /// Returns where a range of the memory of all gradients is in the memory of this bucket.
    pub(super) fn within(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.range.start..range.end - self.range.start
    }

    fn is_behind(&self, other: &Bucket) -> bool {
        let can_join = !self.is_single && !other.is_single && self.dtype == other.dtype;
        can_join && other.range.end.next_multiple_of(8) == self.range.start
    }
}

/// Joins neighbours of one type, from the last one on, as long as they have at most this many bytes.
fn joined(singles: Vec<Bucket>, bytes_max: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    for single in singles.into_iter().rev() {
        match buckets.last_mut() {
            Some(last)
                if last.is_behind(&single) && last.range.end - single.range.start <= bytes_max =>
            {
                last.variables.splice(0..0, single.variables);
                last.range.start = single.range.start;
            }
            _ => buckets.push(single),
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buckets of one variable each, for variables of these types and bytes that follow each other.
    fn singles(variables: &[(DType, usize)]) -> Vec<Bucket> {
        let mut start = 0;
        let bucket = |(index, &(dtype, bytes)): (usize, &(DType, usize))| {
            let range = start..start + bytes;
            start = range.end.next_multiple_of(8);
            Bucket { variables: vec![VariableId(index as u32)], range, dtype, is_single: false }
        };
        variables.iter().enumerate().map(bucket).collect()
    }

    #[test]
    fn neighbours_of_one_type_are_joined_from_the_last_one_on() {
        const W: DType = DType::F32;
        const D: DType = DType::F64;
        // The variables of each bucket, in the order of the reductions.
        type Case = (&'static [(DType, usize)], &'static [&'static [u32]]);
        let cases: [Case; 6] = [
            (&[], &[]),
            (&[(W, 64)], &[&[0]]),
            (&[(W, 32), (W, 32), (W, 32)], &[&[1, 2], &[0]]),
            (&[(W, 8), (W, 4096), (W, 8)], &[&[2], &[1], &[0]]),
            (&[(W, 8), (D, 8), (D, 8), (W, 8)], &[&[3], &[1, 2], &[0]]),
            // The padding counts.
            (&[(W, 12), (W, 20), (W, 28)], &[&[1, 2], &[0]]),
        ];
        for (variables, expected) in cases {
            let buckets = joined(singles(variables), 64);
            let ids = |bucket: &Bucket| bucket.variables.iter().map(|id| id.0).collect::<Vec<_>>();
            assert_eq!(buckets.iter().map(ids).collect::<Vec<_>>(), expected, "{variables:?}");
        }
    }

    #[test]
    fn a_variable_that_travels_encoded_is_alone() {
        let mut singles = singles(&[(DType::F32, 8), (DType::F32, 8), (DType::F32, 8)]);
        singles[1].is_single = true;
        let buckets = joined(singles, 64);
        assert_eq!(
            buckets.iter().map(|it| it.range.clone()).collect::<Vec<_>>(),
            [16..24, 8..16, 0..8]
        );
    }

    #[test]
    fn a_variable_without_gradients_separates_its_neighbours() {
        let mut singles = singles(&[(DType::F32, 8), (DType::F32, 8), (DType::F32, 8)]);
        singles.remove(1);
        let buckets = joined(singles, 64);
        assert_eq!(buckets.iter().map(|it| it.range.clone()).collect::<Vec<_>>(), [16..24, 0..8]);
    }
}
