//! The configuration of a parameter server.

mod faults;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::TaskId;
use pushpull_common::names::NamePattern;
use pushpull_common::protocol::limits;
use pushpull_optim::optimizer::{Optimizer, OptimizerRules};
use pushpull_store::store::{BLOCK_BYTES, CACHED_BYTES_MAX};
use pushpull_store::testing::planted::PlantedBugs;

use crate::aggregate::SparseReduction;
use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::mode::{Mode, OnLoss};
use crate::aggregate::staleness::StalenessPolicy;
use crate::aggregate::step_rule::StepRule;
use crate::checkpoint::{CheckpointStorage, Retention};
use crate::event::{Event, EventSink};

/// The memory in which a server keeps its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Storage {
    /// Anonymous memory, lost with the process.
    Memory {
        /// The limit for all shards of the task together, in bytes.
        bytes_max: u64,
    },
    /// Memory-mapped files in a directory. The directory is created if needed, must belong to this
    /// user alone, and is locked.
    ///
    /// The mapped files are the server's state: a server started on them continues where the
    /// previous one was stopped or killed. Put the directory on a memory file system, for example
    /// `/dev/shm`; on a disk, writers stall while the kernel writes a page back. State from before
    /// a reboot is rejected, except with [`Durability::Power`]. The files remain when the server
    /// stops. To start from nothing, remove the directory.
    Directory {
        /// The directory.
        state: PathBuf,
        /// The limit for all shards of the task together, in bytes.
        bytes_max: u64,
    },
}

impl Storage {
    /// The default memory limit: 16 GiB.
    pub const BYTES_MAX: u64 = 16 << 30;

    pub(crate) fn bytes_max(&self) -> u64 {
        match *self {
            Storage::Memory { bytes_max } | Storage::Directory { bytes_max, .. } => bytes_max,
        }
    }
}

/// Where checkpoints are stored, how often they are saved automatically, and which are retained.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    pub(crate) storage: Arc<dyn CheckpointStorage>,
    pub(crate) every: Option<Duration>,
    pub(crate) retention: Retention,
}

impl Checkpoints {
    /// Configures checkpoints in this storage, saved only on request. The newest five are retained.
    pub fn new(storage: impl CheckpointStorage + 'static) -> Self {
        Checkpoints { storage: Arc::new(storage), every: None, retention: Retention::default() }
    }

    /// Saves a checkpoint automatically once this time has passed and the global step has advanced.
    /// This bounds the loss when a machine fails. At least 10 ms. Only the step owner's setting
    /// counts. Default: no automatic saves.
    pub fn every(self, every: Duration) -> Self {
        Checkpoints { every: Some(every), ..self }
    }

    /// Sets which checkpoints are retained when a newer one is saved. Default: the newest five.
    pub fn retention(self, retention: Retention) -> Self {
        Checkpoints { retention, ..self }
    }
}

/// The failures that an acknowledged push survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// The end of this process by any cause, with [`Storage::Directory`]: kill -9, a panic, the
    /// out-of-memory killer, an upgrade. If the machine's memory is lost, the newest checkpoint
    /// remains, and [`Checkpoints::every`] bounds the loss. Costs a few percent of a push.
    #[default]
    Process,
    /// A power failure as well, if the disk honors flushes. Requires [`Storage::Directory`] on a
    /// disk. Responses wait for the disk and share its flushes, a few milliseconds each, and every
    /// changed block is written. For small models. Not available in [`Mode::Synchronous`].
    Power,
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

