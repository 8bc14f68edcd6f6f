//! Administration: the status of a training, and the order to stop.

use crate::ids::ShardId;
use crate::protocol::limits;
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{List, Text, wire_enum, wire_struct};

wire_enum! {
    /// The progress of a training.
    #[derive(Copy, Eq)]
    PhaseIs {
        /// No variables are declared.
        1 => NoVariables {},
        /// The variables have no values yet.
        2 => Declared {},
        /// Tokens are granted.
        3 => Training {},
        /// The training has ended by order.
        4 => Finished {},
        /// It has ended at the last step.
        5 => LastStep {},
        /// It has ended with the data.
        6 => DataEnd {},
    }
}

wire_enum! {
    /// Whether a worker that has joined is still a member.
    #[derive(Copy, Eq)]
    PresenceIs {
        /// Its lease is valid.
        1 => Present {},
        /// It has left.
        2 => Left {},
        /// Its lease has expired.
        3 => Lost {},
    }
}

wire_struct! {
    /// A worker that has joined.
    #[derive(Eq)]
    MemberIs {
        /// Its job.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// Its index.
        task: u32,
        /// Whether it is present.
        presence: PresenceIs,
        /// The time since the last bytes from it.
        silent_ms: u64,
        /// The steps at which its tokens were granted, and the time since then in milliseconds, oldest
        /// first.
        tokens: List<(u64, u64), { limits::TOKENS_PER_CLIENT_MAX }>,
        /// The time between its last two gradients with an outcome, in microseconds.
        step_us: Option<u64>,
    }
}

wire_struct! {
    /// A task.
    #[derive(Eq)]
    TaskIs {
        /// Its job.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// Its index.
        task: u32,
    }
}

wire_struct! {
    /// The oldest wait of a worker.
    #[derive(Eq)]
    WaitIs {
        /// The awaited event, in words.
        awaited: Detail,
        /// The workers who can end the wait.
        workers: List<TaskIs, { limits::STATUS_TASKS_MAX }>,
        /// The shards that can.
        shards: List<ShardId, { limits::STATUS_TASKS_MAX }>,
        /// The time since it began to wait.
        waited_ms: u64,
    }
}

wire_struct! {
    /// The position of a training in its data set.
    #[derive(Eq)]
    DataIs {
        /// The name of the data set.
        name: Text<{ limits::DATA_NAME_BYTES_MAX }>,
        /// The epoch of the next new batch, from 0.
        epoch: u64,
        /// The batches of all epochs that were granted or reserved at least once.
        begun: u64,
        /// Those among them that are not spent yet.
        unspent: u64,
    }
}

wire_struct! {
    /// Requests the status of the training, as this shard knows it (admin).
    StatusQuery {
        /// The number of members to leave out, in the order of their first join: an answer has only
        /// so many.
        members_from: u32,
    }
}
wire_struct! {
    /// The status of the training.
    StatusIs {
        /// How far it is.
        phase: PhaseIs,
        /// The global step.
        step: u64,
        /// The restore epoch; 0 before the variables have values.
        restore_epoch: u32,
        /// The number of all members.
        members_count: u32,
        /// The members, from `members_from` on.
        members: List<MemberIs, { limits::STATUS_TASKS_MAX }>,
        /// The number of workers of the cluster that have never joined.
        absent_count: u32,
        /// The first of them.
        absent: List<TaskIs, { limits::STATUS_TASKS_MAX }>,
        /// The oldest wait.
        waiting: Option<Box<WaitIs>>,
        /// The position in the data set, if there is one.
        data: Option<Box<DataIs>>,
    }
}
wire_struct! {
    /// Stops the task of this shard for good (admin).
    Stop {}
}
wire_struct! {
    /// The task stops: it answers what is complete, says goodbye and ends.
    Stopping {}
}
