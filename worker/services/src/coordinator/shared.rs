//! [`CoordinatorCore`]: the state that the tasks of a coordinator share, and the execution of the
//! dispatch's decisions.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::{EffectNumber, TaskId};
use pushpull_worker::{OpenedCoordinator, Reader};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::call_digests::CallDigests;
use super::decisions::{self, PROBE_INTERVAL, PROBE_TIMEOUT};
use crate::call::Call;
use crate::call_session::{CallReply, LinkId};
use crate::dispatch::{
    Attempt, CallEnding, Dispatch, DispatchInput, DispatchOutput, ResourceId, WorkerId,
};
use crate::error::ServiceError;
use crate::function_client::{FunctionClient, describe};
use crate::kept::Kept;
use crate::outputs::Outputs;
use crate::remote_value::ValueState;
use crate::runtime::timer::Timer;

/// The calls of a coordinator with a name on the parameter servers.
pub(super) struct Named {
    /// The calls of the name that the shards count.
    pub(super) opened: OpenedCoordinator,
    /// The session that has opened the coordinator.
    pub(super) reader: Reader,
    pub(super) name: String,
}

/// The state that the tasks of a coordinator share.
pub(crate) struct CoordinatorCore {
    state: Mutex<CoordinatorState>,
    client: Arc<FunctionClient>,
    pub(super) named: Option<Named>,
    /// Notified at each change of the calls that have ended.
    pub(super) changed: Notify,
    timer: Timer,
}

/// A scheduled call that has not ended.
pub(super) struct OpenCall {
    pub(super) call: Call,
    /// The digest of the call and all before it; 0 without a name.
    pub(super) digest: u64,
    pub(super) value: watch::Sender<ValueState>,
}

/// The state of a coordinator, behind one lock.
pub(super) struct CoordinatorState {
    pub(super) dispatch: Dispatch<ServiceError>,
    pub(super) workers: Vec<(TaskId, LinkId)>,
    pub(super) calls: BTreeMap<u64, OpenCall>,
    /// The digests of the calls; `None` without a name.
    digests: Option<CallDigests>,
    /// The error of every call from now on, after the scheduled calls have differed from the
    /// recorded ones.
    pub(super) differ: Option<ServiceError>,
    /// The outputs and errors of attempts whose calls are about to end.
    results: HashMap<u64, Result<Outputs, ServiceError>>,
    attempts: HashMap<Attempt, AbortHandle>,
    /// The calls that make per-worker values, indexed by [`ResourceId`].
    pub(super) makers: Vec<Call>,
    /// The kept outputs of per-worker values on each worker.
    made: HashMap<(WorkerId, ResourceId), Kept>,
    /// The tasks that make per-worker values.
    making: Vec<AbortHandle>,
    /// The signatures of the functions of each worker, by function name.
    functions: BTreeMap<TaskId, BTreeMap<String, String>>,
    /// The number of fetches that wait for each call.
    fetches: BTreeMap<u64, usize>,
    /// Whether the coordinator is dropped, or its client has ended: nothing begins any more.
    pub(super) is_given_up: bool,
}

/// A fetch that waits for a call.
pub(crate) struct PendingFetch {
    coordinator: Arc<CoordinatorCore>,
    number: u64,
}

impl Drop for PendingFetch {
    fn drop(&mut self) {
        let fetches = &mut self.coordinator.lock().fetches;
        if let Entry::Occupied(mut fetch) = fetches.entry(self.number) {
            *fetch.get_mut() -= 1;
            if *fetch.get() == 0 {
                fetch.remove();
            }
        }
    }
}