/// The configuration of one ps task.
///
/// All settings except the cluster, the task and the optimizer have defaults. The ps job's indices,
/// the number of shards, the kinds of the optimizers, the mode, and whether gradients are clipped
/// must be the same on all ps tasks. A worker refuses to train with servers that differ in one of
/// them.
#[derive(Clone, Debug)]
pub struct PsConfig {
    pub(crate) cluster: ClusterSpec,
    pub(crate) task: TaskId,
    pub(crate) rules: OptimizerRules,
    pub(crate) shards: u16,
    pub(crate) mode: Mode,
    pub(crate) staleness: StalenessPolicy,
    pub(crate) sparse_reduction: SparseReduction,
    pub(crate) on_loss: OnLoss,
    pub(crate) join_timeout: Duration,
    pub(crate) deterministic: bool,
    pub(crate) clip_by_global_norm: Option<f64>,
    pub(crate) wait_ahead: Option<u64>,
    pub(crate) reject_older: Option<u64>,
    pub(crate) storage: Storage,
    pub(crate) last_step: Option<u64>,
    pub(crate) lease: Duration,
    pub(crate) token_timeout: Option<Duration>,
    pub(crate) non_finite: NonFinite,
    pub(crate) inbox_pushes: usize,
    pub(crate) pin_bytes_max: Option<u64>,
    pub(crate) handshake_timeout: Duration,
    pub(crate) stall_timeout: Duration,
    pub(crate) busy_poll: Duration,
    pub(crate) connections_max: usize,
    pub(crate) waiting_connections_max: usize,
    pub(crate) exit_when_done: Option<Duration>,
    pub(crate) checkpoints: Option<Checkpoints>,
    pub(crate) durability: Durability,
    pub(crate) integrity_full: bool,
    pub(crate) shared_memory: bool,
    pub(crate) events: EventSink,
    pub(crate) elastic_workers: bool,
    /// The address of the Unix socket through which memory is shared; empty if there is none.
    pub(crate) unix_address: String,
    pub(crate) block_bytes: usize,
    pub(crate) cached_bytes_max: u64,
    pub(crate) planted: PlantedBugs,
}

impl PsConfig {
    /// The maximum number of shards of a task.
    pub const SHARDS_MAX: u16 = 256;
    /// The maximum number of push slots of a shard.
    pub const INBOX_PUSHES_MAX: usize = limits::STEP_PUSHES_MAX;
    /// The maximum for [`PsConfig::waiting_connections_max`]: more than a process may have
    /// descriptors.
    pub const WAITING_CONNECTIONS_MAX: usize = 65_536;

