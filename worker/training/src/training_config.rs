//! [`TrainingConfig`]: the settings of a training session.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

#[cfg(feature = "ring")]
use pushpull_collective::Ring;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::data_set::DataSet;
#[cfg(feature = "ring")]
use pushpull_common::ids::TaskId;
use pushpull_common::variable::VariableSpec;
#[cfg(feature = "ring")]
use pushpull_optim::Optimizer;
#[cfg(feature = "ring")]
use pushpull_worker::RingTrainerConfig;
#[cfg(feature = "ring")]
use pushpull_worker::internal::DenseRing;
use pushpull_worker::{ConfigError, InitialValues, Interrupt, WorkerConfig};

use super::cadence::Cadence;
use super::hook::Hook;
use super::lifecycle::LifecycleSettings;
use super::training_error::TrainingError;

/// The default of [`TrainingConfig::non_finite_max`], in gradients.
const NON_FINITE_MAX: u32 = 100;

/// The closure of the caller that sets first values.
pub(super) struct FillValues(pub(super) Box<SetFirstValues>);

/// The function that sets first values, called by the chief.
type SetFirstValues = dyn FnMut(&mut InitialValues<'_>) + Send;

impl fmt::Debug for FillValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FillValues")
    }
}

/// Where a replica trains.
pub(super) enum TrainingPlace {
    /// With servers.
    Servers,
    /// On a ring, until the training has begun there.
    #[cfg(feature = "ring")]
    Ring(Option<Box<(Ring, RingTrainerConfig)>>),
    /// With servers, whose workers average dense gradients around a ring. The ring is here while
    /// the worker has not joined.
    #[cfg(feature = "ring")]
    DenseByRing(Option<Box<DenseRing>>),
}

impl fmt::Debug for TrainingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TrainingPlace::Servers => "Servers",
            #[cfg(feature = "ring")]
            TrainingPlace::Ring(_) => "Ring",
            #[cfg(feature = "ring")]
            TrainingPlace::DenseByRing(_) => "DenseByRing",
        })
    }
}

impl TrainingPlace {
    fn ends_together(&self) -> bool {
        match self {
            TrainingPlace::Servers => false,
            #[cfg(feature = "ring")]
            TrainingPlace::Ring(_) | TrainingPlace::DenseByRing(_) => true,
        }
    }

    /// Checks the place of a replica of this cluster.
    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring has a size"))]
    fn check(&self, cluster: &ClusterSpec) -> Result<(), ConfigError> {
        #[cfg(feature = "ring")]
        if let TrainingPlace::DenseByRing(Some(ring)) = self {
            let ranks = ring.ring().launch().size();
            let tasks = ["chief", "worker"].map(|job| cluster.num_tasks(job).unwrap_or(0));
            let replicas = tasks.iter().sum();
            if replicas != ranks as usize {
                return Err(ConfigError::RingSize { ranks, replicas });
            }
        }
        Ok(())
    }
}

/// The settings of a training session.
///
/// ```no_run
/// use std::time::Duration;
///
/// use pushpull_common::variable::VariableSpec;
/// use pushpull_worker::WorkerConfig;
/// use pushpull_training::{TrainingConfig, hooks};
///
/// # fn run(worker: WorkerConfig) -> Result<(), Box<dyn std::error::Error>> {
/// let config = TrainingConfig::new(worker)
///     .variables([VariableSpec::f32("w", [784, 10])?, VariableSpec::f32("b", [10])?])
///     .initialize(|initial| initial.load("pretrained.safetensors"))
///     .checkpoint_every(Duration::from_secs(600))
///     .hook(hooks::StopAtStep::last(1_000_000))
///     .hook(hooks::NanGuard::fail());
/// # Ok(()) }
/// ```
pub struct TrainingConfig {
    pub(super) worker: WorkerConfig,
    pub(super) variables: Vec<VariableSpec>,
    pub(super) fill: FillValues,
    pub(super) hooks: Vec<Box<dyn Hook>>,
    pub(super) place: TrainingPlace,
    checkpoints: Option<Cadence>,
    final_checkpoint_on_error: bool,
    finish_for_all: bool,
    recover_for: Duration,
    non_finite_max: u32,
    seed: u64,
}

