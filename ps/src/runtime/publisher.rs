//! A checkpoint of all shards of the cluster, from its name to the deletion of older ones; and the
//! newest that is sound.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::wire::Text;
use tokio::task::JoinSet;

use super::peer::save_shard;
use crate::checkpoint::{
    CheckpointError, CheckpointName, CheckpointStorage, CheckpointTraining, Contents, Refused,
    Retention, Save, ShardEntry, newest_good, retain,
};
use crate::optimizer::OptimizerRules;
use crate::peer_hello::PeerHello;

/// What it takes to have all shards save a checkpoint.
#[derive(Debug)]
pub(super) struct Publisher {
    /// Watched: a server that stops is not held up by it.
    pub(super) storage: Arc<dyn CheckpointStorage>,
    pub(super) retention: Retention,
    pub(super) peer_hello: PeerHello,
    /// The addresses of all ps tasks; of this one where it listens.
    pub(super) addresses: BTreeMap<u32, String>,
    pub(super) rules: OptimizerRules,
    pub(super) owner: ShardId,
}

/// How often it is tried to remove what a failed save has written, and the pause between: a shard that has
/// not noticed yet that nobody waits for its part may create one more file at that moment.
const REMOVALS_MAX: u32 = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(100);

/// A checkpoint that is there.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) checkpoint: CheckpointId,
    /// Whether older ones that need not be kept are gone.
    pub(super) retained: Result<(), String>,
}

/// A save that came to nothing.
#[derive(Debug)]
pub(super) struct FailedSave {
    pub(super) cause: String,
    /// The name that its shards were told. No other save may have it, as one that is late could write there.
    pub(super) begun: Option<CheckpointName>,
}

impl From<String> for FailedSave {
    fn from(cause: String) -> FailedSave {
        FailedSave { cause, begun: None }
    }
}

/// What a search for the newest sound checkpoint came to.
#[derive(Clone, Debug)]
pub(super) struct Search {
    /// It; nothing if there is no checkpoint at all.
    pub(super) newest: Result<Option<CheckpointId>, String>,
    /// The newer ones, which are not sound: each by its name, and what is wrong with it.
    pub(super) passed_over: Vec<(String, String)>,
}

impl Publisher {
    /// The newest checkpoint that is sound, and those that are newer and are not. Reads all of it.
    pub(super) async fn find(self: Arc<Self>) -> Search {
        let searched = blocking(move || {
            Ok(match newest_good(&self.storage) {
                Ok(None) => Search { newest: Ok(None), passed_over: Vec::new() },
                Ok(Some((opened, refused))) => {
                    let newest = Ok(Some(identify(opened.manifest().checkpoint)));
                    Search { newest, passed_over: passed_over(&refused) }
                }
                Err(error) => {
                    let passed_over = match &error {
                        CheckpointError::NoneGood { refused } => passed_over(refused),
                        _ => Vec::new(),
                    };
                    Search { newest: Err(error.to_string()), passed_over }
                }
            })
        });
        searched
            .await
            .unwrap_or_else(|panic| Search { newest: Err(panic), passed_over: Vec::new() })
    }

    /// Saves a checkpoint of all shards. Dropped, or when one shard's part fails, it closes its
    /// connections to the shards, and they give up what they write for it.
    pub(super) async fn save(
        self: Arc<Self>,
        user: Vec<u8>,
        catalogue: Arc<Catalogue>,
        (epoch, step): (RestoreEpoch, GlobalStep),
        failed: Option<CheckpointName>,
    ) -> Result<Published, FailedSave> {
        let storage = self.storage.clone();
        let save = blocking(move || Save::begin(storage, epoch, step, failed)).await?;
        let name = save.name();
        match self.clone().finish(save, user, catalogue, epoch).await {
            Ok(published) => Ok(published),
            Err(cause) => {
                let cause = match self.remove_temporary(name).await {
                    Ok(()) => cause,
                    Err(left) => format!("{cause}; its files are left: {left}"),
                };
                Err(FailedSave { cause, begun: Some(name) })
            }
        }
    }

    /// Removes what has been written of a save that has failed, by all shards.
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
                Err(error) => left = error,
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
    ) -> Result<Published, String> {
        let shards = self.have_parts_saved(&catalogue, save.name(), epoch).await?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let contents = Contents {
            saved_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            training: CheckpointTraining::new(&catalogue, &self.rules.of_variables(&catalogue)),
            shards,
            user,
        };
        blocking(move || {
            let published = save.publish(&catalogue, contents)?;
            // What is published stays so, whatever becomes of older ones.
            let retained = retain(&*self.storage, &published, &self.retention);
            let retained = retained.map(|_| ()).map_err(|error| error.to_string());
            Ok(Published { checkpoint: identify(published.name()), retained })
        })
        .await
    }

    async fn have_parts_saved(
        &self,
        catalogue: &Catalogue,
        name: CheckpointName,
        epoch: RestoreEpoch,
    ) -> Result<Vec<ShardEntry>, String> {
        let mut shards: Vec<ShardId> = catalogue.shards().collect();
        if !shards.contains(&self.owner) {
            shards.push(self.owner);
        }
        // All at once: each pins what it has now, so that they are of about one time, or gives what it
        // has kept of one step.
        let mut parts = JoinSet::new();
        for shard in shards {
            let (peer_hello, name) = (self.peer_hello.clone(), name.to_string());
            let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
            parts
                .spawn(async move { save_shard(&peer_hello, &address, shard, &name, epoch).await });
        }
        let mut entries = Vec::new();
        while let Some(part) = parts.join_next().await {
            let entry = part.map_err(|error| error.to_string())??;
            entries.push(serde_json::from_slice(&entry).map_err(|error| error.to_string())?);
        }
        Ok(entries)
    }
}

/// Does something that may wait for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|panic| panic.to_string())?.map_err(|error| error.to_string())
}

fn passed_over(refused: &[Refused]) -> Vec<(String, String)> {
    let each = refused.iter();
    each.map(|refused| (refused.checkpoint.clone(), refused.reason.to_string())).collect()
}

fn identify(name: CheckpointName) -> CheckpointId {
    CheckpointId {
        name: Text::clipped(name.to_string()),
        epoch: RestoreEpoch(name.restore_epoch),
        step: GlobalStep(name.global_step),
    }
}
