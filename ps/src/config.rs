//! What a parameter server is told before it starts.

mod faults;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::TaskId;
use pushpull_common::names::Names;
use pushpull_common::protocol::limits;

use crate::aggregate::SparseReduction;
use crate::aggregate::clipping::Exact;
use crate::aggregate::mode::{Mode, OnLoss};
use crate::aggregate::staleness::StalenessPolicy;
use crate::aggregate::step_coordinator::Rule;
use crate::checkpoint::{CheckpointStorage, Retention};
use crate::event::{Event, EventSink};
use crate::optimizer::{Optimizer, Rules};
use crate::planted::PlantedBugs;
use crate::store::{BLOCK_BYTES, CACHED_BYTES_MAX};

/// Where a server keeps its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Storage {
    /// In anonymous memory: gone with the process.
    Memory {
        /// The most the task's shards may use together, in bytes.
        bytes_max: u64,
    },
    /// In files under a directory, mapped into memory. The directory is created if need be, must
    /// belong to this user alone, and is locked.
    ///
    /// The files are the server's state: a server that is started on them goes on where the one
    /// before was stopped, or killed. They are meant for a memory file system, such as `/dev/shm`,
    /// and are refused once the machine has been started anew. They stay when the server stops;
    /// whoever wants to begin from nothing removes the directory.
    Directory {
        /// The directory.
        state: PathBuf,
        /// The most the task's shards may use together, in bytes.
        bytes_max: u64,
    },
}

impl Storage {
    /// The default cap: 16 GiB.
    pub const BYTES_MAX: u64 = 16 << 30;

    pub(crate) fn bytes_max(&self) -> u64 {
        match *self {
            Storage::Memory { bytes_max } | Storage::Directory { bytes_max, .. } => bytes_max,
        }
    }
}

/// Where checkpoints are kept, how often one is saved by itself, and which of them stay.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    pub(crate) storage: Arc<dyn CheckpointStorage>,
    pub(crate) every: Option<Duration>,
    pub(crate) retention: Retention,
}

impl Checkpoints {
    /// Checkpoints in this storage, saved only when somebody asks. The newest five stay.
    pub fn new(storage: impl CheckpointStorage + 'static) -> Self {
        Checkpoints { storage: Arc::new(storage), every: None, retention: Retention::default() }
    }

    /// Saves one by itself whenever so much time has passed and the step has moved on: what the loss
    /// of a machine can cost. Only the step owner's setting counts. Default: never.
    pub fn every(self, every: Duration) -> Self {
        Checkpoints { every: Some(every), ..self }
    }

    /// Which checkpoints stay when a newer one is there. Default: the newest five.
    pub fn retention(self, retention: Retention) -> Self {
        Checkpoints { retention, ..self }
    }
}

/// What an acknowledged push survives, named by the failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// The end of this process, however it comes: kill -9, a panic, the out-of-memory killer, an
    /// upgrade. Not the end of the machine's memory: then the newest checkpoint is what there is,
    /// and [`Checkpoints::every`] bounds what is lost. Costs a few percent of a push.
    #[default]
    Process,
    /// The loss of power, too, if the disk keeps what it says it keeps. Needs
    /// [`Storage::Directory`] on a disk. Answers wait for the disk, and share its flushes: some
    /// milliseconds each, and every changed block is written. For small models, and not for
    /// [`Mode::Synchronous`].
    Power,
}

/// What happens to a NaN or an infinity in a push, and to a push of finite elements that would make a
/// value one, as a gradient times a large rate may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NonFinite {
    /// The push is refused, naming the variable and the first bad element.
    ///
    /// One that would make a value NaN or infinite is refused as well, and changes nothing, where one shard can
    /// say so for the whole push: in asynchronous mode, if it is the only shard of the cluster. With several
    /// shards others may have applied their parts, and a synchronous step has been decided for all of them: then
    /// it is taken, counted in [`crate::Metrics::overflows`], and the first value is named in
    /// [`crate::Metrics::first_overflow`]. So it is where rows of a table that grows are changed where they lie.
    #[default]
    Reject,
    /// The push is taken and counted in the metrics.
    Count,
    /// Nobody looks; saves one pass over each push while it is in cache. Nothing is counted.
    Allow,
}

