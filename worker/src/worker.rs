//! The worker: the operations of a training loop.

#[cfg(feature = "ring")]
mod around_ring;
mod assigns;
mod coordinators;
mod pulls;
mod pushes;
mod replication;
mod stepping;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, ShardId, TaskId};
use pushpull_common::placement::Placement;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::limits::USER_BLOB_BYTES_MAX;
use pushpull_common::protocol::message;
use pushpull_common::protocol::message::{EndReason, Role};
use pushpull_common::variable::VariableSpec;

pub use self::pulls::{PullHandle, VariableHandle};
pub use self::pushes::PushHandle;
use crate::client::{SessionClient, join_all};
use crate::compression::Compression;
use crate::config::WorkerConfig;
use crate::error::{ConfigError, Error};
use crate::gradients::gradient_buffer::BufferRun;
use crate::gradients::params::{GradientMemory, Gradients, Params};
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::initial_values::InitialValues;
use crate::joined_model::JoinedModel;
use crate::joining::{ChiefJoin, place, replicas};
use crate::mean_variables::MeanVariables;
use crate::metrics::{TimedOperation, WorkerMetrics};
use crate::outcome::{DataBegun, RestoredCheckpoint, SaveHandle, SavedCheckpoint};
use crate::pull_client::ReplicaValues;
use crate::runtime::{Caller, SessionRunner};
use crate::session::{JoinedEpoch, Reply, SessionCommand};
use crate::token::Token;

/// One task that trains, normally of the job `worker`, in a session with the parameter servers.
///
/// A training loop calls [`Worker::connect`] and [`Worker::join`] once. Then it repeats
/// [`Worker::token`], [`Worker::pull`], [`Worker::gradients`] and [`Worker::push`] until there are
/// no more tokens, and calls [`Worker::leave`].
///
/// The worker owns a thread that renews its leases, so the caller may compute for any length of
/// time. Its futures run on any executor; to cancel an operation, drop its future.
/// [`crate::blocking`] has the same operations for threads without an executor. Every operation
/// ends by its deadline ([`WorkerConfig::timeout`]), if only with [`Error::Timeout`], which names
/// the shards that have not answered.
///
/// Dropping a worker ends its session; the servers notice when its lease expires. Call
/// [`Worker::leave`] to return its tokens at once.
#[derive(Debug)]
pub struct Worker {
    pub(crate) client: SessionClient,
    model: Option<Arc<JoinedModel>>,
    placement: Option<Placement>,
    restored: Option<RestoredCheckpoint>,
    /// The restore epoch of the servers when this worker joined.
    pub(crate) joined_epoch: JoinedEpoch,
    /// The variables that replicas average; `None` before [`Worker::join`].
    means: Option<MeanVariables>,
    data_begun: Option<DataBegun>,
    /// Memory of earlier pushes, for reuse.
    pool: Vec<GradientMemory>,
    /// Memory for pushes from the last device.
    #[cfg(feature = "devices")]
    pub(crate) device_pool: Option<crate::devices::DevicePool>,
    /// The variables of the last push, and the scatter for them.
    scatter: Option<(Vec<bool>, Arc<Scatter>)>,
}

/// How long a leaving worker tries to reach servers that hold none of its variables.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(2);

/// The most gradient buffers in the pool: one that the caller fills, and one that is being sent.
const POOL_MAX: usize = 2;

impl Worker {
    /// Connects to the step owner. Waits until it is up, for at most
    /// [`WorkerConfig::connect_timeout`].
    ///
    /// [`Worker::join`] connects to the other servers that hold variables. Workers never connect to
    /// each other.
    ///
    /// Dropping the future ends the session.
    pub async fn connect(config: WorkerConfig) -> Result<Worker, Error> {
        let TaskId { job, index } = &config.task;
        if let Err(source) = config.cluster.require(job, *index) {
            return Err(ConfigError::UnknownTask { task: config.task, source }.into());
        }
        Worker::connect_client(config).await
    }

    /// Connects as [`Worker::connect`] does, also as a client that is no task of the cluster.
    #[doc(hidden)]
    pub async fn connect_client(config: WorkerConfig) -> Result<Worker, Error> {
        let role = if config.is_chief() { Role::Chief {} } else { Role::Worker {} };
        let client = SessionClient::connect(config, role).await?;
        Ok(Worker {
            client,
            model: None,
            placement: None,
            restored: None,
            joined_epoch: JoinedEpoch::default(),
            means: None,
            data_begun: None,
            pool: Vec::new(),
            #[cfg(feature = "devices")]
            device_pool: None,
            scatter: None,
        })
    }

