//! Events: what a server reports to its operator, in addition to the counters in
//! [`crate::Metrics`].

mod admin_order;
mod event_queue;
mod event_sink;

use std::fmt;
use std::time::Duration;

use pushpull_common::access::AccessEvent;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{ShardId, TaskId, VariableId};
use pushpull_common::status::{TrainingPhase, Waiting};

use crate::metrics::Overflowed;

pub use admin_order::AdminOrder;
pub use event_queue::Events;
pub(crate) use event_sink::{EventReaders, EventSink};

/// Something that the operator of a server must know, or that happened to the training.
///
/// Events are rare: none is caused by a step that goes well. Failures are also counted in
/// [`crate::Metrics`]. The text of an event is one line that names the source, and the cause or the
/// global step. See [`crate::PsConfig::on_event`] and [`crate::PsHandle::events`].
///
/// The step owner reports the events of workers and steps, so each is reported once in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A shard cannot get the memory that a push needs, because a table or an index must grow. This
    /// push and all later ones wait; the shard retries every second. Reported when the wait begins,
    /// and whenever the cause changes.
    GrowthFailed {
        /// The shard.
        shard: ShardId,
        /// The file and the error of the operating system, or the memory limit that is reached.
        cause: String,
    },
    /// A shard got the memory that it waited for, and resumes.
    GrowthResumed {
        /// The shard.
        shard: ShardId,
        /// The length of the wait.
        waited: Duration,
    },
    /// A checkpoint save failed, automatic or requested. Earlier checkpoints are unaffected.
    SaveFailed {
        /// The cause.
        cause: String,
        /// The number of saves in a row that have failed, including this one.
        in_a_row: u64,
        /// The time since this process last saved a checkpoint; `None` if it never has.
        since_success: Option<Duration>,
    },
    /// A checkpoint was saved after failed saves.
    SavesResumed {
        /// The checkpoint.
        checkpoint: String,
        /// The number of saves in a row that had failed.
        failed: u64,
    },
    /// A checkpoint was saved, but older ones that are no longer retained could not be deleted.
    RetentionFailed {
        /// The checkpoint that was saved.
        checkpoint: String,
        /// The cause.
        cause: String,
    },
    /// A damaged checkpoint was skipped. Reported by the search for the newest sound checkpoint,
    /// for each damaged one that is newer.
    CheckpointPassedOver {
        /// The damaged checkpoint.
        checkpoint: String,
        /// The damage.
        cause: String,
        /// The checkpoint that is used instead; `None` if none is sound.
        taken: Option<String>,
    },
    /// The process or the system has no file descriptor left: newcomers are refused, and connections
    /// that need another descriptor end. Reported at most once a minute, by each thread that meets
    /// it. See [`crate::raise_open_files_limit`].
    #[non_exhaustive]
    OutOfDescriptors {
        /// The limit of open files of this process; `None` if it has none.
        limit: Option<u64>,
        /// The error of the operating system.
        cause: String,
    },
    /// The chief has declared variables, and their placement leaves one ps task with much more than
    /// the others. Reported by the step owner; see
    /// [`TaskLoads::is_skewed`](pushpull_common::placement::TaskLoads::is_skewed) for the bounds.
    SkewedPlacement {
        /// The index of the fullest ps task.
        task: u32,
        /// Its bytes, without optimizer slots.
        bytes: u64,
        /// The mean of all ps tasks.
        mean: u64,
        /// The variable with the most bytes on the task.
        variable: String,
        /// The bytes of that variable on the task.
        variable_bytes: u64,
    },
    /// A shard has had no connection to the step owner for a lease, the owner's name has no address,
    /// or the owner refuses this server for its settings. In synchronous mode it takes part in no step meanwhile. It keeps reconnecting.
    OwnerLost {
        /// The shard.
        shard: ShardId,
        /// The cause.
        cause: String,
    },
    /// A shard has reconnected to the step owner after [`Event::OwnerLost`].
    OwnerFound {
        /// The shard.
        shard: ShardId,
        /// The time without a connection.
        away: Duration,
    },
    /// Another ps task has another value of a setting that may differ. Reported whenever it
    /// connects.
    #[non_exhaustive]
    SettingsDiffer {
        /// The shard that reports it.
        shard: ShardId,
        /// The other task.
        task: TaskId,
        /// The setting.
        setting: String,
        /// Its value on this task.
        here: String,
        /// Its value on the other task.
        there: String,
    },
    /// Something about who may connect: peers that were denied, connections that were closed, files
    /// that cannot be used.
    Access(AccessEvent),
    /// An administrator has given an order, which this task carries out.
    #[non_exhaustive]
    AdminOrder {
        /// The shard that was asked.
        shard: ShardId,
        /// The order.
        order: AdminOrder,
        /// The task that the administrator says it is.
        task: TaskId,
        /// The name of its access token or certificate, if it was asked who it is.
        principal: Option<String>,
    },
    /// A setting has changed since the state directory of a shard was created, such as a
    /// hyperparameter of an optimizer whose slots are kept. Reported at each start.
    #[non_exhaustive]
    SettingChanged {
        /// The shard.
        shard: ShardId,
        /// The setting.
        setting: String,
        /// Its value at the creation of the state.
        before: String,
        /// Its value now.
        now: String,
    },
    /// The synchronous mode expects more replicas than the cluster has workers, and no other worker
    /// may join. Reported at the start of the step owner.
    #[non_exhaustive]
    FewerWorkers {
        /// The number of expected replicas.
        total_num_replicas: u32,
        /// The number of workers that the cluster lists.
        workers: u32,
    },
    /// The cluster lists more workers than the synchronous mode expects replicas, so each step is made
    /// without some of them. Reported at the start of the step owner.
    #[non_exhaustive]
    MoreWorkers {
        /// The number of expected replicas.
        total_num_replicas: u32,
        /// The number of workers that the cluster lists, its chief included.
        workers: u32,
    },
    /// A worker has joined, or come back after it had left or was lost.
    #[non_exhaustive]
    WorkerJoined {
        /// Its task.
        task: TaskId,
        /// The global step.
        step: u64,
        /// Whether this task has joined before: it was restarted, or has come back.
        again: bool,
        /// If it has displaced a process of the same task that had not left, and whose lease had not
        /// expired: how long that one had been silent. Two processes may be running as one task.
        displaced: Option<Duration>,
    },
    /// A worker has left.
    #[non_exhaustive]
    WorkerLeft {
        /// Its task.
        task: TaskId,
        /// The global step.
        step: u64,
    },
    /// The lease of a worker has expired. Its tokens will be granted to others.
    #[non_exhaustive]
    WorkerLost {
        /// Its task.
        task: TaskId,
        /// The global step.
        step: u64,
        /// How long it had been silent.
        silent: Duration,
        /// The number of tokens that it held.
        tokens: usize,
    },
    /// A gradient of a worker that was lost or restarted is applied on some shards only, and will not
    /// be on the others, in asynchronous mode. Until a checkpoint is restored, the training has no
    /// final values.
    #[non_exhaustive]
    PartlyApplied {
        /// The task of the worker.
        task: TaskId,
        /// The number of the token of the gradient.
        token: u64,
        /// The global step.
        step: u64,
        /// The shards that have applied it.
        applied: Vec<ShardId>,
        /// The shards that have not.
        missing: Vec<ShardId>,
        /// The shards that could not be asked: the gradient may be applied on all shards, or on
        /// none.
        unknown: Vec<ShardId>,
    },
    /// A worker has waited for one lease. Reported once for each wait.
    #[non_exhaustive]
    WaitBegan {
        /// The global step.
        step: u64,
        /// What the worker waits for, and who can end the wait.
        wait: Waiting,
    },
    /// The wait of an [`Event::WaitBegan`] has ended.
    #[non_exhaustive]
    WaitEnded {
        /// The global step.
        step: u64,
        /// The workers that were waited for.
        workers: Vec<TaskId>,
        /// How long it took.
        waited: Duration,
    },
    /// A synchronous step has fewer gradients than configured, because replicas are absent.
    /// Reported when the number changes.
    #[non_exhaustive]
    StepShrunk {
        /// The global step, once this step is made.
        step: u64,
        /// The number of its gradients.
        gradients: usize,
        /// The number of gradients of a step with all replicas.
        aggregate: u32,
        /// The absent workers: left, lost, or never joined.
        absent: Vec<TaskId>,
    },
    /// A checkpoint was saved.
    #[non_exhaustive]
    CheckpointSaved {
        /// The checkpoint.
        checkpoint: String,
        /// The global step of its values.
        step: u64,
    },
    /// The step owner continues with the values of a checkpoint. Other shards may still be reading
    /// theirs.
    #[non_exhaustive]
    CheckpointRestored {
        /// The checkpoint.
        checkpoint: String,
        /// The global step at which the training resumes.
        step: u64,
        /// The restore epoch that begins.
        epoch: u32,
        /// How many gradients one shard's part has more than another's. In asynchronous mode each
        /// shard cuts its part at its own time; that many gradients at least are on some shards
        /// only.
        gradients_apart: u64,
    },
    /// A shard has refused what the chief needs to begin or to continue: to declare, restore or
    /// save the variables. Reported for each attempt. The chief ends, or tries again, by the cause.
    #[non_exhaustive]
    ChiefRefused {
        /// The shard.
        shard: ShardId,
        /// The request of the chief, as in "restore the variables".
        request: &'static str,
        /// The cause.
        cause: String,
    },
    /// The training has ended: no more tokens are granted.
    #[non_exhaustive]
    TrainingEnded {
        /// The global step.
        step: u64,
        /// Why it has ended.
        phase: TrainingPhase,
    },
    /// A shard has forgotten which effects of a coordinator have settled, because another
    /// coordinator needed the place and this one was silent for
    /// [`crate::PsConfig::effects_kept`]. If it resumes, it starts over.
    #[non_exhaustive]
    CoordinatorForgotten {
        /// The shard.
        shard: ShardId,
        /// The name of the coordinator.
        coordinator: String,
        /// The time for which nothing was heard of it.
        idle: Duration,
    },
    /// A trained variable got no gradient in the first 100 updates of a shard since its start. The
    /// model may not use it. Reported once, for at most 16 variables of a shard.
    #[non_exhaustive]
    NeverTrained {
        /// The shard.
        shard: ShardId,
        /// The variable.
        variable: String,
        /// The number of pushes, or of synchronous steps.
        updates: u32,
    },
    /// An update made a value infinite or NaN, for the first time since the shard was started. Later
    /// ones are counted ([`crate::Metrics::overflows`]).
    #[non_exhaustive]
    ValueOverflowed {
        /// The shard.
        shard: ShardId,
        /// The value.
        first: Overflowed,
    },
    /// A reader of [`crate::PsHandle::events`] was too slow, and has lost the events before the
    /// next one.
    #[non_exhaustive]
    EventsLost {
        /// The number of lost events.
        count: u64,
    },
}

