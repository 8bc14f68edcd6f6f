//! The configuration of a worker.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::codec::Codec;
use pushpull_common::data_set::DataSet;
use pushpull_common::ids::TaskId;
use pushpull_common::names::NamePattern;
use pushpull_common::placement::PlacementStrategy;
use pushpull_net::auth::Credentials;

use crate::compression::CodecRule;
use crate::error::{ConfigError, UnresponsiveShards};
use crate::interrupt::Interrupt;
use crate::runtime::CALLER_SPIN;
use crate::session::{Expectations, ExpectedMode};

/// Receives the shards that an operation waits for.
pub type ProgressCallback = Arc<dyn Fn(&UnresponsiveShards) + Send + Sync>;

/// When the bodies of messages carry a checksum. The headers and small fields of messages always
/// do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checksums {
    /// Over TCP to another host.
    #[default]
    Remote,
    /// Always. Costs a pass over each tensor on both sides.
    Always,
    /// Never.
    Never,
}

/// The configuration of one worker or reader.
///
/// Only the cluster and the task are required. A setting says "all workers must agree" where they
/// must.
///
/// ```
/// use std::time::Duration;
///
/// use pushpull_common::codec::Codec;
/// use pushpull_common::ids::TaskId;
/// use pushpull_worker::WorkerConfig;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cluster = "ps=127.0.0.1:2222;worker=127.0.0.1:2223,127.0.0.1:2224".parse()?;
/// let config = WorkerConfig::new(cluster, TaskId::worker(0))
///     .codec("dense/*", Codec::Bf16)
///     .timeout(Duration::from_secs(30));
/// assert!(config.is_chief(), "the worker with the lowest index");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct WorkerConfig {
    #[doc(hidden)]
    pub cluster: ClusterSpec,
    #[doc(hidden)]
    pub task: TaskId,
    pub(crate) placement: PlacementStrategy,
    #[doc(hidden)]
    pub connect_timeout: Duration,
    pub(crate) timeout: Duration,
    pub(crate) save_timeout: Duration,
    pub(crate) checksums: Checksums,
    pub(crate) shared_memory: bool,
    pub(crate) in_place_pulls: bool,
    pub(crate) codecs: Vec<CodecRule>,
    pub(crate) row_residual_bytes: u64,
    pub(crate) values: Option<Codec>,
    #[doc(hidden)]
    pub progress: Option<ProgressCallback>,
    pub(crate) progress_interval: Duration,
    pub(crate) busy_poll: Duration,
    #[doc(hidden)]
    pub credentials: Option<Credentials>,
    #[doc(hidden)]
    pub data: Option<DataSet>,
    #[doc(hidden)]
    pub interrupt: Option<Interrupt>,
    pub(crate) expectations: Expectations,
    /// When all operations of a join must have ended.
    #[doc(hidden)]
    pub limit: Option<Instant>,
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
    /// A configuration for this task of the cluster. The worker with the lowest index is the chief.
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
            in_place_pulls: false,
            codecs: Vec::new(),
            row_residual_bytes: 64 << 20,
            values: None,
            progress: None,
            progress_interval: Duration::from_secs(10),
            busy_poll: CALLER_SPIN.longest,
            credentials: None,
            data: None,
            interrupt: None,
            expectations: Expectations::default(),
            limit: None,
        }
    }

    /// Declares the data set that the training consumes. Default: none.
    ///
    /// The step owner then grants a batch of it with each token ([`crate::Token::samples`]), so
    /// that every sample of an epoch counts exactly once. [`crate::Worker::token`] returns `None`
    /// after the last epoch. All workers must declare the same data set; [`crate::Worker::join`]
    /// fails with [`crate::Error::DataDiffers`] otherwise.
    pub fn data(self, set: DataSet) -> Self {
        WorkerConfig { data: Some(set), ..self }
    }

    /// Expects the servers to be in synchronous mode, or in asynchronous mode. A program that
    /// depends on the mode says so: `connect` then fails with [`crate::Error::Unexpected`] at servers
    /// of the other one. Default: either.
    pub fn expect_synchronous(mut self, synchronous: bool) -> Self {
        self.expectations.mode = Some(match synchronous {
            true => ExpectedMode::Synchronous,
            false => ExpectedMode::Asynchronous,
        });
        self
    }

    /// Expects synchronous steps of this many gradients, of this many replicas
    /// (`Synchronous::total_num_replicas`). A program whose batches depend on them says so, as by
    /// [`WorkerConfig::expect_synchronous`], which this replaces.
    pub fn expect_replicas(mut self, replicas_to_aggregate: u32, total_num_replicas: u32) -> Self {
        self.expectations.mode = Some(ExpectedMode::Replicas {
            aggregate: replicas_to_aggregate,
            total: total_num_replicas,
        });
        self
    }

    /// Expects servers that do not clip gradients by their global norm. `connect` fails with
    /// [`crate::Error::Unexpected`] at others. Default: either.
    #[doc(hidden)]
    pub fn expect_unclipped(mut self) -> Self {
        self.expectations.is_unclipped = true;
        self
    }

    /// Expects the training to end at this step (`PsConfig::last_step`). `connect` fails with
    /// [`crate::Error::Unexpected`] if the step owner has another last step, or none, with which the
    /// training would not end. Default: any.
    pub fn expect_last_step(mut self, step: u64) -> Self {
        self.expectations.last_step = Some(Some(step));
        self
    }

    /// Expects the servers to set no last step: the training ends by order or with its data. Replaces
    /// [`WorkerConfig::expect_last_step`].
    pub fn expect_no_last_step(mut self) -> Self {
        self.expectations.last_step = Some(None);
        self
    }

    /// How variables are cut and placed on shards. All workers must agree. Default:
    /// [`PlacementStrategy::Balanced`].
    pub fn placement(self, strategy: PlacementStrategy) -> Self {
        WorkerConfig { placement: strategy, ..self }
    }

    /// The longest wait for servers that are not up yet, and for the chief to initialize or restore
    /// the variables. For the chief itself: the longest time in which a server finds a checkpoint,
    /// and in which it restores one. Default 60 s.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        WorkerConfig { connect_timeout: timeout, ..self }
    }

    /// The longest time of every other operation, reconnects included. Default 60 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        WorkerConfig { timeout, ..self }
    }

    /// The longest time in which the servers write, verify and publish a checkpoint:
    /// [`crate::Worker::save`]. Default 600 s.
    pub fn save_timeout(self, timeout: Duration) -> Self {
        WorkerConfig { save_timeout: timeout, ..self }
    }

    /// When tensors carry a checksum. Default [`Checksums::Remote`].
    pub fn checksums(self, checksums: Checksums) -> Self {
        WorkerConfig { checksums, ..self }
    }

    /// Whether the worker shares memory with servers of its host. Default true.
    ///
    /// The server must be reached through a Unix socket, run as the same user, and have sharing
    /// enabled. Then:
    ///
    /// - A pull is one copy on the caller's thread, without a request. Rows are requested as over
    ///   any connection. So are all values of a shard with dense variables of `f16` or `bf16`, and
    ///   all values if [`WorkerConfig::pull_codec`] is set.
    /// - [`crate::Worker::gradients`] are written into a push buffer, so pushing them copies
    ///   nothing. This covers unpartitioned variables that are sent unencoded. The server needs
    ///   memory for two pushes.
    ///
    /// A child of `fork` has no session: its operations fail with [`Error::Forked`](crate::Error::Forked).
    /// It shares the memory of its parent, so it must not write to gradients that the parent made
    /// before the fork.
    pub fn shared_memory(self, used: bool) -> Self {
        WorkerConfig { shared_memory: used, ..self }
    }

    /// Whether pulls of all values write into the caller's [`Params`](crate::Params) while they
    /// arrive. Default false: a pull fills other memory of the same size, and `params` is replaced
    /// at once.
    ///
    /// This saves one of the three times the size of the model that a worker needs: its parameters,
    /// its gradients, and the values of the next pull. In return, after a pull that fails, returns
    /// [`Pulled::Stale`](crate::Pulled::Stale) or is dropped, `params` has unspecified values, new,
    /// old or zero: pull again before they are used. Variables that each replica changes by itself
    /// keep their values. Parameters in pages that a device copies from by itself are not filled in
    /// place.
    pub fn in_place_pulls(self, in_place: bool) -> Self {
        WorkerConfig { in_place_pulls: in_place, ..self }
    }

    /// Encodes the gradients of some variables, so that a push has fewer bytes. `names` is the name
    /// of a variable, or a name with one `*` for any text. The last call that matches a variable
    /// decides; `None` leaves its gradients unencoded. Default: none is encoded.
    ///
    /// The worker keeps what an encoding leaves out and adds it to the next gradient
    /// ([`pushpull_common::codec`]). That residual is part of the worker's state:
    /// [`crate::Worker::residuals`].
    ///
    /// Cost: memory for one gradient, and a few passes over it on the caller's thread for each
    /// push. Rows of sparse variables and tables support f16, bf16 and int8 only; see
    /// [`WorkerConfig::row_residual_bytes`].
    ///
    /// `join` fails if a server does not support the codec, if no variable has such a name, or if
    /// none of these variables can be encoded with it.
    pub fn codec(mut self, names: impl Into<NamePattern>, codec: impl Into<Option<Codec>>) -> Self {
        self.codecs.push(CodecRule { names: names.into(), codec: codec.into() });
        self
    }

    /// The most memory for the residuals of rows, in bytes, for each variable that is pushed by
    /// rows with a codec. A row takes its own bytes and about 48 more. Beyond that, the residuals
    /// of the rows that were not pushed for the longest time are dropped: at most one step's error
    /// of each. Default 64 MiB; 0 keeps none.
    pub fn row_residual_bytes(self, bytes: u64) -> Self {
        WorkerConfig { row_residual_bytes: bytes, ..self }
    }

    /// Pulls the values of trained variables as [`Codec::F16`] or [`Codec::Bf16`], in half the
    /// bytes; rows as well. The values are rounded, but arrive in the variable's own type. Default:
    /// unencoded.
    ///
    /// The servers hold and update full values in any case. Plain variables, and variables of `f16`
    /// and `bf16`, are sent in their own type. So are all values of a server that does not support
    /// the encoding.
    pub fn pull_codec(self, codec: impl Into<Option<Codec>>) -> Self {
        WorkerConfig { values: codec.into(), ..self }
    }

    /// Sets what the worker proves itself with: the first access token that suits its role and its
    /// task, or a certificate. With an authority the servers must be reached over TLS. Default: none.
    pub fn credentials(self, credentials: impl Into<Option<Credentials>>) -> Self {
        WorkerConfig { credentials: credentials.into(), ..self }
    }

    /// Sets for how long a blocking call polls at most before its thread sleeps, for an answer or for
    /// the next part of a long one. It polls for up to 50 us, and longer only while waits have ended
    /// within `longest` again and again. It does not poll while other threads want the processor: it
    /// yields the processor while it polls, and stops polling for 50 to 800 ms if others go on taking
    /// it.
    ///
    /// On an idle host polling costs one processor during a call and saves two wake-ups of some 20
    /// us. On a busy host the thread does not poll. Zero switches polling off. Default 400 us.
    pub fn busy_poll(self, longest: Duration) -> Self {
        WorkerConfig { busy_poll: longest, ..self }
    }

    /// Lets another thread cancel the calls of [`crate::blocking::Worker`] and
    /// [`crate::blocking::Reader`], `connect` included, and end a training session. Default: an
    /// interrupt of the worker's own, which exists once it has connected.
    ///
    /// The futures of [`crate::Worker`] and [`crate::Reader`] do not react to it: drop them.
    pub fn interrupt(self, interrupt: &Interrupt) -> Self {
        WorkerConfig { interrupt: Some(interrupt.clone()), ..self }
    }

    /// Validates the codecs.
    pub(crate) fn check_codecs(&self) -> Result<(), ConfigError> {
        for codec in self.codecs.iter().filter_map(|rule| rule.codec) {
            codec.validate()?;
        }
        match self.values.filter(|codec| codec.encoding().codec_of_values().is_none()) {
            Some(codec) => Err(ConfigError::PullCodec { codec }),
            None => Ok(()),
        }
    }

    /// Calls `report` once per `interval` while an operation waits, with the servers that delay it.
    /// Default: no reports.
    ///
    /// - A server whose name has no address is reported at once: the name may be misspelt. The worker
    ///   keeps resolving it, because a server may be registered later.
    /// - Those are servers that cannot be reached, that have not answered a heartbeat for longer
    ///   than a lease, or that wait for storage.
    /// - While a worker waits for the chief to initialize or restore the variables, the report
    ///   names the chief's task and when it was last heard from.
    /// - A training session reports each failure that it tries to recover from, with its cause.
    /// - While a token is awaited in synchronous mode, the report also names the replicas and
    ///   shards that the step owner waits for. The worker asks the owner once per interval, at most
    ///   ten times a second.
    ///
    /// The session's thread calls `report`, or the caller's thread that runs the session. `report`
    /// must not wait for this worker. If it panics, the session ends with
    /// [`crate::Error::Panicked`].
    pub fn on_progress(
        self,
        interval: Duration,
        report: impl Fn(&UnresponsiveShards) + Send + Sync + 'static,
    ) -> Self {
        WorkerConfig { progress: Some(Arc::new(report)), progress_interval: interval, ..self }
    }

    /// Whether this task is the chief, the worker task with the lowest index.
    pub fn is_chief(&self) -> bool {
        let declares = self.task == TaskId::declaring_client();
        declares || self.cluster.chief().is_some_and(|chief| chief == self.task)
    }
}
