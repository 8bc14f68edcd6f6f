//! Publishes a checkpoint of all shards of the cluster, from choosing its name to deleting older
//! ones, and finds the newest sound checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pushpull_checkpoint::{
    CheckpointError, CheckpointFault, CheckpointName, CheckpointStorage, CheckpointTraining,
    Contents, Refused, Retention, Save, ShardEntry, highest_epoch, newest_good, retain,
};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::wire::Text;
use pushpull_optim::optimizer::OptimizerRules;
use tokio::task::JoinSet;

use super::peer::save_shard;
use crate::peer_hello::PeerHello;

/// What a save of all shards needs.
#[derive(Debug)]
pub(super) struct Publisher {
    /// Wrapped by the abandon flag, so that it does not delay a stopping server.
    pub(super) storage: Arc<dyn CheckpointStorage>,
    pub(super) retention: Retention,
    pub(super) peer_hello: PeerHello,
    /// The addresses of all ps tasks; for this task, where it listens.
    pub(super) addresses: BTreeMap<u32, String>,
    pub(super) rules: OptimizerRules,
    pub(super) owner: ShardId,
}

/// How often the removal of a failed save's files is tried, and the pause between two attempts. A
/// shard that has not yet noticed that the save failed may create one more file in between.
const REMOVALS_MAX: u32 = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(100);

/// A published checkpoint.
#[derive(Debug)]
pub(super) struct PublishedSave {
    pub(super) checkpoint: CheckpointId,
    /// Whether the retention policy could delete older checkpoints.
    pub(super) retained: Result<(), String>,
}

/// A failed save.
#[derive(Debug)]
pub(super) struct FailedSave {
    pub(super) fault: CheckpointFault,
    /// The name that its shards were given. No other save may use it, because a slow shard could
    /// still write there.
    pub(super) begun: Option<CheckpointName>,
}

impl From<CheckpointFault> for FailedSave {
    fn from(fault: CheckpointFault) -> FailedSave {
        FailedSave { fault, begun: None }
    }
}

/// The result of a search for the newest sound checkpoint.
#[derive(Clone, Debug)]
pub(super) struct CheckpointSearch {
    /// The newest sound checkpoint; `None` if there is no checkpoint at all.
    pub(super) newest: Result<Option<CheckpointId>, CheckpointFault>,
    /// Newer checkpoints that are not sound, each with its name and the fault.
    pub(super) passed_over: Vec<(String, String)>,
    /// The highest restore epoch that the name of a checkpoint has, sound or not; 0 without any.
    pub(super) named: RestoreEpoch,
}

impl CheckpointSearch {
    fn failed(fault: CheckpointFault) -> CheckpointSearch {
        let passed_over = Vec::new();
        let named = RestoreEpoch(0);
        CheckpointSearch { newest: Err(fault), passed_over, named }
    }
}

impl Publisher {
    /// Finds the newest sound checkpoint, and the newer ones that are not sound. Reads the
    /// checkpoint completely.
    pub(super) async fn find(self: Arc<Self>) -> CheckpointSearch {
        let searched = blocking(move || {
            let named = RestoreEpoch(highest_epoch(&*self.storage)?);
            let (newest, passed_over) = match newest_good(&self.storage) {
                Ok(None) => (Ok(None), Vec::new()),
                Ok(Some((opened, refused))) => {
                    let newest = Ok(Some(identify(opened.manifest().checkpoint)));
                    (newest, passed_over(&refused))
                }
                Err(error) => {
                    let refused = match &error {
                        CheckpointError::NoneGood { refused } => passed_over(refused),
                        _ => Vec::new(),
                    };
                    (Err(error.into()), refused)
                }
            };
            Ok(CheckpointSearch { newest, passed_over, named })
        });
        searched.await.unwrap_or_else(CheckpointSearch::failed)
    }

    /// Saves a checkpoint of all shards. If the future is dropped or one shard's part fails, the
    /// connections to the shards are closed, and the shards abandon their parts.
    pub(super) async fn save(
        self: Arc<Self>,
        user: Vec<u8>,
        catalogue: Arc<Catalogue>,
        epoch: RestoreEpoch,
        step: GlobalStep,
        failed: Option<CheckpointName>,
    ) -> Result<PublishedSave, FailedSave> {
        let storage = self.storage.clone();
        let save = blocking(move || Save::begin(storage, epoch, step, failed)).await?;
        let name = save.name();
        match self.clone().finish(save, user, catalogue, epoch).await {
            Ok(published) => Ok(published),
            Err(fault) => {
                let fault = match self.remove_temporary(name).await {
                    Ok(()) => fault,
                    Err(left) => {
                        fault.map_cause(|cause| format!("{cause}; its files are left: {left}"))
                    }
                };
                Err(FailedSave { fault, begun: Some(name) })
            }
        }
    }

