//! A running server, seen from outside.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::limits::USER_BLOB_BYTES_MAX;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::saver::Wish;
use crate::error::SaveError;
use crate::metrics::{Counters, Metrics, SaveRecord, SaveStatus};

/// A handle on a running server; cheap to clone.
#[derive(Clone, Debug)]
pub struct PsHandle {
    pub(super) addresses: Arc<[String]>,
    pub(super) stop: CancellationToken,
    pub(super) counters: Arc<[Arc<Counters>]>,
    pub(super) wishes: Option<mpsc::Sender<Wish>>,
    pub(super) saves: watch::Receiver<SaveRecord>,
}

impl PsHandle {
    /// The first address the server listens on.
    pub fn address(&self) -> &str {
        self.addresses.first().map_or("", String::as_str)
    }

    /// All addresses the server listens on.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Makes the server stop: it finishes the pushes that are whole, sends their answers, closes
    /// its connections, and `serve` returns. Returns at once; stopping twice is stopping once.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Saves a checkpoint of all shards of the cluster, with the user's bytes (at most 1 MiB) beside
    /// it, and returns its name. The server goes on meanwhile: the checkpoint holds what each
    /// shard had when it began to write, and in synchronous mode what all had after one step.
    ///
    /// # Errors
    /// If this task does not own the step, no place for checkpoints is configured, the variables
    /// have no values yet, a shard cannot be reached or is for 60 s behind the others, a disk fails, or 16 saves wait for the one under
    /// way. Earlier checkpoints are as they were then. That older ones could not be deleted is no
    /// error: it is counted, in [`Metrics::retentions_failed`].
    ///
    /// Dropping the future does not stop the save.
    pub async fn save(&self, user: &[u8]) -> Result<String, SaveError> {
        let Some(wishes) = &self.wishes else {
            let reason = "this task keeps no checkpoints, or does not own the step".to_owned();
            return Err(SaveError { reason });
        };
        let limit = USER_BLOB_BYTES_MAX;
        if user.len() as u64 > limit {
            let reason = format!("{} bytes of the user are more than {limit}", user.len());
            return Err(SaveError { reason });
        }
        let (done, wait) = oneshot::channel();
        let stopping = || SaveError { reason: "the server is stopping".to_owned() };
        wishes.send((user.to_vec(), done)).await.map_err(|_| stopping())?;
        let saved = wait.await.map_err(|_| stopping())?;
        saved.map(|id| id.name.as_str().to_owned()).map_err(|reason| SaveError { reason })
    }

    /// How the saving of checkpoints goes, automatic saves included: whether the last ones have failed, and
    /// why. Nothing is known on a task that does not own the step.
    pub fn saves(&self) -> SaveStatus {
        self.saves.borrow().status(Instant::now())
    }

    /// What the server has done so far, summed over its shards. Costs one load per counter.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum(self.counters.iter().map(|counters| &**counters))
    }

    /// The same for each shard, in their order.
    pub fn metrics_by_shard(&self) -> Vec<Metrics> {
        self.counters.iter().map(|counters| Metrics::sum([&**counters])).collect()
    }
}