    /// The runner of its session.
    #[doc(hidden)]
    pub fn runner(&self) -> &Arc<SessionRunner> {
        self.client.caller.runner()
    }

    /// Ends all later operations, but for checkpoints, at this moment; `None` removes the limit.
    #[doc(hidden)]
    pub fn limit_operations(&self, limit: Option<Instant>) {
        self.client.caller.limit(limit);
    }

    /// Whether its session has failed, so that every operation fails.
    #[doc(hidden)]
    pub fn has_failed(&self) -> bool {
        self.client.caller.has_failed()
    }

    /// Whether this worker is the chief, the worker task with the lowest index. The chief declares
    /// and initializes the variables, saves checkpoints and may end the training.
    pub fn is_chief(&self) -> bool {
        self.client.config.is_chief()
    }

    /// Declares the variables, waits until they have consistent values on all servers, and pulls
    /// them.
    ///
    /// All workers must declare the same variables in the same order with the same
    /// [`WorkerConfig::placement`], because these decide where each variable is. The chief also
    /// provides the values:
    ///
    /// - If all servers have values of one restore epoch, these are kept.
    /// - Otherwise, if there is a sound checkpoint, the newest one is restored on all servers.
    ///   [`Worker::restored`] names it.
    /// - Otherwise, if nothing has been trained yet, the chief calls `fill`, which may set values.
    ///   The servers initialize the other variables with their initializers.
    /// - Otherwise some servers have lost what others still hold: [`Error::NoCheckpoint`].
    ///
    /// A [`VariableSpec::local`] variable and a mean ([`VariableSpec::mean_every_steps`]) begin
    /// with the servers' values, too.
    ///
    /// The other workers wait for the chief, for at most [`WorkerConfig::connect_timeout`], and
    /// never call `fill`.
    ///
    /// # Errors
    /// [`Error::Differs`] if the servers hold other variables, [`Error::AlreadyJoined`] if this
    /// worker has joined, and the errors of placement, codecs and the session.
    ///
    /// Dropping the future leaves the worker unjoined; a later `join` continues with what the
    /// servers hold.
    #[doc(alias = "prepare_or_wait_for_session")]
    #[doc(alias = "Supervisor")]
    #[doc(alias = "MonitoredTrainingSession")]
    pub async fn join(
        &mut self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<Params, Error> {
        if self.model.is_some() {
            return Err(Error::AlreadyJoined);
        }
        // A cluster without replicas is reported before anything is declared.
        replicas(&self.client.config.cluster, variables)?;
        let (placement, catalogue) = place(&self.client, variables)?;
        let plan = Arc::new(ShardingPlan::new(Arc::new(catalogue)));
        let (shards, compression) = self.open_plan(&plan).await?;
        (self.joined_epoch, self.restored) = match self.is_chief() {
            true => ChiefJoin::new(self, &plan, &shards, fill).join().await?,
            false => (self.client.await_values(&plan, &shards).await?, None),
        };
        let params = self.joined(plan, compression).await?;
        self.placement = Some(placement);
        Ok(params)
    }

    /// Joins with the variables that the servers have, once they have values. Never initializes
    /// them, nor declares a data set.
    #[doc(hidden)]
    pub async fn join_declared(&mut self) -> Result<Params, Error> {
        if self.model.is_some() {
            return Err(Error::AlreadyJoined);
        }
        let owner = self.client.owner;
        let timeout = self.client.config.connect_timeout;
        self.client.await_ready(owner, timeout).await?;
        let catalogue = self.client.fetch_catalogue(owner).await?;
        let plan = Arc::new(ShardingPlan::new(Arc::new(catalogue)));
        let (shards, compression) = self.open_plan(&plan).await?;
        self.joined_epoch = self.client.await_values(&plan, &shards).await?;
        self.joined(plan, compression).await
    }

    /// Returns parameters to pull into. `None` before the worker has joined.
    #[doc(hidden)]
    pub fn new_params(&self) -> Option<Params> {
        self.model.as_ref().map(|model| Params::new(model.plan.clone()))
    }

    /// Connects to the shards of a plan.
    async fn open_plan(
        &self,
        plan: &Arc<ShardingPlan>,
    ) -> Result<(Vec<ShardId>, Compression), Error> {
        let (shards, settings) = self.client.open(plan).await?;
        let config = &self.client.config;
        let codecs = &config.codecs;
        let row_bytes = config.row_residual_bytes;
        let encodings = &settings.encodings;
        let compression = Compression::new(plan.catalogue(), codecs, encodings, row_bytes)?;
        Ok((shards, compression))
    }

    /// Pulls the first values of a plan that the servers have.
    async fn joined(
        &mut self,
        plan: Arc<ShardingPlan>,
        compression: Compression,
    ) -> Result<Params, Error> {
        let replicas = replicas(&self.client.config.cluster, plan.catalogue().variables())?;
        if let Some(set) = self.client.config.data.clone() {
            self.data_begun = Some(self.client.declare_data(&set).await?);
        }
        let mut params = Params::new(plan.clone());
        self.client.pulls.newest(&mut params, ReplicaValues::Replace).await?;
        self.means = Some(MeanVariables::new(&plan, replicas, &params.buffer));
        self.model = Some(Arc::new(JoinedModel::new(plan, &self.client, compression)));
        Ok(params)
    }

    /// The variables with their partitions, offsets and digest; `None` before [`Worker::join`].
    pub fn catalogue(&self) -> Option<&Catalogue> {
        self.model.as_ref().map(|model| &**model.plan.catalogue())
    }

    /// Which shard holds which partition; `None` before [`Worker::join`]. [`Placement::table`]
    /// formats the bytes of each task and shard, and their skew.
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// The checkpoint that this worker restored when it joined.
    ///
    /// `None` if it initialized the variables or found them with values, and always on workers
    /// other than the chief. Reset the data readers to their positions in that checkpoint: see
    /// [`Worker::save`].
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.restored.as_ref()
    }