impl fmt::Debug for TrainingConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingConfig")
            .field("worker", &self.worker)
            .field("variables", &self.variables)
            .field("hooks", &self.hooks.iter().map(|hook| hook.name()).collect::<Vec<_>>())
            .field("checkpoints", &self.checkpoints)
            .field("recover_for", &self.recover_for)
            .finish_non_exhaustive()
    }
}

impl TrainingConfig {
    /// The settings for this worker. Its cluster and task decide whether it is the chief.
    pub fn new(worker: WorkerConfig) -> TrainingConfig {
        TrainingConfig {
            worker,
            variables: Vec::new(),
            fill: FillValues(Box::new(|_| ())),
            hooks: Vec::new(),
            place: TrainingPlace::Servers,
            checkpoints: None,
            final_checkpoint_on_error: false,
            finish_for_all: false,
            recover_for: Duration::from_secs(600),
            non_finite_max: NON_FINITE_MAX,
            // Workers that have lost the same server must not return at the same moment.
            seed: RandomState::new().build_hasher().finish(),
        }
    }

    /// The settings of a training on a ring, without servers: the rule updates the values on each
    /// rank by the mean of all gradients.
    ///
    /// - The session of each rank begins with the values of the newest checkpoint or of rank 0, and
    ///   rank 0 saves checkpoints.
    /// - All ranks end together: a hook that stops one stops all, and a step that one rank drops or
    ///   withholds counts on none. The gradients of the others are
    ///   [`Push::Stale`](pushpull_worker::Push::Stale) then.
    /// - If a rank is lost, the others go on without it, for as long as
    ///   [`TrainingConfig::recover_for`] allows. A rank that comes later is let in after a step.
    /// - Data sets that count each sample exactly once need servers. On a ring each rank reads its
    ///   own share: [`Pipeline::shard`](crate::data::Pipeline::shard).
    #[cfg(feature = "ring")]
    #[doc(alias = "hvd.DistributedOptimizer")]
    #[doc(alias = "hvd.BroadcastGlobalVariablesHook")]
    pub fn ring(ring: Ring, rule: impl Optimizer) -> TrainingConfig {
        TrainingConfig::ring_with(ring, RingTrainerConfig::new(rule))
    }

    /// The settings of a training on a ring, with checkpoints, or with rules, rates and codecs by
    /// variable; otherwise as [`TrainingConfig::ring`].
    #[cfg(feature = "ring")]
    pub fn ring_with(ring: Ring, config: RingTrainerConfig) -> TrainingConfig {
        let workers = ClusterSpec::builder().workers(ring.size());
        let task = TaskId::worker(ring.rank());
        // The names of the ranks, for hooks. No task has an address.
        let worker = WorkerConfig::new(workers.build().unwrap_or_default(), task);
        TrainingConfig {
            place: TrainingPlace::Ring(Some(Box::new((ring, config)))),
            ..TrainingConfig::new(worker)
        }
    }

