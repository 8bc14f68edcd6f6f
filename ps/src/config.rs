//! The configuration of a parameter server.

mod faults;
mod mode;
mod network;
mod storage;

use std::sync::Arc;
use std::time::Duration;

use pushpull_checkpoint::{CheckpointStorage, Retention};
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::TaskId;
use pushpull_common::names::NamePattern;
use pushpull_common::protocol::{Features, limits};
use pushpull_net::auth::Credentials;
use pushpull_optim::optimizer::{Optimizer, OptimizerRules};
use pushpull_store::planted::PlantedBugs;
use pushpull_store::store::{BLOCK_BYTES, CACHED_BYTES_MAX};

use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::step_rule::StepRule;
use crate::event::{Event, EventSink};

pub use mode::{Asynchronous, Mode, OnLoss, StalenessPolicy, Synchronous};
pub use network::Network;
pub use storage::{Durability, Storage};

/// Where checkpoints are stored, how often they are saved automatically, and which are retained.
#[doc(alias = "tf.train.Saver")]
#[doc(alias = "CheckpointSaverHook")]
#[derive(Clone, Debug)]
pub struct Checkpoints {
    pub(crate) storage: Arc<dyn CheckpointStorage>,
    pub(crate) every: Option<Duration>,
    pub(crate) retention: Retention,
    pub(crate) on_failure: OnSaveFailure,
}

/// The reaction of a server to a checkpoint that could not be saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnSaveFailure {
    /// The training goes on, and the next save is tried as if nothing had happened. See
    /// [`crate::PsHandle::saves`].
    #[default]
    Continue,
    /// The task of the step owner stops serving, and the training with it. What it has in memory
    /// alone is lost, from the last saved checkpoint on.
    Stop,
}

impl Checkpoints {
    /// Configures checkpoints in this storage, saved only on request. The newest five are retained.
    pub fn new(storage: impl CheckpointStorage + 'static) -> Self {
        Checkpoints::shared(Arc::new(storage))
    }

    /// Configures checkpoints as [`Checkpoints::new`] does, in a storage that the program uses as
    /// well, or whose type it learns only at run time.
    pub fn shared(storage: Arc<dyn CheckpointStorage>) -> Self {
        Checkpoints {
            storage,
            every: None,
            retention: Retention::default(),
            on_failure: OnSaveFailure::Continue,
        }
    }

    /// Saves a checkpoint automatically once this time has passed and the global step has advanced.
    /// This bounds the loss when a machine fails. At least 10 ms; a hundred years and more, such as
    /// [`Duration::MAX`], mean never. Only the step owner's setting counts. Default: no automatic
    /// saves.
    ///
    /// A program whose files have a size limit (`ulimit -f`) must handle or ignore SIGXFSZ, as
    /// `pushpull-ps` does: by default that signal ends the process, where the save would fail.
    pub fn every(self, every: Duration) -> Self {
        Checkpoints { every: Some(every), ..self }
    }

    /// Sets which checkpoints are retained when a newer one is saved. Default: the newest five.
    pub fn retention(self, retention: Retention) -> Self {
        Checkpoints { retention, ..self }
    }

    /// Sets what a failed save does, one that was requested too. Only the step owner's setting
    /// counts. Default: the training goes on.
    pub fn on_failure(self, on_failure: OnSaveFailure) -> Self {
        Checkpoints { on_failure, ..self }
    }
}

/// The treatment of NaN and infinity in a push, and of a finite push that would make a value NaN or
/// infinite, for example a gradient with a large learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NonFinite {
    /// The push is refused; the error names the variable and the first such element.
    ///
    /// A finite push that would make a value NaN or infinite is refused as well, and changes
    /// nothing, where one shard decides for the whole push: in asynchronous mode, if it is the only
    /// shard of the cluster. With several shards, others may already have applied their parts, and
    /// a synchronous step has been decided for all of them. The push is then applied, counted in
    /// [`crate::Metrics::overflows`], and the first such value is reported in
    /// [`crate::Metrics::first_overflow`]. The same holds where rows of a growing table are changed
    /// in place.
    #[default]
    Reject,
    /// The push is applied, and its NaN and infinite elements are counted in
    /// [`crate::Metrics::non_finite`].
    Count,
    /// No check and no counting. Saves one pass over each push while it is in cache.
    Allow,
}

