//! [`TensorFiles`]: the safetensors files at a path: one, or those of a sharded checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushpull_common::tensor::DType;
use safetensors::tensor::TensorInfo;

use crate::error::LoadError;
use crate::safetensors_file::SafetensorsFile;
use crate::safetensors_index::SafetensorsIndex;

/// The open files that have the tensors at a path.
///
/// The path is a safetensors file, the index of a sharded checkpoint (its name ends with `.json`),
/// or a folder that has one of both under the name that Hugging Face gives it.
#[derive(Debug)]
pub(crate) struct TensorFiles {
    /// The file that has each tensor.
    files: BTreeMap<String, Arc<SafetensorsFile>>,
}

/// A tensor of an open file.
#[derive(Clone, Debug)]
pub(crate) struct FileTensor {
    file: Arc<SafetensorsFile>,
    info: TensorInfo,
    name: String,
}

/// The file of a folder with a model that is not sharded.
const WHOLE_FILE: &str = "model.safetensors";

/// The index of a folder with a sharded model.
const INDEX_FILE: &str = "model.safetensors.index.json";

impl TensorFiles {
    /// Opens all files, and checks their headers. `allows_extra` admits tensors that an index does
    /// not name.
    pub(crate) fn open(path: &Path, allows_extra: bool) -> Result<TensorFiles, LoadError> {
        let path = in_folder(path)?;
        let has_index = path.extension().is_some_and(|extension| extension == "json");
        let files = match has_index {
            true => files_of_index(&path, allows_extra)?,
            false => {
                let file = Arc::new(SafetensorsFile::open(&path)?);
                file.names().into_iter().map(|name| (name, file.clone())).collect()
            }
        };
        Ok(TensorFiles { files })
    }

    /// Returns a tensor.
    pub(crate) fn tensor(&self, name: &str) -> Option<FileTensor> {
        let file = self.files.get(name)?;
        let info = file.info(name)?.clone();
        Some(FileTensor { file: file.clone(), info, name: name.to_owned() })
    }

    /// Returns the names of all tensors, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }
}

impl FileTensor {
    /// Returns its name in the file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// Returns what the header of the file says about it.
    pub(crate) fn info(&self) -> &TensorInfo {
        &self.info
    }

    /// Reads a range of its elements, as [`SafetensorsFile::read`] does.
    pub(crate) fn read(&self, elements: Range<u64>, to: DType) -> Result<Vec<u8>, LoadError> {
        self.file.read(&self.name, elements, to)
    }

    /// Reads a range of its elements, 64-bit integers, as ids.
    pub(crate) fn read_ids(&self, ids: Range<u64>) -> Result<Vec<u64>, LoadError> {
        self.file.read_ids(&self.name, ids)
    }
}

/// Returns the path of the file or the index in a folder. Any other path is returned as it is.
fn in_folder(path: &Path) -> Result<PathBuf, LoadError> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    // A link that leads nowhere is named by the error of its opening.
    let names = [WHOLE_FILE, INDEX_FILE].map(|name| path.join(name));
    let found = names.into_iter().find(|path| path.symlink_metadata().is_ok());
    found.ok_or_else(|| LoadError::Folder { path: path.to_owned() })
}

/// Opens the files of an index, and checks that each tensor is in the file that the index names.
fn files_of_index(
    path: &Path,
    allows_extra: bool,
) -> Result<BTreeMap<String, Arc<SafetensorsFile>>, LoadError> {
    let index = SafetensorsIndex::read(path)?;
    let fault = |reason: String| LoadError::Index { path: path.to_owned(), reason };
    let mut opened = BTreeMap::new();
    for name in index.files() {
        let file = SafetensorsFile::open(&index.path_of(name))?;
        let is_other = |tensor: &&String| index.file_of(tensor) != Some(name);
        let names = file.names();
        if let Some(tensor) = names.iter().find(is_other).filter(|_| !allows_extra) {
            return Err(fault(format!(
                "{name:?} has the tensor {tensor:?}, and its weight_map does not say so"
            )));
        }
        opened.insert(name, Arc::new(file));
    }
    let mut files = BTreeMap::new();
    for (tensor, name) in index.tensors() {
        match opened.get(name).filter(|file| file.info(tensor).is_some()) {
            Some(file) => files.insert(tensor.to_owned(), file.clone()),
            None => {
                return Err(fault(format!(
                    "its weight_map names {name:?} for the tensor {tensor:?}, which is not there"
                )));
            }
        };
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
