//! Inspection of a state directory, for people and tools. Never changes it.
//!
//! The files are opened as a server opens them, but as copies, and a committed intent is completed
//! in the copies only. A server may be running on the files; a read that overlaps a commit is
//! repeated.

mod reader;
mod report;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pushpull_common::local_path;
use pushpull_store::arena::{ArenaStorage, Folder, SaveNote, file_name, is_locked};
use pushpull_store::layout::Kind;

use crate::config::PsConfig;
use crate::error::StorageError;
pub use pushpull_common::status::Presence;
use reader::ShardReader;
pub use report::{
    ArenaReport, ClientReport, CompletePush, CoordinatorReport, DataReport, FileReport, Inspection,
    SavesFailing, ShardInspection, ShardState, VariableReport, VariablesStage, Verdict,
};

/// Inspects a state directory, or the folder of one shard. Changes nothing and holds no lock: a
/// server may be running on the files.
///
/// Costs a copy of the words in use, and, if the state has full checksums, a pass over all values
/// and slots.
///
/// # Errors
/// [`StorageError::NoState`] if the path contains no state, [`StorageError::Io`] if a directory
/// cannot be read. Damaged files are reported in the [`Inspection`].
pub fn inspect(path: impl AsRef<Path>) -> Result<Inspection, StorageError> {
    let path = local_path::check(path.as_ref()).map_err(|source| {
        let path = path.as_ref().to_owned();
        StorageError::Io { doing: "open", path, source }
    })?;
    let name = file_name(Kind::Control, 0);
    let is_shard = path.join(&name).exists();
    let (directory, folders) = match is_shard {
        true => (path.parent().unwrap_or(path), vec![path.to_owned()]),
        false => (path, shard_folders(path)?),
    };
    if folders.is_empty() {
        return Err(StorageError::NoState { path: path.to_owned() });
    }
    let live = is_locked(directory);
    let shards: Vec<ShardInspection> =
        folders.iter().map(|folder| inspect_shard(folder, live)).collect::<Result<_, _>>()?;
    let missing = if is_shard { Vec::new() } else { missing_folders(path, &shards) };
    let saves_failing = SaveNote::of(directory).read();
    let saves_failing = saves_failing.map(|(in_a_row, cause)| SavesFailing { in_a_row, cause });
    Ok(Inspection { path: path.to_owned(), live, saves_failing, shards, missing })
}

/// Returns the folders that a directory lacks of the shards of its task.
fn missing_folders(directory: &Path, shards: &[ShardInspection]) -> Vec<PathBuf> {
    let count = |shard: &ShardInspection| {
        let (_, count) = shard.arena.as_ref()?.identity.iter().find(|(name, _)| name == SHARDS)?;
        count.parse::<u16>().ok()
    };
    let count = shards.iter().filter_map(count).max().unwrap_or(0).min(PsConfig::SHARDS_MAX);
    let folders = (0..count).map(|shard| directory.join(format!("shard-{shard}")));
    folders.filter(|folder| !folder.is_dir()).collect()
}

/// The fact of an identity that is the number of shards of a task.
const SHARDS: &str = "shards";

/// Returns the folders of the shards, by shard number.
fn shard_folders(path: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let names = Folder::read_only(path).names()?;
    let number = |name: &str| name.strip_prefix("shard-")?.parse::<u16>().ok();
    let folders: BTreeMap<u16, PathBuf> =
        names.iter().filter_map(|name| Some((number(name)?, path.join(name)))).collect();
    Ok(folders.into_values().collect())
}

/// The maximum number of reads of a running server's files before a fault is reported.
const ATTEMPTS_MAX: u32 = 20;

fn inspect_shard(folder: &Path, live: bool) -> Result<ShardInspection, StorageError> {
    let storage = ArenaStorage::Folder(Folder::read_only(folder));
    for attempt in 1.. {
        let before = storage.open(&file_name(Kind::Control, 0))?;
        let found = ShardReader::read(&storage, folder)?;
        let after = storage.open(&file_name(Kind::Control, 0))?;
        let bytes = |control: &Option<_>| {
            control.as_ref().map(|control: &pushpull_store::arena::Memory| control.bytes().to_vec())
        };
        let unchanged = bytes(&before) == bytes(&after);
        if !live
            || attempt == ATTEMPTS_MAX
            || (unchanged && found.files.iter().all(|f| f.verdict.is_sound()))
        {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(attempt.into()));
    }
    unreachable!("the last attempt returns")
}
