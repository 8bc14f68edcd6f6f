//! [`SafetensorsFile`]: reads tensors from a file that nobody has checked.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pushpull_common::file_kind::{FIRST_BYTES, FileKind};
use pushpull_common::local_path;
use pushpull_common::regular_file::not_regular;
use pushpull_common::tensor::{DType, bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::de::{Deserialize, IgnoredAny};
use serde_json::Value;

use crate::error::LoadError;
use crate::json_entries::JsonEntries;

/// An open file in the safetensors format: 8 bytes with the length of a JSON header, the header,
/// and the elements of the tensors without gaps.
///
/// The header is checked as a whole before a tensor is read. No length is trusted that the file
/// does not have, so a hostile file makes this allocate at most a small multiple of its own length.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Where the elements begin.
    start: u64,
}

/// The most bytes of a header, as in the reference implementation.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The key of a header that is no tensor.
const METADATA: &str = "__metadata__";

/// The bytes of the header's length.
const LENGTH_BYTES: u64 = 8;

/// The most bytes of a tensor that are read at once to be cast.
const CAST_BYTES: u64 = 1 << 20;

impl SafetensorsFile {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: &Path) -> Result<SafetensorsFile, LoadError> {
        let read = |error: std::io::Error| LoadError::Read {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let format = |reason: String| LoadError::Format { path: path.to_owned(), reason };
        let mut file = open_regular(path)?;
        let bytes = file.metadata().map_err(read)?.len();
        let mut first = Vec::with_capacity(FIRST_BYTES);
        (&file).take(FIRST_BYTES as u64).read_to_end(&mut first).map_err(read)?;
        let other = |reason: String| match FileKind::of(&first) {
            Some(kind) if !kind.is_safetensors() => format(format!("it is {}", kind.into_text())),
            _ => format(reason),
        };
        let Some(after_length) = bytes.checked_sub(LENGTH_BYTES) else {
            return Err(other(format!(
                "it has {bytes} bytes, a header has at least {LENGTH_BYTES}"
            )));
        };
        let mut length = [0; LENGTH_BYTES as usize];
        file.rewind().and_then(|()| file.read_exact(&mut length)).map_err(read)?;
        let length = u64::from_le_bytes(length);
        if length > after_length {
            return Err(other(format!(
                "its header has {length} bytes, and {after_length} are behind its length"
            )));
        }
        if length > HEADER_BYTES_MAX {
            return Err(other(format!(
                "its header has {length} bytes: the limit is {HEADER_BYTES_MAX}"
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(read)?;
        let invalid = |error: serde_json::Error| other(format!("its header is invalid: {error}"));
        let names: JsonEntries<IgnoredAny> = serde_json::from_slice(&header).map_err(invalid)?;
        if let Some(name) = names.repeated() {
            return Err(format(format!("its header repeats the tensor {name:?}")));
        }
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| match fault_of_tensors(&header) {
                Some(fault) => format(fault),
                None => invalid(error),
            })?;
        let data = after_length - length;
        let expected = metadata.data_len() as u64;
        if data != expected {
            let mut names = metadata.offset_keys().into_iter();
            let end = |name: &String| metadata.info(name).map_or(0, |info| info.data_offsets.1);
            let cut = names.find(|name| end(name) as u64 > data);
            let cut = cut.map_or_else(String::new, |name| format!(": the tensor {name:?} is cut"));
            return Err(format(format!(
                "it has {data} bytes of elements, and its header describes {expected}{cut}"
            )));
        }
        let start = LENGTH_BYTES + length;
        Ok(SafetensorsFile { path: path.to_owned(), file, metadata, start })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of all tensors, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort_unstable();
        names
    }

    /// Returns what the header says about a tensor.
    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Reads a range of the elements of a tensor as those of a type: the tensor's own, or one to
    /// which it [can be cast](can_cast). The vector has space for padding to a multiple of 8 bytes.
    pub(crate) fn read(
        &self,
        name: &str,
        elements: Range<u64>,
        to: DType,
    ) -> Result<Vec<u8>, LoadError> {
        let from = self.info(name).and_then(dtype_of).unwrap_or(to);
        let bytes = (elements.end - elements.start) as usize * to.size();
        let mut read = Vec::with_capacity(bytes.next_multiple_of(8));
        if from == to {
            read.resize(bytes, 0);
            self.read_at(name, elements.start * to.size() as u64, &mut read)?;
            return Ok(read);
        }
        let at_once = CAST_BYTES / from.size() as u64;
        let mut piece = Vec::new();
        for start in elements.clone().step_by(at_once as usize) {
            let end = elements.end.min(start + at_once);
            piece.resize((end - start) as usize * from.size(), 0);
            self.read_at(name, start * from.size() as u64, &mut piece)?;
            for (element, bytes) in (start..end).zip(piece.chunks_exact(from.size())) {
                let value = number(from, bytes);
                if !append(to, value, &mut read) && value.is_finite() {
                    return Err(LoadError::Range {
                        path: self.path.clone(),
                        tensor: name.to_owned(),
                        element,
                        value: value.to_string(),
                        dtype: to,
                    });
                }
            }
        }
        Ok(read)
    }

    /// Reads a range of the elements of a tensor of 64-bit integers as ids.
    pub(crate) fn read_ids(&self, name: &str, ids: Range<u64>) -> Result<Vec<u64>, LoadError> {
        let mut bytes = vec![0; (ids.end - ids.start) as usize * size_of::<u64>()];
        self.read_at(name, ids.start * size_of::<u64>() as u64, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect())
    }

    /// Fills `out` with the bytes of a tensor of this file from `offset` on.
    fn read_at(&self, name: &str, offset: u64, out: &mut [u8]) -> Result<(), LoadError> {
        // The header was checked: the range is in the file.
        let first = self.info(name).map_or(0, |info| info.data_offsets.0 as u64);
        let begin = self.start.saturating_add(first).saturating_add(offset);
        self.file.read_exact_at(out, begin).map_err(|error| {
            let reason = format!("its tensor {name:?} cannot be read: {error}");
            LoadError::Read { path: self.path.clone(), reason }
        })
    }
}

/// Opens a file of this machine for reading.
pub(crate) fn open_regular(path: &Path) -> Result<File, LoadError> {
    let fault = |reason: String| LoadError::Read { path: path.to_owned(), reason };
    let read = |error: std::io::Error| fault(error.to_string());
    // Opening a pipe would wait for its writer.
    let found = local_path::check(path).and_then(std::fs::metadata).map_err(read)?;
    match not_regular(&found) {
        Some(found) => Err(fault(format!("it is {found}, expected a regular file"))),
        None => File::open(path).map_err(read),
    }
}

/// Names the first tensor of a header that is not possible, and why. The crate of the format does
/// not name it.
fn fault_of_tensors(header: &[u8]) -> Option<String> {
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    let mut ranges = Vec::new();
    for (name, info) in tensors.iter().filter(|(name, _)| *name != METADATA) {
        let fault = |fault: String| Some(format!("its tensor {name:?} {fault}"));
        for field in ["dtype", "shape", "data_offsets"] {
            if info.get(field).is_none() {
                return fault(format!("has no {field}"));
            }
        }
        let Ok(dtype) = Dtype::deserialize(&info["dtype"]) else {
            return fault(format!("has elements of {}, an unknown type", info["dtype"]));
        };
        let Ok(shape) = Vec::<u64>::deserialize(&info["shape"]) else {
            return fault(format!("has {} as its shape", info["shape"]));
        };
        let Ok((begin, end)) = <(u64, u64)>::deserialize(&info["data_offsets"]) else {
            return fault(format!("has {} as its data_offsets", info["data_offsets"]));
        };
        let elements =
            shape.iter().try_fold(1_u64, |elements, &extent| elements.checked_mul(extent));
        let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize() as u64));
        let Some(bytes) = bits.map(|bits| bits.div_ceil(8)) else {
            return fault(format!(
                "of {dtype} and shape {shape:?} has more bytes than can be counted"
            ));
        };
        if end.checked_sub(begin) != Some(bytes) {
            return fault(format!(
                "of {dtype} and shape {shape:?} has {bytes} bytes, and its data_offsets are {begin} to {end}"
            ));
        }
        ranges.push((begin, end, name));
    }
    ranges.sort_unstable();
    let mut expected = 0;
    for (begin, end, name) in ranges {
        if begin != expected {
            return Some(format!(
                "its tensor {name:?} begins at byte {begin} of the elements, expected {expected}"
            ));
        }
        expected = end;
    }
    None
}

/// Whether elements of one type can be cast to another: numbers with fractions.
pub(crate) fn can_cast(from: DType, to: DType) -> bool {
    let is_float = |dtype| matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64);
    is_float(from) && is_float(to)
}

/// Reads one number of a float type.
fn number(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        // `can_cast` allows no other type.
        _ => f64::NAN,
    }
}

/// Appends a number, rounded to a float type. Returns whether it is finite there.
fn append(dtype: DType, number: f64, bytes: &mut Vec<u8>) -> bool {
    match dtype {
        DType::F16 => {
            let half = f16::from_f64(number);
            bytes.extend_from_slice(&half.to_le_bytes());
            half.is_finite()
        }
        DType::Bf16 => {
            let half = bf16::from_f64(number);
            bytes.extend_from_slice(&half.to_le_bytes());
            half.is_finite()
        }
        DType::F32 => {
            bytes.extend_from_slice(&(number as f32).to_le_bytes());
            (number as f32).is_finite()
        }
        _ => {
            bytes.extend_from_slice(&number.to_le_bytes());
            number.is_finite()
        }
    }
}

/// Returns the element type of a tensor; `None` if no variable can have it.
pub(crate) fn dtype_of(info: &TensorInfo) -> Option<DType> {
    match info.dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::I64 => Some(DType::I64),
        _ => None,
    }
}