    /// How much of the declared data set had been granted when this worker joined. `None` without
    /// [`WorkerConfig::data`], and before [`Worker::join`].
    pub fn data_begun(&self) -> Option<DataBegun> {
        self.data_begun
    }

    /// What this worker has done since it connected, and how its time divides into waiting and
    /// computing. Costs no message.
    pub fn metrics(&self) -> WorkerMetrics {
        self.client.caller.times().metrics(Instant::now())
    }

    /// Takes a token, the right to push one gradient to one step. Returns `None` once the last step
    /// is reached, every batch of the data set is spent, or the chief has called
    /// [`Worker::finish`].
    ///
    /// A token that came with the answer to the last push is returned at once, without a request.
    /// Otherwise this waits:
    ///
    /// - In asynchronous mode, while tokens of other workers cover all remaining steps, or while
    ///   this worker is too far ahead of the slowest (bounded staleness).
    /// - In synchronous mode, once this worker has given its share to the current step, until that
    ///   step has its gradients and every shard has applied it.
    ///
    /// # Errors
    /// [`Error::Timeout`] after [`WorkerConfig::timeout`]; [`Error::Refused`] if the servers stop
    /// waiting for a lost replica. Both name the absent replicas, where the step owner has reported
    /// them. Call again to continue waiting.
    ///
    /// Dropping the future loses no token: one that arrives later serves the next call, or is
    /// returned to the step owner.
    pub async fn token(&mut self) -> Result<Option<Token>, Error> {
        self.model("take a token")?;
        self.request_token().await
    }

    /// Takes a token as [`Worker::token`] does, without borrowing the worker meanwhile.
    #[doc(hidden)]
    pub fn request_token(
        &self,
    ) -> impl Future<Output = Result<Option<Token>, Error>> + Send + use<> {
        self.request_token_within(self.client.config.timeout, true)
    }

    /// Requests a token as [`Worker::request_token`] does. `counts_waits` says whether a wait that
    /// has ended without one is an error of this worker's metrics.
    fn request_token_within(
        &self,
        timeout: Duration,
        counts_waits: bool,
    ) -> impl Future<Output = Result<Option<Token>, Error>> + Send + use<> {
        let caller = self.client.caller.clone();
        let reads_data = self.client.config.data.is_some();
        async move {
            let timer = caller.times().timer(TimedOperation::Token).started();
            // A token that came with the last answer is taken without a message to the session's
            // thread.
            let token = match caller.claim() {
                Some(grant) => Ok(Some(Token::new(grant, caller.returns().clone()))),
                None => {
                    let reply = caller.call("take a token", SessionCommand::Token, timeout).await;
                    reply.and_then(|reply| token_of(&caller, reply))
                }
            };
            if counts_waits || !token.as_ref().is_err_and(Error::is_wait) {
                timer.times().count_token(&token);
            }
            token.map_err(|error| data_differs(error, reads_data))
        }
    }