    /// Averages dense gradients around a ring of all workers, while servers in synchronous mode keep
    /// the values, the slots and the rows.
    ///
    /// Each step, the dense gradients of all ranks become their means. Rank 0 pushes these, and
    /// pulls the dense values for all ranks, which get them around the ring. Each rank pushes and
    /// pulls its own rows of sparse variables and tables. The servers apply both in one step, by
    /// their rules. So checkpoints, readers and restarts are those of servers alone, with or without
    /// the ring, and so are the values: bit for bit with two ranks and `f32` or `f64`, and up to the
    /// order of a sum with more.
    ///
    /// - **Servers.** They aggregate one gradient of each rank: `Synchronous::new(n)` with n ranks,
    ///   which are all workers of the cluster; this sets [`WorkerConfig::expect_replicas`]. They do
    ///   not clip by the global norm, because no gradient that they see is that of a replica.
    /// - **Steps.** All ranks take part in each step. One that one rank drops or withholds counts on
    ///   none: the others get [`Push::Stale`](pushpull_worker::Push::Stale). A mean that is NaN or
    ///   infinite is [`Error::NonFinite`](pushpull_worker::Error::NonFinite) on all.
    /// - **End.** All ranks end together, as with [`TrainingConfig::ring`].
    /// - **Loss.** The ranks that are left form the next ring, for as long as
    ///   [`TrainingConfig::recover_for`] allows. Whether steps go on without the lost one is the
    ///   servers' `on_loss`. A rank that comes again is let in at a step.
    /// - **Half types.** A mean of `f16` or `bf16` is rounded to its type, and servers alone would
    ///   not round it.
    ///
    /// Cost: a rank sends 2(n-1)/n times its dense gradients, and the dense values once, around the
    /// ring. The servers receive one dense gradient and send the dense values once in each step,
    /// for any n; without the ring they do so n times. Two small all-reduces, and a wait for the
    /// slowest rank, come to each step.
    ///
    /// # Errors
    /// A session does not start with
    /// - [`ConfigError::RingSize`] if the cluster has another number of workers than the ring ranks,
    /// - [`ConfigError::GrantedData`] with [`TrainingConfig::data`],
    /// - [`Error::Unexpected`](pushpull_worker::Error::Unexpected) at servers that are asynchronous,
    ///   have backup replicas, aggregate another number of gradients, or clip.
    #[cfg(feature = "ring")]
    #[doc(alias = "sparse_as_dense")]
    pub fn dense_by(self, ring: Ring) -> TrainingConfig {
        let ranks = ring.launch().size();
        let worker = self.worker.expect_replicas(ranks, ranks).expect_unclipped();
        let place = TrainingPlace::DenseByRing(Some(Box::new(DenseRing::new(ring))));
        TrainingConfig { worker, place, ..self }
    }

