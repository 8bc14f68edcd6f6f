//! [`SafetensorsIndex`]: reads the index of a sharded checkpoint that nobody has checked.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use pushpull_common::file_kind::{FIRST_BYTES, FileKind};
use serde::Deserialize;

use crate::error::LoadError;
use crate::json_entries::JsonEntries;
use crate::safetensors_file::open_regular;

/// The index of a sharded checkpoint: a JSON object whose `weight_map` names, for each tensor, the
/// file that has it. Other keys, such as `metadata`, are ignored.
///
/// A file is named by a path below the folder of the index. A link there may lead elsewhere: caches
/// of downloads consist of links.
#[derive(Debug)]
pub(crate) struct SafetensorsIndex {
    path: PathBuf,
    /// The names of files, by tensor.
    file_names: BTreeMap<String, String>,
}

/// The most bytes of an index.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// The most files that an index names, because all are open at the same time.
const FILES_MAX: usize = 512;

#[derive(Deserialize)]
struct IndexText {
    weight_map: JsonEntries<String>,
}

impl SafetensorsIndex {
    /// Reads an index and checks it. The files need not exist.
    pub(crate) fn read(path: &Path) -> Result<SafetensorsIndex, LoadError> {
        let file = open_regular(path)?;
        let mut text = Vec::new();
        file.take(INDEX_BYTES_MAX + 1).read_to_end(&mut text).map_err(|error| LoadError::Read {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        let file_names = file_names(&text)
            .map_err(|reason| LoadError::Index { path: path.to_owned(), reason })?;
        Ok(SafetensorsIndex { path: path.to_owned(), file_names })
    }

    /// Returns the names of the files, each once.
    pub(crate) fn files(&self) -> BTreeSet<&str> {
        self.file_names.values().map(String::as_str).collect()
    }

    /// Returns the path of a file.
    pub(crate) fn path_of(&self, file: &str) -> PathBuf {
        self.path.with_file_name(file)
    }

    /// Returns the tensors with the names of their files, in the order of the tensors' names.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.file_names.iter().map(|(tensor, file)| (tensor.as_str(), file.as_str()))
    }

    /// Returns the name of the file that has a tensor.
    pub(crate) fn file_of(&self, tensor: &str) -> Option<&str> {
        self.file_names.get(tensor).map(String::as_str)
    }
}

/// Returns the names of files by tensor, or the fault of an index.
fn file_names(text: &[u8]) -> Result<BTreeMap<String, String>, String> {
    if text.len() as u64 > INDEX_BYTES_MAX {
        return Err(format!("it has more than {INDEX_BYTES_MAX} bytes, the limit"));
    }
    let parsed: Result<IndexText, _> = serde_json::from_slice(text);
    let IndexText { weight_map } = parsed.map_err(|error| {
        let first = &text[..text.len().min(FIRST_BYTES)];
        let kind = FileKind::of(first).filter(|kind| !kind.is_text()).map(FileKind::into_text);
        match kind.filter(|kind| !kind.starts_with("JSON")) {
            Some(kind) => format!("it is {kind}"),
            None => format!("it is invalid: {error}"),
        }
    })?;
    if let Some(tensor) = weight_map.repeated() {
        return Err(format!("its weight_map repeats the tensor {tensor:?}"));
    }
    let outside = weight_map.0.iter().find(|(_, file)| !is_below_folder(file));
    if let Some((tensor, file)) = outside {
        return Err(format!(
            "its weight_map names {file:?} for the tensor {tensor:?}: a file must be in its folder"
        ));
    }
    let files = weight_map.0.iter().map(|(_, file)| file).collect::<BTreeSet<_>>().len();
    if files > FILES_MAX {
        return Err(format!("its weight_map names {files} files: the limit is {FILES_MAX}"));
    }
    Ok(weight_map.0.into_iter().collect())
}

/// Whether a name leads from a folder to a file below it, without regard to links.
fn is_below_folder(name: &str) -> bool {
    let mut parts = Path::new(name).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}