    /// Why the step owner grants no more tokens, after [`Worker::token`] has returned `None`.
    pub fn end_reason(&self) -> Option<EndReason> {
        self.client.caller.end_reason()
    }

    /// Returns an empty set of gradients, in memory that earlier pushes have used.
    ///
    /// If a server of the same host shares a push buffer ([`WorkerConfig::shared_memory`]),
    /// gradients are written where the server reads them, so pushing them copies nothing. This
    /// covers unpartitioned variables that are sent unencoded, for the gradients of two pushes at a
    /// time.
    ///
    /// # Panics
    /// If the worker has not joined.
    pub fn gradients(&mut self) -> Gradients {
        let model = self.model.as_ref().expect("cannot make gradients before joining");
        let plan = model.plan.clone();
        let runs = model.runs.clone();
        Gradients::new(plan.clone(), self.memory(&plan, &runs))
    }

    /// Takes memory for gradients from the pool, or allocates it. `runs` are the ranges that may be
    /// in push buffers.
    fn memory(&mut self, plan: &ShardingPlan, runs: &Arc<[BufferRun]>) -> GradientMemory {
        // Memory with buffer slots comes first: no more slots than those are available.
        let free = self.pool.iter().enumerate().filter(|(_, memory)| memory.is_free());
        let free =
            free.max_by_key(|(_, memory)| memory.buffer.slot_count()).map(|(index, _)| index);
        let memory = free.map(|free| self.pool.swap_remove(free));
        let mut memory = memory.unwrap_or_else(|| GradientMemory::new(plan, runs.clone()));
        let push_buffers = self.client.caller.push_buffers();
        memory.buffer_mut().renew(
            |push_buffer| push_buffers.is_some_and(|buffers| buffers.has(push_buffer)),
            |shard| push_buffers?.take(shard),
        );
        memory
    }

    /// Ends the training for all workers: the step owner grants no more tokens. Only the chief may
    /// call it.
    ///
    /// Dropping the future does not take the request back.
    pub async fn finish(&mut self) -> Result<(), Error> {
        let owner = self.client.owner;
        let timeout = self.client.config.timeout;
        let doing = "finish the training";
        self.client.request(doing, owner, message::Finish {}, Bytes::new(), timeout).await?;
        Ok(())
    }

    /// Waits until the training has ended on all workers, then replaces all of `params` with the
    /// final values. Returns their step; every worker gets the same values.
    ///
    /// Call it after [`Worker::token`] has returned `None`, or after [`Worker::finish`], and before
    /// [`Worker::leave`]. Until then this worker's pushes must have ended: those under way are
    /// waited for. The others have ended once each has called this or has left. A lost worker is
    /// waited for only in asynchronous mode, and for at most two more leases, while it may return
    /// and complete a gradient that some servers have applied and others have not.
    ///
    /// # Errors
    /// [`Error::Refused`] with `Refusal::NotFinal` if a gradient of a lost worker stays on some
    /// servers only, so that there are no final values.
    ///
    /// [`Error::Refused`] after [`WorkerConfig::timeout`], if the training goes on or another
    /// worker has not ended. It names the others. [`Error::Timeout`] if the step owner does not
    /// answer.
    ///
    /// Dropping the future leaves `params` unchanged, unless pulls are in place
    /// ([`WorkerConfig::in_place_pulls`]).
    pub async fn pull_final(&mut self, params: &mut Params) -> Result<u64, Error> {
        self.model("pull the final values")?;
        self.await_end().await?;
        self.pull_newest(params, 0).await
    }

    /// Waits until the training has ended on all workers.
    #[doc(hidden)]
    pub async fn await_end(&self) -> Result<(), Error> {
        let doing = "wait for the end of the training";
        let timeout = self.client.config.timeout;
        let owner = self.client.owner;
        let message = message::AwaitEnd {};
        self.client.request(doing, owner, message, Bytes::new(), timeout).await.map(|_| ())
    }