/// The configuration of one ps task.
///
/// Every setting has a default but the cluster, the task and the optimizer. What must be the same
/// on all ps tasks is the ps job's indices, the shard count, the optimizers' kinds and the mode;
/// workers refuse to train with servers that differ in one of them.
#[derive(Clone, Debug)]
pub struct PsConfig {
    pub(crate) cluster: ClusterSpec,
    pub(crate) task: TaskId,
    pub(crate) rules: Rules,
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
    pub(crate) connections_max: usize,
    pub(crate) waiting_connections_max: usize,
    pub(crate) exit_when_done: Option<Duration>,
    pub(crate) checkpoints: Option<Checkpoints>,
    pub(crate) durability: Durability,
    pub(crate) integrity_full: bool,
    pub(crate) shared_memory: bool,
    pub(crate) events: EventSink,
    pub(crate) elastic_workers: bool,
    /// The address of a Unix socket where memory is lent; nothing if there is none.
    pub(crate) unix_address: String,
    pub(crate) block_bytes: usize,
    pub(crate) cached_bytes_max: u64,
    pub(crate) planted: PlantedBugs,
}

impl PsConfig {
    /// The most shards a task may have.
    pub const SHARDS_MAX: u16 = 256;
    /// The most whole pushes a shard may have room for.
    pub const INBOX_PUSHES_MAX: usize = limits::STEP_PUSHES_MAX;
    /// The most connections without a hello that may be kept: more than a process may have descriptors.
    pub const WAITING_CONNECTIONS_MAX: usize = 65_536;

