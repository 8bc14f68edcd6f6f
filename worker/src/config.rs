//! What a worker is told before it connects.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::codec::Codec;
use pushpull_common::ids::TaskId;
use pushpull_common::names::Names;
use pushpull_common::placement::PlacementStrategy;

use crate::compression::Rule;
use crate::error::{ConnectError, UnresponsiveShards};
use crate::runtime::CALLER_SPIN;

/// A function that is told for whom a worker waits.
pub(crate) type Progress = Arc<dyn Fn(&UnresponsiveShards) + Send + Sync>;

/// Whether tensors carry a checksum on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checksums {
    /// Over TCP to another machine.
    #[default]
    Remote,
    /// Always. Costs a pass over each tensor on either side.
    Always,
    /// Never. Headers and metas carry theirs all the same.
    Never,
}

/// The configuration of one worker.
#[derive(Clone)]
pub struct WorkerConfig {
    pub(crate) cluster: ClusterSpec,
    pub(crate) task: TaskId,
    pub(crate) placement: PlacementStrategy,
    pub(crate) connect_timeout: Duration,
    pub(crate) timeout: Duration,
    pub(crate) save_timeout: Duration,
    pub(crate) checksums: Checksums,
    pub(crate) shared_memory: bool,
    pub(crate) codecs: Vec<Rule>,
    pub(crate) row_residual_bytes: u64,
    pub(crate) values: Option<Codec>,
    pub(crate) progress: Option<Progress>,
    pub(crate) progress_interval: Duration,
    pub(crate) busy_poll: Duration,
}

impl fmt::Debug for WorkerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerConfig")
            .field("cluster", &self.cluster)
            .field("task", &self.task)
            .field("placement", &self.placement)
            .finish_non_exhaustive()
    }
}

impl WorkerConfig {
    /// A worker for this task of the cluster. The worker with the lowest index is the chief.
    pub fn new(cluster: ClusterSpec, task: TaskId) -> Self {
        WorkerConfig {
            cluster,
            task,
            placement: PlacementStrategy::default(),
            connect_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(60),
            save_timeout: Duration::from_secs(600),
            checksums: Checksums::default(),
            shared_memory: true,
            codecs: Vec::new(),
            row_residual_bytes: 64 << 20,
            values: None,
            progress: None,
            progress_interval: Duration::from_secs(10),
            busy_poll: CALLER_SPIN.longest,
        }
    }

    /// Which shard holds which variable. All workers must say the same. Default: round robin in
    /// creation order.
    pub fn placement(self, strategy: PlacementStrategy) -> Self {
        WorkerConfig { placement: strategy, ..self }
    }