    /// Saves a checkpoint of all variables and optimizer slots. Only the chief may call it.
    ///
    /// `user` is at most 1 MiB of the caller's own data, such as the positions of the data readers;
    /// the checkpoint stores it. The checkpoint contains every push that has been applied before
    /// the call. In synchronous mode all shards save the same step, which a push that was only just
    /// accepted may not be part of. The training continues meanwhile.
    ///
    /// When this returns, the checkpoint is written, verified and published. That takes as long as
    /// the disks of the servers do, at most [`WorkerConfig::save_timeout`]. If the connection is
    /// lost meanwhile, the request is repeated, and the checkpoint may be saved twice under two
    /// names.
    ///
    /// Neither dropping the future nor the timeout stops a save that the servers have begun.
    ///
    /// # Errors
    /// [`Error::UserBlob`] if `user` is too long; the refusals of the servers; [`Error::Timeout`].
    pub async fn save(&mut self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        self.start_save(user).await
    }

    /// Starts [`Worker::save`], without a borrow of the worker.
    #[doc(hidden)]
    pub fn start_save(&self, user: &[u8]) -> SaveHandle {
        let doing = "save a checkpoint";
        let bytes = user.len() as u64;
        let limit = USER_BLOB_BYTES_MAX;
        let caller = &self.client.caller;
        let checked = match bytes > limit {
            true => Err(Error::UserBlob { bytes, limit }),
            false => self.model(doing).map(|_| ()),
        };
        SaveHandle::new(match checked {
            Err(error) => caller.failed(doing, error),
            Ok(()) => {
                let shard = self.client.owner;
                let body = Bytes::copy_from_slice(user);
                let command = SessionCommand::Request {
                    shard,
                    message: message::Save {}.into(),
                    body,
                    wait_ms: None,
                };
                caller.call_without_limit(doing, command, self.client.config.save_timeout)
            }
        })
    }

    /// Pulls the newest values without a token, once the servers have applied the steps before
    /// `at_least`. Returns their step.
    #[doc(hidden)]
    pub async fn pull_newest(&mut self, params: &mut Params, at_least: u64) -> Result<u64, Error> {
        let keep = ReplicaValues::Keep;
        match self.client.pulls.start(params, Some(GlobalStep(at_least)), keep).await? {
            Some(read) => Ok(read.step.0),
            // In synchronous mode: there are newer values.
            None => self.client.pulls.newest(params, keep).await.map(|step| step.0),
        }
    }

    /// Leaves the training and ends the session. Unspent tokens go to other workers.
    ///
    /// This announces the departure to all servers, including those that hold none of the
    /// variables: a server may be waiting until its workers have left. An unreachable server does
    /// not prevent the others from being reached.
    ///
    /// # Errors
    /// [`Error::Timeout`] names an unreachable server, if it holds variables.
    pub async fn leave(self) -> Result<(), Error> {
        let mut shards = vec![self.client.owner];
        if let Some(model) = &self.model {
            shards.extend(model.plan.shards().iter().filter(|&&shard| shard != self.client.owner));
        }
        let used = shards.len();
        for (task, _) in self.client.config.cluster.ps_tasks() {
            if !shards.iter().any(|shard| shard.task == task) {
                shards.push(ShardId { task, shard: 0 });
            }
        }
        let timeout = self.client.config.timeout;
        let leaves = shards.into_iter().enumerate().map(|(index, shard)| {
            let timeout = if index < used { timeout } else { timeout.min(UNUSED_TIMEOUT) };
            self.client.request("leave", shard, message::Leave {}, Bytes::new(), timeout)
        });
        let answers = join_all(leaves).await;
        answers.into_iter().take(used).try_for_each(|answer| match answer {
            Ok(_) | Err(Error::ServerStopped { .. }) => Ok(()),
            Err(error) => Err(error),
        })
    }

    pub(crate) fn model(&self, doing: &'static str) -> Result<&Arc<JoinedModel>, Error> {
        self.model.as_ref().ok_or(Error::NotJoined { doing })
    }
}

/// Returns why a worker that reads no data set gets no token: the training has one. A worker that
/// has declared its data set does so again when it joins again.
fn data_differs(error: Error, reads_data: bool) -> Error {
    match error {
        Error::Refused { shard, refusal: Refusal::DataSet { differs }, .. } if !reads_data => {
            Error::DataDiffers { shard, differs: differs.to_string() }
        }
        error => error,
    }
}

/// Returns the token of a reply.
fn token_of(caller: &Caller, reply: Reply) -> Result<Option<Token>, Error> {
    match reply {
        Reply::Token(grant) => Ok(grant.map(|grant| Token::new(grant, caller.returns().clone()))),
        _ => Err(Error::Ended { doing: "take a token" }),
    }
}
