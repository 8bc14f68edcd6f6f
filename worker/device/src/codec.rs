//! Encoding of gradients with error feedback, in the formats of `docs/codecs.md`.

use pushpull_common::codec::{Codec, CodecError, Encoding, STRETCH_ELEMENTS_MAX, top_k_pairs_max};
use pushpull_common::finite;
use pushpull_common::tensor::DType;

use crate::cpu;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

impl Device {
    /// Returns whether [`Device::encode`] knows a codec: all but [`Codec::Threshold`].
    pub fn encodes(codec: &Codec) -> bool {
        matches!(codec, Codec::F16 | Codec::Bf16 | Codec::Int8 | Codec::OneBit | Codec::TopK { .. })
    }

    /// Returns the bytes that [`Device::encode`] needs for a stretch: a multiple of 8.
    ///
    /// The number is exact, except for [`Codec::TopK`], where [`Device::encoded_bytes`] returns the
    /// bytes in use.
    pub fn encoded_bytes_max(codec: &Codec, elements: usize) -> usize {
        match *codec {
            Codec::TopK { fraction } => pair_bytes(top_k_pairs_max(fraction, elements)),
            _ => codec.encoding().bytes_max(DType::F32, elements),
        }
    }

    /// Returns the bytes of an encoded stretch of `elements` elements, from its first 4 bytes.
    ///
    /// Only [`Codec::TopK`] reads them.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if they are missing, [`ComputeError::Pairs`] if they count more
    /// pairs than the codec sends.
    pub fn encoded_bytes(
        codec: &Codec,
        elements: usize,
        head: &[u8],
    ) -> Result<usize, ComputeError> {
        let Codec::TopK { fraction } = *codec else {
            return Ok(Device::encoded_bytes_max(codec, elements));
        };
        check_length("encoded_bytes", "the head", head.len().min(4), 4)?;
        let pairs = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        match pairs <= top_k_pairs_max(fraction, elements) {
            true => Ok(pair_bytes(pairs)),
            false => Err(ComputeError::Pairs { pairs, elements, codec: codec.to_string() }),
        }
    }

    /// Writes the index of the first element that is NaN or infinite to `index`, or [`u64::MAX`] if
    /// all are finite. One pass over the elements, queued on the device.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `index` does not have one element.
    pub fn first_non_finite<'a>(
        &self,
        values: impl Into<View<'a, f32>>,
        index: impl Into<ViewMut<'a, u64>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "first_non_finite";
        let values = values.into();
        let index = index.into();
        check_length(NAME, "index", index.len(), 1)?;
        match self.backend() {
            Backend::Cpu(_) => {
                let values = values.host(NAME, "values")?;
                let index = index.host(NAME, "index")?;
                let found = finite::first_non_finite(DType::F32, bytemuck::cast_slice(values));
                index[0] = found.map_or(u64::MAX, |(index, _)| index as u64);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let values = values.cuda(cuda, NAME, "values")?;
                cuda.first_non_finite(values, index.cuda(cuda, NAME, "index")?)?;
            }
        }
        Ok(())
    }

    /// Encodes the sum of a stretch and its residual to the first bytes of `out`, and keeps the
    /// error of the encoding as the new residual.
    ///
    /// Bytes and residual equal the results of [`Residual::encode`] with [`ScaleBlocks::THROUGH`],
    /// bit for bit, on every device. The elements must be finite, unless the codec is
    /// [`Codec::F16`] or [`Codec::Bf16`]; check them with [`Device::first_non_finite`] before. If
    /// they are not, the processor returns an error; a CUDA device writes unspecified bytes and
    /// residuals. The residual must be finite.
    ///
    /// On a CUDA device the work is queued: one pass over the stretch, or six for [`Codec::TopK`],
    /// which also allocates 4 KiB and 8 bytes for each 2,048 elements. A device without memory
    /// pools waits for the work of that codec before the memory is freed. The processor takes four
    /// passes on the calling thread, and copies the residual.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if the residual does not have the length of the gradient, or if
    /// `out` has fewer bytes than [`Device::encoded_bytes_max`]. [`ComputeError::Codec`] if the
    /// codec is not known or its parameter not valid, if there are more than
    /// [`STRETCH_ELEMENTS_MAX`] elements, and on the processor if an element is not finite. The
    /// errors of [`Device::buffer`].
    ///
    /// # Panics
    /// If `out` is memory of a CUDA device and not aligned to 8 bytes.
    ///
    /// [`Residual::encode`]: pushpull_common::codec::Residual::encode
    /// [`ScaleBlocks::THROUGH`]: pushpull_common::codec::ScaleBlocks::THROUGH
    pub fn encode<'a>(
        &self,
        codec: &Codec,
        gradient: impl Into<View<'a, f32>>,
        residual: impl Into<ViewMut<'a, f32>>,
        out: impl Into<ViewMut<'a, u8>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "encode";
        let gradient = gradient.into();
        let residual = residual.into();
        let out = out.into();
        let elements = gradient.len();
        check_codec(codec, elements)?;
        check_length(NAME, "residual", residual.len(), elements)?;
        let bytes = Device::encoded_bytes_max(codec, elements);
        // More bytes than are needed are no fault.
        check_length(NAME, "out", out.len().min(bytes), bytes)?;
        let out = out.slice(0..bytes);
        match self.backend() {
            Backend::Cpu(_) => {
                let gradient = gradient.host(NAME, "gradient")?;
                let residual = residual.host(NAME, "residual")?;
                cpu::codec::encode(codec, gradient, residual, out.host(NAME, "out")?)
                    .map_err(refused)?;
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let gradient = gradient.cuda(cuda, NAME, "gradient")?;
                let residual = residual.cuda(cuda, NAME, "residual")?;
                let out = out.cuda(cuda, NAME, "out")?.cast();
                match *codec {
                    Codec::F16 => cuda.encode_halves("encode_f16", gradient, residual, out)?,
                    Codec::Bf16 => cuda.encode_halves("encode_bf16", gradient, residual, out)?,
                    Codec::Int8 => cuda.encode_blocks("encode_int8", gradient, residual, out)?,
                    Codec::OneBit => {
                        cuda.encode_blocks("encode_one_bit", gradient, residual, out)?
                    }
                    Codec::TopK { fraction } => {
                        let pairs = top_k_pairs_max(fraction, elements) as u32;
                        cuda.encode_top(pairs, gradient, residual, out)?;
                    }
                    _ => return Err(unknown(codec)),
                }
            }
        }
        Ok(())
    }
}

