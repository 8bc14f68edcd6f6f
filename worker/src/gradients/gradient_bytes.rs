//! Dense gradients as bytes that go from task to task.
//!
//! The bytes are those of a buffer of all variables, then the digest of the catalogue, and a byte
//! for each variable: 1 if it has a gradient. So gradients become such bytes without a copy.

use std::sync::Arc;

use pushpull_common::ids::VariableId;
use thiserror::Error;

use super::gradient_buffer::{AlignedBuffer, GradientBuffer};
use super::params::{GradientMemory, Gradients};
use super::sharding_plan::ShardingPlan;

/// The bytes of a digest.
const DIGEST: usize = 32;

/// Where the parts of the bytes of a plan begin: the digest, the bytes of the variables, and the
/// end.
fn layout(plan: &ShardingPlan) -> [usize; 3] {
    let digest = plan.bytes().next_multiple_of(8);
    let variables = digest + DIGEST;
    [digest, variables, variables + plan.catalogue().variables().len()]
}

/// The gradients of a tower that cannot be sent or used.
#[derive(Debug, Error)]
pub enum GradientBytesError {
    /// Some are rows.
    #[error("a tower returns gradients of dense variables alone")]
    Rows,
    /// They are not of this catalogue.
    #[error("the gradients of a tower are of other variables")]
    OtherVariables,
    /// A variable that can have no such gradient has one.
    #[error("the gradients of a tower are damaged")]
    Damaged,
}

impl Gradients {
    /// Returns an empty set of gradients in memory that becomes bytes without a copy.
    pub(crate) fn for_bytes(plan: &Arc<ShardingPlan>) -> Gradients {
        let [.., bytes] = layout(plan);
        let buffer = GradientBuffer::new(bytes, Arc::from([]));
        Gradients::new(plan.clone(), GradientMemory::of_buffer(plan, buffer))
    }

    /// Returns the gradients as bytes, with their number. Copies those that are not from
    /// [`Gradients::for_bytes`].
    #[doc(hidden)]
    pub fn into_bytes(mut self) -> Result<(AlignedBuffer, usize), GradientBytesError> {
        if self.memory.rows().variables().next().is_some() {
            return Err(GradientBytesError::Rows);
        }
        let scaled: Vec<VariableId> = self.factors.keys().copied().collect();
        scaled.into_iter().for_each(|id| self.apply_factor(id));
        let Gradients { plan, memory, .. } = self;
        let [digest, variables, bytes] = layout(&plan);
        let GradientMemory { buffer, present, .. } = memory;
        let own = Arc::try_unwrap(buffer).map(|buffer| buffer.into_heap(bytes));
        let mut memory = match own {
            Ok(Ok(memory)) => memory,
            Ok(Err(buffer)) => copy(&plan, &present, &buffer, bytes),
            Err(shared) => copy(&plan, &present, &shared, bytes),
        };
        let out = &mut memory.bytes_mut()[..bytes];
        out[digest..variables].copy_from_slice(&plan.catalogue().digest());
        for (out, present) in out[variables..].iter_mut().zip(present) {
            *out = present.into();
        }
        Ok((memory, bytes))
    }

    /// Replaces the gradient of each variable by the mean of those of several towers, each as bytes.
    /// A tower without a gradient of the variable counts as one of zeros. A variable of which no
    /// tower has a gradient is not in the push.
    #[doc(hidden)]
    pub fn set_mean_of_bytes(&mut self, towers: &[&[u8]]) -> Result<(), GradientBytesError> {
        let share = 1.0 / towers.len() as f64;
        let plan = self.plan.clone();
        let parts = towers.iter().map(|bytes| DenseGradients::of(bytes, &plan));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        for index in 0..plan.catalogue().variables().len() {
            let id = VariableId(index as u32);
            let terms: Vec<_> =
                parts.iter().filter_map(|part| Some((share, part.get(id)?))).collect();
            if !terms.is_empty() {
                self.set_dense_sum(id, &terms);
            }
        }
        Ok(())
    }
}

/// Copies gradients to a buffer of this many bytes.
fn copy(
    plan: &ShardingPlan,
    present: &[bool],
    buffer: &GradientBuffer,
    bytes: usize,
) -> AlignedBuffer {
    let mut memory = AlignedBuffer::of_bytes(bytes);
    for (index, _) in present.iter().enumerate().filter(|(_, present)| **present) {
        let range = plan.range(VariableId(index as u32));
        memory.bytes_mut()[range.clone()].copy_from_slice(buffer.slice(range));
    }
    memory
}

