//! [`SafetensorsFile`]: reads tensors from a file that nobody has checked.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use pushpull_common::tensor::DType;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::LoadError;

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
        let found = std::fs::metadata(path).map_err(read)?;
        if !found.is_file() {
            return Err(format("it is not a regular file".to_owned()));
        }
        let mut file = File::open(path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        let Some(after_length) = bytes.checked_sub(LENGTH_BYTES) else {
            return Err(format(format!(
                "it has {bytes} bytes, a header has at least {LENGTH_BYTES}"
            )));
        };
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(read)?;
        let length = u64::from_le_bytes(length);
        let limit = after_length.min(HEADER_BYTES_MAX);
        if length > limit {
            return Err(format(format!("its header has {length} bytes, the limit is {limit}")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(read)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| format(format!("its header is invalid: {error}")))?;
        let (data, expected) = (after_length - length, metadata.data_len() as u64);
        if data != expected {
            return Err(format(format!(
                "it has {data} bytes of elements, and its header describes {expected}"
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
                Err(LoadError::Read { path: self.path.clone(), reason: error.to_string() })
            }
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