impl CoordinatorCore {
    pub(super) fn new(
        state: CoordinatorState,
        client: Arc<FunctionClient>,
        named: Option<Named>,
    ) -> CoordinatorCore {
        let state = Mutex::new(state);
        let changed = Notify::new();
        let timer = Timer::default();
        CoordinatorCore { state, client, named, changed, timer }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, CoordinatorState> {
        // Each change is one input of the dispatch, which keeps its invariants.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the tasks that probe absent workers and that wake the dispatch.
    pub(super) fn start_tasks(self: &Arc<Self>) -> Vec<AbortHandle> {
        let workers = self.lock().workers.clone();
        let probe = |(index, (_, link)): (usize, (TaskId, LinkId))| {
            self.client.core().spawn(self.clone().probe(WorkerId(index as u32), link))
        };
        let mut tasks: Vec<_> = workers.into_iter().enumerate().map(probe).collect();
        tasks.push(self.client.core().spawn(self.clone().run_timer()));
        tasks
    }

    /// Cancels all calls, and releases the per-worker values. No call begins afterwards: a task
    /// that makes a per-worker value or probes a worker may still report to the dispatch.
    pub(super) fn give_up(&self) {
        let mut state = self.lock();
        state.is_given_up = true;
        state.attempts.drain().for_each(|(_, attempt)| attempt.abort());
        state.making.drain(..).for_each(|making| making.abort());
        // Without its sender the value of a call has ended. Calls hold outputs as well as workers
        // do, and these are released without the lock.
        let calls = std::mem::take(&mut state.calls);
        let made = std::mem::take(&mut state.made);
        drop(state);
        drop((calls, made));
        self.changed.notify_waiters();
    }

    /// Begins a fetch of the value of a call.
    pub(crate) fn begin_fetch(self: Arc<Self>, number: u64) -> PendingFetch {
        *self.lock().fetches.entry(number).or_default() += 1;
        // There may be an error already.
        self.handle(DispatchInput::Tick);
        PendingFetch { coordinator: self, number }
    }

    pub(super) fn handle(self: &Arc<Self>, input: DispatchInput<ServiceError>) {
        let mut state = self.lock();
        if state.is_given_up {
            return;
        }
        let now = Instant::now();
        state.dispatch.handle(now, input);
        // After an error nothing begins before the program looks. One that fetches looks at what
        // would never begin.
        if state.dispatch.await_look(state.fetches.keys()) {
            state.dispatch.handle(now, DispatchInput::Look);
        }
        let mut ended = false;
        while let Some(output) = state.dispatch.poll_output() {
            match output {
                DispatchOutput::Start { attempt, settled } => {
                    self.start(&mut state, attempt, settled);
                }
                DispatchOutput::Cancel { attempt } => {
                    if let Some(running) = state.attempts.remove(&attempt) {
                        running.abort();
                    }
                }
                DispatchOutput::Make { worker, resource } => {
                    self.make(&mut state, worker, resource);
                }
                DispatchOutput::Ended { number, ending } => {
                    ended = true;
                    state.end(number, ending);
                }
            }
        }
        self.timer.set(state.dispatch.wake_at());
        drop(state);
        if ended {
            self.changed.notify_waiters();
        }
    }

    fn start(self: &Arc<Self>, state: &mut CoordinatorState, attempt: Attempt, settled: u64) {
        let Attempt { number, worker, .. } = attempt;
        let (task, link) = &state.workers[worker.0 as usize];
        let link = *link;
        let Some(OpenCall { call, digest, .. }) = state.calls.get(&number) else { return };
        let timeout = call.timeout.unwrap_or(self.client.timeout());
        let made = |resource| state.made.get(&(worker, resource)).map(Kept::id);
        let of = |named: &Named| named.opened.effect(number, EffectNumber(settled), *digest);
        let scheduled = self.named.as_ref().map(of);
        let order = decisions::attempt_order(&call.on_worker(task, made), scheduled);
        let shared = self.clone();
        let running = self.client.core().spawn(async move {
            let reply = match order {
                Err(error) => Err(error),
                Ok(order) => {
                    let deadline = Instant::now().checked_add(timeout);
                    shared.client.core().call(link, order, deadline).1.await
                }
            };
            shared.attempt_ended(attempt, reply);
        });
        state.attempts.insert(attempt, running);
    }

    /// Probes a worker until it is present.
    async fn probe(self: Arc<Self>, worker: WorkerId, link: LinkId) {
        loop {
            if self.client.core().is_over() {
                return self.give_up();
            }
            if !self.lock().dispatch.is_up(worker) {
                let deadline = Instant::now() + PROBE_TIMEOUT;
                let described = describe(self.client.core(), link, Some(deadline)).await;
                if let Ok((task, description)) = described {
                    self.lock().functions.insert(task, description.functions);
                    self.handle(DispatchInput::WorkerUp { worker });
                }
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    /// Ticks the dispatch at the times that it asks for.
    async fn run_timer(self: Arc<Self>) {
        let tick = || {
            self.handle(DispatchInput::Tick);
            self.lock().dispatch.wake_at()
        };
        self.timer.run(tick).await;
    }

    /// Begins the call that makes a per-worker value on a worker.
    fn make(
        self: &Arc<Self>,
        state: &mut CoordinatorState,
        worker: WorkerId,
        resource: ResourceId,
    ) {
        let (task, _) = state.workers[worker.0 as usize].clone();
        let Some(call) = state.makers.get(resource.0 as usize).cloned() else { return };
        let device: DeviceSpec = call.device.parse().unwrap_or_default();
        let device = device.merge(&DeviceSpec::of_task(&task)).to_string();
        let keeping = self.client.keep(call.on(&device).ends_with_connection());
        let shared = self.clone();
        let making = self.client.core().spawn(async move {
            let kept = match keeping {
                Ok(keeping) => keeping.await.map(|(kept, _)| kept),
                Err(error) => Err(error),
            };
            let end = decisions::making_end(worker, resource, kept.as_ref().err());
            let mut state = shared.lock();
            let old = match kept {
                kept if state.is_given_up => kept.ok(),
                Ok(kept) => state.made.insert((worker, resource), kept),
                Err(_) => state.made.remove(&(worker, resource)),
            };
            drop(state);
            drop(old);
            shared.handle(end);
        });
        state.making.retain(|making| !making.is_finished());
        state.making.push(making);
    }

    fn attempt_ended(self: &Arc<Self>, attempt: Attempt, reply: Result<CallReply, ServiceError>) {
        let mut state = self.lock();
        if state.attempts.remove(&attempt).is_none() {
            return;
        }
        let uses_kept =
            state.calls.get(&attempt.number).is_some_and(|it| !it.call.resources().is_empty());
        let end = decisions::attempt_end(reply.as_ref().err(), uses_kept);
        let result = reply.map(|reply| match reply {
            CallReply::Done(values) => Outputs::from(values),
            _ => Outputs::new(),
        });
        state.results.insert(attempt.number, result);
        drop(state);
        self.handle(DispatchInput::AttemptEnded { attempt, end });
        // Of a call that goes on, the result is not wanted.
        self.lock().results.remove(&attempt.number);
    }
}

impl CoordinatorState {
    pub(super) fn new(
        dispatch: Dispatch<ServiceError>,
        workers: Vec<(TaskId, LinkId)>,
        digests: Option<CallDigests>,
    ) -> CoordinatorState {
        CoordinatorState {
            dispatch,
            workers,
            calls: BTreeMap::new(),
            digests,
            differ: None,
            results: HashMap::new(),
            attempts: HashMap::new(),
            makers: Vec::new(),
            made: HashMap::new(),
            making: Vec::new(),
            functions: BTreeMap::new(),
            fetches: BTreeMap::new(),
            is_given_up: false,
        }
    }

    /// Returns the digest of the next call, which has this number.
    pub(super) fn digest(&mut self, number: u64, call: &Call) -> Result<u64, ServiceError> {
        let Some(digests) = &mut self.digests else { return Ok(0) };
        // Another thread may have found the difference since this one was told of none.
        if let Some(differs) = &self.differ {
            return Err(differs.clone());
        }
        let digest = digests.next(number, call);
        if let Err(differs) = &digest {
            self.differ = Some(differs.clone());
        }
        digest
    }

    /// Checks that the workers have the same function for a call.
    pub(super) fn check_signature(&self, call: &Call) -> Result<(), ServiceError> {
        let mut with = self.functions.iter().filter_map(|(task, functions)| {
            functions.get(&call.function).map(|signature| (task, signature))
        });
        let Some((left, left_signature)) = with.next() else { return Ok(()) };
        match with.find(|(_, signature)| *signature != left_signature) {
            None => Ok(()),
            Some((right, right_signature)) => Err(ServiceError::SignaturesDiffer {
                doing: call.doing(),
                left: left.to_string(),
                left_signature: left_signature.clone(),
                right: right.to_string(),
                right_signature: right_signature.clone(),
            }),
        }
    }

    fn end(&mut self, number: u64, ending: CallEnding) {
        let Some(OpenCall { call, value, .. }) = self.calls.remove(&number) else { return };
        let cancelled = || Err(ServiceError::Cancelled { doing: call.doing() });
        let result = match ending {
            CallEnding::Cancelled => cancelled(),
            CallEnding::Done | CallEnding::Failed => {
                self.results.remove(&number).unwrap_or_else(cancelled)
            }
            CallEnding::WithoutResource { resource } => {
                self.dispatch.resource_error(resource).cloned().map_or_else(cancelled, Err)
            }
        };
        // Nobody may hold the value.
        let _ = value.send(Some(result));
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::ShardId;
    use pushpull_worker::simulation::recorded_digests;

    use super::*;
    use crate::coordinator::CoordinatorConfig;

    #[test]
    fn a_difference_outlasts_the_calls_behind_it() {
        let recorded = recorded_digests(ShardId::default(), Some(1), (1, 1));
        let digests = CallDigests::new("trainer", recorded);
        let dispatch = decisions::dispatch(&CoordinatorConfig::new(), 0, None);
        let mut state = CoordinatorState::new(dispatch, Vec::new(), Some(digests));
        let call = Call::new("train");
        assert!(state.digest(1, &call).is_err(), "the servers know another first call");
        assert!(state.digest(2, &call).is_err(), "another thread may be about to schedule it");
        assert!(matches!(state.differ, Some(ServiceError::CallsDiffer { .. })));
    }
}