/// The configuration of one ps task: a task of the job that holds the variables of its cluster
/// ([`ClusterSpec::variables_job`]).
///
/// All settings except the cluster, the task and the optimizer have defaults. The name and indices
/// of the job, the number of shards, the optimizers with their hyperparameters and schedules, the
/// mode with its settings, the treatment of NaN, the last step, the lease, the token timeout and the
/// time that effects are kept must be the same on all ps tasks. A worker refuses to train with
/// servers that differ in one of them, and so do the servers. That only some have a place for
/// checkpoints is reported ([`Event::SettingsDiffer`]).
///
/// Settings that belong together are one value: the mode, the storage and the network.
///
/// ```
/// use pushpull_common::cluster::ClusterSpec;
/// use pushpull_common::ids::TaskId;
/// use pushpull_ps::{Adam, Network, PsConfig, Storage, Synchronous};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cluster: ClusterSpec = "ps=127.0.0.1:2222;worker=127.0.0.1:2223,127.0.0.1:2224".parse()?;
/// let config = PsConfig::new(cluster, TaskId::ps(0), Adam::new(1e-3))
///     .mode(Synchronous::new(2).clip_by_global_norm(1.0))
///     .storage(Storage::directory("/dev/shm/state").bytes_max(8 << 30))
///     .network(Network::default().connections_max(64))
///     .last_step(10_000);
/// # let _ = config;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PsConfig {
    pub(crate) cluster: ClusterSpec,
    pub(crate) task: TaskId,
    pub(crate) rules: OptimizerRules,
    pub(crate) shards: u16,
    pub(crate) mode: Mode,
    pub(crate) storage: Storage,
    pub(crate) network: Network,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) checkpoints: Option<Checkpoints>,
    pub(crate) last_step: Option<u64>,
    pub(crate) lease: Duration,
    pub(crate) token_timeout: Option<Duration>,
    pub(crate) effects_kept: Duration,
    pub(crate) non_finite: NonFinite,
    pub(crate) inbox_pushes: usize,
    pub(crate) exit_when_done: Option<Duration>,
    pub(crate) events: EventSink,
    pub(crate) elastic_workers: bool,
    /// The address of the Unix socket through which memory is shared; empty if there is none.
    pub(crate) unix_address: String,
    pub(crate) block_bytes: usize,
    pub(crate) cached_bytes_max: u64,
    /// The features of the protocol that this task has.
    pub(crate) features: Features,
    pub(crate) planted: PlantedBugs,
}

impl PsConfig {
    /// The maximum number of shards of a task.
    pub const SHARDS_MAX: u16 = 256;
    /// The maximum number of push slots of a shard.
    pub const INBOX_PUSHES_MAX: usize = limits::STEP_PUSHES_MAX;

    /// Configures a server for a task of the cluster, whose variables are trained by this
    /// optimizer.
    pub fn new(cluster: ClusterSpec, task: TaskId, optimizer: impl Optimizer) -> Self {
        PsConfig {
            cluster,
            task,
            rules: OptimizerRules::new(Arc::new(optimizer)),
            shards: 1,
            mode: Mode::default(),
            storage: Storage::memory(),
            network: Network::default(),
            credentials: None,
            checkpoints: None,
            last_step: None,
            lease: Duration::from_secs(5),
            token_timeout: Some(Duration::from_secs(600)),
            effects_kept: Duration::from_secs(24 * 3600),
            non_finite: NonFinite::Reject,
            inbox_pushes: 4,
            exit_when_done: None,
            events: EventSink::default(),
            elastic_workers: false,
            unix_address: String::new(),
            block_bytes: BLOCK_BYTES,
            cached_bytes_max: CACHED_BYTES_MAX,
            features: Features::ALL,
            planted: PlantedBugs::default(),
        }
    }

