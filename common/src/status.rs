//! The status of a training as a server sees it: plain data, at one point in time.

mod wire;

use std::fmt;
use std::time::Duration;

use crate::ids::{ShardId, TaskId};

/// What a training does, from `PsHandle::status` of a server, or from `Admin::status`.
///
/// The *step owner*, the ps task with the lowest index, knows everything here. Another task knows
/// its own variables and the members that use them. There, `tokens`, `waiting` and `data` are
/// empty, and the phase does not pass [`TrainingPhase::Training`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// How far the training is.
    pub phase: TrainingPhase,
    /// The global step; in asynchronous mode 0 unless the task is the step owner.
    pub global_step: u64,
    /// Counts the restores of the cluster. 0 before the variables have values.
    pub restore_epoch: u32,
    /// The workers that have ever joined, in the order of their first join.
    pub members: Vec<MemberStatus>,
    /// The tasks of the jobs `worker` and `chief` in the cluster spec that have never joined.
    pub never_joined: Vec<TaskId>,
    /// What the oldest waiting request of a worker waits for; `None` if none waits.
    pub waiting: Option<Waiting>,
    /// The position in the declared data set, if there is one.
    pub data: Option<DataStatus>,
}

/// The progress of a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum TrainingPhase {
    /// No variables are declared.
    NoVariables,
    /// The variables are declared, and have no values yet.
    Declared,
    /// The variables have values, and tokens are granted.
    Training,
    /// The training has ended by order: of the chief, of an administrator, or by `PsHandle::finish`.
    Finished,
    /// The training has ended at `PsConfig::last_step`.
    LastStep,
    /// The training has ended because every batch of the data set is spent.
    DataEnd,
}

/// A worker that has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its task.
    pub task: TaskId,
    /// Whether it is present.
    pub presence: Presence,
    /// The time since the last bytes from it. After a restart of the server, the time since that.
    pub silent: Duration,
    /// The tokens that it holds, oldest first.
    pub tokens: Vec<HeldToken>,
    /// The step time: the time between its last two gradients with an outcome. `None` before the
    /// second one of this incarnation and of this server process.
    pub step_time: Option<Duration>,
}

/// Whether a worker that has joined is still a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Presence {
    /// Its lease is valid.
    Present,
    /// It has left.
    Left,
    /// Its lease has expired.
    Lost,
}

/// A token that a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldToken {
    /// The global step at which it was granted.
    pub step: u64,
    /// The time since the grant. After a restart of the server, the time since that.
    pub held: Duration,
}

/// What the workers of a training wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The awaited event with its causes, as `WorkerConfig::on_progress` reports it to workers.
    pub reason: String,
    /// The awaited workers. If some have not joined yet, those that may.
    pub workers: Vec<TaskId>,
    /// The awaited shards.
    pub shards: Vec<ShardId>,
    /// How long the oldest request has waited.
    pub waited: Duration,
}

/// The position of a training in its declared data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataStatus {
    /// The name of the data set.
    pub name: String,
    /// The epoch of the next new batch, counted from 0; after the last batch, the last epoch.
    pub epoch: u64,
    /// Batches of all epochs that were granted or reserved at least once.
    pub begun: u64,
    /// Batches among them that are not spent yet.
    pub unspent: u64,
}

impl TrainingPhase {
    /// Returns whether the training has ended.
    pub fn has_ended(self) -> bool {
        self > TrainingPhase::Training
    }
}

impl fmt::Display for TrainingPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TrainingPhase::NoVariables => "no variables are declared",
            TrainingPhase::Declared => "the variables have no values yet",
            TrainingPhase::Training => "training",
            TrainingPhase::Finished => "finished by order",
            TrainingPhase::LastStep => "ended at the last step",
            TrainingPhase::DataEnd => "ended with the data",
        })
    }
}

impl Status {
    /// Returns the status of a task from those of its shards, in shard order. Facts of the step
    /// owner come from the first.
    #[doc(hidden)]
    pub fn of_task(shards: impl IntoIterator<Item = Status>) -> Option<Status> {
        shards.into_iter().reduce(Status::merge)
    }

    fn merge(mut self, other: Status) -> Status {
        self.phase = match (self.phase, other.phase) {
            (ended, _) if ended.has_ended() => ended,
            // A shard without variables hears of none.
            (TrainingPhase::NoVariables, phase) | (phase, TrainingPhase::NoVariables) => phase,
            (one, other) => one.min(other),
        };
        self.global_step = self.global_step.max(other.global_step);
        self.restore_epoch = self.restore_epoch.max(other.restore_epoch);
        for member in other.members {
            match self.members.iter_mut().find(|known| known.task == member.task) {
                Some(known) => known.merge(&member),
                None => self.members.push(member),
            }
        }
        self.never_joined.retain(|task| other.never_joined.contains(task));
        self
    }
}

impl MemberStatus {
    /// Adds what another shard knows. The shard that has heard from the worker last knows its
    /// presence.
    fn merge(&mut self, other: &MemberStatus) {
        if other.silent < self.silent {
            self.silent = other.silent;
            self.presence = other.presence;
        }
        self.step_time = self.step_time.or(other.step_time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(index: u32, presence: Presence, silent: u64) -> MemberStatus {
        let silent = Duration::from_millis(silent);
        let step_time = None;
        MemberStatus { task: TaskId::worker(index), presence, silent, tokens: vec![], step_time }
    }

    fn shard(phase: TrainingPhase, members: Vec<MemberStatus>, absent: &[u32]) -> Status {
        let never_joined = absent.iter().map(|&index| TaskId::worker(index)).collect();
        let global_step = 0;
        let restore_epoch = 1;
        let waiting = None;
        let data = None;
        Status { phase, global_step, restore_epoch, members, never_joined, waiting, data }
    }

    #[test]
    fn the_phase_of_a_task_is_that_of_its_slowest_shard_with_variables() {
        use TrainingPhase::{Declared, LastStep, NoVariables, Training};
        for (first, second, expected) in [
            (NoVariables, NoVariables, NoVariables),
            (NoVariables, Training, Training),
            (Training, NoVariables, Training),
            (Training, Declared, Declared),
            (Declared, Training, Declared),
            (LastStep, Training, LastStep),
        ] {
            let shards = [first, second].map(|phase| shard(phase, vec![], &[]));
            let status = Status::of_task(shards).unwrap();
            assert_eq!(status.phase, expected, "{first:?} and {second:?}");
        }
    }

    #[test]
    fn members_of_all_shards_are_members_of_the_task() {
        use Presence::{Lost, Present};
        let first = shard(
            TrainingPhase::Training,
            vec![member(0, Present, 5), member(1, Lost, 900)],
            &[2, 3],
        );
        let second = shard(
            TrainingPhase::Training,
            vec![member(1, Present, 7), member(2, Present, 9)],
            &[0, 3],
        );
        let status = Status::of_task([first, second]).unwrap();
        assert_eq!(
            status.members,
            [member(0, Present, 5), member(1, Present, 7), member(2, Present, 9)]
        );
        assert_eq!(status.never_joined, [TaskId::worker(3)]);
    }
}
