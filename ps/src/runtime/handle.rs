//! A handle on a running server.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use pushpull_checkpoint::CheckpointError;
use pushpull_common::protocol::limits::USER_BLOB_BYTES_MAX;
use pushpull_common::status::Status;
use pushpull_net::HomeProcess;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::saver::SaveWaiter;
use crate::event::{EventReaders, Events};
use crate::metrics::{Counters, Metrics, SaveRecord, SaveStatus};

/// A handle on a running server; cheap to clone.
///
/// A child of `fork` has no server: its handle cannot stop or finish the one of its parent, and
/// shows what was known at the fork.
///
/// ```
/// # use pushpull_common::{cluster::ClusterSpec, ids::TaskId};
/// # use pushpull_ps::{Adam, Ps, PsConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let listener = Ps::listen("127.0.0.1:0").await?;
/// # let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build()?;
/// # let ps = listener.start(PsConfig::new(cluster, TaskId::ps(0), Adam::default()))?;
/// let handle = ps.handle();
/// assert_eq!(handle.metrics().global_step, 0);
/// // Another thread ends the server.
/// std::thread::spawn(move || handle.stop());
/// ps.serve(std::future::pending()).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PsHandle {
    pub(super) addresses: Arc<[String]>,
    pub(super) stop: CancellationToken,
    pub(super) ending: Arc<ServerEnd>,
    pub(super) counters: Arc<[Arc<Counters>]>,
    pub(super) save_waiters: Option<mpsc::Sender<SaveWaiter>>,
    pub(super) saves: watch::Receiver<SaveRecord>,
    /// The status of each shard, never empty.
    pub(super) statuses: Arc<[watch::Receiver<Status>]>,
    pub(super) home: HomeProcess,
    /// Gone once the threads of the server have ended.
    pub(super) event_readers: Weak<EventReaders>,
}

/// How a server ends, if its handle has said so.
#[derive(Debug, Default)]
pub(super) struct ServerEnd {
    /// Whether the server stops for good, so that its shards say goodbye to their clients.
    pub(super) is_final: AtomicBool,
    /// Cancelled when the training ends by order of the server.
    pub(super) finish: CancellationToken,
    /// How long a finished server waits for its workers to leave.
    pub(super) grace: OnceLock<Duration>,
}

impl PsHandle {
    /// Returns the first address that the server listens on.
    pub fn address(&self) -> &str {
        self.addresses.first().map_or("", String::as_str)
    }

    /// Returns all addresses that the server listens on.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Stops the server for good: it finishes whole pushes, sends their answers, says goodbye, and
    /// closes its connections; then `serve` returns. Every operation of a worker or a reader that
    /// uses the server ends with `Error::ServerStopped`. Returns at once; further calls have no
    /// effect.
    pub fn stop(&self) {
        if self.home.is_elsewhere() {
            return;
        }
        self.ending.is_final.store(true, Ordering::Relaxed);
        self.stop.cancel();
    }

    /// Stops the server without a goodbye, because another one will continue with its state and its
    /// address: workers wait for that one, as after a crash. Else the same as [`PsHandle::stop`].
    pub fn suspend(&self) {
        if !self.home.is_elsewhere() {
            self.stop.cancel();
        }
    }

    /// Ends the training: every worker's next token is `None`. Once all workers have left, or after
    /// `grace`, the server stops as by [`PsHandle::stop`]. Returns at once; further calls have no
    /// effect.
    ///
    /// The step owner, the ps task with the lowest index, grants the tokens. Call this on the
    /// handles of all ps tasks, so that all of them stop.
    pub fn finish(&self, grace: Duration) {
        if self.home.is_elsewhere() {
            return;
        }
        // The first call decides.
        let _ = self.ending.grace.set(grace);
        self.ending.finish.cancel();
    }

    /// Saves a checkpoint of all shards of the cluster with the user's bytes (at most 1 MiB), and
    /// returns its name. The server continues meanwhile. The checkpoint holds the values that each
    /// shard had when it began to write; in synchronous mode, the values of all shards after one
    /// step.
    ///
    /// # Errors
    /// [`CheckpointError::Forked`] in a child of `fork`. Otherwise if this task does not own the step,
    /// no checkpoint storage is configured, the variables have
    /// no values yet, a shard cannot be reached or is 60 s behind the others, a disk fails, or 16
    /// saves wait for the one under way. Earlier checkpoints are unchanged then. A failed deletion
    /// of older checkpoints is no error; it is counted in [`Metrics::retentions_failed`].
    ///
    /// Dropping the future does not stop the save.
    pub async fn save(&self, user: &[u8]) -> Result<String, CheckpointError> {
        if self.home.is_elsewhere() {
            return Err(CheckpointError::Forked { parent: self.home.id() });
        }
        let Some(save_waiters) = &self.save_waiters else {
            let reason = "this task has no checkpoint storage or does not own the step".to_owned();
            return Err(CheckpointError::NotSaved { reason });
        };
        let limit = USER_BLOB_BYTES_MAX;
        if user.len() as u64 > limit {
            let reason = format!("{} user bytes exceed the limit of {limit}", user.len());
            return Err(CheckpointError::NotSaved { reason });
        }
        let (done, wait) = oneshot::channel();
        let stopping = || CheckpointError::NotSaved { reason: "the server is stopping".to_owned() };
        save_waiters.send((user.to_vec(), done)).await.map_err(|_| stopping())?;
        let saved = wait.await.map_err(|_| stopping())?;
        saved
            .map(|id| id.name.as_str().to_owned())
            .map_err(|fault| CheckpointError::NotSaved { reason: fault.to_string() })
    }

    /// Returns the state of saving, periodic saves included: whether the last saves failed, and
    /// why. Empty on a task that does not own the step.
    pub fn saves(&self) -> SaveStatus {
        self.saves.borrow().status(Instant::now())
    }

    /// Returns what the training does: how far it is, who its members are and who is waited for.
    ///
    /// Copies what each shard has published, without a message to it. Each publishes its status
    /// every 50 ms, and a last time when the server ends. A shard that applies a large push may be
    /// late by one slice of that work.
    pub fn status(&self) -> Status {
        let shards = self.statuses.iter().map(|status| status.borrow().clone());
        Status::of_task(shards).expect("a server has at least one shard")
    }

    /// Returns a reader of the events from now on, beside the function of
    /// [`crate::PsConfig::on_event`]. There may be any number of readers, each with its own queue.
    pub fn events(&self) -> Events {
        let readers = self.event_readers.upgrade();
        readers.map_or_else(Events::ended, |readers| readers.subscribe())
    }

    /// Returns the server's counters, summed over its shards. Costs one load per counter.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum(self.counters.iter().map(|counters| &**counters))
    }

    /// Returns the counters of each shard, in shard order.
    pub fn metrics_by_shard(&self) -> Vec<Metrics> {
        self.counters.iter().map(|counters| Metrics::sum([&**counters])).collect()
    }
}