    /// Sets another optimizer for some variables: the one with this name, or, if the name ends in
    /// `*`, all with this prefix. Of several calls that match a variable, the last counts. All
    /// tasks must have the same. Default: the optimizer of [`PsConfig::new`] trains all variables.
    ///
    /// All variables share one block layout, with the optimizer slots of the rule that has most on
    /// the shard. A declaration of variables is refused if a name matches none that is trained.
    pub fn optimizer_for(
        mut self,
        names: impl Into<NamePattern>,
        optimizer: impl Optimizer,
    ) -> Self {
        self.rules.optimizer_for(names.into(), Arc::new(optimizer));
        self
    }

    /// Sets a factor for the learning rate of some variables, for any optimizer and schedule. Must
    /// be finite and not negative; 0 freezes the values. Names match as in
    /// [`PsConfig::optimizer_for`]; of several calls that match a variable, the last counts. All
    /// tasks must have the same. Default: 1.
    ///
    /// A declaration of variables is refused if a name matches none that is trained, or a matching
    /// variable's optimizer has no scalable rate ([`Optimizer::scales_rate`]: all but
    /// [`crate::optim::Ftrl`] do).
    pub fn rate_for(mut self, names: impl Into<NamePattern>, factor: f64) -> Self {
        self.rules.rate_for(names.into(), factor);
        self
    }

    /// Sets the number of shards of the task. Each has its own thread and uses one core. All ps
    /// tasks must have the same number. Default 1, at most [`PsConfig::SHARDS_MAX`].
    pub fn shards(self, shards: u16) -> Self {
        PsConfig { shards, ..self }
    }

    /// Sets the update mode, with its settings: [`Asynchronous`] or [`Synchronous`]. All tasks must
    /// have the same mode. Default [`Asynchronous::default`].
    pub fn mode(self, mode: impl Into<Mode>) -> Self {
        PsConfig { mode: mode.into(), ..self }
    }

    /// Sets where the variables are kept, their limits and their durability. Default
    /// [`Storage::memory`].
    pub fn storage(self, storage: Storage) -> Self {
        PsConfig { storage, ..self }
    }

    /// Sets the limits and waits of connections. Default [`Network::default`].
    pub fn network(self, network: Network) -> Self {
        PsConfig { network, ..self }
    }

    /// Sets whom the server lets in, and what it proves itself with to other ps tasks. Those of the
    /// listener ([`crate::Ps::listen_secured`]) come first. Default: none, so everybody who can connect
    /// is let in.
    pub fn credentials(self, credentials: impl Into<Option<Credentials>>) -> Self {
        PsConfig { credentials: credentials.into(), ..self }
    }

    /// Sets the global step at which training ends; `token()` then returns `None`. The step is
    /// reached exactly, with any number of workers. All tasks must have the same. Default: training
    /// does not end.
    #[doc(alias = "StopAtStepHook")]
    pub fn last_step(self, step: u64) -> Self {
        PsConfig { last_step: Some(step), ..self }
    }

    /// Sets the lease: how long a worker may be silent before it is lost and its tokens are granted
    /// to others. A worker sends a heartbeat every fifth of it. All tasks must have the same. At least
    /// 100 ms. Default 5 s.
    pub fn lease(self, lease: Duration) -> Self {
        PsConfig { lease, ..self }
    }

    /// Sets how long a live worker may hold a token before it is recalled; `None` for no limit. A
    /// push with a recalled token is refused. All tasks must have the same. Default 10 minutes.
    pub fn token_timeout(self, timeout: Option<Duration>) -> Self {
        PsConfig { token_timeout: timeout, ..self }
    }

    /// Sets how long a shard keeps what has settled of a coordinator that is silent, if others need
    /// the place: it keeps [`COORDINATORS_MAX`](limits::COORDINATORS_MAX) of them. A coordinator
    /// that resumes later starts over, and its effects count again. The name of a coordinator of
    /// which no effect has settled is kept for a lease: it loses nothing. All tasks must have the
    /// same. Default 24 hours.
    pub fn effects_kept(self, kept: Duration) -> Self {
        PsConfig { effects_kept: kept, ..self }
    }

