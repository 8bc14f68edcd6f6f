//! A range of a shard's layout piece by piece, and in a shorter form.

use std::ops::Range;

use super::layout::ShardLayout;
use crate::codec::{Blocks, Codec, DecodeError, EncodeError, Encoding};
use crate::tensor::DType;

/// What of a range belongs to one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// Where it lies in the layout, with its padding.
    pub range: Range<u64>,
    /// Its elements.
    pub elements: usize,
    /// Their type.
    pub dtype: DType,
    /// Whether the optimizer updates them: only then do their values travel encoded.
    pub trainable: bool,
}

impl Piece {
    /// The bytes it has if values travel so: whole words.
    pub fn encoded_bytes(&self, encoding: Encoding) -> usize {
        match self.trainable {
            true => encoding.bytes_max(self.dtype, self.elements),
            false => (self.range.end - self.range.start) as usize,
        }
    }

    /// The bytes of its elements.
    pub fn element_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Decodes it into the memory of its elements, aligned for their type.
    pub fn decode(
        &self,
        encoding: Encoding,
        bytes: &[u8],
        target: &mut [u8],
    ) -> Result<(), DecodeError> {
        if self.trainable {
            return encoding.decode_into(Blocks::THROUGH, self.dtype, bytes, target);
        }
        let values = bytes.get(..target.len()).filter(|_| target.len() == self.element_bytes());
        let (dtype, length) = (self.dtype, target.len());
        target.copy_from_slice(values.ok_or(DecodeError::Target { dtype, bytes: length })?);
        Ok(())
    }
}

impl ShardLayout {
    /// The pieces of a range that starts and ends on multiples of 8, in order; they cover it, if it
    /// lies within the layout.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        self.within(range.clone()).map(move |partition| {
            let (start, end) = (partition.offset.max(range.start), partition.end().min(range.end));
            let values = (partition.offset + partition.bytes).min(end).saturating_sub(start);
            Piece {
                range: start..end,
                elements: (values / partition.dtype.size() as u64) as usize,
                dtype: partition.dtype,
                trainable: partition.trainable,
            }
        })
    }

    /// The bytes of a range if values travel so.
    pub fn encoded_bytes(&self, encoding: Encoding, range: Range<u64>) -> u64 {
        self.pieces(range).map(|piece| piece.encoded_bytes(encoding) as u64).sum()
    }

    /// Appends the values of a range, which lie in `words`, to `out`: piece by piece, trained ones as a
    /// stretch each, others as they are.
    pub fn encode_values(
        &self,
        codec: &Codec,
        range: Range<u64>,
        words: &[u64],
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        for piece in self.pieces(range.clone()) {
            let words = &words[((piece.range.start - range.start) / 8) as usize..];
            let words = &words[..((piece.range.end - piece.range.start) / 8) as usize];
            let values = &bytemuck::cast_slice::<u64, u8>(words)[..piece.element_bytes()];
            match (piece.trainable, piece.dtype) {
                (true, DType::F32) => codec.encode::<f32>(bytemuck::cast_slice(values), out)?,
                (true, DType::F64) => codec.encode::<f64>(bytemuck::cast_slice(values), out)?,
                _ => out.extend_from_slice(bytemuck::cast_slice(words)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::placement::{Placement, ShardMap, Strategy};
    use crate::tensor::Shape;
    use crate::variable::VariableSpec;

    /// Encoded range by range and decoded piece by piece, values are what they were, trained ones but
    /// for the rounding.
    #[test]
    fn values_survive_their_short_form_wherever_they_are_cut() {
        let variables = vec![
            VariableSpec::f32("w", [5]).unwrap(),
            VariableSpec::f32("ledger", [3]).unwrap().plain(),
            VariableSpec::new("d", DType::F64, Shape::new([4]).unwrap()).unwrap(),
            VariableSpec::new("n", DType::I64, Shape::new([2]).unwrap()).unwrap(),
            VariableSpec::f32("none", [0]).unwrap(),
            VariableSpec::f32("b", [1]).unwrap(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let layout = catalogue.layout(catalogue.shards().next().unwrap());
        // 24 + 16 + 32 + 16 + 8 bytes; each float is one that half of its bits are enough for.
        let floats = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        let mut plain = floats(&[1.0, -2.5, 0.0, 3e4, 7.0, 0.0, 1.1, 2.2, 3.3, 0.0]);
        plain.extend(bytemuck::cast_slice::<f64, u8>(&[0.5, -1.0, 1e-3 + 0.25, 9.0]));
        plain.extend(bytemuck::cast_slice::<i64, u8>(&[i64::MAX, -7]));
        plain.extend(floats(&[-0.125, 0.0]));
        let words = plain.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
        let words: Vec<u64> = words.collect();
        assert_eq!(layout.bytes(), plain.len() as u64);
        for start in (0..=96).step_by(8) {
            for end in (start..=96).step_by(8) {
                let (range, mut out) = (start as u64..end as u64, Vec::new());
                let words = &words[start / 8..end / 8];
                layout.encode_values(&Codec::F16, range.clone(), words, &mut out).unwrap();
                assert_eq!(out.len() as u64, layout.encoded_bytes(Encoding::F16, range.clone()));
                let mut found: Vec<u64> = vec![0; words.len()];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
                let mut rest = &out[..];
                for piece in layout.pieces(range.clone()) {
                    let (encoded, tail) = rest.split_at(piece.encoded_bytes(Encoding::F16));
                    let at = piece.range.start as usize - start;
                    let target = &mut bytes[at..at + piece.element_bytes()];
                    piece.decode(Encoding::F16, encoded, target).unwrap();
                    rest = tail;
                }
                assert!(rest.is_empty());
                for (found, &word) in found.iter().zip(words) {
                    // 0.251 is the one number that is not short.
                    let near = |a: f64, b: f64| (a - b).abs() < 1e-3;
                    let is_it = near(f64::from_bits(*found), f64::from_bits(word));
                    assert!(*found == word || is_it, "{found:x} is not {word:x}");
                }
            }
        }
    }
}
