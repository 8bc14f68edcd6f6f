//! Rendezvous of clusters: tasks register their addresses, and learn those of all others.

use crate::protocol::limits;
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{Text, wire_enum, wire_struct};

wire_enum! {
    /// The identity of a task within its job.
    #[derive(Eq, PartialOrd, Ord)]
    TaskKey {
        /// The index, if the launcher numbers the tasks of the job.
        1 => Index {
            /// The index.
            index: u32,
        },
        /// A stable id, such as the name of a container. The rendezvous assigns the index.
        2 => Id {
            /// The id. A process that is started again under it gets its index back.
            id: Text<{ limits::TASK_ID_BYTES_MAX }>,
        },
    }
}
wire_struct! {
    /// Asks a rendezvous for the cluster. It follows a `Hello` of the role `task`, whose identity has
    /// the numbers of tasks.
    RegisterTask {
        /// The job: `ps` or `worker`.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// The identity of the task within its job.
        key: TaskKey,
        /// The address at which others reach the task; `-` for a worker that accepts no connections.
        address: Text<{ limits::TASK_ADDRESS_BYTES_MAX }>,
    }
}
wire_struct! {
    /// Names the tasks that have not registered. Sent to each task that waits, again and again.
    ClusterWaits {
        /// The number of tasks that have registered.
        registered: u32,
        /// The number of tasks of the cluster.
        tasks: u32,
        /// The tasks that have not, in words.
        missing: Detail,
    }
}
wire_struct! {
    /// All tasks have registered. The body is the text of the cluster.
    ClusterIs {
        /// The index of the receiver in its job.
        index: u32,
    }
}
