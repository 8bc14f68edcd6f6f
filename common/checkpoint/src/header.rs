//! Writes the header of a safetensors file.
//!
//! The header is never parsed. The manifest and the catalogue determine what a file must contain,
//! so a reader generates the expected header and compares the bytes. A header can hide nothing
//! hostile.

use std::fmt::{Display, Write};

use pushpull_common::tensor::DType;

use crate::error::{CheckpointError, corrupt};
use crate::files::read_pieces;
use crate::storage::ReadFile;

/// One tensor of a file. Tensors are listed in the order of their data.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) extents: Vec<u64>,
}

impl Tensor {
    /// Returns the size in bytes. It cannot overflow: the elements of a shape and of its parts are
    /// bounded.
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().product::<u64>() * self.dtype.size() as u64
    }
}

/// Returns the head of a file whose tensors are stored without gaps: the length of the header, then
/// the header as JSON, padded so that the data starts at a multiple of 8.
///
/// The format allows no gaps between tensors, so tensors of wider elements must come first for all
/// to be aligned.
pub(crate) fn head(
    metadata: &[(&str, String)],
    tensors: &[Tensor],
) -> Result<Vec<u8>, CheckpointError> {
    let mut json = String::from("{");
    if !metadata.is_empty() {
        let fields =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value)));
        let fields: Vec<String> = fields.collect();
        push(&mut json, format_args!("{}:{{{}}}", quoted(METADATA), fields.join(",")));
    }
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let name = quoted(&tensor.name);
        let extents = &tensor.extents;
        let dtype = name_of(tensor.dtype);
        push(
            &mut json,
            format_args!(
                r#"{name}:{{"dtype":"{dtype}","shape":{extents:?},"data_offsets":[{start},{end}]}}"#
            ),
        );
        start = end;
    }
    json.push('}');
    let padded = json.len().next_multiple_of(8);
    let found = padded as u64;
    if found > HEADER_BYTES_MAX {
        let what = "bytes of names and shapes in one file";
        return Err(CheckpointError::TooLarge { what, found, limit: HEADER_BYTES_MAX });
    }
    let mut head = found.to_le_bytes().to_vec();
    head.extend_from_slice(json.as_bytes());
    head.resize(8 + padded, b' ');
    Ok(head)
}

/// Checks that a file starts with this head.
pub(crate) fn check(head: &[u8], path: &str, file: &dyn ReadFile) -> Result<(), CheckpointError> {
    let mut done = 0;
    read_pieces(file, 0, head.len() as u64, &mut |piece| {
        let expected = &head[done..done + piece.len()];
        if let Some(at) = piece.iter().zip(expected).position(|(a, b)| a != b) {
            let excerpt = |bytes: &[u8]| {
                let end = bytes.len().min(at + 24);
                format!("{:?}", String::from_utf8_lossy(&bytes[at..end]))
            };
            return Err(corrupt(path, (done + at) as u64, excerpt(expected), excerpt(piece)));
        }
        done += piece.len();
        Ok(())
    })
}

/// The key of the metadata; no tensor may have this name.
pub(crate) const METADATA: &str = "__metadata__";

/// Appends an entry, after a comma if it is not the first.
fn push(json: &mut String, entry: impl Display) {
    let comma = if json.len() > 1 { "," } else { "" };
    write!(json, "{comma}{entry}").expect("writing to a string cannot fail");
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::I64 => "I64",
        DType::F16 => "F16",
        DType::Bf16 => "BF16",
        _ => unreachable!("a catalogue holds known types only"),
    }
}

/// The limit of other readers of the format.
const HEADER_BYTES_MAX: u64 = 100_000_000;

// Elements are written as they are in memory, and the format is little-endian.
const _: () = assert!(cfg!(target_endian = "little"));
