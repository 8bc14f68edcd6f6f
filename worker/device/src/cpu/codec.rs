//! Encoding of gradients, by the code of the wire format itself.

use pushpull_common::codec::{Codec, CodecError, Residual, ScaleBlocks};

/// Encodes a stretch to the first bytes of `out`, which is long enough.
pub(crate) fn encode(
    codec: &Codec,
    gradient: &[f32],
    residual: &mut [f32],
    out: &mut [u8],
) -> Result<(), CodecError> {
    let mut bytes = Vec::with_capacity(out.len());
    let mut kept = Residual::from_left(residual.to_vec());
    kept.encode(codec, ScaleBlocks::THROUGH, 0, gradient, &mut bytes)?;
    residual.copy_from_slice(kept.left());
    out[..bytes.len()].copy_from_slice(&bytes);
    Ok(())
}
