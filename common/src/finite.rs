//! Finds NaN and infinities among elements.

use half::{bf16, f16};

use crate::tensor::DType;

/// Bytes scanned at a time before the bad element among them is located.
const BLOCK_BYTES: usize = 16 << 10;

/// Returns the index and value of the first NaN or infinity among elements of this type.
///
/// The bytes need no alignment. Integers are always finite, and an incomplete element at the end is
/// ignored. One pass over the bytes, at about the bandwidth of the L2 cache.
pub fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<(usize, f64)> {
    let exponents = Exponents::of(dtype);
    let size = dtype.size();
    let bytes = &bytes[..bytes.len() / size * size];
    // Almost every block has only finite elements.
    let mut blocks = bytes.chunks(BLOCK_BYTES).enumerate();
    let (block, bytes) = blocks.find(|(_, bytes)| exponents.are_full_in(bytes))?;
    let mut elements = bytes.chunks_exact(size).enumerate();
    let (index, element) = elements.find(|(_, element)| exponents.are_full_in(element))?;
    Some((block * (BLOCK_BYTES / size) + index, value_of(dtype, element)))
}

/// Returns the number of elements of this type that are NaN or infinite.
pub fn count_non_finite(dtype: DType, bytes: &[u8]) -> u64 {
    let exponents = Exponents::of(dtype);
    let size = dtype.size();
    let (words, rest) = bytes[..bytes.len() / size * size].as_chunks();
    let of = |word: [u8; 8]| u64::from(exponents.full_in(u64::from_ne_bytes(word)).count_ones());
    words.iter().map(|word| of(*word)).sum::<u64>() + of(word_of(rest))
}

/// Returns a word that starts with these bytes, padded with zeros.
fn word_of(bytes: &[u8]) -> [u8; 8] {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    word
}

/// The exponent bits of the elements in an 8-byte word. NaN and infinity have all of them set;
/// finite numbers never do.
///
/// Lets a loop scan elements while it does something else with them: it ORs the results of
/// [`Exponents::plus_last`] over all words, then asks [`Exponents::were_full`] once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exponents {
    bits: u64,
    /// The lowest bit of each exponent.
    last: u64,
}

impl Exponents {
    /// No exponent bits: never full.
    pub const NONE: Exponents = Exponents { bits: 0, last: 0 };

    /// Returns the exponents of a type; integers have none.
    pub fn of(dtype: DType) -> Exponents {
        let bits: u64 = match dtype {
            DType::F32 => 0x7f80_0000_7f80_0000,
            DType::F64 => 0x7ff0_0000_0000_0000,
            DType::I64 => return Exponents::NONE,
            DType::F16 => 0x7c00_7c00_7c00_7c00,
            DType::Bf16 => 0x7f80_7f80_7f80_7f80,
        };
        Exponents { bits, last: bits & !(bits << 1) }
    }

    /// Adds the lowest exponent bit to each exponent of a word.
    ///
    /// The sum carries into the sign bit exactly if all exponent bits are set, and never further.
    /// One operation therefore checks a whole word, and vectors of words need neither a branch nor
    /// an instruction that some processors lack.
    #[inline(always)]
    pub fn plus_last(self, word: u64) -> u64 {
        (word & self.bits) + self.last
    }

    /// Returns whether an exponent was full in one of the words whose sums were ORed into `sums`.
    #[inline(always)]
    pub fn were_full(self, sums: u64) -> bool {
        sums & (self.bits + self.last) != 0
    }

    /// Returns a word with one bit set for each element whose exponent is full.
    fn full_in(self, word: u64) -> u64 {
        self.plus_last(word) & (self.bits + self.last)
    }

    /// Returns whether an exponent is full among these elements.
    pub fn are_full_in(self, bytes: &[u8]) -> bool {
        let (lines, rest) = bytes.as_chunks::<64>();
        let mut sums = [0; 8];
        for line in lines {
            let line: [u64; 8] = bytemuck::cast(*line);
            for (sum, word) in sums.iter_mut().zip(line) {
                *sum |= self.plus_last(word);
            }
        }
        let rest = rest.chunks(8).map(|part| self.plus_last(u64::from_ne_bytes(word_of(part))));
        self.were_full(sums.into_iter().chain(rest).fold(0, |all, sum| all | sum))
    }
}

