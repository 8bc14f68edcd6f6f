//! Dense gradients as a value that goes from task to task.
//!
//! The bytes are those of a buffer of all variables, then the digest of the catalogue, and a byte
//! for each variable: 1 if it has a gradient. So gradients become a value without a copy.

use std::sync::Arc;

use pushpull_common::ids::VariableId;

use super::functions::FunctionError;
use super::value::Value;
use crate::gradients::gradient_buffer::{AlignedBuffer, GradientBuffer};
use crate::gradients::params::{GradientMemory, Gradients};
use crate::gradients::sharding_plan::ShardingPlan;

/// The bytes of a digest.
const DIGEST: usize = 32;

/// Where the parts of a value of a plan begin: the digest, the bytes of the variables, and the end.
fn layout(plan: &ShardingPlan) -> [usize; 3] {
    let digest = plan.bytes().next_multiple_of(8);
    let variables = digest + DIGEST;
    [digest, variables, variables + plan.catalogue().variables().len()]
}

/// Returns an empty set of gradients in memory that becomes a value.
pub(crate) fn empty(plan: &Arc<ShardingPlan>) -> Gradients {
    let [.., bytes] = layout(plan);
    let buffer = GradientBuffer::new(bytes, Arc::from([]));
    Gradients::new(plan.clone(), GradientMemory::of_buffer(plan, buffer))
}

/// Returns gradients as a value. Copies those that are not from [`empty`].
pub(crate) fn encode(mut gradients: Gradients) -> Result<Value, FunctionError> {
    if gradients.memory.rows().variables().next().is_some() {
        return Err(FunctionError::new("a tower returns gradients of dense variables alone"));
    }
    let scaled: Vec<VariableId> = gradients.factors.keys().copied().collect();
    scaled.into_iter().for_each(|id| gradients.apply_factor(id));
    let Gradients { plan, memory, .. } = gradients;
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
    Value::of_bytes(memory, bytes).ok_or_else(|| FunctionError::new("too many gradients"))
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

/// The gradients of a value.
#[derive(Debug)]
pub(crate) struct DenseGradients<'a> {
    plan: &'a ShardingPlan,
    bytes: &'a [u8],
    present: &'a [u8],
}

impl<'a> DenseGradients<'a> {
    /// Reads the gradients of a value, which are of the variables of this plan.
    pub(crate) fn of(
        value: &'a Value,
        plan: &'a ShardingPlan,
    ) -> Result<DenseGradients<'a>, FunctionError> {
        let [digest, variables, end] = layout(plan);
        let bytes = value.as_bytes();
        let is_of = |bytes: &[u8]| bytes[digest..variables] == plan.catalogue().digest();
        if bytes.len() != end || !is_of(bytes) {
            return Err(FunctionError::new("the gradients of a tower are of other variables"));
        }
        let present = &bytes[variables..];
        for (variable, &present) in plan.catalogue().variables().iter().zip(present) {
            let dense = !variable.is_sparse() && variable.as_table().is_none();
            let allowed = u8::from(dense && variable.is_trainable());
            if present > allowed {
                return Err(FunctionError::new("the gradients of a tower are damaged"));
            }
        }
        Ok(DenseGradients { plan, bytes, present })
    }

    /// Returns the gradient of a variable, if there is one.
    pub(crate) fn get(&self, id: VariableId) -> Option<&'a [u8]> {
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
    fn a_value_has_the_gradients_that_are_there() {
        let plan = plan(3);
        let other = Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        for gradients in [empty(&plan), other] {
            let value = encode(fill(gradients)).unwrap();
            let read = DenseGradients::of(&value, &plan).unwrap();
            let w = read.get(VariableId(0)).map(bytemuck::cast_slice::<u8, f32>);
            assert_eq!(w, Some(&[0.5, -1.0, 2.0][..]));
            assert_eq!(read.get(VariableId(1)), None);
            assert_eq!(read.get(VariableId(2)), None);
        }
    }

    #[test]
    fn gradients_become_a_value_without_a_copy() {
        let plan = plan(3);
        let gradients = fill(empty(&plan));
        let place = gradients.bytes_of(VariableId(0)).as_ptr();
        let value = encode(gradients).unwrap();
        let read = DenseGradients::of(&value, &plan).unwrap();
        assert_eq!(read.get(VariableId(0)).unwrap().as_ptr(), place);
    }

    #[test]
    fn values_that_are_no_gradients_are_refused() {
        let plan_3 = plan(3);
        let good = encode(fill(empty(&plan_3))).unwrap();
        let refused = |bytes: &[u8], plan: &ShardingPlan| {
            let value = Value::bytes(bytes).unwrap();
            DenseGradients::of(&value, plan).unwrap_err().to_string()
        };
        let others = "the gradients of a tower are of other variables";
        assert_eq!(refused(good.as_bytes(), &plan(4)), others);
        assert_eq!(refused(&[], &plan_3), others);
        let [digest, variables, end] = layout(&plan_3);
        for at in 0..end {
            let mut bytes = good.as_bytes().to_vec();
            bytes[at] ^= 2;
            match at {
                _ if at < digest => {
                    let value = Value::bytes(&bytes).unwrap();
                    assert!(DenseGradients::of(&value, &plan_3).is_ok());
                }
                _ if at < variables => assert_eq!(refused(&bytes, &plan_3), others),
                _ => {
                    let damaged = "the gradients of a tower are damaged";
                    assert_eq!(refused(&bytes, &plan_3), damaged);
                }
            }
        }
        // A gradient of a table is not dense.
        let mut bytes = good.as_bytes().to_vec();
        bytes[variables + 2] = 1;
        assert_eq!(refused(&bytes, &plan_3), "the gradients of a tower are damaged");
    }
}
