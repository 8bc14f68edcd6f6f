//! Checkpoints: saving, verifying, publishing and restoring portable copies of variables and
//! optimizer slots.
//!
//! A checkpoint is a folder of files that is either complete or not a checkpoint; see
//! `docs/checkpoint.md`. All code here is synchronous, for a thread that may block on a disk. It
//! knows neither the shards' memory nor a clock: values come through a `CheckpointSource` and go to
//! a callback, and times are arguments.

mod abandon;
mod contents;
mod data_entry;
mod error;
mod export;
mod fault;
mod files;
mod header;
mod hex;
mod local;
mod manifest;
mod name;
mod publish;
mod reshard;
mod restore;
mod retain;
mod saved_coordinator;
mod shard_file;
mod storage;
mod table_file;
mod training;

pub use contents::{CheckpointContents, contents};
pub use error::{CheckpointError, Refused};
pub use export::{export, export_since};
pub use local::LocalDirectory;
pub use restore::{CheckpointSummary, Listing, list};
pub use retain::Retention;
pub use storage::{CheckpointStorage, ReadFile, StorageClaim, StorageFault, WriteFile};

pub(crate) use abandon::AbandonFlag;
pub(crate) use data_entry::DataEntry;
pub(crate) use fault::CheckpointFault;
pub(crate) use manifest::{ClientWindow, Contents, ShardEntry};
pub(crate) use name::CheckpointName;
pub(crate) use publish::Save;
pub(crate) use reshard::{CheckpointPiece, RestoredShard};
pub(crate) use restore::{Opened, highest_epoch, newest_good};
pub(crate) use retain::retain;
pub(crate) use saved_coordinator::SavedCoordinator;
pub(crate) use shard_file::{CheckpointSource, write_shard};
pub(crate) use table_file::{TableEntry, TableSource, write_table};
pub(crate) use training::CheckpointTraining;

#[cfg(test)]
pub(crate) mod tests;
