//! Saves and restores the model of a ring, in the format of the servers' checkpoints.

use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use pushpull_checkpoint::{
    CheckpointError, CheckpointPiece, CheckpointSource, CheckpointStorage, CheckpointTraining,
    Contents, Manifest, Retention, Save, ShardEntry, StorageClaim, highest_epoch, newest_good,
    retain, write_shard,
};
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::stored_stream::StoredStream;

use super::local_model::{LocalModel, SHARD};
use crate::outcome::{PassedOver, RestoredCheckpoint, SavedCheckpoint};

/// The checkpoints of a ring.
#[derive(Debug)]
pub(super) struct ModelCheckpoints {
    storage: Arc<dyn CheckpointStorage>,
    retention: Retention,
    /// The right of rank 0 to save there, from its first use on. A cluster of servers, or a rank 0
    /// that the others have declared lost, cannot save there meanwhile.
    claim: Option<StorageClaim>,
}

impl ModelCheckpoints {
    pub(super) fn new(
        storage: Arc<dyn CheckpointStorage>,
        retention: Retention,
    ) -> ModelCheckpoints {
        ModelCheckpoints { storage, retention, claim: None }
    }

    fn claim(&mut self) -> Result<(), CheckpointError> {
        if self.claim.is_none() {
            self.claim = Some(self.storage.claim()?);
        }
        Ok(())
    }

    /// Releases the claim of a rank that saves no more.
    pub(super) fn release(&mut self) {
        self.claim = None;
    }

    /// Restores the newest sound checkpoint into the model. Returns `None` if there is none at all.
    pub(super) fn restore(
        &mut self,
        model: &mut LocalModel,
    ) -> Result<Option<RestoredCheckpoint>, CheckpointError> {
        self.claim()?;
        let named = highest_epoch(&*self.storage)?;
        let Some((mut opened, refused)) = newest_good(&self.storage)? else { return Ok(None) };
        let catalogue = model.catalogue().clone();
        let training = CheckpointTraining::new(&catalogue, model.rules());
        opened.check_shard(&catalogue, SHARD, &training, &[])?;
        let name = opened.manifest().checkpoint;
        check_whole(opened.manifest())?;
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
        &mut self,
        model: &LocalModel,
        epoch: RestoreEpoch,
        user: &[u8],
    ) -> Result<SavedCheckpoint, CheckpointError> {
        self.claim()?;
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

/// Refuses a checkpoint with state that a ring would lose: the positions of granted data and the
/// effects of coordinators, which only servers keep. Refuses counts near the end of their range.
fn check_whole(manifest: &Manifest) -> Result<(), CheckpointError> {
    let unfit = |what, expected: &str, found: String| {
        let checkpoint = manifest.checkpoint.to_string();
        Err(CheckpointError::Unfit { checkpoint, what, expected: expected.to_owned(), found })
    };
    for shard in &manifest.shards {
        if shard.data.is_some() {
            let expected = "none: a ring grants no samples";
            return unfit("data set", expected, "one with a position".to_owned());
        }
        if !shard.coordinators.is_empty() {
            let expected = "none: a ring has no coordinator";
            let found = format!("{} of them", shard.coordinators.len());
            return unfit("open coordinators", expected, found);
        }
        let count = shard.gradients.max(manifest.checkpoint.global_step);
        if count >= COUNTS_LIMIT {
            return unfit("count", "below 2^55", count.to_string());
        }
    }
    Ok(())
}

/// No training counts as many steps or gradients, so sums of counts stay in range.
const COUNTS_LIMIT: u64 = 1 << 55;

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
