//! The flags of the two update modes.

use clap::Args;

use super::shared::ModeOptions;

#[derive(Debug, Args)]
#[command(next_help_heading = "Synchronous training")]
pub(crate) struct SynchronousOptions {
    #[command(flatten)]
    replicas: ModeOptions,
    /// Step of a lost replica: shrink:MIN, wait:SECONDS or fail [default: shrink:1]
    #[arg(long, value_name = "POLICY", requires = "mode")]
    on_loss: Option<String>,
    /// Time that the first step waits for replicas, in ms [default: 60000]
    #[arg(long, value_name = "MS", requires = "mode")]
    join_timeout_ms: Option<u64>,
    /// Sum in the order of the workers, so that two runs give equal bits; requires A = R
    #[arg(long, requires = "mode")]
    deterministic: bool,
    /// Norm over all servers to which longer gradients are scaled [default: none]
    #[arg(long, value_name = "NORM", requires = "mode")]
    clip_by_global_norm: Option<f64>,
    /// Sparse rows of a step: replica-mean, row-mean or sum [default: replica-mean]
    #[arg(long, value_name = "KIND", requires = "mode")]
    sparse_reduction: Option<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Asynchronous training (the default)")]
pub(crate) struct AsynchronousOptions {
    /// Stale gradients: ignore, damp, compensate[:LAMBDA] [default: ignore]
    #[arg(long, value_name = "POLICY", conflicts_with = "synchronous")]
    staleness: Option<String>,
    /// Lead over the slowest worker at which a worker waits, in gradients [default: none]
    #[arg(long, value_name = "GRADIENTS", conflicts_with = "synchronous")]
    wait_ahead: Option<u64>,
    /// Maximum age of the values of a gradient, in steps; older are dropped [default: none]
    #[arg(long, value_name = "STEPS", conflicts_with = "synchronous")]
    reject_older: Option<u64>,
}