    /// Removes the files that all shards have written for a failed save.
    async fn remove_temporary(&self, name: CheckpointName) -> Result<(), String> {
        let mut left = String::new();
        for _ in 0..REMOVALS_MAX {
            let storage = self.storage.clone();
            let removed = blocking(move || match storage.remove_folder(&name.temporary()) {
                Err(fault) if fault.is_not_found() => Ok(()),
                removed => removed.map_err(CheckpointError::from),
            });
            match removed.await {
                Ok(()) => return Ok(()),
                Err(error) => left = error.to_string(),
            }
            tokio::time::sleep(REMOVAL_PAUSE).await;
        }
        Err(left)
    }

    /// Has all shards write their parts, and publishes them.
    async fn finish(
        self: Arc<Self>,
        save: Save,
        user: Vec<u8>,
        catalogue: Arc<Catalogue>,
        epoch: RestoreEpoch,
    ) -> Result<PublishedSave, CheckpointFault> {
        let parts = self.save_parts(&catalogue, save.name(), epoch).await;
        let shards = match parts {
            // A part may be missing because the directory was removed, for which a retry helps.
            Err(CheckpointFault::Unfit(cause)) if !self.has_folder(save.name()).await => {
                return Err(CheckpointFault::Storage(cause));
            }
            parts => parts?,
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let contents = Contents {
            saved_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            training: CheckpointTraining::new(&catalogue, &self.rules.of_variables(&catalogue)),
            shards,
            user,
        };
        blocking(move || {
            let published = save.publish(&catalogue, contents)?;
            // A failed deletion of older checkpoints does not undo the publication.
            let retained = retain(&*self.storage, &published, &self.retention);
            let retained = retained.map(|_| ()).map_err(|error| Chain(&error).to_string());
            Ok(PublishedSave { checkpoint: identify(published.name()), retained })
        })
        .await
    }

    /// Returns whether the folder of a save is where this task has created it.
    async fn has_folder(&self, name: CheckpointName) -> bool {
        let storage = self.storage.clone();
        let listed = blocking(move || Ok(storage.list(None)?)).await;
        listed.is_ok_and(|folders| folders.contains(&name.temporary()))
    }

    async fn save_parts(
        &self,
        catalogue: &Catalogue,
        name: CheckpointName,
        epoch: RestoreEpoch,
    ) -> Result<Vec<ShardEntry>, CheckpointFault> {
        let mut shards: Vec<ShardId> = catalogue.shards().collect();
        if !shards.contains(&self.owner) {
            shards.push(self.owner);
        }
        // All at once: each shard pins its current values, so that the parts are of about one time,
        // or in synchronous mode writes the values that it has pinned for one step.
        let mut parts = JoinSet::new();
        for shard in shards {
            let peer_hello = self.peer_hello.clone();
            let name = name.to_string();
            let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
            parts
                .spawn(async move { save_shard(&peer_hello, &address, shard, &name, epoch).await });
        }
        let mut entries = Vec::new();
        while let Some(part) = parts.join_next().await {
            let unavailable = |cause: String| CheckpointFault::Unavailable(cause);
            let entry = part.map_err(|panic| unavailable(panic.to_string()))??;
            let entry = serde_json::from_slice(&entry);
            entries.push(entry.map_err(|error| unavailable(error.to_string()))?);
        }
        Ok(entries)
    }
}

/// Runs `work` on a thread that may block on a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<T, CheckpointFault> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        // The user's storage has panicked: that ends the server, as every panic of a user's code.
        Err(panic) if panic.is_panic() => std::panic::resume_unwind(panic.into_panic()),
        Err(error) => Err(CheckpointFault::Unavailable(error.to_string())),
    }
}

fn passed_over(refused: &[Refused]) -> Vec<(String, String)> {
    let each = refused.iter();
    each.map(|refused| (refused.checkpoint.clone(), Chain(&refused.reason).to_string())).collect()
}

fn identify(name: CheckpointName) -> CheckpointId {
    CheckpointId {
        name: Text::clipped(name.to_string()),
        epoch: RestoreEpoch(name.restore_epoch),
        step: GlobalStep(name.global_step),
    }
}