    /// A server for this task of the cluster, whose variables are trained by this optimizer.
    pub fn new(cluster: ClusterSpec, task: TaskId, optimizer: impl Optimizer) -> Self {
        PsConfig {
            cluster,
            task,
            rules: Rules::new(Arc::new(optimizer)),
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

    /// Another optimizer for some variables: that of this name, or if a `*` stands at the end, all
    /// whose names begin so. Called again, the last call that is for a variable counts. Give all tasks
    /// the same. Default: the optimizer of [`PsConfig::new`] trains all.
    ///
    /// Variables of all rules lie in the same blocks, with room for the slots of the rule that has most
    /// on the shard. Whoever declares variables is refused if none that is trained is named so.
    pub fn optimizer_for(mut self, names: impl Into<Names>, optimizer: impl Optimizer) -> Self {
        self.rules.optimizer_for(names.into(), Arc::new(optimizer));
        self
    }

    /// What the learning rate of some variables is multiplied by, schedule and all, whichever
    /// optimizer they have: not negative, and 0 for values that stay as they are. Names are those of
    /// [`PsConfig::optimizer_for`], and the last call that is for a variable counts. Give all tasks
    /// the same. Default: 1.
    ///
    /// Whoever declares variables is refused if none that is trained is named so, or if one's rule
    /// takes no such factor ([`Optimizer::scales_rate`]: all but [`crate::Ftrl`] do).
    pub fn rate_for(mut self, names: impl Into<Names>, factor: f64) -> Self {
        self.rules.rate_for(names.into(), factor);
        self
    }

    /// How many shards the task has, each with a thread of its own. One core is used for each;
    /// all ps tasks must have the same number. Default 1, at most [`PsConfig::SHARDS_MAX`].
    pub fn shards(self, shards: u16) -> Self {
        PsConfig { shards, ..self }
    }

    /// How updates are taken. Default [`Mode::Asynchronous`].
    pub fn mode(self, mode: Mode) -> Self {
        PsConfig { mode, ..self }
    }

    /// What is made of stale gradients, in [`Mode::Asynchronous`]. Each task goes by its own setting
    /// with the values it holds: give all the same. Default [`StalenessPolicy::Ignore`].
    pub fn staleness(self, policy: StalenessPolicy) -> Self {
        PsConfig { staleness: policy, ..self }
    }

    /// What rows of sparse variables become when the gradients of a synchronous step are taken
    /// together. Give all tasks the same. Default [`SparseReduction::ReplicaMean`]: what a dense
    /// variable would become.
    pub fn sparse_reduction(self, reduction: SparseReduction) -> Self {
        PsConfig { sparse_reduction: reduction, ..self }
    }

    /// What becomes of a synchronous step when a replica leaves or is lost. Default
    /// [`OnLoss::Shrink`] with a `min` of 1. Only the step owner's setting counts.
    pub fn on_loss(self, policy: OnLoss) -> Self {
        PsConfig { on_loss: policy, ..self }
    }

    /// How long the first synchronous step counts on replicas that have not come yet. Default 60 s,
    /// from the first replica's coming; only the step owner's setting counts.
    pub fn join_timeout(self, timeout: Duration) -> Self {
        PsConfig { join_timeout: timeout, ..self }
    }

    /// Whether the gradients of a synchronous step are added up in the order of the worker tasks, so
    /// that two runs over the same data give the same bits. Needs
    /// `replicas_to_aggregate == total_num_replicas`, worker tasks from 0 on, and no loss: a replica
    /// that is lost is waited for, whatever [`PsConfig::on_loss`] says. Default false.
    pub fn deterministic(self, deterministic: bool) -> Self {
        PsConfig { deterministic, ..self }
    }

    /// In [`Mode::Synchronous`]: a gradient whose Euclidean norm is above this, over all variables on all
    /// shards together, is scaled down to it before the mean of the step is taken: each replica's
    /// gradient by itself, as the workers' `Gradients::clip_by_global_norm` does, and so the
    /// mean is no longer than the bound either. Every shard scales a gradient by the same number, which
    /// the step owner makes of the norms that they report. Rows of sparse variables count as they are
    /// pushed; a gradient whose norm is not finite is taken as it is.
    ///
    /// Above 0 and finite. In asynchronous mode it is refused: there a shard applies what it has
    /// before others have the rest, and workers clip. All tasks must clip, or none; the bound is the
    /// step owner's. Costs a pass over each gradient when it is whole. Default: none.
    pub fn clip_by_global_norm(self, bound: f64) -> Self {
        PsConfig { clip_by_global_norm: Some(bound), ..self }
    }

    /// In asynchronous mode: a worker that has made `gradients` more than the slowest waits for a
    /// token until the slowest has caught up (stale synchronous parallel). Tokens in hand count as
    /// gradients made, so that a worker holds `gradients` at most. 1 keeps all at one pace.
    /// Counted are the workers that have asked for a token and have not left or been lost; one that
    /// comes later is as far as the slowest, one that comes back no further ahead than the bound.
    /// Only the step owner's setting counts. Default: nobody waits.
    pub fn wait_ahead(self, gradients: u64) -> Self {
        PsConfig { wait_ahead: Some(gradients), ..self }
    }

    /// In asynchronous mode: a gradient whose values are more than `steps` global steps old is
    /// dropped, on all shards, and its worker is told that it is stale. The other shards wait for the
    /// step owner's word before they apply a gradient, which takes a round trip more than without a
    /// bound. Only the step owner's setting counts; one that is changed by a restart counts for pushes
    /// that begin after it. Default: every gradient is applied.
    pub fn reject_older(self, steps: u64) -> Self {
        PsConfig { reject_older: Some(steps), ..self }
    }

    /// Where the variables are kept, and how many bytes they may take. Default
    /// [`Storage::Memory`] with [`Storage::BYTES_MAX`].
    pub fn storage(self, storage: Storage) -> Self {
        PsConfig { storage, ..self }
    }

    /// The global step at which training ends: `token()` answers `None` then. It is reached
    /// exactly, under any number of workers. Only the step owner's setting counts. Default: none.
    pub fn last_step(self, step: u64) -> Self {
        PsConfig { last_step: Some(step), ..self }
    }

    /// How long a worker may be silent before it is lost and its tokens go to others. A worker
    /// sends a heartbeat every fifth of it. Default 5 s.
    pub fn lease(self, lease: Duration) -> Self {
        PsConfig { lease, ..self }
    }

    /// How long a living worker may hold a token before it is taken back; `None` for ever.
    /// A push under a token taken back is refused. Default 10 minutes.
    pub fn token_timeout(self, timeout: Option<Duration>) -> Self {
        PsConfig { token_timeout: timeout, ..self }
    }

    /// What happens to NaN and infinities. Default [`NonFinite::Reject`].
    pub fn non_finite(self, policy: NonFinite) -> Self {
        PsConfig { non_finite: policy, ..self }
    }

    /// How many whole pushes each shard has room for; further ones wait their turn before they
    /// send a byte. Costs the shard's size in memory each. Default 4, at most
    /// [`PsConfig::INBOX_PUSHES_MAX`]. In synchronous mode these are beside the rooms for the
    /// gradients of a step, and are for pushes of other kinds; one is enough.
    pub fn inbox_pushes(self, pushes: usize) -> Self {
        PsConfig { inbox_pushes: pushes, ..self }
    }

    /// How many bytes of values each shard may hold on to for pulls that are being sent, and for
    /// checkpoints that are being written, while pushes go on; and as much of each slot. When they
    /// are used up, pushes wait for the slowest pull, and a checkpoint is given up. Default: the
    /// size of the shard's values, with which a checkpoint never is.
    pub fn pin_bytes_max(self, bytes: u64) -> Self {
        PsConfig { pin_bytes_max: Some(bytes), ..self }
    }

    /// By when a peer must have said hello, however slowly it sends; the connection is closed then. 100 ms
    /// to 10 minutes. Default 5 s.
    pub fn handshake_timeout(self, timeout: Duration) -> Self {
        PsConfig { handshake_timeout: timeout, ..self }
    }

    /// How long a peer may leave a frame half sent, or an answer unread, before its connection is
    /// closed; and how long an update waits for memory that a slow pull holds
    /// ([`PsConfig::pin_bytes_max`]) before that pull is cut off. Default 30 s.
    pub fn stall_timeout(self, timeout: Duration) -> Self {
        PsConfig { stall_timeout: timeout, ..self }
    }

    /// Connections per shard. Default 4096.
    pub fn connections_max(self, connections: usize) -> Self {
        PsConfig { connections_max: connections, ..self }
    }

    /// Connections of the task that have not said hello yet. When one more comes, the oldest goes of the
    /// address that has most of them, the newcomer counted; all that come through Unix sockets are of one
    /// address, and so is a network of 64 bits of IPv6. Each costs a descriptor and a few KiB; where the process
    /// has none left, one goes as well. [`crate::Metrics`] counts what was evicted.
    ///
    /// A client that has said hello is never evicted. A limit above the clients that connect at once also
    /// keeps those that have not come to say it yet. 1 to [`PsConfig::WAITING_CONNECTIONS_MAX`]. Default 1024.
    pub fn waiting_connections_max(self, connections: usize) -> Self {
        PsConfig { waiting_connections_max: connections, ..self }
    }

    /// Where checkpoints are kept, and how often one is saved. All ps tasks of a cluster must be given
    /// the same place. Default: none are kept.
    pub fn checkpoints(self, checkpoints: Checkpoints) -> Self {
        PsConfig { checkpoints: Some(checkpoints), ..self }
    }

    /// What an acknowledged push survives. Default [`Durability::Process`].
    pub fn durability(self, durability: Durability) -> Self {
        PsConfig { durability, ..self }
    }

    /// Whether the state carries a checksum of every block of values and slots, which is compared
    /// when the state is opened: it takes a pass over all of it then, and another over every block
    /// that a push changes. Default false: tables and everything that names blocks carry
    /// checksums always.
    pub fn integrity_full(self, full: bool) -> Self {
        PsConfig { integrity_full: full, ..self }
    }

    /// Whether clients that come through a Unix socket and run as the same user are lent memory: they
    /// map the values, to read them, and pull them without a request. Each costs a page of memory, the
    /// shard 8 bytes a block. Values of a server that listens on such a socket are in memory with a
    /// descriptor then, which has huge pages only where the system gives them to such memory
    /// (`shmem_enabled`). Who can be lent memory can read all values, and could have read them so
    /// before: the user is the border that is kept.
    ///
    /// Workers that do so may be lent memory to write their gradients into, too: as much as two pushes take, for each, which is counted as memory, and
    /// once more if they send a part of a push otherwise. For 64 workers a shard at most. NaN is looked
    /// for there as the gradient is applied, or before it is held for a synchronous step; a worker that
    /// writes it there after that has trained with it. What lies there goes with the process, and workers
    /// send it again; so with [`Mode::Synchronous`], whose shards say that they hold a gradient before
    /// it is applied, none is lent by a server that keeps its state in a [`Storage::Directory`].
    ///
    /// Nothing is lent with [`Durability::Power`], where values are read that are not on the disk yet,
    /// nor with [`StalenessPolicy::DelayCompensation`], which keeps what each client has read; and on
    /// Linux alone. Default true.
    pub fn shared_memory(self, shared: bool) -> Self {
        PsConfig { shared_memory: shared, ..self }
    }

    /// Calls this function with each [`Event`]: what the person who runs the server must be told. Called on the
    /// server's threads, which wait for it: hand the event to a thread of your own if it may take long. A
    /// panic of it is caught, and ends nothing. Called again, the last function counts. Default: nobody is
    /// told, and [`crate::Metrics`] alone count.
    pub fn on_event(self, told: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        PsConfig { events: EventSink::new(told), ..self }
    }

    /// Whether workers come that the cluster does not list: of a job that it has beside `ps`, with any index. A
    /// cluster that lists no tasks but those of `ps` says nothing of workers, and any are let in. Default
    /// false: others than those that are listed are refused, and a shard has no more clients than those.
    pub fn elastic_workers(self, elastic: bool) -> Self {
        PsConfig { elastic_workers: elastic, ..self }
    }

    /// Why nobody is lent memory of this task, if nobody is.
    pub(crate) fn shares_nothing(&self) -> Option<&'static str> {
        let compensates = matches!(self.staleness, StalenessPolicy::DelayCompensation { .. });
        match () {
            () if !cfg!(target_os = "linux") => Some("memory is shared on Linux only"),
            () if !self.shared_memory => Some("shared memory is switched off"),
            () if self.durability == Durability::Power => {
                Some("values would be seen that are not on the disk yet")
            }
            () if compensates => Some("what clients read is kept, to compensate for delays"),
            () => None,
        }
    }

    /// Plants a bug.
    #[cfg(feature = "planted")]
    pub fn planted(self, planted: PlantedBugs) -> Self {
        PsConfig { planted, ..self }
    }

    /// Makes the server stop by itself once every worker that joined has left or lost its lease
    /// and `grace` has passed without another. Workers that leave say so to servers that hold none of
    /// their variables, too. Default: it serves until it is stopped.
    pub fn exit_when_done(self, grace: Duration) -> Self {
        PsConfig { exit_when_done: Some(grace), ..self }
    }

    /// What all ps tasks of a cluster must agree on, and their workers with them.
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

    /// Whether a push that would make values infinite or NaN is refused: by the policy, where the shard that
    /// notices it is the only one that has the push.
    pub(crate) fn refuses_overflows(&self) -> bool {
        let is_alone = self.shards == 1 && self.cluster.num_tasks("ps") == Ok(1);
        let asynchronous = self.mode == Mode::Asynchronous;
        is_alone && asynchronous && self.non_finite == NonFinite::Reject
    }

    /// What synchronous steps are made of, if steps are synchronous.
    pub(crate) fn rule(&self) -> Option<Rule> {
        let Mode::Synchronous { replicas_to_aggregate: aggregate, total_num_replicas: total } =
            self.mode
        else {
            return None;
        };
        let floor = match self.on_loss {
            OnLoss::Shrink { min } if !self.deterministic => min,
            _ => aggregate,
        };
        let rule = Rule {
            aggregate,
            total,
            floor,
            ordered: self.deterministic,
            push_slots: 0,
            last_step: self.last_step,
            clip: self.clip_by_global_norm.map(Exact::from),
        };
        // With so many nobody ever waits for one.
        let push_slots = u64::from(rule.share()) * u64::from(total);
        Some(Rule { push_slots: usize::try_from(push_slots).unwrap_or(usize::MAX), ..rule })
    }

    /// Whole pushes that each shard has room for.
    pub(crate) fn push_slots(&self) -> usize {
        self.inbox_pushes.saturating_add(self.rule().map_or(0, |rule| rule.push_slots))
    }

    /// Whether this task owns the step: the ps task with the lowest index.
    pub(crate) fn owns_step(&self) -> bool {
        self.cluster.step_owner().is_some_and(|owner| owner == self.task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{Adam, Sgd};

    #[test]
    fn the_lowest_ps_task_owns_the_step() {
        let cluster = ClusterSpec::builder().sparse_job("ps", [(7, "a:1"), (3, "b:1")]);
        let cluster = cluster.build().unwrap();
        let owns = |task| PsConfig::new(cluster.clone(), task, Sgd::new(0.1)).owns_step();
        assert!(owns(TaskId::ps(3)) && !owns(TaskId::ps(7)));
    }

    #[test]
    fn tasks_differ_by_the_kinds_of_their_rules_and_not_by_rates() {
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
