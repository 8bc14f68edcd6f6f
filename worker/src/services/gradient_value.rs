//! Dense gradients as a value that goes from task to task.
//!
//! The bytes are the digest of the catalogue, the number of variables as a `u64`, their ids as `u64`,
//! and then the elements of each, padded to 8 bytes.

use pushpull_common::ids::VariableId;

use super::functions::FunctionError;
use super::value::Value;
use crate::gradients::params::Gradients;

/// The bytes of a digest.
const DIGEST: usize = 32;

/// Returns gradients as a value.
pub(crate) fn encode(mut gradients: Gradients) -> Result<Value, FunctionError> {
    if gradients.memory.rows().variables().next().is_some() {
        return Err(FunctionError::new("a tower returns gradients of dense variables alone"));
    }
    let scaled: Vec<VariableId> = gradients.factors.keys().copied().collect();
    scaled.into_iter().for_each(|id| gradients.apply_factor(id));
    let ids: Vec<VariableId> = gradients.present().collect();
    let sizes = ids.iter().map(|&id| gradients.bytes_of(id).len().next_multiple_of(8));
    let bytes = DIGEST + 8 + 8 * ids.len() + sizes.sum::<usize>();
    let fill = |out: &mut [u8]| {
        let (digest, mut rest) = out.split_at_mut(DIGEST);
        digest.copy_from_slice(&gradients.plan.catalogue().digest());
        let numbers = std::iter::once(ids.len() as u64).chain(ids.iter().map(|id| id.0.into()));
        for number in numbers {
            let (head, tail) = rest.split_at_mut(8);
            head.copy_from_slice(&number.to_le_bytes());
            rest = tail;
        }
        for &id in &ids {
            let elements = gradients.bytes_of(id);
            let (head, tail) = rest.split_at_mut(elements.len().next_multiple_of(8));
            head[..elements.len()].copy_from_slice(elements);
            rest = tail;
        }
    };
    Value::filled_bytes(bytes, fill).ok_or_else(|| FunctionError::new("too many gradients"))
}

/// Replaces gradients by those of a value.
pub(crate) fn decode(value: &Value, gradients: &mut Gradients) -> Result<(), FunctionError> {
    let broken = || FunctionError::new("the gradients of a tower are damaged");
    let (digest, mut rest) = value.as_bytes().split_at_checked(DIGEST).ok_or_else(broken)?;
    let plan = gradients.plan.clone();
    if digest != plan.catalogue().digest() {
        return Err(FunctionError::new("the gradients of a tower are of other variables"));
    }
    let number = |rest: &mut &[u8]| {
        let (head, tail) = rest.split_first_chunk::<8>()?;
        *rest = tail;
        Some(u64::from_le_bytes(*head))
    };
    let count = number(&mut rest).ok_or_else(broken)?;
    let variables = plan.catalogue().variables();
    if count > variables.len() as u64 {
        return Err(broken());
    }
    let mut ids = Vec::new();
    for _ in 0..count {
        let id = number(&mut rest).and_then(|id| u32::try_from(id).ok()).ok_or_else(broken)?;
        let dense = variables.get(id as usize).filter(|v| !v.is_sparse() && v.as_table().is_none());
        if !dense.is_some_and(|variable| variable.is_trainable()) {
            return Err(broken());
        }
        ids.push(VariableId(id));
    }
    gradients.memory.present.fill(false);
    for id in ids {
        let bytes = plan.range(id).len();
        let (head, tail) = rest.split_at_checked(bytes.next_multiple_of(8)).ok_or_else(broken)?;
        gradients.bytes_of_mut(id).copy_from_slice(&head[..bytes]);
        gradients.memory.present[id.0 as usize] = true;
        rest = tail;
    }
    if rest.is_empty() { Ok(()) } else { Err(broken()) }
}
