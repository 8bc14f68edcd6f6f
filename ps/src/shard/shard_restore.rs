//! The restore of a shard's part of a checkpoint. Another thread, which may wait for a disk, does
//! the work.

use std::sync::Arc;

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::message::CheckpointId;
use pushpull_store::store::Store;

use super::record::RESTORED_LIMIT;
use crate::checkpoint::{
    AbandonFlag, CheckpointError, CheckpointName, CheckpointPiece, CheckpointStorage,
    CheckpointTraining, Opened, RestoredShard, RowHead,
};

/// The work of reading a shard's part of a checkpoint.
#[derive(Debug)]
pub(crate) struct ShardRestore {
    pub(super) store: Box<Store>,
    pub(super) shard: ShardId,
    pub(super) checkpoint: CheckpointId,
    pub(super) training: CheckpointTraining,
    pub(super) abandon_flag: AbandonFlag,
}

/// The result of [`ShardRestore::run`].
#[derive(Debug)]
pub(crate) struct ShardRestored {
    pub(super) store: Box<Store>,
    pub(super) result: Result<RestoredShard, String>,
}

#[cfg(test)]
impl ShardRestored {
    /// Returns the error, if the part was not restored.
    pub(crate) fn error(self) -> Result<(), String> {
        self.result.map(|_| ())
    }
}

impl ShardRestore {
    /// Reads the part. May wait for a disk.
    pub(crate) fn run(mut self, storage: Arc<dyn CheckpointStorage>) -> ShardRestored {
        let storage = self.abandon_flag.watch(storage);
        let result = self.read(storage).map_err(|error| error.to_string());
        ShardRestored { store: self.store, result }
    }

    fn read(
        &mut self,
        storage: Arc<dyn CheckpointStorage>,
    ) -> Result<RestoredShard, CheckpointError> {
        let name = self.checkpoint.name.as_str();
        let parsed = name.parse::<CheckpointName>();
        let unfit = |what, expected: String, found: String| {
            let checkpoint = name.to_owned();
            CheckpointError::Unfit { checkpoint, what, expected, found }
        };
        let parsed = parsed.map_err(|_| unfit("name", "a checkpoint's".into(), name.into()))?;
        // The name must match the epoch and the step that the chief knows and the shard will
        // continue from.
        let (epoch, step) = (self.checkpoint.epoch, self.checkpoint.step);
        if (parsed.restore_epoch, parsed.global_step) != (epoch.0, step.0) {
            return Err(unfit("name", format!("of epoch {epoch} and step {step}"), name.into()));
        }
        let mut opened = Opened::open(storage, parsed)?;
        let manifest = opened.manifest();
        let shards = manifest.shards.iter();
        let counts =
            shards.flat_map(|s| [("version", s.version), ("count of gradients", s.gradients)]);
        for (what, found) in counts.chain([("step", step.0)]) {
            if found >= RESTORED_LIMIT {
                return Err(unfit(what, format!("below {RESTORED_LIMIT}"), found.to_string()));
            }
        }
        let (catalogue, store) = (self.store.catalogue().clone(), &mut self.store);
        let training = &self.training;
        opened.restore_shard(&catalogue, self.shard, training, &mut |piece| match piece {
            CheckpointPiece::Range(stream, range, bytes) => {
                store.write_committed(stream, range.start, bytes);
                Ok(())
            }
            CheckpointPiece::Row(table, head, streams) => {
                let head = RowHead { step: head.step.min(RESTORED_LIMIT), ..head };
                let table = &mut store.tables_mut()[table];
                let restored = table.restore_row(head, streams);
                restored.map_err(|error| match table.rows() >= table.limit() {
                    true => {
                        let variable = catalogue.variable(table.partition().variable).name();
                        let (variable, limit) = (variable.to_owned(), table.limit());
                        CheckpointError::TableFull { variable, limit }
                    }
                    false => CheckpointError::Memory { reason: error.to_string() },
                })
            }
        })
    }
}

/// A restore that is running.
#[derive(Debug)]
pub(super) struct RestoreInProgress {
    pub(super) abandon_flag: AbandonFlag,
    pub(super) connection: u64,
    pub(super) request: Envelope,
    pub(super) checkpoint: CheckpointId,
    pub(super) epoch: RestoreEpoch,
}