impl Event {
    /// Returns [`Event::SkewedPlacement`] if the variables of a catalogue are uneven on these ps
    /// tasks, ascending.
    pub(crate) fn skewed_placement(catalogue: &Catalogue, tasks: &[u32]) -> Option<Event> {
        let loads = catalogue.task_loads(tasks);
        let (task, bytes) = loads.fullest().filter(|_| loads.is_skewed())?;
        let of_variable = |variable| {
            let here = catalogue.partitions_of(variable).iter().filter(|p| p.shard.task == task);
            here.map(|partition| catalogue.stored_bytes(partition)).sum::<u64>()
        };
        let variables = (0..catalogue.variables().len() as u32).map(VariableId);
        let largest = variables.max_by_key(|&variable| of_variable(variable))?;
        Some(Event::SkewedPlacement {
            task,
            bytes,
            mean: loads.mean(),
            variable: catalogue.variable(largest).name().to_owned(),
            variable_bytes: of_variable(largest),
        })
    }

    /// Returns a short name of the kind, for counting and filtering, such as `save-failed`.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::GrowthFailed { .. } => "growth-failed",
            Event::GrowthResumed { .. } => "growth-resumed",
            Event::SaveFailed { .. } => "save-failed",
            Event::SavesResumed { .. } => "saves-resumed",
            Event::RetentionFailed { .. } => "retention-failed",
            Event::CheckpointPassedOver { .. } => "checkpoint-passed-over",
            Event::OutOfDescriptors { .. } => "out-of-descriptors",
            Event::SkewedPlacement { .. } => "skewed-placement",
            Event::OwnerLost { .. } => "owner-lost",
            Event::OwnerFound { .. } => "owner-found",
            Event::SettingsDiffer { .. } => "settings-differ",
            Event::Access(event) => event.kind(),
            Event::AdminOrder { order, .. } => order.kind(),
            Event::SettingChanged { .. } => "setting-changed",
            Event::FewerWorkers { .. } => "fewer-workers",
            Event::MoreWorkers { .. } => "more-workers",
            Event::WorkerJoined { .. } => "worker-joined",
            Event::WorkerLeft { .. } => "worker-left",
            Event::WorkerLost { .. } => "worker-lost",
            Event::PartlyApplied { .. } => "partly-applied",
            Event::WaitBegan { .. } => "wait-began",
            Event::WaitEnded { .. } => "wait-ended",
            Event::StepShrunk { .. } => "step-shrunk",
            Event::CheckpointSaved { .. } => "checkpoint-saved",
            Event::CheckpointRestored { .. } => "checkpoint-restored",
            Event::ChiefRefused { .. } => "chief-refused",
            Event::TrainingEnded { .. } => "training-ended",
            Event::CoordinatorForgotten { .. } => "coordinator-forgotten",
            Event::NeverTrained { .. } => "never-trained",
            Event::ValueOverflowed { .. } => "value-overflowed",
            Event::EventsLost { .. } => "events-lost",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::GrowthFailed { shard, cause } => {
                write!(f, "{shard} cannot grow, and its pushes wait: {cause}")
            }
            Event::GrowthResumed { shard, waited } => {
                write!(f, "{shard} has grown after {} s and resumes", waited.as_secs())
            }
            Event::SaveFailed { cause, in_a_row, since_success } => {
                write!(f, "cannot save a checkpoint: {cause} (failure {in_a_row} in a row, ")?;
                match since_success {
                    Some(since) => write!(f, "the last was saved {} s ago)", since.as_secs()),
                    None => write!(f, "none was saved since the start)"),
                }
            }
            Event::SavesResumed { checkpoint, failed } => {
                write!(f, "saved {checkpoint} after {failed} failed saves")
            }
            Event::RetentionFailed { checkpoint, cause } => {
                write!(f, "saved {checkpoint}, but cannot delete older checkpoints: {cause}")
            }
            Event::CheckpointPassedOver { checkpoint, cause, taken } => {
                write!(f, "skipped the checkpoint {checkpoint}, which is not sound: {cause}; ")?;
                match taken {
                    Some(taken) => write!(f, "used {taken}"),
                    None => write!(f, "no checkpoint is sound"),
                }
            }
            Event::OutOfDescriptors { limit, cause } => {
                write!(f, "no connection can be accepted: {cause}; ")?;
                match limit {
                    Some(limit) => {
                        write!(f, "this process may have {limit} files open (ulimit -n)")
                    }
                    None => f.write_str("this process has no limit of open files"),
                }
            }
            Event::SkewedPlacement { task, bytes, mean, variable, variable_bytes } => write!(
                f,
                "the placement is uneven: ps task {task} holds {bytes} bytes, the mean is {mean}; \
                 {variable_bytes} of them are of {variable:?}: place by PlacementStrategy::Balanced, \
                 or cut it by a partitioner"
            ),
            Event::OwnerLost { shard, cause } => {
                write!(f, "{shard} has no connection to the step owner: {cause}")
            }
            Event::OwnerFound { shard, away } => {
                let away = away.as_millis();
                write!(f, "{shard} is connected to the step owner again, after {away} ms")
            }
            Event::SettingsDiffer { shard, task, setting, here, there } => write!(
                f,
                "the servers have different settings: {setting} is {here:?} on {shard}, and \
                 {there:?} on {task}"
            ),
            Event::Access(event) => event.fmt(f),
            Event::AdminOrder { shard, order, task, principal } => {
                let by = task.to_string();
                write!(f, "{shard} was told to {order} by {}", by.escape_debug())?;
                match principal {
                    Some(principal) => write!(f, ", who is {principal}"),
                    None => Ok(()),
                }
            }
            Event::SettingChanged { shard, setting, before, now } => write!(
                f,
                "{setting} of {shard} is {now:?} now, and was {before:?} when its state was created"
            ),
            Event::MoreWorkers { total_num_replicas, workers } => write!(
                f,
                "the cluster has {workers} workers, and synchronous steps expect \
                 {total_num_replicas} replicas: each step is made without some of them"
            ),
            Event::FewerWorkers { total_num_replicas, workers } => write!(
                f,
                "synchronous steps expect {total_num_replicas} replicas, and the cluster has \
                 {workers} workers"
            ),
            Event::WorkerJoined { task, step, displaced: Some(silent), .. } => {
                let silent = silent.as_millis();
                write!(
                    f,
                    "another process has joined as {task} at step {step}, and displaced the "
                )?;
                write!(f, "one that was heard from {silent} ms ago: it can no longer train")
            }
            Event::WorkerJoined { task, step, again, .. } => {
                write!(f, "{task} joined{} at step {step}", if *again { " again" } else { "" })
            }
            Event::WorkerLeft { task, step } => write!(f, "{task} left at step {step}"),
            Event::WorkerLost { task, step, silent, tokens } => {
                let silent = silent.as_millis();
                write!(f, "{task} is lost at step {step}: silent for {silent} ms, ")?;
                write!(f, "with {tokens} tokens")
            }
            Event::PartlyApplied { task, token, step, applied, missing, unknown } => {
                write!(f, "a gradient of {task}, under token {token}, is applied on some shards ")?;
                write!(f, "only at step {step}: ")?;
                let parts = [
                    (applied, "applied on"),
                    (missing, "not applied on"),
                    (unknown, "could not ask"),
                ];
                let parts = parts.into_iter().filter(|(shards, _)| !shards.is_empty());
                let parts = parts.map(|(shards, what)| {
                    let names: Vec<String> = shards.iter().map(ShardId::to_string).collect();
                    format!("{what} {}", names.join(", "))
                });
                write!(f, "{}", parts.collect::<Vec<String>>().join("; "))
            }
            Event::WaitBegan { step, wait } => {
                let waited = wait.waited.as_millis();
                write!(f, "step {step} has waited {waited} ms for {}", wait.reason)?;
                // The text describes workers that have joined, and only counts the others.
                let is_unnamed = |task: &&TaskId| !wait.reason.contains(&task.to_string());
                let unnamed: Vec<TaskId> =
                    wait.workers.iter().filter(is_unnamed).cloned().collect();
                match unnamed.is_empty() {
                    true => Ok(()),
                    false => write!(f, ": {}", Names(&unnamed)),
                }
            }
            Event::WaitEnded { step, waited, workers } => {
                let waited = waited.as_millis();
                write!(f, "the wait for {} ended at step {step}, ", Names(workers))?;
                write!(f, "after {waited} ms")
            }
            Event::StepShrunk { step, gradients, aggregate, absent } => {
                write!(f, "step {step} has {gradients} of {aggregate} gradients: ")?;
                match absent.is_empty() {
                    true => f.write_str("the cluster lists too few workers"),
                    false => write!(f, "absent are {}", Names(absent)),
                }
            }
            Event::CheckpointSaved { checkpoint, step } => {
                write!(f, "saved {checkpoint} of step {step}")
            }
            Event::CheckpointRestored { checkpoint, step, epoch, gradients_apart } => {
                write!(
                    f,
                    "restored {checkpoint}: resumes at step {step} in restore epoch {epoch}"
                )?;
                match gradients_apart {
                    0 => Ok(()),
                    apart => write!(f, "; its shards are {apart} gradients apart"),
                }
            }
            Event::ChiefRefused { shard, request, cause } => {
                write!(f, "{shard} has refused the chief, which asked to {request}: {cause}")
            }
            Event::TrainingEnded { step, phase } => {
                write!(f, "the training is over at step {step}: {phase}")
            }
            Event::CoordinatorForgotten { shard, coordinator, idle } => write!(
                f,
                "{shard} has forgotten the effects of coordinator {coordinator:?}, silent for {} s: if \
                 it resumes, it starts over",
                idle.as_secs()
            ),
            Event::NeverTrained { shard, variable, updates } => write!(
                f,
                "{variable:?} on {shard} got no gradient in the first {updates} updates: the model \
                 may not use it"
            ),
            Event::ValueOverflowed { shard, first } => write!(
                f,
                "{first} on {shard} by an update of finite gradients: the learning rate may be too \
                 large"
            ),
            Event::EventsLost { count } => {
                write!(f, "this reader was too slow and lost {count} events")
            }
        }
    }
}

