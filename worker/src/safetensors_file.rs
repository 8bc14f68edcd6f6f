//! [`SafetensorsFile`]: reads tensors from a file that nobody has checked.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use pushpull_common::file_kind::{FIRST_BYTES, FileKind};
use pushpull_common::local_path;
use pushpull_common::tensor::{DType, bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::error::LoadError;
use pushpull_common::regular_file::not_regular;

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

impl SafetensorsFile {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: &Path) -> Result<SafetensorsFile, LoadError> {
        let read = |error: std::io::Error| LoadError::Read {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let format = |reason: String| LoadError::Format { path: path.to_owned(), reason };
        // Opening a pipe would wait for its writer.
        let found = local_path::check(path).and_then(std::fs::metadata).map_err(read)?;
        if let Some(found) = not_regular(&found) {
            return Err(format(format!("it is {found}, expected a regular file")));
        }
        let mut file = File::open(path).map_err(read)?;
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
        let Names(mut names) = serde_json::from_slice(&header).map_err(invalid)?;
        names.sort_unstable();
        if let Some([name, ..]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
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

    /// Reads the elements of a tensor of this file of one type, cast to another, as
    /// [`SafetensorsFile::read_padded`] does.
    pub(crate) fn read_cast(
        &mut self,
        name: &str,
        from: DType,
        to: DType,
    ) -> Result<Vec<u8>, LoadError> {
        let elements = self.info(name).map_or(0, |info| info.shape.iter().product::<usize>());
        let bytes = self.read_padded(name)?;
        let mut cast = Vec::with_capacity((elements * to.size()).next_multiple_of(8));
        for (element, bytes) in bytes.chunks_exact(from.size()).take(elements).enumerate() {
            let value = number(from, bytes);
            if !append(to, value, &mut cast) && value.is_finite() {
                return Err(LoadError::Range {
                    path: self.path.clone(),
                    tensor: name.to_owned(),
                    element: element as u64,
                    value: value.to_string(),
                    dtype: to,
                });
            }
        }
        cast.resize(cast.len().next_multiple_of(8), 0);
        Ok(cast)
    }

    /// Reads the elements of a tensor of this file, padded with zeros to a multiple of 8 bytes.
    pub(crate) fn read_padded(&mut self, name: &str) -> Result<Vec<u8>, LoadError> {
        let (from, to) = self.info(name).map_or((0, 0), |info| info.data_offsets);
        // The header was checked: the range is in the file.
        let bytes = to.saturating_sub(from);
        let mut padded = vec![0; bytes.next_multiple_of(8)];
        let begin = self.start.saturating_add(from as u64);
        let read = self
            .file
            .seek(SeekFrom::Start(begin))
            .and_then(|_| self.file.read_exact(&mut padded[..bytes]));
        match read {
            Ok(()) => Ok(padded),
            Err(error) => {
                let reason = format!("its tensor {name:?} cannot be read: {error}");
                Err(LoadError::Read { path: self.path.clone(), reason })
            }
        }
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

/// The keys of a JSON object, in their order. A map would keep one of those that are repeated.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Names, D::Error> {
        deserializer.deserialize_map(NamesVisitor)
    }
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = Names;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
        let mut names = Vec::new();
        while let Some((name, IgnoredAny)) = map.next_entry()? {
            names.push(name);
        }
        Ok(Names(names))
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
