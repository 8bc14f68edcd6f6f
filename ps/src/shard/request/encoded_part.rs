//! Encoded parts of pushes: gradients, and every push of an f16 or bf16 variable. Parts are decoded
//! into their push slot when they arrive, so that later code sees elements.

use std::ops::Range;

use pushpull_common::codec::{Encoding, ScaleBlocks};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{Operation, PushEncoded, PushPart};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Header, Refusal};
use pushpull_common::tensor::DType;
use pushpull_store::store::Store;

/// The encoding that the message of a part states.
#[derive(Clone, Copy, Debug)]
pub(in crate::shard) struct PartEncoding {
    pub(in crate::shard) encoding: u8,
    pub(in crate::shard) elements: u32,
    pub(in crate::shard) factor: f64,
}

impl PartEncoding {
    pub(in crate::shard) fn of(encoded: &PushEncoded) -> PartEncoding {
        let &PushEncoded { encoding, elements, factor, .. } = encoded;
        PartEncoding { encoding, elements, factor }
    }
}

/// An encoded body of a part.
#[derive(Clone, Debug)]
pub(in crate::shard) struct EncodedPart {
    encoding: Encoding,
    variable: VariableId,
    dtype: DType,
    blocks: ScaleBlocks,
    /// The bytes of its elements after decoding.
    decoded: usize,
    /// The factor of the decoded elements.
    factor: f64,
    /// The memory that receives the body. Empty until then.
    pub(in crate::shard) bytes: Vec<u8>,
}

impl EncodedPart {
    /// Returns the encoded body that the message of a part announces, and its range in the shard's
    /// layout. Refuses one that cannot be what the message states.
    pub(in crate::shard) fn of(
        store: Option<&Store>,
        header: &Header,
        part: &PushPart,
        form: PartEncoding,
    ) -> Result<(Range<u64>, EncodedPart), Refusal> {
        let store = store.ok_or(Refusal::NotInitialized {})?;
        let layout = store.layout();
        if part.offset >= layout.values_end() {
            let offset = part.offset;
            let bytes = header.body_bytes;
            let limit = layout.values_end();
            return Err(Refusal::Range { offset, bytes, limit });
        }
        let partition = layout.at(part.offset);
        let variable = partition.variable;
        let dtype = partition.dtype;
        let refusal = |detail: String| {
            let detail = Detail::clipped(detail);
            Refusal::Encoding { variable, encoding: form.encoding, detail }
        };
        let encoding = Encoding::from_code(form.encoding)
            .ok_or_else(|| refusal("it is unknown to this server".to_owned()))?;
        let own = partition.own_encoding == Some(encoding);
        if !own && (part.operation != (Operation::Gradient {}) || !dtype.is_float()) {
            return Err(refusal(format!("only gradients of floats are encoded, not {dtype}")));
        }
        let factor = form.factor;
        let scales = own && part.operation == (Operation::Gradient {}) && factor.is_finite();
        if factor != 1.0 && !scales {
            return Err(refusal(format!("{factor} is not a valid factor")));
        }
        if partition.is_sparse() && !encoding.is_for_rows() {
            return Err(refusal("rows cannot have it".to_owned()));
        }
        let decoded = u64::from(form.elements) * dtype.size() as u64;
        let end = part.offset + decoded;
        let limit = partition.offset + partition.bytes;
        let aligned = (part.offset - partition.offset).is_multiple_of(dtype.size() as u64);
        if !aligned || form.elements == 0 || end > limit || decoded > PART_BYTES_MAX {
            return Err(Refusal::Range { offset: part.offset, bytes: decoded, limit });
        }
        let blocks = partition.blocks_from(part.offset);
        let most = encoding.rows_bytes_max(blocks, dtype, form.elements as usize) as u64;
        let fits = match encoding {
            Encoding::Pairs => header.body_bytes <= most,
            _ => header.body_bytes == most,
        };
        if !fits {
            let found = header.body_bytes;
            let elements = form.elements;
            return Err(refusal(format!("{found} bytes for {elements} elements")));
        }
        // The last elements include the padding behind them. Rows may end after any whole row.
        let ends = end == limit || partition.is_sparse();
        let end = if ends { end.next_multiple_of(8) } else { end };
        let decoded = decoded as usize;
        let bytes = Vec::default();
        let encoded = EncodedPart { encoding, variable, dtype, blocks, decoded, factor, bytes };
        Ok((part.offset..end, encoded))
    }

    /// Decodes the body into its range of the push slot.
    pub(in crate::shard) fn decode_into(&self, range: &mut [u8]) -> Result<(), Refusal> {
        let (elements, padding) = range.split_at_mut(self.decoded.min(range.len()));
        padding.fill(0);
        let EncodedPart { encoding, dtype, blocks, bytes, .. } = self;
        let decoded = encoding.decode_into(*blocks, *dtype, bytes, elements);
        decoded.map_err(|error| Refusal::Encoding {
            variable: self.variable,
            encoding: self.encoding.code(),
            detail: Detail::clipped(error.to_string()),
        })?;
        if self.factor != 1.0 {
            // Only f16 and bf16 variables have a factor. Their gradients are stored as f32.
            let elements: &mut [f32] = bytemuck::cast_slice_mut(elements);
            elements.iter_mut().for_each(|g| *g = (f64::from(*g) * self.factor) as f32);
        }
        Ok(())
    }
}