    /// Sets the treatment of NaN and infinity. Default [`NonFinite::Reject`].
    pub fn non_finite(self, policy: NonFinite) -> Self {
        PsConfig { non_finite: policy, ..self }
    }

    /// Sets the number of push slots of each shard. Further pushes wait for a free slot before they
    /// send a byte. A slot takes as much memory as the shard's values. The first keeps its memory;
    /// the others take theirs off [`Storage::bytes_max`] when they are requested, and return it
    /// after five seconds without use. A push that finds none waits for its turn. In synchronous
    /// mode these slots come in addition to those for the gradients of a step, which keep their
    /// memory, and serve pushes of other kinds; one is enough. Default 4, at most
    /// [`PsConfig::INBOX_PUSHES_MAX`].
    pub fn inbox_pushes(self, pushes: usize) -> Self {
        PsConfig { inbox_pushes: pushes, ..self }
    }

    /// Sets where checkpoints are stored, and how often they are saved. All ps tasks of a cluster
    /// must use the same storage. Default: no checkpoints.
    pub fn checkpoints(self, checkpoints: Checkpoints) -> Self {
        PsConfig { checkpoints: Some(checkpoints), ..self }
    }

    /// Calls a function with each [`Event`]. The function runs on the server's threads, which wait
    /// for it: pass the event to another thread if it may take long, or read
    /// [`crate::PsHandle::events`] instead. A panic in it is caught. If called again, the last
    /// function counts. Default: none is called.
    pub fn on_event(self, callback: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        PsConfig { events: EventSink::new(callback), ..self }
    }

    /// Sets whether workers that the cluster does not list may join: any index of a job that the
    /// cluster contains, except that of the ps tasks. A cluster that lists only ps tasks always
    /// admits any worker. Default false: only listed workers may join, which also bounds the number
    /// of clients of a shard.
    pub fn elastic_workers(self, elastic: bool) -> Self {
        PsConfig { elastic_workers: elastic, ..self }
    }

