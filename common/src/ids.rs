//! Newtypes for ids and counters, so that a step is never passed for a token.

use std::fmt;
use std::sync::Arc;

/// Declares a newtype over an unsigned integer that prints as the bare number.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                $name(value)
            }
        }
    };
}

number! {
    /// The dense index of a variable in its catalogue, in creation order.
    VariableId(u32)
}
number! {
    /// The dense index of a partition (a row range of a variable) in its catalogue.
    PartitionId(u32)
}
number! {
    /// Correlates a response with its request on one connection; 0 means "not a request".
    RequestId(u64)
}
number! {
    /// The number of times the variables have been updated; counted by the step owner.
    GlobalStep(u64)
}
number! {
    /// The right to contribute one gradient to one step; never reused.
    TokenId(u64)
}
number! {
    /// Numbers the pushes of one client epoch, from 1; 0 means "no push".
    Sequence(u64)
}
number! {
    /// Assigned by the step owner at each start of a client; a higher epoch fences a lower one.
    ClientEpoch(u64)
}
number! {
    /// Counts the restores of the whole cluster; messages of an older epoch are dropped.
    RestoreEpoch(u32)
}
number! {
    /// Counts the changes of the cluster's configuration; reserved for replication.
    ConfigEpoch(u32)
}
number! {
    /// Chosen by a process at each start, so that a restart is not mistaken for a reconnect.
    Incarnation(u64)
}
number! {
    /// Names a coordinator on the shards, from its first opening until it is closed; assigned by
    /// the step owner, and never reused.
    CoordinatorId(u64)
}
number! {
    /// Assigned by the step owner each time a coordinator is opened; a higher epoch fences a
    /// lower one.
    CoordinatorEpoch(u64)
}
number! {
    /// Numbers the effects of one coordinator from 1, in the order in which their calls were first
    /// scheduled; 0 means "no effect". A number means the same effect under every epoch.
    EffectNumber(u64)
}

/// A task of a job: one process of the cluster, written `/job:worker/task:3`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId {
    /// The job's name, such as `ps` or `worker`.
    pub job: Arc<str>,
    /// The task's index within its job; the indices of a sparse job have holes.
    pub index: u32,
}

/// The longest name of the job of a client.
pub(crate) const CLIENT_JOB_BYTES_MAX: usize = 64;

impl TaskId {
    /// The job that holds the variables of every cluster that has it, and does not train: `ps`.
    pub const PS_JOB: &str = "ps";

    /// Names a task. The name is not checked; a [`crate::cluster::ClusterSpec`] does that.
    pub fn new(job: &str, index: u32) -> Self {
        TaskId { job: job.into(), index }
    }

    /// Returns a task of the job `ps`.
    pub fn ps(index: u32) -> Self {
        TaskId::new(TaskId::PS_JOB, index)
    }

    /// Returns a task of the job `worker`.
    pub fn worker(index: u32) -> Self {
        TaskId::new("worker", index)
    }

    /// The end of the job under which the functions of a task train. No job of a cluster has a
    /// colon.
    const FUNCTIONS: &str = ":functions";

    /// Returns the client by which the functions of this task train. It is not the task itself, so
    /// a worker of the task and its functions train side by side. `None` if the name of the job is
    /// too long for one.
    pub fn for_functions(&self) -> Option<TaskId> {
        let job = format!("{}{}", self.job, TaskId::FUNCTIONS);
        (job.len() <= CLIENT_JOB_BYTES_MAX).then(|| TaskId::new(&job, self.index))
    }

    /// Returns the task whose functions train by this client; `None` if it is another client.
    pub fn of_functions(&self) -> Option<TaskId> {
        Some(TaskId::new(self.job.strip_suffix(TaskId::FUNCTIONS)?, self.index))
    }

    /// Returns the client by which a client of functions declares variables.
    pub fn declaring_client() -> TaskId {
        TaskId::new("client:declares", 0)
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/job:{}/task:{}", self.job, self.index)
    }
}

/// A shard: the part of the variables that one thread of one ps task owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId {
    /// The ps task's index.
    pub task: u32,
    /// The shard's index within the task.
    pub shard: u16,
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/job:ps/task:{}/shard:{}", self.task, self.shard)
    }
}
