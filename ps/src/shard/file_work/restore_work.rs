//! [`RestoreWork`]: the check of a shard's part of a checkpoint, and its restore. Another thread, which
//! may wait for a disk, does the work; during the check the shard trains on.

use std::sync::Arc;

use pushpull_checkpoint::{
    AbandonFlag, CheckpointError, CheckpointFault, CheckpointName, CheckpointPiece,
    CheckpointStorage, CheckpointTraining, Opened, RestoredShard,
};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::error::Chain;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::table::RowHead;
use pushpull_store::store::Store;

use super::RESTORED_LIMIT;

/// The work of a restore on checkpoint files.
#[derive(Debug)]
pub(crate) enum RestoreWork {
    /// Check the shard's part.
    Check(RestoreCheck),
    /// Read the part, which has been checked.
    Read(Box<ShardRestore>),
}

/// The result of [`RestoreWork::run`].
#[derive(Debug)]
pub(crate) enum RestoreResult {
    Checked(Box<RestoreChecked>),
    Read(ShardRestored),
}

impl RestoreWork {
    /// Does the work. May wait for a disk.
    pub(crate) fn run(self, storage: Arc<dyn CheckpointStorage>) -> RestoreResult {
        match self {
            RestoreWork::Check(check) => RestoreResult::Checked(Box::new(check.run(storage))),
            RestoreWork::Read(restore) => RestoreResult::Read(restore.run()),
        }
    }
}

#[cfg(test)]
impl RestoreResult {
    /// Returns the error, if the part was not checked or not read.
    pub(crate) fn error(self) -> Result<(), String> {
        let result = match self {
            RestoreResult::Checked(checked) => checked.result.map(|_| ()),
            RestoreResult::Read(restored) => restored.result.map(|_| ()),
        };
        result.map_err(|fault| fault.to_string())
    }
}

/// The work of reading a shard's part of a checkpoint.
#[derive(Debug)]
pub(crate) struct ShardRestore {
    pub(in crate::shard) store: Box<Store>,
    pub(in crate::shard) shard: ShardId,
    pub(in crate::shard) training: CheckpointTraining,
    pub(in crate::shard) opened: Opened,
}

/// The result of [`ShardRestore::run`].
#[derive(Debug)]
pub(crate) struct ShardRestored {
    pub(in crate::shard) store: Box<Store>,
    pub(in crate::shard) result: Result<RestoredShard, CheckpointFault>,
}

impl ShardRestore {
    fn run(mut self) -> ShardRestored {
        let result = self.read().map_err(CheckpointFault::from);
        ShardRestored { store: self.store, result }
    }

    fn read(&mut self) -> Result<RestoredShard, CheckpointError> {
        let ShardRestore { store, shard, training, opened } = self;
        let catalogue = store.catalogue().clone();
        opened.restore_shard(&catalogue, *shard, training, &mut |piece| match piece {
            CheckpointPiece::Range(stream, range, bytes) => {
                store.write_committed(stream, range.start, bytes);
                Ok(())
            }
            CheckpointPiece::Row(table, head, streams) => {
                let head = RowHead { step: head.step.min(RESTORED_LIMIT), ..head };
                let table = &mut store.tables_mut()[table];
                // The check has found that all rows fit the table.
                let restored = table.restore_row(head, streams);
                restored
                    .map_err(|error| CheckpointError::Memory { reason: Chain(&error).to_string() })
            }
        })
    }
}

/// The work of checking a shard's part of a checkpoint: its manifest, that the part fits the shard,
/// and the hashes of the files that have some of it.
#[derive(Debug)]
pub(crate) struct RestoreCheck {
    pub(in crate::shard) number: u64,
    pub(in crate::shard) shard: ShardId,
    pub(in crate::shard) checkpoint: CheckpointId,
    pub(in crate::shard) catalogue: Arc<Catalogue>,
    pub(in crate::shard) training: CheckpointTraining,
    /// The most rows of each table of the shard.
    pub(in crate::shard) row_limits: Vec<u64>,
    pub(in crate::shard) abandon_flag: AbandonFlag,
}

/// The result of [`RestoreCheck::run`].
#[derive(Debug)]
pub(crate) struct RestoreChecked {
    pub(in crate::shard) number: u64,
    pub(in crate::shard) result: Result<Opened, CheckpointFault>,
}

impl RestoreCheck {
    /// Checks the part. May wait for a disk.
    fn run(self, storage: Arc<dyn CheckpointStorage>) -> RestoreChecked {
        let storage = self.abandon_flag.watch(storage);
        let result = self.open(storage).map_err(CheckpointFault::from);
        RestoreChecked { number: self.number, result }
    }

    fn open(&self, storage: Arc<dyn CheckpointStorage>) -> Result<Opened, CheckpointError> {
        let name = self.checkpoint.name.as_str();
        let parsed = name.parse::<CheckpointName>();
        let unfit = |what, expected: String, found: String| {
            let checkpoint = name.to_owned();
            CheckpointError::Unfit { checkpoint, what, expected, found }
        };
        let parsed = parsed.map_err(|_| unfit("name", "a checkpoint's".into(), name.into()))?;
        // The name must match the epoch and the step that the chief knows and the shard will
        // continue from.
        let epoch = self.checkpoint.epoch;
        let step = self.checkpoint.step;
        if (parsed.restore_epoch, parsed.global_step) != (epoch.0, step.0) {
            return Err(unfit("name", format!("of epoch {epoch} and step {step}"), name.into()));
        }
        let mut opened = Opened::open(storage, parsed)?;
        let shards = opened.manifest().shards.iter();
        let counts =
            shards.flat_map(|s| [("version", s.version), ("count of gradients", s.gradients)]);
        for (what, found) in counts.chain([("step", step.0)]) {
            if found >= RESTORED_LIMIT {
                return Err(unfit(what, format!("below {RESTORED_LIMIT}"), found.to_string()));
            }
        }
        opened.check_shard(&self.catalogue, self.shard, &self.training, &self.row_limits)?;
        Ok(opened)
    }
}