/// The most tasks that a text names.
const NAMES_MAX: usize = 8;

/// The names of some tasks.
struct Names<'a>(&'a [TaskId]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().take(NAMES_MAX).map(TaskId::to_string).collect();
        match (names.is_empty(), self.0.len().saturating_sub(NAMES_MAX)) {
            (true, _) => f.write_str("workers"),
            (false, 0) => f.write_str(&names.join(", ")),
            (false, others) => write!(f, "{} and {others} others", names.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_that_names_source_and_cause() {
        let shard = ShardId { task: 3, shard: 1 };
        let cause = "the disk is full".to_owned();
        let checkpoint = "ckpt-1-2".to_owned();
        let taken = Some("ckpt-1-1".to_owned());
        let lost = shard.to_string();
        let events = [
            (Event::GrowthFailed { shard, cause: cause.clone() }, &*lost),
            (
                Event::SaveFailed { cause: cause.clone(), in_a_row: 2, since_success: None },
                "failure 2 in a row",
            ),
            (
                Event::RetentionFailed { checkpoint: checkpoint.clone(), cause: cause.clone() },
                "ckpt-1-2",
            ),
            (Event::CheckpointPassedOver { checkpoint, cause: cause.clone(), taken }, "ckpt-1-2"),
            (
                Event::SkewedPlacement {
                    task: 3,
                    bytes: 300,
                    mean: 100,
                    variable: cause.clone(),
                    variable_bytes: 200,
                },
                "ps task 3 holds 300 bytes, the mean is 100; 200 of them",
            ),
            (Event::OwnerLost { shard, cause: cause.clone() }, &*lost),
            (
                Event::CheckpointRestored {
                    checkpoint: cause.clone(),
                    step: 7,
                    epoch: 2,
                    gradients_apart: 3,
                },
                "resumes at step 7 in restore epoch 2; its shards are 3 gradients apart",
            ),
            (Event::CheckpointSaved { checkpoint: cause.clone(), step: 7 }, "of step 7"),
            (Event::NeverTrained { shard, variable: cause, updates: 100 }, &*lost),
        ];
        for (event, named) in events {
            let text = event.to_string();
            assert!(text.contains("the disk is full") && text.contains(named), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn an_event_of_workers_names_them_and_the_step() {
        let tasks = |indices: std::ops::Range<u32>| indices.map(TaskId::worker).collect::<Vec<_>>();
        let step = 7;
        let task = TaskId::worker(3);
        let silent = Duration::from_millis(5100);
        let waited = Duration::from_millis(5100);
        let waiting = |reason: &str, workers| Waiting {
            reason: reason.to_owned(),
            workers,
            shards: Vec::new(),
            waited,
        };
        let known = "/job:worker/task:3 (heard from 9 ms ago)";
        let unknown = "1 not joined yet";
        let wait_began =
            |reason: &str| Event::WaitBegan { step, wait: waiting(reason, vec![task.clone()]) };
        for (event, text) in [
            (
                Event::WorkerJoined { task: task.clone(), step, again: true, displaced: None },
                "/job:worker/task:3 joined again at step 7",
            ),
            (
                Event::WorkerJoined {
                    task: task.clone(),
                    step,
                    again: true,
                    displaced: Some(Duration::from_millis(9)),
                },
                "another process has joined as /job:worker/task:3 at step 7, and displaced the one \
                 that was heard from 9 ms ago: it can no longer train",
            ),
            (Event::WorkerLeft { task: task.clone(), step }, "/job:worker/task:3 left at step 7"),
            (
                Event::WorkerLost { task: task.clone(), step, silent, tokens: 2 },
                "/job:worker/task:3 is lost at step 7: silent for 5100 ms, with 2 tokens",
            ),
            (
                Event::PartlyApplied {
                    task: task.clone(),
                    token: 9,
                    step,
                    applied: vec![ShardId { task: 0, shard: 0 }],
                    missing: vec![ShardId { task: 0, shard: 1 }, ShardId { task: 1, shard: 0 }],
                    unknown: vec![],
                },
                "a gradient of /job:worker/task:3, under token 9, is applied on some shards only at \
                 step 7: applied on /job:ps/task:0/shard:0; not applied on /job:ps/task:0/shard:1, \
                 /job:ps/task:1/shard:0",
            ),
            (
                wait_began(known),
                "step 7 has waited 5100 ms for /job:worker/task:3 (heard from 9 ms ago)",
            ),
            (
                wait_began(unknown),
                "step 7 has waited 5100 ms for 1 not joined yet: /job:worker/task:3",
            ),
            (
                Event::WaitEnded { step, workers: tasks(1..3), waited },
                "the wait for /job:worker/task:1, /job:worker/task:2 ended at step 7, after 5100 ms",
            ),
            (
                Event::StepShrunk { step, gradients: 1, aggregate: 2, absent: tasks(3..4) },
                "step 7 has 1 of 2 gradients: absent are /job:worker/task:3",
            ),
            (
                Event::StepShrunk { step, gradients: 2, aggregate: 4, absent: vec![] },
                "step 7 has 2 of 4 gradients: the cluster lists too few workers",
            ),
            (
                Event::TrainingEnded { step, phase: TrainingPhase::LastStep },
                "the training is over at step 7: ended at the last step",
            ),
        ] {
            assert_eq!(event.to_string(), text);
        }
        let absent = Event::StepShrunk { step, gradients: 1, aggregate: 40, absent: tasks(1..40) };
        assert!(absent.to_string().ends_with("/job:worker/task:8 and 31 others"), "{absent}");
    }
}
