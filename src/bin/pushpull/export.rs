//! `pushpull export`: writes a checkpoint as one safetensors file.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use pushpull::checkpoint::{CheckpointError, Refused, export_since};
use pushpull::error::Chain;

use super::options::local_path;
use super::output::print_error;
use super::place::{Place, place};
use super::saved::checkpoint_folder;

/// Options of `pushpull export`.
#[derive(Debug, Args)]
pub(crate) struct ExportOptions {
    /// Directory or URL of the checkpoints, or the folder of one
    #[arg(value_parser = place())]
    directory: Place,
    /// File to write; replaced once the new one is complete
    #[arg(long, value_name = "FILE", value_parser = local_path(), help_heading = "Output")]
    to: PathBuf,
    /// Write the optimizer slots as well, as `name:slot`
    #[arg(long, help_heading = "Output")]
    slots: bool,
    /// Name of the checkpoint [default: the newest sound one]
    #[arg(long, value_name = "NAME", help_heading = "Checkpoint")]
    checkpoint: Option<String>,
    /// Of tables that grow, write only rows pushed since this global step
    #[arg(long, value_name = "STEP", default_value_t = 0, help_heading = "Checkpoint")]
    since: u64,
}

pub(crate) fn run(options: &ExportOptions) -> Result<(), Box<dyn Error>> {
    let ExportOptions { directory, checkpoint, to, slots, since } = options;
    if to.as_os_str() == "-" {
        return Err("--to -: give the name of a file, or ./- for this name".into());
    }
    let (directory, checkpoint) = match (checkpoint_folder(directory), checkpoint) {
        (None, checkpoint) => (directory.clone(), checkpoint.clone()),
        (Some((parent, name)), None) => (parent, Some(name)),
        (Some((_, name)), Some(other)) => {
            return Err(format!("--checkpoint {other}: {directory} is the folder of {name}").into());
        }
    };
    let storage = directory.open_read_only()?;
    let exported = export_since(storage, checkpoint.as_deref(), to, *slots, *since);
    let passed_over = exported.map_err(|error| match (&error, &checkpoint) {
        (CheckpointError::NotFound { .. }, Some(name)) => format!("--checkpoint {name}: {error}"),
        (CheckpointError::NoCheckpoint, _) => {
            format!("cannot find a checkpoint in {directory}")
        }
        _ => Chain(&error).to_string(),
    })?;
    for Refused { checkpoint, reason, .. } in passed_over {
        let reason = Chain(&reason);
        print_error(&format!("skipped {checkpoint}, which is not sound: {reason}"));
    }
    Ok(())
}