    /// Adds variables. All workers must add the same in the same order.
    pub fn variables(mut self, variables: impl IntoIterator<Item = VariableSpec>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// Sets first values. The session calls `fill` on the chief, if neither the servers nor a
    /// checkpoint have values: see [`Worker::join`](pushpull_worker::Worker::join). Default: the initializers
    /// of the variables.
    #[doc(alias = "init_fn")]
    pub fn initialize(self, fill: impl FnMut(&mut InitialValues<'_>) + Send + 'static) -> Self {
        TrainingConfig { fill: FillValues(Box::new(fill)), ..self }
    }

    /// Declares the data set that the training consumes: see [`WorkerConfig::data`]. Each step then
    /// has samples, which [`Step::load`](super::Step::load) reads.
    pub fn data(self, set: DataSet) -> Self {
        TrainingConfig { worker: self.worker.data(set), ..self }
    }

    /// Saves checkpoints on the chief: after each join, then whenever this time has passed since
    /// the last one, and at the end. Default: none.
    ///
    /// The session asks; the servers write. Steps do not wait for that. Values that come from a
    /// checkpoint are not saved again at the same step.
    #[doc(alias = "save_checkpoint_secs")]
    #[doc(alias = "save_model_secs")]
    pub fn checkpoint_every(self, interval: Duration) -> Self {
        TrainingConfig { checkpoints: Some(Cadence::Time(interval)), ..self }
    }

    /// Saves checkpoints as [`TrainingConfig::checkpoint_every`] does, but after this many global
    /// steps. The last of both calls counts.
    #[doc(alias = "save_checkpoint_steps")]
    pub fn checkpoint_every_steps(self, steps: u64) -> Self {
        TrainingConfig { checkpoints: Some(Cadence::Steps(steps)), ..self }
    }

    /// Whether the chief saves a checkpoint also if the training fails, as long as it still reaches
    /// the servers. Default: no, since the values may be what has failed.
    pub fn final_checkpoint_on_error(self, saves: bool) -> Self {
        TrainingConfig { final_checkpoint_on_error: saves, ..self }
    }

    /// Whether the end on the chief ends the training for all workers
    /// ([`Worker::finish`](pushpull_worker::Worker::finish)). Default: no, each worker ends by itself. An
    /// error on the chief ends no other worker.
    pub fn finish_for_all(self, finishes: bool) -> Self {
        TrainingConfig { finish_for_all: finishes, ..self }
    }

    /// The time for which the session tries to recover before it gives up with the last error.
    /// Default 600 s. The time counts from the first failure after a settled push. Zero gives up at
    /// once. An attempt under way ends with the time, a second later at the latest; only a
    /// checkpoint has [`WorkerConfig::save_timeout`]. [`Hook::retrying`] hears of every failure
    /// that the session tries to recover from.
    ///
    /// The pauses between attempts grow from 0.1 s to 5 s, with jitter. The first attempt to join
    /// has [`WorkerConfig::connect_timeout`] instead.
    #[doc(alias = "recovery_wait_secs")]
    pub fn recover_for(self, time: Duration) -> Self {
        TrainingConfig { recover_for: time, ..self }
    }

    /// The most gradients in a row that may be refused because of NaN or infinity. The next one
    /// fails the training with [`TrainingError::NonFinite`]: a model that has broken down gives
    /// nothing else. Default 100, which a dynamic loss scale does not reach. `u32::MAX` is no
    /// limit.
    ///
    /// Hooks see each as [`GradientOutcome::Skipped`](super::GradientOutcome::Skipped), and
    /// [`WorkerMetrics::pushes_non_finite`](pushpull_worker::WorkerMetrics::pushes_non_finite) counts them.
    /// The samples of such a gradient go back, and are granted again.
    pub fn non_finite_max(self, in_a_row: u32) -> Self {
        TrainingConfig { non_finite_max: in_a_row, ..self }
    }

    /// Sets the seed of the jitter, so that a run can be repeated. Default: a random one.
    pub fn jitter_seed(self, seed: u64) -> Self {
        TrainingConfig { seed, ..self }
    }

    /// Adds a hook. Hooks are called in the order in which they were added.
    pub fn hook(mut self, hook: impl Hook + 'static) -> Self {
        self.hooks.push(Box::new(hook));
        self
    }

    /// Ends the training when this interrupt is raised, in every wait of the session: see
    /// [`WorkerConfig::interrupt`].
    ///
    /// A push under way has a quarter of a second to settle. Then the last checkpoint is saved, if
    /// the session saves some, for at most [`WorkerConfig::save_timeout`]. The worker leaves, and
    /// waits for a silent server for a quarter of a second.
    pub fn interrupt(self, interrupt: &Interrupt) -> Self {
        TrainingConfig { worker: self.worker.interrupt(interrupt), ..self }
    }

    /// Returns the settings of the lifecycle.
    pub(super) fn lifecycle(&self) -> Result<LifecycleSettings, TrainingError> {
        let interval = match self.checkpoints {
            Some(Cadence::Steps(0)) => Some("0 steps".to_owned()),
            Some(Cadence::Time(Duration::ZERO)) => Some("0 s".to_owned()),
            _ => None,
        };
        if let Some(interval) = interval {
            return Err(TrainingError::CheckpointInterval { interval });
        }
        self.place.check(&self.worker.cluster).map_err(pushpull_worker::Error::from)?;
        if let (true, Some(set)) = (self.place.ends_together(), &self.worker.data) {
            let data_set = set.name().to_owned();
            let error = pushpull_worker::Error::from(ConfigError::GrantedData { data_set });
            return Err(error.into());
        }
        Ok(LifecycleSettings {
            is_chief: self.worker.is_chief(),
            checkpoints: self.checkpoints,
            final_checkpoint_on_error: self.final_checkpoint_on_error,
            finish_for_all: self.finish_for_all,
            ends_together: self.place.ends_together(),
            connect_timeout: self.worker.connect_timeout,
            recover_for: self.recover_for,
            non_finite_max: self.non_finite_max,
            seed: self.seed,
        })
    }
}
