//! Sums rows of one id, so that the ids of a push are unique and ascend.

use std::convert::identity;
use std::ops::AddAssign;

use pushpull_common::tensor::{DType, Element, bf16, f16};

/// The memory for sums of rows, reused from push to push.
#[derive(Clone, Debug, Default)]
pub(super) struct DuplicateSums {
    /// Row ids, each with the index of its row, sorted.
    order: Vec<(u64, u32)>,
    /// The sum of the rows of one id.
    sum: Vec<u64>,
}

impl DuplicateSums {
    /// Appends rows to `unique` and `out` with unique ascending ids. Rows of one id are summed in
    /// their order; halves are summed in `f32` and rounded once.
    pub(super) fn add_up<T: Element>(
        &mut self,
        ids: &[u64],
        values: &[T],
        unique: &mut Vec<u64>,
        out: &mut Vec<u8>,
    ) {
        if ids.is_sorted_by(|a, b| a < b) {
            unique.extend_from_slice(ids);
            out.extend_from_slice(bytemuck::cast_slice(values));
            return;
        }
        // Sorted by id, then by index.
        self.order.clear();
        let keys = ids.iter().enumerate().map(|(place, &id)| (id, place as u32));
        self.order.extend(keys);
        self.order.sort_unstable();
        unique.extend(self.order.chunk_by(|a, b| a.0 == b.0).map(|of| of[0].0));
        let width = values.len().checked_div(ids.len()).unwrap_or(0);
        let order = &self.order[..];
        let sums = &mut self.sum;
        let values: &[u8] = bytemuck::cast_slice(values);
        match T::DTYPE {
            DType::F32 => sum::<f32, f32>(order, width, values, sums, out, identity, identity),
            DType::F64 => sum::<f64, f64>(order, width, values, sums, out, identity, identity),
            DType::I64 => sum::<i64, i64>(order, width, values, sums, out, identity, identity),
            DType::F16 => sum(order, width, values, sums, out, f16::to_f32, f16::from_f32),
            DType::Bf16 => sum(order, width, values, sums, out, bf16::to_f32, bf16::from_f32),
            _ => unreachable!("an element is of a known type"),
        }
        sums.clear();
    }
}

/// Appends the rows in this order of ids and indices, and sums rows of one id in type `S`. `values`
/// are the bytes of elements of type `T`, and `sums` is memory for one row.
fn sum<T: Element, S: Element + AddAssign>(
    order: &[(u64, u32)],
    width: usize,
    values: &[u8],
    sums: &mut Vec<u64>,
    out: &mut Vec<u8>,
    widen: impl Fn(T) -> S,
    narrow: impl Fn(S) -> T,
) {
    let values: &[T] = bytemuck::cast_slice(values);
    let row = |place: u32| &values[place as usize * width..(place as usize + 1) * width];
    for of in order.chunk_by(|a, b| a.0 == b.0) {
        if let [(_, place)] = of {
            out.extend_from_slice(bytemuck::cast_slice(row(*place)));
            continue;
        }
        sums.resize((width * size_of::<S>()).div_ceil(8), 0);
        let sums: &mut [S] = &mut bytemuck::cast_slice_mut(sums)[..width];
        for (nth, (_, place)) in of.iter().enumerate() {
            for (sum, &value) in sums.iter_mut().zip(row(*place)) {
                // Adding the first row to zeros would lose a negative zero.
                if nth == 0 {
                    *sum = widen(value);
                } else {
                    *sum += widen(value);
                }
            }
        }
        let rounded = sums.iter().map(|&sum| narrow(sum));
        rounded.for_each(|value| out.extend_from_slice(bytemuck::bytes_of(&value)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_summed_in_f32_and_rounded_once() {
        let mut sums = DuplicateSums::default();
        let mut ids = Vec::new();
        let mut bytes = Vec::new();
        let [one, tiny] = [bf16::ONE, bf16::from_f32(1.0 / 256.0)];
        // Each tiny row alone would be rounded away.
        sums.add_up(&[7, 5, 7, 7], &[one, -bf16::ZERO, tiny, tiny], &mut ids, &mut bytes);
        let values = pushpull_common::tensor::elements_of::<bf16>(&bytes);
        assert_eq!(ids, [5, 7]);
        assert_eq!(values[1], bf16::from_f32(1.0 + 2.0 / 256.0));
        assert!(values[0].is_sign_negative(), "one row is copied, not added to zero");
        sums.add_up(&[1, 2], &[1.0_f32, 2.0], &mut ids, &mut bytes);
        assert_eq!((&ids[2..], bytes.len()), (&[1, 2][..], 2 * 2 + 2 * 4));
    }
}
