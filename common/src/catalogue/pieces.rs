//! Splits a range of a shard's layout into pieces and encodes values into shorter forms.

use std::ops::Range;

use super::layout::ShardLayout;
use crate::codec::{CodecError, DecodeError, Encoding, ScaleBlocks};
use crate::tensor::DType;

/// A form in which values travel, which may be shorter than the stored form.
///
/// In every form, variables of type `f16` or `bf16` travel in that type. Other variables that are
/// not trainable travel as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ValueEncoding {
    /// Trainable variables travel as stored.
    Own,
    /// Trainable variables travel as [`Encoding::F16`].
    F16,
    /// Trainable variables travel as [`Encoding::Bf16`].
    Bf16,
}

impl ValueEncoding {
    /// Returns the form in which trainable values have this encoding; `None` if there is none.
    pub const fn of(encoding: Encoding) -> Option<ValueEncoding> {
        match encoding {
            Encoding::F16 => Some(ValueEncoding::F16),
            Encoding::Bf16 => Some(ValueEncoding::Bf16),
            _ => None,
        }
    }

    /// Returns the code on the wire: the code of the encoding, or 0 for [`ValueEncoding::Own`].
    pub const fn code(self) -> u8 {
        match self.encoding() {
            Some(encoding) => encoding.code(),
            None => 0,
        }
    }

    /// Returns the form of a code; `None` for a code that this version does not know.
    pub fn from_code(code: u8) -> Option<ValueEncoding> {
        match code {
            0 => Some(ValueEncoding::Own),
            code => Encoding::from_code(code).and_then(ValueEncoding::of),
        }
    }

    /// The encoding of trainable values whose variable type is the stored type.
    const fn encoding(self) -> Option<Encoding> {
        match self {
            ValueEncoding::Own => None,
            ValueEncoding::F16 => Some(Encoding::F16),
            ValueEncoding::Bf16 => Some(Encoding::Bf16),
        }
    }
}

/// The part of a layout range that belongs to one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayoutPiece {
    /// The byte range in the layout, padding included.
    pub range: Range<u64>,
    /// The number of elements.
    pub elements: usize,
    /// The stored type of the elements.
    pub dtype: DType,
    /// The wire encoding if the variable's own type is not the stored type.
    pub own_encoding: Option<Encoding>,
    /// Whether the optimizer updates the elements. Others have no shorter form unless
    /// `own_encoding` is set.
    pub trainable: bool,
}

impl LayoutPiece {
    /// The encoding of the values in this form; `None` if they travel as stored.
    fn encoding(&self, form: ValueEncoding) -> Option<Encoding> {
        self.own_encoding.or(form.encoding().filter(|_| self.trainable))
    }

    /// Returns the bytes of the piece in this form, a multiple of 8.
    pub fn encoded_bytes(&self, form: ValueEncoding) -> usize {
        match self.encoding(form) {
            Some(encoding) => encoding.bytes_max(self.dtype, self.elements),
            None => (self.range.end - self.range.start) as usize,
        }
    }

    /// Returns the bytes of the elements in their stored type, without padding.
    pub fn element_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Decodes the piece into `target`: elements of the variable's own type, aligned for it.
    pub fn decode(
        &self,
        form: ValueEncoding,
        bytes: &[u8],
        target: &mut [u8],
    ) -> Result<(), DecodeError> {
        if let (None, Some(encoding)) = (self.own_encoding, self.encoding(form)) {
            return encoding.decode_into(ScaleBlocks::THROUGH, self.dtype, bytes, target);
        }
        let found = target.len();
        let unfit = DecodeError::Target { dtype: self.dtype, bytes: found };
        if let Some(own) = self.own_encoding {
            return if found == 2 * self.elements { own.take(bytes, target) } else { Err(unfit) };
        }
        // Values as stored: copy them without the padding.
        let expected = self.element_bytes();
        let values = bytes.get(..found).filter(|_| found == expected).ok_or(unfit)?;
        target.copy_from_slice(values);
        Ok(())
    }
}

