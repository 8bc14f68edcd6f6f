//! Base-4 digits: a push adds 1 to a digit of its own, so values show of which pushes they are the
//! sum.

use pushpull_common::tensor::DType;

use crate::setting::RATE;

/// Returns how many pushes one element can encode: two bits each, exact in the type's mantissa.
pub(crate) fn digits(dtype: DType) -> usize {
    match dtype {
        DType::F64 => 26,
        _ => 12,
    }
}

/// Returns the element and the digit of a push.
pub(crate) fn place(number: usize, dtype: DType) -> (usize, usize) {
    (number / digits(dtype), number % digits(dtype))
}

/// Decodes values: yields for each element the sum of its gradients.
///
/// # Panics
/// If a value is no sum of gradients.
pub(crate) fn sums(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(dtype.size()).map(move |value| {
        let value = match dtype {
            DType::F64 => f64::from_le_bytes(value.try_into().expect("8 bytes")),
            _ => f32::from_le_bytes(value.try_into().expect("4 bytes")).into(),
        };
        let sum = -value / RATE;
        assert!(sum >= 0.0 && sum.fract() == 0.0, "{value} is no sum of gradients");
        sum as u64
    })
}

/// Yields the numbers of the pushes of one element, and how often each counts.
pub(crate) fn counts(dtype: DType, element: usize, sum: u64) -> impl Iterator<Item = (usize, u64)> {
    let first = element * digits(dtype);
    (0..digits(dtype)).map(move |digit| (first + digit, (sum >> (2 * digit)) % 4))
}
