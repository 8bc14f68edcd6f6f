//! [`BucketProgress`]: which buckets of a streamed step are complete.

use pushpull_common::ids::VariableId;

use super::bucket_plan::BucketPlan;

/// The variables of a streamed step that have come, and the buckets that are reduced.
///
/// Invariant: buckets are reduced in the order of the plan, so all ranks perform the same
/// operations in any order of their variables.
#[derive(Debug)]
pub(super) struct BucketProgress {
    has_come: Vec<bool>,
    /// The variables of each bucket that have not come.
    missing: Vec<usize>,
    /// The first bucket that is not reduced yet.
    next: usize,
}

impl BucketProgress {
    pub(super) fn new(plan: &BucketPlan, variables: usize) -> BucketProgress {
        let missing = plan.buckets().iter().map(|bucket| bucket.variables.len()).collect();
        BucketProgress { has_come: vec![false; variables], missing, next: 0 }
    }

    /// Returns whether a variable has come.
    pub(super) fn has(&self, id: VariableId) -> bool {
        self.has_come[id.0 as usize]
    }

    /// Returns whether no variable has come.
    pub(super) fn is_empty(&self) -> bool {
        !self.has_come.contains(&true)
    }

    /// Records that a variable of this bucket has come.
    pub(super) fn add(&mut self, id: VariableId, bucket: usize) {
        let had_come = std::mem::replace(&mut self.has_come[id.0 as usize], true);
        debug_assert!(!had_come, "the caller checks that");
        self.missing[bucket] -= usize::from(!had_come);
    }

    /// Returns the next bucket, once, if it is complete.
    pub(super) fn next_complete(&mut self) -> Option<usize> {
        let next = self.next;
        (self.missing.get(next) == Some(&0)).then(|| {
            self.next += 1;
            next
        })
    }

    /// Returns the first variable of the plan that has not come.
    pub(super) fn first_missing(&self, plan: &BucketPlan) -> Option<VariableId> {
        let mut all = plan.buckets().iter().flat_map(|bucket| bucket.variables.iter().rev());
        all.find(|id| !self.has(**id)).copied()
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::{DType, Shape};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::testing::plans::plan_of;

    #[test]
    fn a_complete_bucket_waits_for_those_before_it() {
        let shape = || Shape::new([2]).unwrap();
        let variable = |name, dtype| VariableSpec::new(name, dtype, shape()).unwrap();
        let variables = vec![
            variable("a", DType::F32),
            variable("b", DType::F64),
            variable("c", DType::F32),
            variable("d", DType::F32),
        ];
        let plan = BucketPlan::new(&plan_of(variables, 1), |_| false);
        let mut progress = BucketProgress::new(&plan, 4);
        assert!(progress.is_empty());
        // The buckets are `c` with `d`, `b`, `a`. Each row gives a variable, and has the buckets that
        // can be reduced then and the first variable that is missing.
        let rows: [(u32, &[usize], Option<u32>); 4] =
            [(1, &[], Some(3)), (3, &[], Some(2)), (2, &[0, 1], Some(0)), (0, &[2], None)];
        for (variable, complete, missing) in rows {
            let id = VariableId(variable);
            progress.add(id, plan.place(id).unwrap());
            let mut reduced = Vec::new();
            reduced.extend(std::iter::from_fn(|| progress.next_complete()));
            assert_eq!(reduced, complete, "{variable}");
            assert_eq!(progress.first_missing(&plan), missing.map(VariableId), "{variable}");
            assert!(progress.has(id) && !progress.is_empty());
        }
        assert_eq!(progress.next_complete(), None);
    }
}
