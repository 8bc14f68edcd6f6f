//! The inputs and outputs of a dispatch.

/// The index of a worker of a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerId(pub(crate) u32);

/// The id of a per-worker value, a resource of which each worker has one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ResourceId(pub(crate) u32);

/// One attempt to run a call on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Attempt {
    /// The number of the call.
    pub(crate) number: u64,
    /// The worker that runs the attempt.
    pub(crate) worker: WorkerId,
    /// The number of the attempt among the attempts of all calls.
    pub(crate) attempt: u64,
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttemptEnd<E> {
    /// The function has returned outputs.
    Done,
    /// The worker was lost during the attempt.
    Lost,
    /// The function has not returned in time.
    TimedOut(E),
    /// The function has failed, and another attempt may succeed.
    Retry(E),
    /// The function has failed for good.
    Final(E),
}

/// The end of the call that makes a resource on a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MakingEnd<E> {
    /// The worker has the resource.
    Made,
    /// Another call may succeed.
    Retry,
    /// The worker cannot have the resource until it restarts.
    Failed(E),
}

/// The end of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallEnding {
    /// The function of the call has returned outputs.
    Done,
    /// The call has failed for good.
    Failed,
    /// The call needs a resource that no worker for it can make, for the reason in
    /// [`super::Dispatch::resource_error`].
    WithoutResource { resource: ResourceId },
    /// The call was not begun, or not repeated after the loss of its worker, because another call
    /// has failed.
    Cancelled,
}

/// An event for a dispatch.
#[derive(Debug)]
pub(crate) enum DispatchInput<E> {
    /// The program schedules a call. The caller has asked [`super::Dispatch::has_room`].
    Schedule {
        /// The number of the call. One that has ended is not run again.
        number: u64,
        /// The only worker that may run the call; `None` for any.
        pinned: Option<WorkerId>,
        /// The resources that the call needs on its worker.
        resources: Vec<ResourceId>,
    },
    /// The program checks whether an error has occurred.
    Look,
    /// A worker is present, for the first time or again.
    WorkerUp { worker: WorkerId },
    /// A worker is lost, perhaps for a time.
    WorkerLost { worker: WorkerId },
    /// The program wants an instance of a resource on each worker.
    Resource { resource: ResourceId },
    /// The call that makes a resource on a worker has ended. The loss of the worker is no such end.
    MakingEnded { worker: WorkerId, resource: ResourceId, end: MakingEnd<E> },
    /// An attempt has ended, with its result or with its worker.
    AttemptEnded { attempt: Attempt, end: AttemptEnd<E> },
    /// The time that [`super::Dispatch::wake_at`] has asked for has come.
    Tick,
}

/// An action of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DispatchOutput {
    /// Run a call on a worker.
    Start {
        /// The attempt to begin.
        attempt: Attempt,
        /// The watermark: all calls up to this number have ended.
        settled: u64,
    },
    /// Cancel an attempt, whose result is not needed.
    Cancel { attempt: Attempt },
    /// Make a resource on a worker.
    Make { worker: WorkerId, resource: ResourceId },
    /// A call has ended for good.
    Ended { number: u64, ending: CallEnding },
}
