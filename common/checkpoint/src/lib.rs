//! Checkpoints: saving, verifying, publishing and restoring portable copies of variables and
//! optimizer slots.
//!
//! A checkpoint is a folder of files that is either complete or not a checkpoint; see
//! `docs/checkpoint.md`. All code here is synchronous, for a thread that may block on a disk. It
//! knows neither the memory of the variables nor a clock: values come through a
//! [`CheckpointSource`] and go to a callback, and times are arguments.
//!
//! A [`Save`] begins a checkpoint. [`write_shard`] and [`write_table`] write its files, and
//! [`Save::publish`] makes it visible. [`newest_good`] finds the newest valid checkpoint, and
//! [`Opened::restore_shard`] reads it into any layout. An internal crate of pushpull: its API may
//! change with any version.

#![forbid(unsafe_code)]

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
mod piece_hasher;
mod publish;
mod reshard;
mod restore;
mod retain;
mod saved_coordinator;
mod shard_file;
mod storage;
mod table_file;
mod training;

pub use abandon::AbandonFlag;
pub use contents::{CheckpointContents, contents};
pub use data_entry::DataEntry;
pub use error::{CheckpointError, Refused};
pub use export::{export, export_since};
pub use fault::CheckpointFault;
pub use files::FileEntry;
pub use local::LocalDirectory;
pub use manifest::{ClientWindow, Contents, Manifest, Settled, ShardEntry};
pub use name::{CheckpointName, NotAName};
pub use publish::{PublishedCheckpoint, Save};
pub use reshard::{CheckpointPiece, RestoredShard};
pub use restore::{CheckpointSummary, Listing, Opened, highest_epoch, list, newest_good};
pub use retain::{Retention, retain};
pub use saved_coordinator::SavedCoordinator;
pub use shard_file::{CheckpointSource, write_shard};
pub use storage::{
    CheckpointStorage, ReadFile, StorageClaim, StorageFault, WriteFile, is_valid_name,
};
pub use table_file::{TableEntry, TableSource, write_table};
pub use training::{CheckpointTraining, OptimizerEntry};

#[cfg(test)]
mod tests;
