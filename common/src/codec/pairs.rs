//! The encoding of pairs: elements with their indices, for codecs that omit most elements.
//!
//! The format: the number of pairs as a `u32`, 4 zero bytes, the indices as ascending `u32`, zeros
//! up to a multiple of 8, the values unchanged, zeros up to a multiple of 8.
//!
//! A codec sends the elements beyond a threshold (N. Strom, "Scalable Distributed DNN Training
//! Using Commodity GPU Cloud Computing", Interspeech 2015). Or it sends the largest (A. F. Aji, K.
//! Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017), chosen exactly.

use super::{DecodeError, Encoding, Real, length, padding};

const HEAD: usize = 8;
const INDEX: usize = 4;

pub(super) const fn bytes(width: usize, pairs: usize) -> usize {
    HEAD + (pairs * INDEX).next_multiple_of(8) + (pairs * width).next_multiple_of(8)
}

/// Encodes the elements of at least this magnitude.
pub(super) fn encode_beyond<T: Real>(values: &[T], magnitude: f64, out: &mut Vec<u8>) {
    let is_sent = |value: T| value.to_f64().abs() >= magnitude;
    let count = values.iter().filter(|&&value| is_sent(value)).count();
    put(values, count, is_sent, out);
}

/// Returns how many of `elements` elements are sent at most, if a fraction of them is.
pub fn top_k_pairs_max(fraction: f64, elements: usize) -> usize {
    ((elements as f64 * fraction).ceil() as usize).min(elements)
}

/// Encodes the given fraction of elements with the largest magnitudes, without zeros. Of equal
/// magnitudes the first are sent. `order` is scratch memory for the magnitudes.
pub(super) fn encode_top<T: Real>(
    values: &[T],
    fraction: f64,
    order: &mut Vec<T>,
    out: &mut Vec<u8>,
) {
    let count = top_k_pairs_max(fraction, values.len());
    if count == 0 {
        return put(values, 0, |_| false, out);
    }
    order.clear();
    order.extend_from_slice(values);
    let order: &mut [T::Magnitude] = bytemuck::cast_slice_mut(order);
    order.iter_mut().zip(values).for_each(|(magnitude, value)| *magnitude = value.magnitude());
    let (_, &mut smallest, larger) = order.select_nth_unstable(values.len() - count);
    // The larger ones are all sent; elements equal to `smallest` fill the rest of `count`.
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

/// Encodes the `count` elements for which `is_sent` holds.
fn put<T: Real>(values: &[T], count: usize, mut is_sent: impl FnMut(T) -> bool, out: &mut Vec<u8>) {
    let start = out.len();
    let indices = start + HEAD;
    let end = indices + INDEX * count;
    // The loop below may write one index more than is kept; it is truncated afterwards.
    out.resize(end + INDEX, 0);
    // Fits: a stretch has at most `u32::MAX` elements.
    out[start..start + INDEX].copy_from_slice(&(count as u32).to_le_bytes());
    // Every index is written, and kept only if its element is sent: an unpredictable branch would
    // cost more.
    let slots = out[indices..].as_chunks_mut::<INDEX>().0;
    let mut sent = 0;
    for (index, &value) in values.iter().enumerate() {
        slots[sent] = (index as u32).to_le_bytes();
        sent += usize::from(is_sent(value));
    }
    debug_assert_eq!(sent, count, "`count` is exact");
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

/// Returns how many of `elements` elements are sent, as the head of a stretch announces it; 0 if
/// the stretch has no whole head.
fn announced(elements: usize, stretch: &[u8]) -> Result<usize, DecodeError> {
    let pairs = stretch.first_chunk().map_or(0, |head| u32::from_le_bytes(*head));
    // Check the count before a length is computed from it.
    match pairs as usize > elements {
        true => Err(DecodeError::Count { pairs, elements }),
        false => Ok(pairs as usize),
    }
}

/// Returns the length of a stretch that other bytes may follow, as its head announces it.
pub(super) fn announced_bytes(
    width: usize,
    elements: usize,
    stretch: &[u8],
) -> Result<usize, DecodeError> {
    announced(elements, stretch).map(|count| bytes(width, count))
}

pub(super) fn decode<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    let elements = target.len();
    let width = size_of::<T>();
    let Some((head, rest)) = bytes.split_at_checked(HEAD) else {
        return length(Encoding::Pairs, elements, bytes, HEAD);
    };
    padding(&head[INDEX..])?;
    let count = announced(elements, head)?;
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