    /// How long to wait for servers that are not up yet, and for the chief to initialize or restore
    /// the variables; for the chief itself, how long a server may take to find a checkpoint, and to
    /// restore it. Default 60 s.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        WorkerConfig { connect_timeout: timeout, ..self }
    }

    /// How long every other operation may take, reconnects included. Default 60 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        WorkerConfig { timeout, ..self }
    }

    /// How long the servers may take to write, verify and publish a checkpoint:
    /// [`crate::Worker::save`]. Default 600 s.
    pub fn save_timeout(self, timeout: Duration) -> Self {
        WorkerConfig { save_timeout: timeout, ..self }
    }

    /// Whether tensors carry checksums. Default [`Checksums::Remote`].
    pub fn checksums(self, checksums: Checksums) -> Self {
        WorkerConfig { checksums, ..self }
    }

    /// Whether values are read in the memory of servers that are reached through a Unix socket, run as the
    /// same user and lend it: a pull is then one copy on the caller's thread, made when it is asked for,
    /// and asks nobody. Where they do not lend it, values are asked for as over any connection; so are
    /// those of `f16` and `bf16`, those that [`WorkerConfig::pull_codec`] is for, and rows. And whether
    /// [`crate::Worker::gradients`] lie in such memory, so that pushing them copies nothing: those of
    /// variables in one piece that travel as they are, if the server lends it. It takes the server memory for
    /// two pushes. A process that forks shares them with its child: it must not write to gradients there that
    /// it was given before, nor its parent to those that the child writes to. Default true.
    pub fn shared_memory(self, used: bool) -> Self {
        WorkerConfig { shared_memory: used, ..self }
    }

    /// Encodes the gradients of variables, so that fewer bytes are sent: those of this name, or if a
    /// `*` stands at its end, all whose names begin so. Called again, the last call that matches a
    /// variable counts; `None` sends it as it is. Default: none is encoded.
    ///
    /// What an encoding leaves out is added to the next gradient ([`pushpull_common::codec`]), and
    /// belongs to the worker: [`crate::Worker::residuals`]. Cost: the memory of one gradient, and some
    /// passes over it on the caller's thread for each push. Gradients of rows, of sparse variables and
    /// of tables that grow, are encoded as f16, bf16 or int8 only; see
    /// [`WorkerConfig::row_residual_bytes`]. `join` refuses a codec that a server does
    /// not know, and names that no variable has or only such as cannot be encoded so.
    pub fn codec(mut self, names: impl Into<Names>, codec: impl Into<Option<Codec>>) -> Self {
        self.codecs.push(Rule { names: names.into(), codec: codec.into() });
        self
    }

    /// How much of what codecs leave out of rows is kept, in bytes, for each variable that is pushed by
    /// rows with a codec: a row takes its own bytes and about 48 more. Where more rows than that are
    /// pushed, what was left of those that were not pushed for longest is forgotten, at most one step's
    /// error of each. Default 64 MiB; with 0 nothing is kept.
    pub fn row_residual_bytes(self, bytes: u64) -> Self {
        WorkerConfig { row_residual_bytes: bytes, ..self }
    }

    /// Pulls the values of trained variables as [`Codec::F16`] or [`Codec::Bf16`], so that half as many bytes
    /// come, rows too: they are rounded, and of the variable's own type all the same. Plain variables come as
    /// they are, and those of `f16` and `bf16` as what they are, as always. A server that does
    /// not know the encoding sends all as they are. Default: as they are. The servers hold, and optimizers
    /// change, full values in any case.
    pub fn pull_codec(self, codec: impl Into<Option<Codec>>) -> Self {
        WorkerConfig { values: codec.into(), ..self }
    }

    /// Sets for how long a blocking call polls at most before its thread sleeps. It polls for up to 50 us in any
    /// case, and longer only while waits have ended within `longest` again and again, and no more threads are
    /// runnable than there are processors.
    ///
    /// On an idle host polling costs one processor during a call and saves two wake-ups of some 20 us. On a busy
    /// host it costs other threads up to 50 us per call. Zero switches polling off. Default 400 us.
    pub fn busy_poll(self, longest: Duration) -> Self {
        WorkerConfig { busy_poll: longest, ..self }
    }

    /// What is wrong with the codecs, if something is.
    pub(crate) fn check_codecs(&self) -> Result<(), ConnectError> {
        for codec in self.codecs.iter().filter_map(|rule| rule.codec) {
            codec.validate()?;
        }
        match self.values.filter(|codec| codec.encoding().codec_of_values().is_none()) {
            Some(codec) => Err(ConnectError::PullCodec { codec }),
            None => Ok(()),
        }
    }

    /// Calls `report` every `interval` for which an operation still waits, with the servers that hold it up:
    /// those that cannot be reached, that are connected and have not answered a heartbeat for longer than a
    /// lease, or that wait for storage. While a token is awaited in synchronous mode it is told as well for which
    /// replicas and shards the step owner waits: the owner is asked once in each interval, and at most ten times a
    /// second. Called from the session's thread, or from the one that waits for it. It must not wait for this
    /// worker.
    pub fn on_progress(
        self,
        interval: Duration,
        report: impl Fn(&UnresponsiveShards) + Send + Sync + 'static,
    ) -> Self {
        WorkerConfig { progress: Some(Arc::new(report)), progress_interval: interval, ..self }
    }

    /// Whether this task is the chief: the lowest index of its cluster's workers.
    pub fn is_chief(&self) -> bool {
        self.cluster.chief().is_some_and(|chief| chief == self.task)
    }
}