    /// Configures a server for a task of the cluster, whose variables are trained by this
    /// optimizer.
    pub fn new(cluster: ClusterSpec, task: TaskId, optimizer: impl Optimizer) -> Self {
        PsConfig {
            cluster,
            task,
            rules: OptimizerRules::new(Arc::new(optimizer)),
            shards: 1,
            mode: Mode::Asynchronous,
            staleness: StalenessPolicy::default(),
            sparse_reduction: SparseReduction::default(),
            on_loss: OnLoss::default(),
            join_timeout: Duration::from_secs(60),
            deterministic: false,
            clip_by_global_norm: None,
            wait_ahead: None,
            reject_older: None,
            storage: Storage::Memory { bytes_max: Storage::BYTES_MAX },
            last_step: None,
            lease: Duration::from_secs(5),
            token_timeout: Some(Duration::from_secs(600)),
            non_finite: NonFinite::Reject,
            inbox_pushes: 4,
            pin_bytes_max: None,
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(30),
            busy_poll: Duration::from_micros(50),
            connections_max: 4096,
            waiting_connections_max: 1024,
            exit_when_done: None,
            checkpoints: None,
            durability: Durability::Process,
            integrity_full: false,
            shared_memory: true,
            events: EventSink::default(),
            elastic_workers: false,
            unix_address: String::new(),
            block_bytes: BLOCK_BYTES,
            cached_bytes_max: CACHED_BYTES_MAX,
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
    /// [`crate::Ftrl`] do).
    pub fn rate_for(mut self, names: impl Into<NamePattern>, factor: f64) -> Self {
        self.rules.rate_for(names.into(), factor);
        self
    }

    /// Sets the number of shards of the task. Each has its own thread and uses one core. All ps
    /// tasks must have the same number. Default 1, at most [`PsConfig::SHARDS_MAX`].
    pub fn shards(self, shards: u16) -> Self {
        PsConfig { shards, ..self }
    }

    /// Sets the update mode. All tasks must have the same. Default [`Mode::Asynchronous`].
    pub fn mode(self, mode: Mode) -> Self {
        PsConfig { mode, ..self }
    }

    /// Sets the treatment of stale gradients in [`Mode::Asynchronous`]. Each task applies its own
    /// setting to its own variables, so all should have the same. Default
    /// [`StalenessPolicy::Ignore`].
    pub fn staleness(self, policy: StalenessPolicy) -> Self {
        PsConfig { staleness: policy, ..self }
    }

    /// Sets how a synchronous step combines the rows of sparse gradients. All tasks should have the
    /// same. Default [`SparseReduction::ReplicaMean`], which equals the result for a dense
    /// variable.
    pub fn sparse_reduction(self, reduction: SparseReduction) -> Self {
        PsConfig { sparse_reduction: reduction, ..self }
    }

    /// Sets what happens to a synchronous step when a replica leaves or is lost. Only the step
    /// owner's setting counts. Default [`OnLoss::Shrink`] with a `min` of 1.
    pub fn on_loss(self, policy: OnLoss) -> Self {
        PsConfig { on_loss: policy, ..self }
    }

    /// Sets how long the first synchronous step waits for replicas that have not joined yet,
    /// counted from the first join. Only the step owner's setting counts. Default 60 s.
    pub fn join_timeout(self, timeout: Duration) -> Self {
        PsConfig { join_timeout: timeout, ..self }
    }

    /// Sets whether the gradients of a synchronous step are added in the order of the worker tasks,
    /// so that two runs over the same data are bitwise equal. Requires equal
    /// `replicas_to_aggregate` and `total_num_replicas`, worker tasks from 0 on, and no loss: a
    /// lost replica is waited for, regardless of [`PsConfig::on_loss`]. Default false.
    pub fn deterministic(self, deterministic: bool) -> Self {
        PsConfig { deterministic, ..self }
    }

    /// Clips gradients by their global norm in [`Mode::Synchronous`]. A gradient whose Euclidean
    /// norm, over all variables on all shards, exceeds the bound is scaled down to it before the
    /// step takes the mean. Each replica's gradient is clipped by itself, as the workers'
    /// `Gradients::clip_by_global_norm` does, so the mean does not exceed the bound either. All
    /// shards scale a gradient by the same factor, which the step owner computes from the norms
    /// that they report. Rows of sparse variables count as pushed. A gradient whose norm is not
    /// finite is not scaled.
    ///
    /// The bound must be finite and above 0. In asynchronous mode it is rejected: a shard applies
    /// its part before the other shards have theirs, so workers must clip. Either all tasks clip or
    /// none; the step owner's bound counts. Costs a pass over each complete gradient. Default: no
    /// clipping.
    pub fn clip_by_global_norm(self, bound: f64) -> Self {
        PsConfig { clip_by_global_norm: Some(bound), ..self }
    }

    /// Bounds how far workers run ahead in asynchronous mode (stale synchronous parallel). A worker
    /// that is `gradients` ahead of the slowest waits for a token until the slowest has caught up.
    /// Tokens in hand count as gradients made, so a worker holds at most `gradients` tokens. A
    /// bound of 1 keeps all workers in step. Must be at least 1.
    ///
    /// Only workers that have requested a token and have neither left nor been lost count. A worker
    /// that joins later starts level with the slowest; one that returns is at most the bound ahead.
    /// Only the step owner's setting counts. Default: no bound.
    pub fn wait_ahead(self, gradients: u64) -> Self {
        PsConfig { wait_ahead: Some(gradients), ..self }
    }

    /// Drops stale gradients in asynchronous mode: those computed from values more than `steps`
    /// global steps old, on all shards. The worker is told that its gradient was stale. The other
    /// shards wait for the step owner's decision before they apply a gradient, which costs an extra
    /// round trip. Only the step owner's setting counts; a change applies to pushes that begin
    /// after the restart. Default: every gradient is applied.
    pub fn reject_older(self, steps: u64) -> Self {
        PsConfig { reject_older: Some(steps), ..self }
    }

    /// Sets where the variables are kept, and their memory limit. Default [`Storage::Memory`] with
    /// [`Storage::BYTES_MAX`].
    pub fn storage(self, storage: Storage) -> Self {
        PsConfig { storage, ..self }
    }

    /// Sets the global step at which training ends; `token()` then returns `None`. The step is
    /// reached exactly, with any number of workers. Only the step owner's setting counts. Default:
    /// training does not end.
    pub fn last_step(self, step: u64) -> Self {
        PsConfig { last_step: Some(step), ..self }
    }

    /// Sets the lease: how long a worker may be silent before it is lost and its tokens are granted
    /// to others. A worker sends a heartbeat every fifth of it. At least 100 ms. Default 5 s.
    pub fn lease(self, lease: Duration) -> Self {
        PsConfig { lease, ..self }
    }

    /// Sets how long a live worker may hold a token before it is recalled; `None` for no limit. A
    /// push with a recalled token is refused. Default 10 minutes.
    pub fn token_timeout(self, timeout: Option<Duration>) -> Self {
        PsConfig { token_timeout: timeout, ..self }
    }

    /// Sets the treatment of NaN and infinity. Default [`NonFinite::Reject`].
    pub fn non_finite(self, policy: NonFinite) -> Self {
        PsConfig { non_finite: policy, ..self }
    }

    /// Sets the number of push slots of each shard. Further pushes wait for a free slot before they
    /// send a byte. Each slot costs as much memory as the shard's values. In synchronous mode these
    /// slots come in addition to those for the gradients of a step and serve pushes of other kinds;
    /// one is enough. Default 4, at most [`PsConfig::INBOX_PUSHES_MAX`].
    pub fn inbox_pushes(self, pushes: usize) -> Self {
        PsConfig { inbox_pushes: pushes, ..self }
    }

    /// Limits the bytes of values that each shard keeps pinned for pulls being sent and checkpoints
    /// being written while pushes continue. The same limit holds for each optimizer slot. At the
    /// limit, pushes wait for the slowest pull, and a checkpoint is abandoned. Default: the size of
    /// the shard's values, with which a checkpoint is never abandoned.
    pub fn pin_bytes_max(self, bytes: u64) -> Self {
        PsConfig { pin_bytes_max: Some(bytes), ..self }
    }

    /// Sets the time limit for a peer's hello, regardless of how slowly it sends. A peer that
    /// exceeds it is disconnected. 100 ms to 10 minutes. Default 5 s.
    pub fn handshake_timeout(self, timeout: Duration) -> Self {
        PsConfig { handshake_timeout: timeout, ..self }
    }

    /// Sets how long a peer may leave a frame partly sent or a response unread before its
    /// connection is closed. Also sets how long an update waits for memory pinned by a slow pull
    /// ([`PsConfig::pin_bytes_max`]) before that pull is cut off. Default 30 s.
    pub fn stall_timeout(self, timeout: Duration) -> Self {
        PsConfig { stall_timeout: timeout, ..self }
    }

    /// Sets for how long a shard's thread polls its sockets at most before it sleeps. It polls only while peers
    /// have come within that time again and again, and no more threads are runnable than there are processors.
    ///
    /// On an idle host polling costs at most one processor per shard while requests follow each other, and saves
    /// the wake-up of some 20 us per request. On a busy host the thread does not poll. Zero switches polling off.
    /// Default 50 us.
    pub fn busy_poll(self, longest: Duration) -> Self {
        PsConfig { busy_poll: longest, ..self }
    }

    /// Sets the maximum number of connections per shard. Default 4096.
    pub fn connections_max(self, connections: usize) -> Self {
        PsConfig { connections_max: connections, ..self }
    }

    /// Sets the maximum number of connections of the task without a hello. When one more arrives,
    /// the oldest connection from the address with the most of them is closed; the new one counts.
    /// All connections through Unix sockets count as one address, and so does each IPv6 /64
    /// network. Each waiting connection costs a descriptor and a few KiB. One is also closed when
    /// the process has no descriptors left. [`crate::Metrics`] counts the evictions.
    ///
    /// A client that has said hello is never evicted. If the limit exceeds the number of clients
    /// that connect at once, none of them is evicted before its hello either. 1 to
    /// [`PsConfig::WAITING_CONNECTIONS_MAX`]. Default 1024.
    pub fn waiting_connections_max(self, connections: usize) -> Self {
        PsConfig { waiting_connections_max: connections, ..self }
    }

    /// Sets where checkpoints are stored, and how often they are saved. All ps tasks of a cluster
    /// must use the same storage. Default: no checkpoints.
    pub fn checkpoints(self, checkpoints: Checkpoints) -> Self {
        PsConfig { checkpoints: Some(checkpoints), ..self }
    }

    /// Sets which failures an acknowledged push survives. Default [`Durability::Process`].
    pub fn durability(self, durability: Durability) -> Self {
        PsConfig { durability, ..self }
    }

    /// Sets whether the state has a checksum of every block of values and slots, verified when the
    /// state is opened. Costs a pass over the whole state then, and a pass over every block that a
    /// push changes. Tables and everything else that names blocks always have checksums. Default
    /// false.
    pub fn integrity_full(self, full: bool) -> Self {
        PsConfig { integrity_full: full, ..self }
    }

    /// Sets whether clients that connect through a Unix socket as the same user get shared memory.
    /// They map the values read-only and pull them without a request. Each client costs a page of
    /// memory, and the shard 8 bytes per block. The values are then in memory with a descriptor,
    /// which gets huge pages only where the system grants them to such memory (`shmem_enabled`). A
    /// client with shared memory can read all values, as it could before through pulls: the user is
    /// the security boundary.
    ///
    /// Such workers can also get push buffers, shared memory in which they write gradients in
    /// place. A push buffer takes the memory of two pushes, charged to the memory limit, and one
    /// more push for each of its slots once the worker also sends parts over the connection. At
    /// most 64 workers per shard have one. The NaN check there runs while the gradient is applied,
    /// or before it is held for a synchronous step. NaN that a worker writes after the check enters
    /// the training, like any other wrong gradient. The contents are lost with the server process,
    /// and workers resend them. In [`Mode::Synchronous`] shards acknowledge a gradient as held
    /// before it is applied, so a server with [`Storage::Directory`] shares no push buffers there.
    ///
    /// Nothing is shared with [`Durability::Power`], where readers would see values that are not on
    /// disk yet, nor with [`StalenessPolicy::DelayCompensation`], which must keep what each client
    /// has read. Linux only. Default true.
    pub fn shared_memory(self, shared: bool) -> Self {
        PsConfig { shared_memory: shared, ..self }
    }

    /// Calls a function with each [`Event`] that the server's operator must know. The function runs
    /// on the server's threads, which wait for it: pass the event to another thread if it may take
    /// long. A panic in it is caught. If called again, the last function counts. Default: events
    /// are only counted, in [`crate::Metrics`].
    pub fn on_event(self, callback: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        PsConfig { events: EventSink::new(callback), ..self }
    }

    /// Sets whether workers that the cluster does not list may join: any index of a job other than
    /// `ps` that the cluster contains. A cluster that lists only `ps` tasks always admits any
    /// worker. Default false: only listed workers may join, which also bounds the number of clients
    /// of a shard.
    pub fn elastic_workers(self, elastic: bool) -> Self {
        PsConfig { elastic_workers: elastic, ..self }
    }

    /// Returns why this task shares no memory; `None` if it does.
    pub(crate) fn sharing_obstacle(&self) -> Option<&'static str> {
        let compensates = matches!(self.staleness, StalenessPolicy::DelayCompensation { .. });
        match () {
            () if !cfg!(target_os = "linux") => Some("memory is shared on Linux only"),
            () if !self.shared_memory => Some("shared memory is switched off"),
            () if self.durability == Durability::Power => {
                Some("readers would see values that are not on disk yet")
            }
            () if compensates => Some("values that clients read are kept to compensate for delays"),
            () => None,
        }
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

    /// Returns the settings on which all ps tasks of a cluster and their workers must agree.
    pub(crate) fn identity(&self) -> Identity {
        let mode = match self.mode {
            Mode::Asynchronous => "asynchronous".to_owned(),
            Mode::Synchronous { replicas_to_aggregate, total_num_replicas } => {
                format!("synchronous {replicas_to_aggregate}/{total_num_replicas}")
            }
        };
        Identity::new()
            .with("ps", self.cluster.ps_identity())
            .with("shards", self.shards.to_string())
            .with("optimizer", self.rules.default().kind())
            .with("optimizer_for", self.rules.exceptions())
            .with("mode", mode)
            .with("clips", if self.clip_by_global_norm.is_some() { "by global norm" } else { "" })
    }

    /// Returns whether a push that would make values infinite or NaN is refused: the policy
    /// rejects, and this shard is the only one with the push.
    pub(crate) fn refuses_overflows(&self) -> bool {
        let is_alone = self.shards == 1 && self.cluster.num_tasks("ps") == Ok(1);
        let asynchronous = self.mode == Mode::Asynchronous;
        is_alone && asynchronous && self.non_finite == NonFinite::Reject
    }

    /// Returns the rule of synchronous steps, in synchronous mode.
    pub(crate) fn rule(&self) -> Option<StepRule> {
        let Mode::Synchronous { replicas_to_aggregate: aggregate, total_num_replicas: total } =
            self.mode
        else {
            return None;
        };
        let floor = match self.on_loss {
            OnLoss::Shrink { min } if !self.deterministic => min,
            _ => aggregate,
        };
        let rule = StepRule {
            aggregate,
            total,
            floor,
            ordered: self.deterministic,
            push_slots: 0,
            last_step: self.last_step,
            clip: self.clip_by_global_norm.map(BitwiseF64::from),
        };
        // With this many push slots no gradient waits for one.
        let push_slots = u64::from(rule.share()) * u64::from(total);
        Some(StepRule { push_slots: usize::try_from(push_slots).unwrap_or(usize::MAX), ..rule })
    }

    /// Returns the number of push slots of each shard.
    pub(crate) fn push_slots(&self) -> usize {
        self.inbox_pushes.saturating_add(self.rule().map_or(0, |rule| rule.push_slots))
    }

    /// Returns whether this task owns the global step: it is the ps task with the lowest index.
    pub(crate) fn owns_step(&self) -> bool {
        self.cluster.step_owner().is_some_and(|owner| owner == self.task)
    }
}

#[cfg(test)]
mod tests {
    use pushpull_optim::optimizer::{Adam, Sgd};

    use super::*;

    #[test]
    fn the_lowest_ps_task_owns_the_step() {
        let cluster = ClusterSpec::builder().sparse_job("ps", [(7, "a:1"), (3, "b:1")]);
        let cluster = cluster.build().unwrap();
        let owns = |task| PsConfig::new(cluster.clone(), task, Sgd::new(0.1)).owns_step();
        assert!(owns(TaskId::ps(3)) && !owns(TaskId::ps(7)));
    }

    #[test]
    fn identity_includes_optimizer_kinds_but_not_rates() {
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        let config = || PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.1));
        let ours = config().optimizer_for("w*", Sgd::new(0.1)).identity();
        let rates = config().optimizer_for("w*", Sgd::new(0.5)).rate_for("*", 0.5).identity();
        assert_eq!(ours.difference(&rates), None);
        let others = [
            (config(), ""),
            (config().optimizer_for("w", Sgd::new(0.1)), "\"w\": sgd"),
            (config().optimizer_for("w*", Adam::new(0.1)), "\"w*\": adam"),
        ];
        for (other, found) in others {
            let expected = ("optimizer_for", "\"w*\": sgd", found);
            assert_eq!(ours.difference(&other.identity()), Some(expected));
        }
    }
}