    /// Returns why this task shares no memory; `None` if it does.
    pub(crate) fn sharing_obstacle(&self) -> Option<&'static str> {
        match () {
            () if !cfg!(target_os = "linux") => Some("memory is shared on Linux only"),
            () if !self.network.shared_memory => Some("shared memory is switched off"),
            () if self.storage.durability == Durability::Power => {
                Some("readers would see values that are not on disk yet")
            }
            () if self.compensates() => {
                Some("values that clients read are kept to compensate for delays")
            }
            () => None,
        }
    }

    /// Returns whether stale gradients are compensated, for which pulled values are kept.
    pub(crate) fn compensates(&self) -> bool {
        matches!(self.mode.staleness(), StalenessPolicy::DelayCompensation { .. })
    }

    /// Plants a bug, for tests.
    #[cfg(feature = "planted")]
    pub fn planted(self, planted: PlantedBugs) -> Self {
        PsConfig { planted, ..self }
    }

    /// Stops the server once every worker that joined has left or lost its lease, and `grace` has
    /// passed without another one. Workers that leave notify all servers, even those that hold none
    /// of their variables. Default: the server runs until it is stopped.
    pub fn exit_when_done(self, grace: Duration) -> Self {
        PsConfig { exit_when_done: Some(grace), ..self }
    }

    /// Returns the settings on which all ps tasks of a cluster and their workers must agree, and
    /// those of which a difference is reported.
    pub(crate) fn identity(&self) -> Identity {
        let text = |value: Option<u64>| value.map_or("none".to_owned(), |value| value.to_string());
        self.kinds()
            .with_protocol()
            .with_long(Identity::RULES, &self.rules.settings())
            .with_long(Identity::MODE_SETTINGS, &format!("{:?}", self.mode))
            .with("non_finite", format!("{:?}", self.non_finite))
            .with(Identity::LAST_STEP, text(self.last_step))
            .with(Identity::LEASE_MS, self.lease.as_millis().to_string())
            .with(
                Identity::TOKEN_TIMEOUT_MS,
                text(self.token_timeout.map(|t| t.as_millis() as u64)),
            )
            .with(Identity::EFFECTS_KEPT_S, self.effects_kept.as_secs().to_string())
            .with_free(
                "checkpoints",
                if self.checkpoints.is_some() { "configured" } else { "none" },
            )
    }

    /// Returns the facts that change neither while a cluster runs nor while its state exists.
    fn kinds(&self) -> Identity {
        let mode = match &self.mode {
            Mode::Asynchronous(_) => "asynchronous".to_owned(),
            Mode::Synchronous(mode) => {
                format!("synchronous {}/{}", mode.replicas_to_aggregate, mode.total_num_replicas)
            }
        };
        let clips = self.mode.clip_by_global_norm().is_some();
        let sums_whole = self.rules.optimizers().any(|rule| rule.sums_whole_variables());
        Identity::new()
            .with("ps", self.cluster.ps_identity())
            .with("shards", self.shards.to_string())
            .with("optimizer", self.rules.default().kind())
            .with("optimizer_for", self.rules.exceptions())
            .with(Identity::MODE, mode)
            .with("clips", if clips { "by global norm" } else { "" })
            .with(Identity::WHOLE_VARIABLES, if sums_whole { Identity::YES } else { "" })
    }

    /// Returns whether a push that would make values infinite or NaN is refused: the policy
    /// rejects, and this shard is the only one with the push.
    pub(crate) fn refuses_overflows(&self) -> bool {
        let is_alone = self.shards == 1 && self.cluster.num_tasks(self.job()) == Ok(1);
        is_alone && self.rule().is_none() && self.non_finite == NonFinite::Reject
    }

    /// Returns the rule of synchronous steps, in synchronous mode.
    pub(crate) fn rule(&self) -> Option<StepRule> {
        let mode = self.mode.synchronous()?;
        let aggregate = mode.replicas_to_aggregate;
        let total = mode.total_num_replicas;
        let floor = match mode.on_loss {
            OnLoss::Shrink { min } if !mode.deterministic => min,
            _ => aggregate,
        };
        let rule = StepRule {
            aggregate,
            total,
            floor,
            ordered: mode.deterministic,
            push_slots: 0,
            last_step: self.last_step,
            clip: mode.clip_by_global_norm.map(BitwiseF64::from),
        };
        // With this many push slots no gradient waits for one.
        let push_slots = u64::from(rule.share()) * u64::from(total);
        Some(StepRule { push_slots: usize::try_from(push_slots).unwrap_or(usize::MAX), ..rule })
    }

    /// Returns [`Event::FewerWorkers`] if the mode expects more replicas than may ever join.
    pub(crate) fn fewer_workers(&self) -> Option<Event> {
        let total = self.mode.synchronous()?.total_num_replicas;
        let others = self.cluster.jobs().filter(|&job| job != self.job());
        let workers: usize = others.filter_map(|job| self.cluster.num_tasks(job).ok()).sum();
        let workers = u32::try_from(workers).unwrap_or(u32::MAX);
        let is_closed = workers > 0 && !self.elastic_workers;
        (is_closed && total > workers)
            .then_some(Event::FewerWorkers { total_num_replicas: total, workers })
    }

    /// Returns [`Event::MoreWorkers`] if the cluster lists more workers than the mode expects
    /// replicas. Other jobs than `chief` and `worker` may have no replica.
    pub(crate) fn more_workers(&self) -> Option<Event> {
        let total = self.mode.synchronous()?.total_num_replicas;
        let jobs = ["chief", "worker"].into_iter().filter(|&job| job != self.job());
        let workers: usize = jobs.filter_map(|job| self.cluster.num_tasks(job).ok()).sum();
        let workers = u32::try_from(workers).unwrap_or(u32::MAX);
        (workers > total).then_some(Event::MoreWorkers { total_num_replicas: total, workers })
    }

    /// Returns the number of push slots of each shard.
    pub(crate) fn push_slots(&self) -> usize {
        self.inbox_pushes.saturating_add(self.rule().map_or(0, |rule| rule.push_slots))
    }

    /// Returns the number of push slots that keep their memory: those that the gradients of a step
    /// need, and one more.
    pub(crate) fn kept_push_slots(&self) -> usize {
        self.rule().map_or(0, |rule| rule.push_slots).saturating_add(1)
    }

    /// Returns the job of the ps tasks: that of this task, as [`PsConfig::check`] ensures.
    pub(crate) fn job(&self) -> &str {
        &self.task.job
    }

    /// Returns whether this task owns the global step: it is the ps task with the lowest index.
    pub(crate) fn owns_step(&self) -> bool {
        self.cluster.step_owner().is_some_and(|owner| owner == self.task)
    }
}

