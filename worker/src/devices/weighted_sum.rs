//! The weighted sum of several gradients, of the towers of a model.

use std::collections::BTreeSet;

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, Element, bf16, f16};

use crate::error::ViewError;
use crate::gradients::params::Gradients;

impl Gradients {
    /// Replaces the gradients by the weighted sum of others, which are of the same plan. A variable
    /// is in the push if it is in one of them; to those it is missing in it is zero. Sums are made
    /// in `f64`, in the order of `parts`, and rounded once; those of rows with one id in the type
    /// of the rows.
    ///
    /// # Errors
    /// [`ViewError::RowsAtOnce`] if a table gets more rows than it accepts in one push.
    pub(crate) fn set_weighted_sum(
        &mut self,
        parts: &mut [(f64, &mut Gradients)],
    ) -> Result<(), ViewError> {
        self.memory.present.fill(false);
        self.memory.staged_mut().empty();
        self.factors.clear();
        let mut dense = BTreeSet::new();
        let mut sparse = BTreeSet::new();
        for (_, part) in parts.iter_mut() {
            let scaled: Vec<VariableId> = part.factors.keys().copied().collect();
            scaled.into_iter().for_each(|id| part.apply_factor(id));
            dense.extend(part.present());
            sparse.extend(part.memory.rows().variables());
        }
        let plan = self.plan.clone();
        let dtype = |id| plan.catalogue().variable(id).dtype();
        for id in dense {
            let with = parts.iter().filter(|(_, part)| part.memory.present[id.0 as usize]);
            let terms: Vec<_> = with.map(|(weight, part)| (*weight, part.bytes_of(id))).collect();
            self.set_dense_sum(id, &terms);
        }
        for id in sparse {
            match dtype(id) {
                DType::F32 => self.sum_rows::<f32>(id, parts, |sum| sum as f32)?,
                DType::F64 => self.sum_rows::<f64>(id, parts, |sum| sum)?,
                DType::F16 => self.sum_rows::<f16>(id, parts, f16::from_f64)?,
                DType::Bf16 => self.sum_rows::<bf16>(id, parts, bf16::from_f64)?,
                _ => unreachable!("only floating-point variables have gradients"),
            }
        }
        Ok(())
    }

    fn sum_rows<T: Element + Into<f64>>(
        &mut self,
        id: VariableId,
        parts: &[(f64, &mut Gradients)],
        round: impl Fn(f64) -> T,
    ) -> Result<(), ViewError> {
        let mut ids = Vec::new();
        let mut rows = Vec::new();
        for (weight, part) in parts {
            let Some(found) = part.memory.rows().of_variable(id) else { continue };
            ids.extend_from_slice(found.ids);
            rows.extend(found.elements::<T>().iter().map(|&x| round(weight * x.into())));
        }
        self.memory.rows_mut().set(&self.plan, id, &ids, &rows)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pushpull_common::tensor::Shape;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::dense_sum::SUMS_AT_ONCE;
    use crate::gradients::params::GradientMemory;
    use crate::testing::plans::plan_of;

    #[test]
    fn sums_of_long_vectors_are_those_of_their_elements() {
        let length = 2 * SUMS_AT_ONCE + 7;
        let plan = plan_of(vec![VariableSpec::f32("w", [length as u64]).unwrap()], 1);
        let gradients = || Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        let mut a = gradients();
        let mut b = gradients();
        let mut sum = gradients();
        let fill = |gradients: &mut Gradients, value: fn(usize) -> f32| {
            let out = gradients.view_mut::<f32>("w").unwrap();
            out.iter_mut().enumerate().for_each(|(index, out)| *out = value(index));
        };
        fill(&mut a, |index| index as f32);
        fill(&mut b, |index| 3.0 * index as f32 + 4.0);
        sum.set_weighted_sum(&mut [(0.5, &mut a), (0.25, &mut b)]).unwrap();
        let found = sum.view_mut::<f32>("w").unwrap().iter().enumerate();
        found.for_each(|(index, &found)| assert_eq!(found, 1.25 * index as f32 + 1.0));
        // One term of weight 1 is copied, and of another weight it is not.
        sum.set_weighted_sum(&mut [(1.0, &mut a)]).unwrap();
        assert_eq!(sum.view_mut::<f32>("w").unwrap()[length - 1], length as f32 - 1.0);
        sum.set_weighted_sum(&mut [(0.5, &mut a)]).unwrap();
        assert_eq!(sum.view_mut::<f32>("w").unwrap()[length - 1], (length as f32 - 1.0) / 2.0);
    }

    #[test]
    fn sums_are_weighted_and_missing_gradients_are_zero() {
        let variables = vec![
            VariableSpec::f32("w", [2]).unwrap(),
            VariableSpec::bf16("h", [2]).unwrap(),
            VariableSpec::new("d", DType::F64, Shape::new([1]).unwrap()).unwrap(),
            VariableSpec::f32("none", [3]).unwrap(),
            VariableSpec::f32("rows", [9, 2]).unwrap().sparse(),
        ];
        let plan = plan_of(variables, 2);
        let gradients = || Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        let mut a = gradients();
        let mut b = gradients();
        let mut sum = gradients();
        // What an earlier push left.
        sum.view_mut::<f32>("none").unwrap().fill(7.0);
        a.view_mut::<f32>("w").unwrap().copy_from_slice(&[1.0, 2.0]);
        b.view_mut::<f32>("w").unwrap().copy_from_slice(&[-3.0, 6.0]);
        a.view_mut::<bf16>("h").unwrap().copy_from_slice(&[1.0, 4.0].map(bf16::from_f64));
        a.scale(2.0);
        b.view_mut::<f64>("d").unwrap().copy_from_slice(&[8.0]);
        a.set_rows("rows", &[5, 1], &[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
        b.set_rows("rows", &[1], &[8.0_f32, 16.0]).unwrap();
        sum.set_weighted_sum(&mut [(0.25, &mut a), (0.5, &mut b)]).unwrap();
        let names: Vec<&str> =
            sum.present().map(|id| plan.catalogue().variable(id).name()).collect();
        assert_eq!(names, ["w", "h", "d"]);
        let rows = sum.memory.rows().iter().next().unwrap();
        assert_eq!(rows.ids, [1, 5]);
        assert_eq!(*rows.elements::<f32>(), [4.75, 9.0, 0.25, 0.5]);
        assert_eq!(sum.view_mut::<f32>("w").unwrap(), [-1.0, 4.0]);
        assert_eq!(sum.view_mut::<bf16>("h").unwrap(), [0.5, 2.0].map(bf16::from_f64));
        assert_eq!(sum.view_mut::<f64>("d").unwrap(), [4.0]);
    }
}
