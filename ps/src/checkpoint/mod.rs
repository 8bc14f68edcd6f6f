//! Checkpoints: saving, verifying, publishing and restoring portable copies of variables and
//! optimizer slots. The crate `pushpull-checkpoint` has the format; this module has its public part.

pub use pushpull_checkpoint::{
    CheckpointContents, CheckpointError, CheckpointStorage, CheckpointSummary, Listing,
    LocalDirectory, ReadFile, Refused, Retention, StorageClaim, StorageFault, WriteFile, contents,
    export, export_since, list,
};

#[cfg(test)]
pub(crate) mod tests;
