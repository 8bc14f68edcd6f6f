//! The status as the protocol has it.

use std::time::Duration;

use super::{DataStatus, HeldToken, MemberStatus, Presence, Status, TrainingPhase, Waiting};
use crate::ids::TaskId;
use crate::protocol::limits::{STATUS_TASKS_MAX, TOKENS_PER_CLIENT_MAX};
use crate::protocol::message::{DataIs, MemberIs, PhaseIs, PresenceIs, StatusIs, TaskIs, WaitIs};
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{List, Text};

impl Status {
    /// Returns the status for the wire without the first members, and with as many others as fit.
    #[doc(hidden)]
    pub fn to_wire(&self, members_from: usize) -> StatusIs {
        StatusIs {
            phase: self.phase.to_wire(),
            step: self.global_step,
            restore_epoch: self.restore_epoch,
            members_count: count(&self.members),
            members: first(self.members.iter().skip(members_from).map(MemberStatus::to_wire)),
            absent_count: count(&self.never_joined),
            absent: first(self.never_joined.iter().map(task_is)),
            waiting: self.waiting.as_ref().map(|waiting| waiting.to_wire().into()),
            data: self.data.as_ref().map(|data| data.to_wire().into()),
        }
    }

    /// Returns the status that a server has sent, with the members and absent workers that it names.
    #[doc(hidden)]
    pub fn from_wire(is: StatusIs) -> Status {
        Status {
            phase: TrainingPhase::from_wire(is.phase),
            global_step: is.step,
            restore_epoch: is.restore_epoch,
            members: is.members.items().iter().map(MemberStatus::from_wire).collect(),
            never_joined: is.absent.items().iter().map(task_of).collect(),
            waiting: is.waiting.as_deref().map(Waiting::from_wire),
            data: is.data.as_deref().map(DataStatus::from_wire),
        }
    }
}

impl MemberStatus {
    fn to_wire(&self) -> MemberIs {
        let MemberStatus { task, presence, silent, tokens, step_time } = self;
        let TaskIs { job, task } = task_is(task);
        let held = tokens.iter().map(|&HeldToken { step, held }| (step, millis(held)));
        MemberIs {
            job,
            task,
            presence: match presence {
                Presence::Present => PresenceIs::Present {},
                Presence::Left => PresenceIs::Left {},
                Presence::Lost => PresenceIs::Lost {},
            },
            silent_ms: millis(*silent),
            tokens: List::of(held.take(TOKENS_PER_CLIENT_MAX)).unwrap_or_default(),
            step_us: step_time.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        }
    }

    fn from_wire(is: &MemberIs) -> MemberStatus {
        let MemberIs { job, task, presence, silent_ms, tokens, step_us } = is;
        let token = |&(step, held)| HeldToken { step, held: Duration::from_millis(held) };
        MemberStatus {
            task: TaskId::new(job.as_str(), *task),
            presence: match presence {
                PresenceIs::Present {} => Presence::Present,
                PresenceIs::Left {} => Presence::Left,
                PresenceIs::Lost {} => Presence::Lost,
            },
            silent: Duration::from_millis(*silent_ms),
            tokens: tokens.items().iter().map(token).collect(),
            step_time: step_us.map(Duration::from_micros),
        }
    }
}

impl Waiting {
    fn to_wire(&self) -> WaitIs {
        let Waiting { reason, workers, shards, waited } = self;
        WaitIs {
            awaited: Detail::clipped(reason.as_str()),
            workers: first(workers.iter().map(task_is)),
            shards: first(shards.iter().copied()),
            waited_ms: millis(*waited),
        }
    }

    fn from_wire(is: &WaitIs) -> Waiting {
        Waiting {
            reason: is.awaited.to_string(),
            workers: is.workers.items().iter().map(task_of).collect(),
            shards: is.shards.items().to_vec(),
            waited: Duration::from_millis(is.waited_ms),
        }
    }
}

impl DataStatus {
    fn to_wire(&self) -> DataIs {
        let &DataStatus { ref name, epoch, begun, unspent } = self;
        DataIs { name: Text::clipped(name.as_str()), epoch, begun, unspent }
    }

    fn from_wire(is: &DataIs) -> DataStatus {
        let &DataIs { ref name, epoch, begun, unspent } = is;
        DataStatus { name: name.to_string(), epoch, begun, unspent }
    }
}

