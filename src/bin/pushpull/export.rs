//! A checkpoint for other programs.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use pushpull::checkpoint::export_since;
use pushpull::{CheckpointError, LocalDirectory};

/// What to export.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The directory of the checkpoints.
    directory: PathBuf,
    /// The file to write; it replaces what is there once it is whole.
    #[arg(long)]
    to: PathBuf,
    /// The name of a checkpoint; the newest that is sound without it.
    #[arg(long)]
    checkpoint: Option<String>,
    /// Writes the optimizer's slots, too, as `name:slot`.
    #[arg(long)]
    slots: bool,
    /// Of tables that grow, writes only the rows that were pushed since this global step, which may
    /// be that of an older checkpoint.
    #[arg(long, value_name = "STEP", default_value_t = 0)]
    since: u64,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let storage = Arc::new(LocalDirectory::open(&options.directory)?);
    let Options { checkpoint, to, slots, since, .. } = options;
    let exported = export_since(storage, checkpoint.as_deref(), to, *slots, *since);
    exported.map_err(|error| match (&error, checkpoint) {
        (CheckpointError::NotFound { .. }, Some(name)) => format!("--checkpoint {name}: {error}"),
        _ => error.to_string(),
    })?;
    Ok(())
}