impl ShardLayout {
    /// Splits a range that starts and ends on multiples of 8 into pieces, in order. The pieces
    /// cover the range if it is within the layout.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = LayoutPiece> + '_ {
        self.within(range.clone()).map(move |partition| {
            let start = partition.offset.max(range.start);
            let end = partition.end().min(range.end);
            let values = (partition.offset + partition.bytes).min(end).saturating_sub(start);
            LayoutPiece {
                range: start..end,
                elements: (values / partition.dtype.size() as u64) as usize,
                dtype: partition.dtype,
                own_encoding: partition.own_encoding,
                trainable: partition.trainable,
            }
        })
    }

    /// Returns the bytes of a range in this form.
    pub fn encoded_bytes(&self, form: ValueEncoding, range: Range<u64>) -> u64 {
        self.pieces(range).map(|piece| piece.encoded_bytes(form) as u64).sum()
    }

    /// Appends the values of `range`, stored in `words`, to `out`. Each piece is one stretch if it
    /// is encoded in this form; other pieces are copied as stored.
    pub fn encode_values(
        &self,
        form: ValueEncoding,
        range: Range<u64>,
        words: &[u64],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        for piece in self.pieces(range.clone()) {
            let words = &words[((piece.range.start - range.start) / 8) as usize..];
            let words = &words[..((piece.range.end - piece.range.start) / 8) as usize];
            let values = &bytemuck::cast_slice::<u64, u8>(words)[..piece.element_bytes()];
            let codec = piece.encoding(form).and_then(Encoding::codec_of_values);
            match (codec, piece.dtype) {
                (Some(codec), DType::F32) => {
                    codec.encode::<f32>(bytemuck::cast_slice(values), out)?
                }
                (Some(codec), DType::F64) => {
                    codec.encode::<f64>(bytemuck::cast_slice(values), out)?
                }
                _ => out.extend_from_slice(bytemuck::cast_slice(words)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::catalogue::Catalogue;
    use crate::placement::{Placement, PlacementStrategy, ShardMap};
    use crate::tensor::Shape;
    use crate::variable::VariableSpec;

    /// Decodes a piece as a worker does, then converts its elements back to the stored type.
    fn put_back(piece: &LayoutPiece, form: ValueEncoding, encoded: &[u8], kept: &mut [u8]) {
        let Some(own) = piece.own_encoding else {
            return piece.decode(form, encoded, kept).unwrap();
        };
        let mut held = vec![0_u16; piece.elements];
        piece.decode(form, encoded, bytemuck::cast_slice_mut(&mut held)).unwrap();
        let kept = bytemuck::cast_slice_mut::<u8, f32>(kept);
        for (kept, bits) in kept.iter_mut().zip(held) {
            *kept = match own {
                Encoding::F16 => f16::from_bits(bits).into(),
                _ => bf16::from_bits(bits).into(),
            };
        }
    }

    /// Values that are encoded over any range and decoded piece by piece come back, up to rounding
    /// if they were encoded.
    #[test]
    fn values_survive_encoding_for_every_range() {
        let variables = vec![
            VariableSpec::f32("w", [5]).unwrap(),
            VariableSpec::f32("ledger", [3]).unwrap().plain(),
            VariableSpec::new("d", DType::F64, Shape::new([4]).unwrap()).unwrap(),
            VariableSpec::new("n", DType::I64, Shape::new([2]).unwrap()).unwrap(),
            VariableSpec::f32("none", [0]).unwrap(),
            VariableSpec::f32("b", [1]).unwrap(),
            VariableSpec::bf16("brain", [5]).unwrap(),
            VariableSpec::f16("half", [3]).unwrap().plain(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let layout = catalogue.layout(catalogue.shards().next().unwrap());
        // 24 + 16 + 32 + 16 + 8 + 24 + 16 bytes. Every float fits 16 bits, up to rounding.
        let floats = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        let mut plain = floats(&[1.0, -2.5, 0.0, 3e4, 7.0, 0.0, 1.1, 2.2, 3.3, 0.0]);
        plain.extend(bytemuck::cast_slice::<f64, u8>(&[0.5, -1.0, 1e-3 + 0.25, 9.0]));
        plain.extend(bytemuck::cast_slice::<i64, u8>(&[i64::MAX, -7]));
        plain.extend(floats(&[-0.125, 0.0]));
        plain.extend(floats(&[1.0, 3e38, -0.5, 2.0, 1e-40, 0.0]));
        plain.extend(floats(&[0.5, -65504.0, 6e-8, 0.0]));
        let words = plain.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
        let words: Vec<u64> = words.collect();
        assert_eq!(layout.bytes(), plain.len() as u64);
        let cuts = || (0..=layout.bytes() as usize).step_by(8);
        for (start, end) in cuts().flat_map(|start| cuts().map(move |end| (start, end))) {
            for form in
                [ValueEncoding::Own, ValueEncoding::F16].into_iter().filter(|_| start <= end)
            {
                let range = start as u64..end as u64;
                let mut out = Vec::new();
                let words = &words[start / 8..end / 8];
                layout.encode_values(form, range.clone(), words, &mut out).unwrap();
                assert_eq!(out.len() as u64, layout.encoded_bytes(form, range.clone()));
                let mut found: Vec<u64> = vec![0; words.len()];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
                let mut rest = &out[..];
                for piece in layout.pieces(range.clone()) {
                    let (encoded, tail) = rest.split_at(piece.encoded_bytes(form));
                    let at = piece.range.start as usize - start;
                    let target = &mut bytes[at..at + piece.element_bytes()];
                    put_back(&piece, form, encoded, target);
                    rest = tail;
                }
                assert!(rest.is_empty());
                for (found, &word) in found.iter().zip(words) {
                    // Encoded values may differ in the bits that the shorter form drops.
                    let is_close =
                        |a: f32, b: f32| a == b || (a - b).abs() <= 4e-3 * b.abs() + 1e-7;
                    let floats = |word: u64| bytemuck::cast::<u64, [f32; 2]>(word);
                    let is_close_f64 =
                        |a: f64, b: f64| form != ValueEncoding::Own && (a - b).abs() < 1e-3;
                    let survived = std::iter::zip(floats(*found), floats(word))
                        .all(|(a, b)| is_close(a, b))
                        || is_close_f64(f64::from_bits(*found), f64::from_bits(word));
                    assert!(*found == word || survived, "{found:x} is not {word:x}");
                }
            }
        }
    }

    /// A shard may send any bytes.
    #[test]
    fn malformed_half_floats_are_rejected() {
        let variables = vec![VariableSpec::bf16("h", [5]).unwrap()];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let layout = catalogue.layout(catalogue.shards().next().unwrap());
        let piece = layout.pieces(0..24).next().unwrap();
        assert_eq!((piece.encoded_bytes(ValueEncoding::Own), piece.element_bytes()), (16, 20));
        let mut held = [0_u16; 5];
        let mut decode = |bytes: &[u8], count: usize| {
            piece.decode(ValueEncoding::F16, bytes, bytemuck::cast_slice_mut(&mut held[..count]))
        };
        let mut bytes = [0_u8; 16];
        assert_eq!(decode(&bytes, 5), Ok(()));
        let target = |bytes| DecodeError::Target { dtype: DType::F32, bytes };
        assert_eq!(decode(&bytes, 4), Err(target(8)));
        let length = decode(&bytes[..8], 5);
        let encoding = Encoding::Bf16;
        let elements = 5;
        let expected = DecodeError::Length { encoding, elements, bytes: 8, expected: 16 };
        assert_eq!(length, Err(expected));
        bytes[10] = 1;
        assert_eq!(decode(&bytes, 5), Err(DecodeError::Padding));
        for code in 3..=u8::MAX {
            assert_eq!(ValueEncoding::from_code(code), None);
        }
        for form in [ValueEncoding::Own, ValueEncoding::F16, ValueEncoding::Bf16] {
            assert_eq!(ValueEncoding::from_code(form.code()), Some(form));
        }
    }
}