#[cfg(test)]
mod tests {
    use pushpull_checkpoint::LocalDirectory;
    use pushpull_common::identity::FactDifference;
    use pushpull_optim::optimizer::{Adam, Lamb, Schedule, Sgd};

    use super::*;

    #[test]
    fn the_lowest_ps_task_owns_the_step() {
        let cluster = ClusterSpec::builder().sparse_job("ps", [(7, "a:1"), (3, "b:1")]);
        let cluster = cluster.build().unwrap();
        let owns = |task| PsConfig::new(cluster.clone(), task, Sgd::new(0.1)).owns_step();
        assert!(owns(TaskId::ps(3)) && !owns(TaskId::ps(7)));
    }

    #[test]
    fn more_replicas_than_workers_are_reported() {
        let event = |cluster: &str, total: u32, elastic: bool| {
            let config = PsConfig::new(cluster.parse().unwrap(), TaskId::ps(0), Sgd::new(0.1));
            let config = config.mode(Synchronous::new(total)).elastic_workers(elastic);
            config.fewer_workers().map(|event| event.to_string())
        };
        let two = "ps=a:1;worker=b:1,c:1";
        let found = event(two, 5, false).unwrap();
        assert!(found.contains("expect 5 replicas") && found.contains("2 workers"), "{found}");
        assert_eq!(event(two, 2, false), None);
        assert_eq!(event(two, 5, true), None);
        assert_eq!(event("ps=a:1", 5, false), None);
    }

    fn texts(difference: FactDifference) -> [String; 3] {
        let FactDifference { setting, ours, theirs } = difference;
        [setting, ours, theirs]
    }

    #[test]
    fn more_workers_than_replicas_are_reported() {
        let event = |cluster: &str, mode: Mode| {
            let config = PsConfig::new(cluster.parse().unwrap(), TaskId::ps(0), Sgd::new(0.1));
            config.mode(mode).more_workers().map(|event| event.to_string())
        };
        let three = "ps=a:1;chief=d:1;worker=b:1,c:1;evaluator=e:1";
        let found = event(three, Synchronous::new(2).into()).unwrap();
        assert!(found.contains("3 workers") && found.contains("expect 2 replicas"), "{found}");
        assert_eq!(event(three, Synchronous::new(3).into()), None);
        assert_eq!(event(three, Synchronous::new(2).total_num_replicas(3).into()), None);
        assert_eq!(event(three, Mode::default()), None);
    }

