//! Elements with their indices, for codecs that leave most out: the number of pairs as a `u32`, 4
//! zeros, the indices as rising `u32`, zeros up to a multiple of 8, the values as they are, zeros
//! up to a multiple of 8.
//!
//! Which elements are sent: those beyond a threshold (N. Strom, "Scalable Distributed DNN Training
//! Using Commodity GPU Cloud Computing", Interspeech 2015), or the largest (A. F. Aji, K. Heafield,
//! "Sparse Communication for Distributed Gradient Descent", EMNLP 2017), chosen exactly.

use super::{DecodeError, Encoding, Real, length, padding};

const HEAD: usize = 8;
const INDEX: usize = 4;

pub(super) const fn bytes(width: usize, pairs: usize) -> usize {
    HEAD + (pairs * INDEX).next_multiple_of(8) + (pairs * width).next_multiple_of(8)
}

/// Encodes those of at least this magnitude.
pub(super) fn encode_beyond<T: Real>(values: &[T], magnitude: f64, out: &mut Vec<u8>) {
    let is_sent = |value: T| value.to_f64().abs() >= magnitude;
    let count = values.iter().filter(|&&value| is_sent(value)).count();
    put(values, count, is_sent, out);
}

/// Encodes this share of the largest, without zeros. Of equal ones the first go. `order` is memory for
/// the magnitudes.
pub(super) fn encode_top<T: Real>(
    values: &[T],
    fraction: f64,
    order: &mut Vec<T>,
    out: &mut Vec<u8>,
) {
    let count = ((values.len() as f64 * fraction).ceil() as usize).min(values.len());
    if count == 0 {
        return put(values, 0, |_| false, out);
    }
    order.clear();
    order.extend_from_slice(values);
    let order: &mut [T::Magnitude] = bytemuck::cast_slice_mut(order);
    order.iter_mut().zip(values).for_each(|(magnitude, value)| *magnitude = value.magnitude());
    let (_, &mut smallest, larger) = order.select_nth_unstable(values.len() - count);
    // As many of the smallest that are sent as there is room for beside those that are larger.
    let larger = larger.iter().filter(|&&magnitude| magnitude > smallest).count();
    let mut ties = count - larger;
    let zero = T::Magnitude::default();
    let count = if smallest > zero { count } else { larger };
    let is_sent = |value: T| {
        let magnitude = value.magnitude();
        if magnitude == smallest && magnitude > zero && ties > 0 {
            ties -= 1;
            return true;
        }
        magnitude > smallest
    };
    put(values, count, is_sent, out);
}

/// Encodes those that are sent, which are so many.
fn put<T: Real>(values: &[T], count: usize, mut is_sent: impl FnMut(T) -> bool, out: &mut Vec<u8>) {
    let start = out.len();
    let indices = start + HEAD;
    let end = indices + INDEX * count;
    // One more than there are, which is zero again in the end.
    out.resize(end + INDEX, 0);
    // A stretch has no more elements than a u32 counts.
    out[start..start + INDEX].copy_from_slice(&(count as u32).to_le_bytes());
    // Written for every element and kept for those that are sent: a branch that cannot be foreseen
    // costs more.
    let slots = out[indices..].as_chunks_mut::<INDEX>().0;
    let mut sent = 0;
    for (index, &value) in values.iter().enumerate() {
        slots[sent] = (index as u32).to_le_bytes();
        sent += usize::from(is_sent(value));
    }
    debug_assert_eq!(sent, count, "they were counted");
    out.truncate(end);
    pad(start, out);
    for at in (indices..end).step_by(INDEX) {
        let index = index(&out[at..]);
        out.extend(values[index as usize].to_bytes().as_ref());
    }
    pad(start, out);
}

fn pad(start: usize, out: &mut Vec<u8>) {
    out.resize(start + (out.len() - start).next_multiple_of(8), 0);
}

fn index(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

pub(super) fn decode<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    let (elements, width) = (target.len(), size_of::<T>());
    let Some((head, rest)) = bytes.split_at_checked(HEAD) else {
        return length(Encoding::Pairs, elements, bytes, HEAD);
    };
    let pairs = index(head);
    padding(&head[INDEX..])?;
    // Before a length is made of it.
    if pairs as usize > elements {
        return Err(DecodeError::Count { pairs, elements });
    }
    let count = pairs as usize;
    length(Encoding::Pairs, elements, bytes, self::bytes(width, count))?;
    let (indices, values) = rest.split_at((count * INDEX).next_multiple_of(8));
    target.fill(T::ZERO);
    let mut free = 0;
    let pairs = indices.chunks(INDEX).zip(values.chunks(width)).take(count);
    for (pair, (found, value)) in pairs.enumerate() {
        let index = index(found);
        if (index as usize) < free || index as usize >= elements {
            return Err(DecodeError::Index { pair, index, elements });
        }
        target[index as usize] = T::from_bytes(value);
        free = index as usize + 1;
    }
    padding(&indices[count * INDEX..])?;
    padding(&values[count * width..])
}
