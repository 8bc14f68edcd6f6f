//! The weighted sum of gradients of one dense variable.

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, Element, bf16, f16};

use super::params::Gradients;

impl Gradients {
    /// Replaces the gradient of a dense variable by a weighted sum of gradients of its type, which
    /// is made in `f64`, in the order of `terms`, and rounded once.
    pub(crate) fn set_dense_sum(&mut self, id: VariableId, terms: &[(f64, &[u8])]) {
        self.memory.present[id.0 as usize] = true;
        let dtype = self.plan.catalogue().variable(id).dtype();
        let out = self.bytes_of_mut(id);
        match dtype {
            DType::F32 => sum_dense::<f32>(out, terms, |sum| sum as f32),
            DType::F64 => sum_dense::<f64>(out, terms, |sum| sum),
            DType::F16 => sum_dense::<f16>(out, terms, f16::from_f64),
            DType::Bf16 => sum_dense::<bf16>(out, terms, bf16::from_f64),
            _ => unreachable!("only floating-point variables have gradients"),
        }
    }
}

/// How many sums are made at once: they stay in the nearest cache.
pub(crate) const SUMS_AT_ONCE: usize = 512;

fn sum_dense<T: Element + Into<f64>>(
    out: &mut [u8],
    terms: &[(f64, &[u8])],
    round: impl Fn(f64) -> T,
) {
    if let [(1.0, only)] = terms {
        return out.copy_from_slice(only);
    }
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let mut sums = [0.0; SUMS_AT_ONCE];
    for (chunk, out) in out.chunks_mut(SUMS_AT_ONCE).enumerate() {
        let sums = &mut sums[..out.len()];
        sums.fill(0.0);
        for (weight, term) in terms {
            let term: &[T] = bytemuck::cast_slice(term);
            let term = &term[chunk * SUMS_AT_ONCE..][..out.len()];
            for (sum, &element) in sums.iter_mut().zip(term) {
                *sum += weight * element.into();
            }
        }
        for (out, &sum) in out.iter_mut().zip(&*sums) {
            *out = round(sum);
        }
    }
}
