//! What a state directory holds, for people and tools: read, and never changed.
//!
//! The files are opened as a server opens them, but as copies: what a commit has left to be done is
//! done to those. A server may be running on the files meanwhile; a look that falls into a commit is
//! taken again.

mod found;
mod look;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::arena::{Folder, Place, SaveNote, file_name, is_locked};
use crate::error::StorageError;
use crate::layout::Kind;
pub use found::{
    ArenaIs, ClientIs, FileIs, Inspection, Presence, SavesFailing, ShardInspection, ShardState,
    VariableIs, VariablesAre, Verdict, WholePushIs,
};
use look::Look;

/// Why there is nothing to inspect.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Neither a state directory nor the folder of a shard.
    #[error(
        "cannot inspect {}: it holds neither folders shard-0, shard-1 ... nor a control file",
        path.display()
    )]
    NoState {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Looks into a state directory, or into the folder of one shard of it. Nothing is changed, and no
/// lock is held: a server may be running on the files.
///
/// Costs a copy of the words that are in use, and a pass over all values and slots where those have
/// checksums.
pub fn inspect(path: impl AsRef<Path>) -> Result<Inspection, InspectError> {
    let path = path.as_ref();
    let name = file_name(Kind::Control, 0);
    let (directory, folders) = match path.join(&name).exists() {
        true => (path.parent().unwrap_or(path), vec![path.to_owned()]),
        false => (path, shard_folders(path)?),
    };
    if folders.is_empty() {
        return Err(InspectError::NoState { path: path.to_owned() });
    }
    let live = is_locked(directory);
    let shards = folders.iter().map(|folder| look(folder, live)).collect::<Result<_, _>>()?;
    let saves_failing = SaveNote::of(directory).read();
    let saves_failing = saves_failing.map(|(in_a_row, cause)| SavesFailing { in_a_row, cause });
    Ok(Inspection { path: path.to_owned(), live, saves_failing, shards })
}

/// The folders of the shards, by their numbers.
fn shard_folders(path: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let names = Folder::look(path).names()?;
    let number = |name: &str| name.strip_prefix("shard-")?.parse::<u16>().ok();
    let folders: BTreeMap<u16, PathBuf> =
        names.iter().filter_map(|name| Some((number(name)?, path.join(name)))).collect();
    Ok(folders.into_values().collect())
}

/// How often a running server is looked at before what is wrong is believed.
const LOOKS: u32 = 20;

fn look(folder: &Path, live: bool) -> Result<ShardInspection, InspectError> {
    let place = Place::Folder(Folder::look(folder));
    for round in 1.. {
        let before = place.open(&file_name(Kind::Control, 0))?;
        let found = Look::into(&place, folder)?;
        let after = place.open(&file_name(Kind::Control, 0))?;
        let bytes = |control: &Option<_>| {
            control.as_ref().map(|control: &crate::arena::Memory| control.bytes().to_vec())
        };
        let still = bytes(&before) == bytes(&after);
        if !live || round == LOOKS || (still && found.files.iter().all(|f| f.verdict.is_sound())) {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(round.into()));
    }
    unreachable!("it looks a number of times")
}