impl TrainingPhase {
    fn to_wire(self) -> PhaseIs {
        match self {
            TrainingPhase::NoVariables => PhaseIs::NoVariables {},
            TrainingPhase::Declared => PhaseIs::Declared {},
            TrainingPhase::Training => PhaseIs::Training {},
            TrainingPhase::Finished => PhaseIs::Finished {},
            TrainingPhase::LastStep => PhaseIs::LastStep {},
            TrainingPhase::DataEnd => PhaseIs::DataEnd {},
        }
    }

    fn from_wire(is: PhaseIs) -> TrainingPhase {
        match is {
            PhaseIs::NoVariables {} => TrainingPhase::NoVariables,
            PhaseIs::Declared {} => TrainingPhase::Declared,
            PhaseIs::Training {} => TrainingPhase::Training,
            PhaseIs::Finished {} => TrainingPhase::Finished,
            PhaseIs::LastStep {} => TrainingPhase::LastStep,
            PhaseIs::DataEnd {} => TrainingPhase::DataEnd,
        }
    }
}

fn task_is(task: &TaskId) -> TaskIs {
    TaskIs { job: Text::clipped(&*task.job), task: task.index }
}

fn task_of(is: &TaskIs) -> TaskId {
    TaskId::new(is.job.as_str(), is.task)
}

fn count<T>(of: &[T]) -> u32 {
    u32::try_from(of.len()).unwrap_or(u32::MAX)
}

fn first<T>(of: impl Iterator<Item = T>) -> List<T, STATUS_TASKS_MAX> {
    List::of(of.take(STATUS_TASKS_MAX)).unwrap_or_default()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ShardId;
    use crate::protocol::Message;
    use crate::protocol::limits::{JOB_BYTES_MAX, META_BYTES_MAX};
    use crate::protocol::{Features, message};

    /// A status with this many tasks of each kind, with names of this length.
    fn status(tasks: u32, name: usize) -> Status {
        let task = |index| TaskId::new(&"w".repeat(name), index);
        let tokens = vec![HeldToken { step: 3, held: Duration::from_millis(4) }; 16];
        let member = |index| MemberStatus {
            task: task(index),
            presence: [Presence::Present, Presence::Left, Presence::Lost][index as usize % 3],
            silent: Duration::from_millis(7),
            tokens: tokens.clone(),
            step_time: (index % 2 == 0).then_some(Duration::from_micros(9)),
        };
        Status {
            phase: TrainingPhase::Training,
            global_step: 11,
            restore_epoch: 2,
            members: (0..tasks).map(member).collect(),
            never_joined: (0..tasks).map(task).collect(),
            waiting: Some(Waiting {
                reason: "a gradient".to_owned(),
                workers: (0..tasks).map(task).collect(),
                shards: (0..tasks).map(|task| ShardId { task, shard: 1 }).collect(),
                waited: Duration::from_millis(5),
            }),
            data: Some(DataStatus { name: "train".to_owned(), epoch: 1, begun: 9, unspent: 8 }),
        }
    }

    #[test]
    fn what_fits_arrives_as_it_was() {
        for phase in [
            TrainingPhase::NoVariables,
            TrainingPhase::Declared,
            TrainingPhase::Training,
            TrainingPhase::Finished,
            TrainingPhase::LastStep,
            TrainingPhase::DataEnd,
        ] {
            let told = Status { phase, ..status(STATUS_TASKS_MAX as u32, 6) };
            assert_eq!(Status::from_wire(told.to_wire(0)), told);
        }
    }

    #[test]
    fn pages_have_all_members() {
        let told = status(2 * STATUS_TASKS_MAX as u32 + 7, 6);
        let mut members = Vec::new();
        loop {
            let is = told.to_wire(members.len());
            assert_eq!((is.members_count, is.absent_count), (207, 207));
            let page = Status::from_wire(is);
            if page.members.is_empty() {
                break;
            }
            members.extend(page.members);
        }
        assert_eq!(members, told.members);
    }

    #[test]
    fn the_largest_status_fits_a_meta() {
        let largest: Message = status(1000, JOB_BYTES_MAX).to_wire(0).into();
        assert!(matches!(largest, Message::StatusIs(message::StatusIs { .. })));
        let mut meta = Vec::new();
        largest.put(Features::NONE, &mut meta);
        assert!(meta.len() < META_BYTES_MAX as usize, "{} bytes", meta.len());
    }
}
