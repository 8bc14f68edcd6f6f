//! Saves and restores the model of a ring, in the format of the servers' checkpoints.

use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use pushpull_checkpoint::{
    CheckpointError, CheckpointPiece, CheckpointSource, CheckpointStorage, CheckpointTraining,
    Contents, Retention, Save, ShardEntry, highest_epoch, newest_good, retain, write_shard,
};
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::stored_stream::StoredStream;

use super::local_model::{LocalModel, SHARD};
use crate::outcome::{PassedOver, RestoredCheckpoint, SavedCheckpoint};

/// The checkpoints of a ring.
#[derive(Clone, Debug)]
pub(super) struct ModelCheckpoints {
    pub(super) storage: Arc<dyn CheckpointStorage>,
    pub(super) retention: Retention,
}

impl ModelCheckpoints {
    /// Restores the newest sound checkpoint into the model. Returns `None` if there is none at all.
    pub(super) fn restore(
        &self,
        model: &mut LocalModel,
    ) -> Result<Option<RestoredCheckpoint>, CheckpointError> {
        let named = highest_epoch(&*self.storage)?;
        let Some((mut opened, refused)) = newest_good(&self.storage)? else { return Ok(None) };
        let catalogue = model.catalogue().clone();
        let training = CheckpointTraining::new(&catalogue, model.rules());
        opened.check_shard(&catalogue, SHARD, &training, &[])?;
        let name = opened.manifest().checkpoint;
        let restored = opened.restore_shard(&catalogue, SHARD, &training, &mut |piece| {
            if let CheckpointPiece::Range(stream, range, bytes) = piece {
                let range = range.start as usize..range.end as usize;
                let target = model.stream_mut(stream).and_then(|all| all.get_mut(range));
                if let Some(target) = target {
                    target.copy_from_slice(bytes);
                }
            }
            Ok(())
        })?;
        model.step = name.global_step;
        model.gradients = restored.gradients;
        let passed_over = refused.iter().map(|refused| PassedOver {
            checkpoint: refused.checkpoint.clone(),
            cause: Chain(&refused.reason).to_string(),
        });
        Ok(Some(RestoredCheckpoint {
            name: name.to_string(),
            step: name.global_step,
            // A restore begins a higher epoch, so its checkpoints are newer than all that it has
            // passed over.
            epoch: named.max(name.restore_epoch).saturating_add(1),
            passed_over: passed_over.collect(),
        }))
    }

    /// Saves the model. May wait for a disk.
    pub(super) fn save(
        &self,
        model: &LocalModel,
        epoch: RestoreEpoch,
        user: &[u8],
    ) -> Result<SavedCheckpoint, CheckpointError> {
        let catalogue = model.catalogue().clone();
        let training = CheckpointTraining::new(&catalogue, model.rules());
        let step = GlobalStep(model.step);
        let save = Save::begin(self.storage.clone(), epoch, step, None)?;
        let name = save.name();
        let source = ModelSource { model };
        let file = write_shard(&*self.storage, name, &catalogue, SHARD, &training, source);
        let published = file.and_then(|file| {
            let shard = ShardEntry {
                task: SHARD.task,
                shard: SHARD.shard,
                file,
                tables: Vec::new(),
                version: model.gradients,
                gradients: model.gradients,
                clients: Vec::new(),
                data: None,
                coordinators: Vec::new(),
            };
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let saved_unix_ms = since.unwrap_or_default().as_millis() as u64;
            let user = user.to_vec();
            save.publish(
                &catalogue,
                Contents { saved_unix_ms, training, shards: vec![shard], user },
            )
        });
        let published = match published {
            Ok(published) => published,
            Err(error) => {
                // What is left is removed by the next save.
                let _ = self.storage.remove_folder(&name.temporary());
                return Err(error);
            }
        };
        retain(&*self.storage, &published, &self.retention)?;
        Ok(SavedCheckpoint { name: published.name().to_string(), step: model.step })
    }
}

/// A model as the source of its checkpoint.
#[derive(Debug)]
struct ModelSource<'a> {
    model: &'a LocalModel,
}

impl CheckpointSource for ModelSource<'_> {
    fn read(
        &mut self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let range = range.start as usize..range.end as usize;
        let bytes = self.model.stream(stream).and_then(|all| all.get(range));
        let missing = || CheckpointError::Memory { reason: format!("it has no {stream:?}") };
        out(bytes.ok_or_else(missing)?)
    }
}