/// Gradients as bytes, to be read.
#[derive(Debug)]
struct DenseGradients<'a> {
    plan: &'a ShardingPlan,
    bytes: &'a [u8],
    present: &'a [u8],
}

impl<'a> DenseGradients<'a> {
    /// Reads gradients, which are of the variables of this plan.
    fn of(
        bytes: &'a [u8],
        plan: &'a ShardingPlan,
    ) -> Result<DenseGradients<'a>, GradientBytesError> {
        let [digest, variables, end] = layout(plan);
        let is_of = |bytes: &[u8]| bytes[digest..variables] == plan.catalogue().digest();
        if bytes.len() != end || !is_of(bytes) {
            return Err(GradientBytesError::OtherVariables);
        }
        let present = &bytes[variables..];
        for (variable, &present) in plan.catalogue().variables().iter().zip(present) {
            let dense = !variable.is_sparse() && variable.as_table().is_none();
            let allowed = u8::from(dense && variable.is_trainable());
            if present > allowed {
                return Err(GradientBytesError::Damaged);
            }
        }
        Ok(DenseGradients { plan, bytes, present })
    }

    /// Returns the gradient of a variable, if there is one.
    fn get(&self, id: VariableId) -> Option<&'a [u8]> {
        (self.present[id.0 as usize] == 1).then(|| &self.bytes[self.plan.range(id)])
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::testing::plans::plan_of;

    fn plan(length: u64) -> Arc<ShardingPlan> {
        let vector = |name, length| VariableSpec::f32(name, [length]).unwrap();
        let table = VariableSpec::f32("rows", [4, 2]).unwrap().sparse();
        plan_of(vec![vector("w", length), vector("none", 3), table], 2)
    }

    fn fill(mut gradients: Gradients) -> Gradients {
        gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&[1.0, -2.0, 4.0]);
        gradients.scale(0.5);
        gradients
    }

    #[test]
    fn bytes_have_the_gradients_that_are_there() {
        let plan = plan(3);
        let other = Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        for gradients in [Gradients::for_bytes(&plan), other] {
            let (memory, length) = fill(gradients).into_bytes().unwrap();
            let read = DenseGradients::of(&memory.bytes()[..length], &plan).unwrap();
            let w = read.get(VariableId(0)).map(bytemuck::cast_slice::<u8, f32>);
            assert_eq!(w, Some(&[0.5, -1.0, 2.0][..]));
            assert_eq!(read.get(VariableId(1)), None);
            assert_eq!(read.get(VariableId(2)), None);
        }
    }

    #[test]
    fn gradients_become_bytes_without_a_copy() {
        let plan = plan(3);
        let gradients = fill(Gradients::for_bytes(&plan));
        let place = gradients.bytes_of(VariableId(0)).as_ptr();
        let (memory, length) = gradients.into_bytes().unwrap();
        let read = DenseGradients::of(&memory.bytes()[..length], &plan).unwrap();
        assert_eq!(read.get(VariableId(0)).unwrap().as_ptr(), place);
    }

    #[test]
    fn bytes_that_are_no_gradients_are_refused() {
        let plan_3 = plan(3);
        let (memory, length) = fill(Gradients::for_bytes(&plan_3)).into_bytes().unwrap();
        let good = &memory.bytes()[..length];
        let refused = |bytes: &[u8], plan: &ShardingPlan| {
            DenseGradients::of(bytes, plan).unwrap_err().to_string()
        };
        let others = "the gradients of a tower are of other variables";
        assert_eq!(refused(good, &plan(4)), others);
        assert_eq!(refused(&[], &plan_3), others);
        let [digest, variables, end] = layout(&plan_3);
        for at in 0..end {
            let mut bytes = good.to_vec();
            bytes[at] ^= 2;
            match at {
                _ if at < digest => {
                    assert!(DenseGradients::of(&bytes, &plan_3).is_ok());
                }
                _ if at < variables => assert_eq!(refused(&bytes, &plan_3), others),
                _ => {
                    let damaged = "the gradients of a tower are damaged";
                    assert_eq!(refused(&bytes, &plan_3), damaged);
                }
            }
        }
        // A gradient of a table is not dense.
        let mut bytes = good.to_vec();
        bytes[variables + 2] = 1;
        assert_eq!(refused(&bytes, &plan_3), "the gradients of a tower are damaged");
    }
}