fn value_of(dtype: DType, element: &[u8]) -> f64 {
    match dtype {
        DType::F32 => bytemuck::pod_read_unaligned::<f32>(element).into(),
        DType::F64 => bytemuck::pod_read_unaligned(element),
        DType::I64 => bytemuck::pod_read_unaligned::<i64>(element) as f64,
        DType::F16 => bytemuck::pod_read_unaligned::<f16>(element).into(),
        DType::Bf16 => bytemuck::pod_read_unaligned::<bf16>(element).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bad_element_is_found() {
        let mut values = vec![f32::MAX; 10_000];
        let bytes = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        assert_eq!(first_non_finite(DType::F32, &bytes(&values)), None);
        values[9_999] = f32::NAN;
        values[8_192] = f32::NEG_INFINITY;
        let found = first_non_finite(DType::F32, &bytes(&values));
        assert_eq!(found, Some((8_192, f64::NEG_INFINITY)));
        assert_eq!(count_non_finite(DType::F32, &bytes(&values)), 2);
        let wide = [f64::MIN_POSITIVE, 0.0, f64::INFINITY];
        let wide = bytemuck::cast_slice(&wide);
        assert_eq!(first_non_finite(DType::F64, wide), Some((2, f64::INFINITY)));
        assert_eq!(first_non_finite(DType::I64, &[0xff; 80]), None);
    }

    /// Tests each position in a line, and those around the end of a block and of the input.
    #[test]
    fn every_position_is_scanned() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
            let size = dtype.size();
            let block = BLOCK_BYTES / size;
            let elements = 2 * block + 5;
            let good = vec![0x3f; elements * size];
            let positions = (0..70).chain(block - 2..block + 70).chain(elements - 5..elements);
            for position in positions {
                // Shifted by a byte, because no alignment is required.
                let mut bytes = [&[0], &good[..]].concat();
                let bad = &mut bytes[1 + position * size..][..size];
                bad.copy_from_slice(match dtype {
                    DType::F64 => bytemuck::bytes_of(&f64::NEG_INFINITY),
                    DType::F32 => bytemuck::bytes_of(&f32::NEG_INFINITY),
                    DType::F16 => bytemuck::bytes_of(&f16::NEG_INFINITY),
                    _ => bytemuck::bytes_of(&bf16::NEG_INFINITY),
                });
                let found = first_non_finite(dtype, &bytes[1..]);
                assert_eq!(found, Some((position, f64::NEG_INFINITY)), "{dtype}");
                assert_eq!(count_non_finite(dtype, &bytes[1..]), 1, "{dtype} at {position}");
                // An incomplete element is ignored.
                let short = &bytes[1..position * size + size];
                assert_eq!(first_non_finite(dtype, short), None, "{dtype} at {position}");
            }
            assert_eq!(first_non_finite(dtype, &good), None);
        }
    }

    /// Only the exponent decides, so each exponent is tested with several mantissas.
    #[test]
    fn every_exponent_of_f32_and_f64_is_classified() {
        for exponent in 0..=u8::MAX {
            for sign in [0, 1 << 31] {
                for mantissa in [0, 1, 0x007f_ffff, 0x0040_0000] {
                    let number = f32::from_bits(sign | u32::from(exponent) << 23 | mantissa);
                    let found = first_non_finite(DType::F32, &number.to_ne_bytes());
                    assert_eq!(found.is_none(), number.is_finite(), "{number:?}");
                }
            }
        }
        for exponent in 0..1 << 11 {
            for rest in [0, 1, 0x000f_ffff_ffff_ffff, 1 << 63, 0x8008_0000_0000_0000] {
                let number = f64::from_bits(exponent << 52 | rest);
                let found = first_non_finite(DType::F64, &number.to_ne_bytes());
                assert_eq!(found.is_none(), number.is_finite(), "{number:?}");
            }
        }
    }

    /// Compares all 65,536 numbers with the crate `half`.
    #[test]
    fn every_f16_and_bf16_is_classified() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_ne_bytes();
            let found = |dtype| {
                let first = first_non_finite(dtype, &bytes);
                assert_eq!(count_non_finite(dtype, &bytes), u64::from(first.is_some()));
                first.map(|(index, value)| (index, value.to_bits()))
            };
            let half = f16::from_bits(bits);
            let brain = bf16::from_bits(bits);
            let expected = |value: f64| (0, value.to_bits());
            let bad = (!half.is_finite()).then(|| expected(half.into()));
            assert_eq!(found(DType::F16), bad, "{bits:x}");
            let bad = (!brain.is_finite()).then(|| expected(brain.into()));
            assert_eq!(found(DType::Bf16), bad, "{bits:x}");
        }
    }
}
