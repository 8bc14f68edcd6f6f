//! What goes into a dispatch, and what comes out.

/// A worker of a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerId(pub(crate) u32);

/// Something that each worker has one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ResourceId(pub(crate) u32);

/// One attempt to run a call on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Attempt {
    /// The number of the call.
    pub(crate) number: u64,
    /// The worker.
    pub(crate) worker: WorkerId,
    /// Numbers the attempts of all calls.
    pub(crate) attempt: u64,
}

/// How an attempt has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttemptEnd<E> {
    /// The function has returned.
    Done,
    /// The worker was lost.
    Lost,
    /// The function has not returned in time.
    TimedOut(E),
    /// The function has failed, and another attempt may succeed.
    Retry(E),
    /// The function has failed for good.
    Final(E),
}

/// How the call that makes a resource of a worker has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MakingEnd<E> {
    /// The worker has the resource.
    Made,
    /// Another call may succeed.
    Retry,
    /// The worker cannot have the resource until it restarts.
    Failed(E),
}

/// How a call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallEnding {
    /// Its function has returned.
    Done,
    /// It has failed for good.
    Failed,
    /// It needs a resource that could be made on no worker that may run it, for the reason in
    /// [`super::Dispatch::resource_error`].
    WithoutResource { resource: ResourceId },
    /// It was not begun, or not again after its worker was lost, because another has failed.
    Cancelled,
}

/// An event for a dispatch.
#[derive(Debug)]
pub(crate) enum DispatchInput<E> {
    /// The program schedules a call. The caller has asked [`super::Dispatch::has_room`].
    Schedule {
        /// The number of the call. One that has ended is not run again.
        number: u64,
        /// The only worker that may run it.
        pinned: Option<WorkerId>,
        /// What it needs of its worker.
        resources: Vec<ResourceId>,
    },
    /// The program looks whether an error has occurred.
    Look,
    /// A worker is there, for the first time or again.
    WorkerUp { worker: WorkerId },
    /// A worker is lost. It may come back.
    WorkerLost { worker: WorkerId },
    /// Each worker is to have one of these.
    Resource { resource: ResourceId },
    /// The call that makes a resource of a worker has ended, and not because the worker was lost.
    MakingEnded { worker: WorkerId, resource: ResourceId, end: MakingEnd<E> },
    /// An attempt has ended.
    AttemptEnded { attempt: Attempt, end: AttemptEnd<E> },
    /// Time has passed.
    Tick,
}

/// An action of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DispatchOutput {
    /// Run a call on a worker.
    Start {
        /// The attempt.
        attempt: Attempt,
        /// All calls up to this number have ended.
        settled: u64,
    },
    /// Nobody waits for an attempt any more.
    Cancel { attempt: Attempt },
    /// Make a resource of a worker.
    Make { worker: WorkerId, resource: ResourceId },
    /// A call has ended.
    Ended { number: u64, ending: CallEnding },
}