/// Checks that a codec can encode this many elements.
fn check_codec(codec: &Codec, elements: usize) -> Result<(), ComputeError> {
    if !Device::encodes(codec) {
        return Err(unknown(codec));
    }
    codec.validate().map_err(refused)?;
    match elements <= STRETCH_ELEMENTS_MAX {
        true => Ok(()),
        false => Err(refused(CodecError::TooLong { elements })),
    }
}

fn refused(error: CodecError) -> ComputeError {
    ComputeError::Codec { reason: error.to_string() }
}

fn unknown(codec: &Codec) -> ComputeError {
    ComputeError::Codec { reason: format!("cannot encode on a device with the codec {codec}") }
}

fn pair_bytes(pairs: usize) -> usize {
    Encoding::Pairs.bytes_max(DType::F32, pairs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::random;

    #[test]
    fn lengths_are_those_of_the_encoded_stretches() {
        let device = Device::cpu_threads(1).unwrap();
        let fractions = [1e-9, 0.01, 0.3, 1.0].map(|fraction| Codec::TopK { fraction });
        let others = [Codec::F16, Codec::Bf16, Codec::Int8, Codec::OneBit];
        for codec in fractions.into_iter().chain(others) {
            for elements in [0, 1, 100, 257, 1000] {
                let gradient = random(1, elements);
                let mut left = vec![0.0; elements];
                let mut expected = Vec::new();
                codec.encode(&gradient, &mut expected).unwrap();
                let mut out = vec![0xff; Device::encoded_bytes_max(&codec, elements)];
                device.encode(&codec, &gradient, &mut left, &mut out).unwrap();
                assert_eq!(out, expected, "{elements} as {codec}");
                assert_eq!(Device::encoded_bytes(&codec, elements, &out), Ok(out.len()));
            }
        }
        let codec = Codec::TopK { fraction: 0.5 };
        let bytes = |pairs: u32| Device::encoded_bytes(&codec, 4, &pairs.to_le_bytes());
        assert_eq!([0, 1, 2].map(bytes), [Ok(8), Ok(24), Ok(24)]);
        let error = bytes(3).unwrap_err().to_string();
        assert_eq!(error, "the device has encoded 3 pairs of 4 elements with topk(0.5)");
        let error = Device::encoded_bytes(&codec, 4, &[0; 3]).unwrap_err().to_string();
        assert_eq!(error, "encoded_bytes needs 4 elements of the head, not 3");
    }

    #[test]
    fn faults_are_found_before_anything_is_written() {
        let device = Device::cpu_threads(1).unwrap();
        let mut left = [0.5; 2];
        let mut out = [0xff; 16];
        let mut refusal = |codec: Codec, gradient: &[f32]| {
            let error = device.encode(&codec, gradient, &mut left, &mut out).unwrap_err();
            assert_eq!((left, out), ([0.5; 2], [0xff; 16]));
            error.to_string()
        };
        let threshold = Codec::Threshold { magnitude: 0.1 };
        assert!(!Device::encodes(&threshold));
        let expected = "cannot encode on a device with the codec threshold(0.1)";
        assert_eq!(refusal(threshold, &[1.0; 2]), expected);
        let error = refusal(Codec::TopK { fraction: 0.0 }, &[1.0; 2]);
        assert!(error.starts_with("cannot use the codec topk(0)"), "{error}");
        assert_eq!(
            refusal(Codec::Int8, &[1.0, f32::NAN]),
            "cannot encode element 1 as int8: it is NaN"
        );
        assert_eq!(refusal(Codec::F16, &[1.0]), "encode needs 1 elements of residual, not 2");
        assert_eq!(
            refusal(Codec::TopK { fraction: 1.0 }, &[1.0; 2]),
            "encode needs 24 elements of out, not 16"
        );
    }
}