    #[test]
    fn servers_agree_on_every_setting_that_changes_values_and_report_the_others() {
        let cluster: ClusterSpec = "ps=a:1,b:1;worker=c:1".parse().unwrap();
        let config = |rule| PsConfig::new(cluster.clone(), TaskId::ps(0), rule);
        let ours = || config(Adam::new(0.001));
        let steps = Schedule::steps(0.001, [(10, 0.0001)]);
        let refused = [
            (config(Adam::new(0.01)), "rules", "0.01"),
            (config(Adam::new(steps)), "rules", "(10, 0.0001)"),
            (config(Adam::new(0.001).betas(0.8, 0.999)), "rules", "0.8"),
            (ours().optimizer_for("w*", Adam::new(0.5)), "optimizer_for", "\"w*\": adam"),
            (ours().rate_for("w*", 0.25), "rules", "0.25"),
            (ours().non_finite(NonFinite::Allow), "non_finite", "Allow"),
            (ours().mode(Asynchronous::default().reject_older(3)), "mode", "reject_older: Some(3)"),
            (ours().last_step(7), "last_step", "7"),
            (ours().lease(Duration::from_millis(800)), "lease_ms", "800"),
            (ours().token_timeout(None), "token_timeout_ms", "none"),
            (ours().effects_kept(Duration::from_secs(60)), "effects_kept_s", "60"),
        ];
        for (other, name, value) in refused {
            let ours = ours().identity();
            let other = other.identity();
            let found = ours.difference(&other).unwrap();
            assert_eq!(found.setting, name);
            assert!(found.theirs.contains(value), "{found:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let storage = LocalDirectory::create(folder.path()).unwrap();
        let other = ours().checkpoints(Checkpoints::new(storage)).identity();
        let ours = ours().identity();
        assert_eq!(ours.difference(&other), None);
        let found: Vec<_> = ours.free_differences(&other).map(texts).collect();
        assert_eq!(found, [["checkpoints", "none", "configured"].map(str::to_owned)]);
    }

    #[test]
    fn the_facts_of_any_configuration_fit_on_the_wire() {
        let cluster: ClusterSpec = "ps=a:1,b:1;worker=c:1".parse().unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.001));
        let config = (0..40).fold(config, |config, index| {
            config.optimizer_for(format!("variable_{index}*"), Adam::new(0.5))
        });
        let identity = config.identity();
        let long = format!("{} {}", Identity::RULES, Identity::PARTS_MAX);
        assert!(identity.field(&long).is_some());
        // The settings of the mode may have as many parts as the rules.
        let count = identity.fields().count() + Identity::PARTS_MAX - 1;
        assert!(count <= limits::IDENTITY_FIELDS_MAX, "{count}");
    }

    #[test]
    fn a_state_is_opened_with_another_end_and_lease() {
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        let config = || PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.1));
        let ours = config().identity().of_state();
        let other = config().last_step(7).lease(Duration::from_secs(9)).token_timeout(None);
        let other = other.effects_kept(Duration::ZERO).identity().of_state();
        assert_eq!(ours, other);
    }

    #[test]
    fn a_state_is_bound_to_optimizer_kinds_but_not_to_rates() {
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        let config = || PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.1));
        let ours = config().optimizer_for("w*", Sgd::new(0.1)).identity().of_state();
        let rates = config().optimizer_for("w*", Sgd::new(0.5)).rate_for("*", 0.5);
        let rates = rates.identity().of_state();
        assert_eq!(ours.difference(&rates), None);
        let [name, ours_is, theirs_is] = ours.free_differences(&rates).map(texts).next().unwrap();
        assert_eq!(name, "rules");
        assert!(ours_is.contains("0.1") && theirs_is.contains("0.5"), "{ours_is} {theirs_is}");
        let others = [
            (config(), ""),
            (config().optimizer_for("w", Sgd::new(0.1)), "\"w\": sgd"),
            (config().optimizer_for("w*", Adam::new(0.1)), "\"w*\": adam"),
        ];
        for (other, found) in others {
            let expected = ["optimizer_for", "\"w*\": sgd", found].map(str::to_owned);
            let found = ours.difference(&other.identity().of_state());
            assert_eq!(found.map(texts), Some(expected));
        }
        let local = "local=a:1".parse().unwrap();
        let local = PsConfig::new(local, TaskId::new("local", 0), Sgd::new(0.1)).identity();
        let found = config().identity().difference(&local).map(texts);
        assert_eq!(found, Some(["ps", "0", "local:0"].map(str::to_owned)));
        let whole =
            |identity: Identity| identity.field(Identity::WHOLE_VARIABLES) == Some(Identity::YES);
        assert!(!whole(ours) && whole(config().optimizer_for("w", Lamb::new(0.1)).identity()));
    }
}
