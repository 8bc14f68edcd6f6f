//! `pushpull export`: writes a checkpoint as one safetensors file.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use pushpull::checkpoint::export_since;
use pushpull::{CheckpointError, LocalDirectory};

/// Options of `pushpull export`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Directory of the checkpoints.
    directory: PathBuf,
    /// File to write. It replaces an existing file once it is complete.
    #[arg(long)]
    to: PathBuf,
    /// Name of the checkpoint. Default: the newest sound one.
    #[arg(long)]
    checkpoint: Option<String>,
    /// Also write the optimizer slots, as `name:slot`.
    #[arg(long)]
    slots: bool,
    /// Of each table that grows, write only the rows pushed since this global step, for example
    /// that of an older checkpoint.
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
