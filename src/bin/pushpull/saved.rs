//! `pushpull inspect` for a directory of checkpoints.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use pushpull::checkpoint::{
    CheckpointContents, CheckpointStorage, CheckpointSummary, Refused, contents, list,
};
use pushpull::error::Chain;
use serde_json::{Value, json};

use super::output::print_lines;
use super::place::Place;

/// Returns whether the directory has an entry named as a checkpoint, `ckpt-...`.
///
/// # Errors
/// Returns an error that names the directory if it cannot be listed.
pub(crate) fn holds_checkpoints(directory: &Path) -> Result<bool, String> {
    let unlisted = |error| format!("cannot list {}: {error}", directory.display());
    for entry in std::fs::read_dir(directory).map_err(unlisted)? {
        if entry.map_err(unlisted)?.file_name().to_string_lossy().starts_with("ckpt-") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the directory of the checkpoints and the name of one, if the place is its own folder: one
/// with a manifest, or a URL that ends in the name of a checkpoint.
pub(crate) fn checkpoint_folder(place: &Place) -> Option<(Place, String)> {
    match place {
        Place::Directory(path) => {
            if !path.join("MANIFEST").is_file() {
                return None;
            }
            let path = path.canonicalize().ok()?;
            let name = path.file_name()?.to_str()?.to_owned();
            Some((Place::Directory(path.parent()?.to_owned()), name))
        }
        Place::Url(url) => {
            let (parent, name) = url.trim_end_matches('/').rsplit_once('/')?;
            let is_name = name.starts_with("ckpt-") && !parent.ends_with('/');
            is_name.then(|| (Place::Url(parent.to_owned()), name.to_owned()))
        }
    }
}

/// Reads and verifies every checkpoint in full, or the one of a name, prints them, and fails if one
/// is not sound, or if there is none. The newest is first: the one of the highest restore epoch and
/// step.
pub(crate) fn run(place: &Place, only: Option<&str>, json: bool) -> Result<(), Box<dyn Error>> {
    let storage = place.open_read_only()?;
    let found = read(&storage, only)?;
    let mut unsound = found.refused.len();
    let mut values = Vec::new();
    let mut page = String::new();
    for (summary, contents) in &found.checkpoints {
        unsound += usize::from(contents.is_err());
        values.push(json_of(summary, contents));
        page += &page_of(summary, contents);
    }
    for refused in &found.refused {
        let reason = Chain(&refused.reason).to_string();
        values.push(json!({ "name": refused.checkpoint, "sound": false, "fault": reason }));
        page += &format!("{}\n  not sound  {reason}\n", refused.checkpoint);
    }
    let path = place.to_string();
    if values.is_empty() {
        return Err(match only {
            Some(name) if place.directory().is_none() => {
                format!("{path} has no checkpoint {name}")
            }
            Some(name) => format!(
                "{path}/{name} has a manifest and not the name of a checkpoint, as in ckpt-1-802: a \
                 folder that was renamed is not restored"
            ),
            None => format!("{path} has no checkpoint, only what unfinished saves have left"),
        }
        .into());
    }
    match json {
        true => print_lines(&json!({ "path": path, "checkpoints": values }).to_string())?,
        false => print_lines(page.trim_end())?,
    }
    match unsound {
        0 => Ok(()),
        _ => Err(format!("{} of {} checkpoints are not sound", unsound, values.len()).into()),
    }
}

/// The checkpoints of a directory.
struct Found {
    /// Each with its contents, or with what is wrong with it.
    checkpoints: Vec<(CheckpointSummary, Result<CheckpointContents, String>)>,
    /// Those whose manifest cannot be read.
    refused: Vec<Refused>,
}

/// The most times that a directory is listed in which checkpoints are deleted meanwhile.
const LISTINGS_MAX: u32 = 20;

/// Reads every checkpoint of a directory, or the one of a name. The servers may delete one
/// meanwhile: if its folder is gone, the directory is listed again.
fn read(storage: &Arc<dyn CheckpointStorage>, only: Option<&str>) -> Result<Found, Box<dyn Error>> {
    for listing in 1.. {
        let mut listed = list(&**storage)?;
        listed.checkpoints.retain(|saved| only.is_none_or(|name| saved.name == name));
        listed.refused.retain(|refused| only.is_none_or(|name| refused.checkpoint == name));
        let read = |summary: CheckpointSummary| {
            let found = contents(storage.clone(), &summary.name);
            (summary, found.map_err(|error| Chain(&error).to_string()))
        };
        let checkpoints: Vec<_> = listed.checkpoints.into_iter().map(read).collect();
        let faulty = checkpoints.iter().filter(|(_, found)| found.is_err());
        let faulty = faulty.map(|(summary, _)| &summary.name);
        let mut named = faulty.chain(listed.refused.iter().map(|refused| &refused.checkpoint));
        let folders = storage.list(None)?;
        let is_gone = named.any(|name| !folders.contains(name));
        if !is_gone || listing == LISTINGS_MAX {
            return Ok(Found { checkpoints, refused: listed.refused });
        }
    }
    unreachable!("the last listing returns")
}

fn page_of(summary: &CheckpointSummary, found: &Result<CheckpointContents, String>) -> String {
    let CheckpointSummary {
        name, global_step, restore_epoch, optimizers, shards, bytes, user, ..
    } = summary;
    let mut page = format!(
        "{name}\n  step       {global_step}, restore epoch {restore_epoch}\n  \
         saved      {bytes} bytes of {shards} shards, trained by {}, {} bytes of the user\n",
        optimizers.join(" and "),
        user.len()
    );
    match found {
        Err(error) => page += &format!("  not sound  {error}\n"),
        Ok(contents) => {
            page += &format!("  sound      {} partitions\n", contents.partitions);
            for (variable, training) in contents.variables.iter().zip(&contents.training) {
                let name = variable.name();
                let dtype = variable.dtype();
                let shape = variable.shape();
                let by = training.as_ref().map(|(kind, _)| format!(", trained by {kind}"));
                page +=
                    &format!("  variable   {name}: {dtype} {shape}{}\n", by.unwrap_or_default());
            }
        }
    }
    page
}

fn json_of(summary: &CheckpointSummary, found: &Result<CheckpointContents, String>) -> Value {
    let mut value = json!({
        "name": summary.name,
        "step": summary.global_step,
        "restore_epoch": summary.restore_epoch,
        "saved_unix_ms": summary.saved_unix_ms,
        "optimizers": summary.optimizers,
        "shards": summary.shards,
        "bytes": summary.bytes,
        "user_bytes": summary.user.len(),
        "sound": found.is_ok(),
    });
    match found {
        Err(error) => value["fault"] = json!(error),
        Ok(contents) => {
            let variables = contents.variables.iter().zip(&contents.training);
            let variables = variables.map(|(variable, training)| {
                let (optimizer, slots) = training.clone().unzip();
                json!({
                    "name": variable.name(),
                    "dtype": variable.dtype().to_string(),
                    "shape": variable.shape().to_string(),
                    "optimizer": optimizer,
                    "slots": slots.unwrap_or_default(),
                })
            });
            value["variables"] = variables.collect();
            value["partitions"] = json!(contents.partitions);
            let clients =
                contents.clients.iter().map(|(job, index)| json!(format!("{job}:{index}")));
            value["clients"] = clients.collect();
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_checkpoint_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let parent = directory.path().canonicalize().unwrap();
        let checkpoint_folder = |path: &Path| {
            let (parent, name) = checkpoint_folder(&Place::Directory(path.to_owned()))?;
            Some((parent.directory().unwrap().to_owned(), name))
        };
        let folder = parent.join("ckpt-1-802");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(checkpoint_folder(&parent), None);
        assert_eq!(checkpoint_folder(&folder), None, "it has no manifest");
        std::fs::write(folder.join("MANIFEST"), "").unwrap();
        let expected = Some((parent.clone(), "ckpt-1-802".to_owned()));
        assert_eq!(checkpoint_folder(&folder), expected);
        assert_eq!(checkpoint_folder(&folder.join(".")), expected);
        assert_eq!(checkpoint_folder(&parent.join("absent")), None);
    }
}
