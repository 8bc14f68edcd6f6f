//! A coordinator: schedules calls on the workers of a cluster.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::{CallNumber, TaskId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::limits::CALL_WINDOW;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::block_on::block_on;
use super::call::Call;
use super::call_session::{CallReply, LinkId};
use super::client::{Client, describe, order_of};
use super::dispatch::{
    Attempt, AttemptEnd, CallEnding, Dispatch, DispatchConfig, DispatchInput, DispatchOutput,
    ResourceId, WorkerId,
};
use super::error::ServiceError;
use super::kept::Kept;
use super::outputs::Outputs;
use super::per_worker::PerWorker;
use super::remote_value::{RemoteValue, ValueState};
use crate::calls::OpenedCalls;
use crate::config::WorkerConfig;
use crate::reader::Reader;

/// How long one look for an absent worker takes at most.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The settings of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    job: String,
    queue_max: usize,
    calls_per_worker: usize,
    retry_for: Duration,
    probe_interval: Duration,
}

impl CoordinatorConfig {
    /// A coordinator of the tasks of the job `worker`.
    pub fn new() -> CoordinatorConfig {
        CoordinatorConfig {
            job: "worker".to_owned(),
            queue_max: 262_144,
            calls_per_worker: 1,
            retry_for: Duration::from_secs(60),
            probe_interval: Duration::from_millis(100),
        }
    }

    /// The job whose tasks run the calls. Default `worker`.
    pub fn job(self, job: &str) -> CoordinatorConfig {
        CoordinatorConfig { job: job.to_owned(), ..self }
    }

    /// How many calls may be scheduled and not have ended. [`Coordinator::schedule`] waits beyond
    /// that. Default 262,144.
    pub fn queue_max(self, calls: usize) -> CoordinatorConfig {
        CoordinatorConfig { queue_max: calls.max(1), ..self }
    }

    /// How many calls one worker runs at once. Default 1.
    pub fn calls_per_worker(self, calls: usize) -> CoordinatorConfig {
        CoordinatorConfig { calls_per_worker: calls.max(1), ..self }
    }

    /// How long a call is tried again if its function says that another execution may succeed, for
    /// example because a parameter server was lost. The loss of a worker does not count. Default
    /// 60 s.
    pub fn retry_for(self, time: Duration) -> CoordinatorConfig {
        CoordinatorConfig { retry_for: time, ..self }
    }
}

impl Default for CoordinatorConfig {
    fn default() -> CoordinatorConfig {
        CoordinatorConfig::new()
    }
}

/// Schedules calls on the workers of a cluster, whichever is free.
///
/// A call goes elsewhere if its worker is lost. The workers of the cluster are used as they appear,
/// and one that is lost is not waited for.
///
/// **The first error** of a function that is final cancels every call that has not begun. The next
/// [`Coordinator::join`], [`Coordinator::done`] or [`Coordinator::schedule`] returns it, once the
/// calls under way have ended. After that the coordinator may be used again.
///
/// **Effects count once.** With a name ([`Coordinator::resume`]), a gradient that a function pushes
/// with [`super::Invocation::push`] carries the number of its call. Every shard counts a number once,
/// however often the call is executed, also by a coordinator that was killed and resumes: its program
/// schedules the same calls in the same order, and those that have ended are not executed again.
///
/// Dropping the coordinator cancels its calls.
#[doc(alias = "ClusterCoordinator")]
pub struct Coordinator {
    shared: Arc<Shared>,
    client: Arc<Client>,
    timer: AbortHandle,
}

/// What the tasks of a coordinator share.
struct Shared {
    state: Mutex<State>,
    client: Arc<Client>,
    /// The calls that the shards count, if the coordinator has a name.
    opened: Option<OpenedCalls>,
    /// The session by which they were opened.
    reader: Option<(Reader, String)>,
    /// How often absent workers are looked for.
    probe_interval: Duration,
    /// Notified when calls have ended.
    changed: Notify,
    /// Notified when the time of the next tick is earlier.
    rearm: Notify,
}

struct State {
    dispatch: Dispatch<ServiceError>,
    workers: Vec<(TaskId, LinkId)>,
    calls: BTreeMap<u64, (Call, watch::Sender<ValueState>)>,
    /// The outputs and errors of attempts whose calls are about to end.
    results: HashMap<u64, Result<Outputs, ServiceError>>,
    attempts: HashMap<Attempt, AbortHandle>,
    /// The calls that make per-worker values, by their numbers.
    makers: Vec<Call>,
    /// What workers have of them.
    made: HashMap<(WorkerId, ResourceId), Kept>,
    /// The signatures of the functions of workers, with the first task that has each.
    signatures: BTreeMap<String, (TaskId, String)>,
    /// The functions that are not the same on all workers: another task, and its signature.
    differing: BTreeMap<String, (TaskId, String)>,
    /// The tasks that look for workers.
    probes: Vec<AbortHandle>,
    /// The workers that are not used any more.
    removed: BTreeSet<WorkerId>,
    next_number: u64,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    // Each change is one input of the dispatch, which keeps its invariants.
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Coordinator {
    /// A coordinator without a name. The effects of its calls count once for each execution.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] if the cluster lacks the job.
    pub fn new(client: Client, config: CoordinatorConfig) -> Result<Coordinator, ServiceError> {
        Coordinator::start(client, config, None)
    }

    /// A coordinator with a name, for the first time or again. It asks the parameter servers of the
    /// cluster which of its calls have ended, and shuts out an earlier coordinator of the name.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] if the cluster lacks the job, [`ServiceError::Servers`] if the servers
    /// cannot be reached or refuse the name; they remember 64.
    pub async fn resume(
        client: Client,
        name: &str,
        config: CoordinatorConfig,
    ) -> Result<Coordinator, ServiceError> {
        let failed = |source| {
            let (doing, source) = (format!("resume coordinator {name:?}"), Box::new(source));
            ServiceError::Servers { doing, source }
        };
        let task = TaskId::new("coordinator", 0);
        let reader = Reader::connect(WorkerConfig::new(client.cluster(), task)).await;
        let reader = reader.map_err(failed)?;
        let opened = reader.open_calls(name).await.map_err(failed)?;
        Coordinator::start(client, config, Some((opened, reader, name.to_owned())))
    }

    fn start(
        client: Client,
        config: CoordinatorConfig,
        named: Option<(OpenedCalls, Reader, String)>,
    ) -> Result<Coordinator, ServiceError> {
        let client = Arc::new(client);
        let cluster = client.cluster();
        let no_task = |reason| ServiceError::NoTask { doing: "coordinate".to_owned(), reason };
        let indices = cluster.task_indices(&config.job).map_err(|e| no_task(e.to_string()))?;
        let mut workers = Vec::new();
        for index in indices {
            let task = TaskId::new(&config.job, index);
            let link = client.link(&task).map_err(no_task)?;
            workers.push((task, link));
        }
        let (settled, also) = match &named {
            None => (0, Vec::new()),
            Some((opened, ..)) => {
                let (settled, newest) = (opened.window.settled().0, opened.window.newest());
                let unsettled: Vec<u64> = opened.window.unsettled(newest).map(|n| n.0).collect();
                let also = (settled + 1..=newest.0).filter(|number| !unsettled.contains(number));
                (settled, also.collect())
            }
        };
        let dispatch = DispatchConfig {
            queue_max: config.queue_max,
            calls_per_worker: config.calls_per_worker,
            window: CALL_WINDOW,
            retry_for: config.retry_for,
        };
        let state = State {
            dispatch: Dispatch::new(dispatch, settled, also),
            workers,
            calls: BTreeMap::new(),
            results: HashMap::new(),
            attempts: HashMap::new(),
            makers: Vec::new(),
            made: HashMap::new(),
            signatures: BTreeMap::new(),
            differing: BTreeMap::new(),
            probes: Vec::new(),
            removed: BTreeSet::new(),
            next_number: 1,
        };
        let (opened, reader) = match named {
            Some((opened, reader, name)) => (Some(opened), Some((reader, name))),
            None => (None, None),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            client: client.clone(),
            opened,
            reader,
            probe_interval: config.probe_interval,
            changed: Notify::new(),
            rearm: Notify::new(),
        });
        let workers = lock(&shared).workers.clone();
        for (index, (_, link)) in workers.into_iter().enumerate() {
            shared.probe(WorkerId(index as u32), link);
        }
        let timer = client.core().spawn(run_timer(shared.clone()));
        Ok(Coordinator { shared, client, timer })
    }

    /// The client by which the coordinator calls.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Schedules a call, and waits while the queue is full. The calls of a coordinator are numbered
    /// from 1 in this order. One that had ended in an earlier run is not executed.
    ///
    /// A task in [`Call::on`] pins the call: it waits for that worker, if need be.
    ///
    /// # Errors
    /// The first error of an earlier call, once; [`ServiceError::NoTask`] if the call is pinned to no
    /// worker; [`ServiceError::SignaturesDiffer`] if two workers have different functions of this name;
    /// [`ServiceError::Invalid`].
    pub async fn schedule(&self, call: Call) -> Result<RemoteValue, ServiceError> {
        order_of(&call.without_per_worker(), false)?;
        let pinned = self.pinned(&call)?;
        lock(&self.shared).check_signature(&call)?;
        loop {
            let changed = self.shared.changed.notified();
            self.raise()?;
            if let Some(value) = self.try_schedule(&call, pinned) {
                return Ok(value);
            }
            changed.await;
        }
    }

    /// As [`Coordinator::schedule`], for threads without an async runtime.
    ///
    /// # Errors
    /// As [`Coordinator::schedule`].
    pub fn schedule_blocking(&self, call: Call) -> Result<RemoteValue, ServiceError> {
        block_on(self.schedule(call))
    }

    fn pinned(&self, call: &Call) -> Result<Option<WorkerId>, ServiceError> {
        let no_task = |reason: String| ServiceError::NoTask { doing: call.doing(), reason };
        let device: pushpull_common::device::DeviceSpec =
            call.device.parse().map_err(|error| no_task(format!("{error}")))?;
        let Some(index) = device.task() else { return Ok(None) };
        let state = lock(&self.shared);
        let is_it = |(task, _): &(TaskId, LinkId)| {
            task.index == index && device.job().is_none_or(|job| *job == *task.job)
        };
        let found = state.workers.iter().position(is_it);
        let found = found.ok_or_else(|| no_task(format!("{device} is no worker")))?;
        Ok(Some(WorkerId(found as u32)))
    }

    fn try_schedule(&self, call: &Call, pinned: Option<WorkerId>) -> Option<RemoteValue> {
        let mut state = lock(&self.shared);
        if !state.dispatch.has_room() {
            return None;
        }
        let number = state.next_number;
        state.next_number += 1;
        if state.dispatch.has_ended(number) {
            let ended = Err(ServiceError::EndedBefore { number });
            return Some(RemoteValue::new(number, watch::channel(Some(ended)).1));
        }
        let (sender, receiver) = watch::channel(None);
        state.calls.insert(number, (call.clone(), sender));
        drop(state);
        let resources = call.resources();
        self.shared.handle(DispatchInput::Schedule { number, pinned, resources });
        Some(RemoteValue::new(number, receiver))
    }

    /// Has each worker call a function whose outputs stay with it, now and whenever it comes back.
    /// Calls may be given them with [`Call::per_worker`], and run only where they are there.
    ///
    /// A worker on which the function fails runs no such call.
    ///
    /// # Errors
    /// [`ServiceError::Invalid`].
    #[doc(alias = "create_per_worker_dataset")]
    pub fn per_worker(&self, call: Call) -> Result<PerWorker, ServiceError> {
        order_of(&call, true)?;
        let resource = {
            let mut state = lock(&self.shared);
            state.makers.push(call);
            ResourceId(state.makers.len() as u32 - 1)
        };
        self.shared.handle(DispatchInput::Resource { resource });
        Ok(PerWorker::new(resource))
    }

    /// Uses another task of the cluster as a worker, as soon as it is there.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] if the cluster lacks it.
    pub fn add_worker(&self, task: &TaskId) -> Result<(), ServiceError> {
        let no_task = |reason| ServiceError::NoTask { doing: "add a worker".to_owned(), reason };
        let link = self.client.link(task).map_err(no_task)?;
        let worker = {
            let mut state = lock(&self.shared);
            let known = state.workers.iter().position(|(other, _)| other == task);
            let worker = known.unwrap_or(state.workers.len());
            if known.is_none() {
                state.workers.push((task.clone(), link));
            }
            let worker = WorkerId(worker as u32);
            if known.is_some() && !state.removed.remove(&worker) {
                return Ok(());
            }
            worker
        };
        self.shared.probe(worker, link);
        Ok(())
    }

    /// Uses a worker no more. Its calls go elsewhere.
    pub fn remove_worker(&self, task: &TaskId) {
        let mut state = lock(&self.shared);
        let Some(worker) = state.workers.iter().position(|(other, _)| other == task) else {
            return;
        };
        let worker = WorkerId(worker as u32);
        state.removed.insert(worker);
        drop(state);
        self.shared.handle(DispatchInput::WorkerLost { worker });
    }

    /// Waits until every scheduled call has ended.
    ///
    /// # Errors
    /// The first error of a call that is final, once. Every other call has ended by then.
    pub async fn join(&self) -> Result<(), ServiceError> {
        loop {
            let changed = self.shared.changed.notified();
            self.raise()?;
            if lock(&self.shared).dispatch.is_idle() {
                return Ok(());
            }
            changed.await;
        }
    }

    /// As [`Coordinator::join`], for threads without an async runtime.
    ///
    /// # Errors
    /// As [`Coordinator::join`].
    pub fn join_blocking(&self) -> Result<(), ServiceError> {
        block_on(self.join())
    }

    /// Whether every scheduled call has ended. Does not wait.
    ///
    /// # Errors
    /// As [`Coordinator::join`].
    pub fn done(&self) -> Result<bool, ServiceError> {
        self.raise()?;
        Ok(lock(&self.shared).dispatch.is_idle())
    }

    /// The number up to which all calls have ended. A program that resumes may schedule the calls
    /// after it, if it also tells [`Coordinator::skip_to`].
    pub fn settled(&self) -> u64 {
        lock(&self.shared).dispatch.settled()
    }

    /// Lets the next call have this number, if it is above those of earlier calls: a program that
    /// knows what came before need not schedule it again.
    pub fn skip_to(&self, number: u64) {
        let mut state = lock(&self.shared);
        state.next_number = state.next_number.max(number);
    }

    /// Ends the coordinator for good: the parameter servers forget its name and its calls. Waits for
    /// the calls under way.
    ///
    /// # Errors
    /// As [`Coordinator::join`], and [`ServiceError::Servers`].
    pub async fn close(self) -> Result<(), ServiceError> {
        self.join().await?;
        let (Some(opened), Some((reader, name))) = (&self.shared.opened, &self.shared.reader)
        else {
            return Ok(());
        };
        reader.close_calls(name, opened.epoch).await.map_err(|source| {
            let (doing, source) = (format!("close coordinator {name:?}"), Box::new(source));
            ServiceError::Servers { doing, source }
        })
    }

    /// Lets the program look: returns the error that it is to get.
    fn raise(&self) -> Result<(), ServiceError> {
        self.shared.handle(DispatchInput::Look);
        match lock(&self.shared).dispatch.take_error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.timer.abort();
        let mut state = lock(&self.shared);
        for (_, attempt) in state.attempts.drain() {
            attempt.abort();
        }
        for probe in state.probes.drain(..) {
            probe.abort();
        }
        // The outputs that stay on workers are released without the lock.
        let made = std::mem::take(&mut state.made);
        drop(state);
        drop(made);
    }
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.shared);
        f.debug_struct("Coordinator")
            .field("settled", &state.dispatch.settled())
            .field("calls", &state.calls.len())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn handle(self: &Arc<Self>, input: DispatchInput<ServiceError>) {
        let mut state = lock(self);
        let before = state.dispatch.wake_at();
        state.dispatch.handle(Instant::now(), input);
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
        if state.dispatch.wake_at().is_some_and(|at| before.is_none_or(|before| at < before)) {
            self.rearm.notify_one();
        }
        drop(state);
        if ended {
            self.changed.notify_waiters();
        }
    }

    fn start(self: &Arc<Self>, state: &mut State, attempt: Attempt, settled: u64) {
        let Attempt { number, worker, .. } = attempt;
        let (task, link) = state.workers[worker.0 as usize].clone();
        let Some((call, _)) = state.calls.get(&number) else { return };
        let timeout = call.timeout.unwrap_or(self.client.timeout());
        let made = |resource| state.made.get(&(worker, resource)).cloned();
        let order = order_of(&call.on_worker(made), false).map(|mut order| {
            order.ends_with_connection = true;
            if order.device.is_empty() {
                order.device = task.to_string();
            }
            let opened = self.opened.as_ref();
            order.scheduled = opened.map(|opened| opened.call(number, CallNumber(settled)));
            order
        });
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

    /// Looks for a worker whenever it is not there.
    fn probe(self: &Arc<Self>, worker: WorkerId, link: LinkId) {
        let shared = self.clone();
        let probe = async move {
            loop {
                let (is_up, removed) = {
                    let state = lock(&shared);
                    (state.dispatch.is_up(worker), state.removed.contains(&worker))
                };
                if removed {
                    return;
                }
                if !is_up {
                    let deadline = Instant::now() + PROBE_TIMEOUT;
                    let described = describe(shared.client.core(), link, Some(deadline)).await;
                    if let Ok((task, description)) = described {
                        lock(&shared).learn_signatures(&task, description.functions);
                        shared.handle(DispatchInput::WorkerUp { worker });
                    }
                }
                tokio::time::sleep(shared.probe_interval).await;
            }
        };
        let probe = self.client.core().spawn(probe);
        let mut state = lock(self);
        state.probes.retain(|probe| !probe.is_finished());
        state.probes.push(probe);
    }

    /// Begins to make what a worker is to have of a per-worker value.
    fn make(self: &Arc<Self>, state: &mut State, worker: WorkerId, resource: ResourceId) {
        let (task, _) = state.workers[worker.0 as usize].clone();
        let Some(call) = state.makers.get(resource.0 as usize).cloned() else { return };
        let keeping = self.client.keep(call.on(&task.to_string()).ends_with_connection());
        let shared = self.clone();
        self.client.core().spawn(async move {
            let kept = match keeping {
                Ok(keeping) => keeping.await.map(|(kept, _)| kept),
                Err(error) => Err(error),
            };
            let made = kept.is_ok();
            let lost = kept.as_ref().is_err_and(|error| end_of(error) == AttemptEnd::Lost);
            let old = match kept {
                Ok(kept) => lock(&shared).made.insert((worker, resource), kept),
                Err(_) => lock(&shared).made.remove(&(worker, resource)),
            };
            drop(old);
            shared.handle(match lost {
                true => DispatchInput::WorkerLost { worker },
                false => DispatchInput::ResourceMade { worker, resource, made },
            });
        });
    }

    fn attempt_ended(self: &Arc<Self>, attempt: Attempt, reply: Result<CallReply, ServiceError>) {
        let mut state = lock(self);
        if state.attempts.remove(&attempt).is_none() {
            return;
        }
        let uses_kept =
            state.calls.get(&attempt.number).is_some_and(|(c, _)| !c.resources().is_empty());
        let end = match &reply {
            Ok(_) => AttemptEnd::Done,
            // The worker has restarted, and lacks what it had.
            Err(ServiceError::Refused { refusal: Refusal::NoOutput { .. }, .. }) if uses_kept => {
                AttemptEnd::Lost
            }
            Err(error) => end_of(error),
        };
        let result = reply.map(|reply| match reply {
            CallReply::Done(values) => Outputs::from(values),
            _ => Outputs::new(),
        });
        state.results.insert(attempt.number, result);
        drop(state);
        self.handle(DispatchInput::AttemptEnded { attempt, end });
        // Of a call that goes on, the result is not wanted.
        lock(self).results.remove(&attempt.number);
    }
}

impl State {
    /// Compares the functions of a worker with those of the others.
    fn learn_signatures(&mut self, task: &TaskId, functions: BTreeMap<String, String>) {
        for (name, signature) in functions {
            match self.signatures.get(&name) {
                Some((other, known)) if other != task && *known != signature => {
                    self.differing.insert(name, (task.clone(), signature));
                }
                Some((other, _)) if other != task => {
                    self.differing.retain(|differing, (at, _)| *differing != name || at != task);
                }
                _ => _ = self.signatures.insert(name, (task.clone(), signature)),
            }
        }
    }

    fn check_signature(&self, call: &Call) -> Result<(), ServiceError> {
        let known = self.signatures.get(&call.function).zip(self.differing.get(&call.function));
        let Some(((left, left_signature), (right, right_signature))) = known else { return Ok(()) };
        Err(ServiceError::SignaturesDiffer {
            doing: call.doing(),
            left: left.to_string(),
            left_signature: left_signature.clone(),
            right: right.to_string(),
            right_signature: right_signature.clone(),
        })
    }

    fn end(&mut self, number: u64, ending: CallEnding) {
        let Some((call, sender)) = self.calls.remove(&number) else { return };
        let cancelled = || Err(ServiceError::Cancelled { doing: call.doing() });
        let result = match ending {
            CallEnding::Cancelled => cancelled(),
            CallEnding::Done | CallEnding::Failed => {
                self.results.remove(&number).unwrap_or_else(cancelled)
            }
        };
        // Nobody may hold the value.
        let _ = sender.send(Some(result));
    }
}

/// Returns what an error of an attempt means for its call.
fn end_of(error: &ServiceError) -> AttemptEnd<ServiceError> {
    match error {
        ServiceError::Lost { .. }
        | ServiceError::Unavailable { .. }
        | ServiceError::Protocol { .. }
        // The coordinator has not cancelled it: the server is stopping.
        | ServiceError::Cancelled { .. }
        | ServiceError::Refused { refusal: Refusal::Stopping {}, .. } => AttemptEnd::Lost,
        ServiceError::Failed { retry: true, .. }
        | ServiceError::Refused {
            refusal: Refusal::Busy { .. } | Refusal::Unreturned { .. } | Refusal::NoOutput { .. },
            ..
        } => AttemptEnd::Retry(error.clone()),
        _ => AttemptEnd::Final(error.clone()),
    }
}

/// Wakes the dispatch whenever it asks for it.
async fn run_timer(shared: Arc<Shared>) {
    loop {
        let wake = lock(&shared).dispatch.wake_at();
        let sleep = async {
            match wake {
                Some(wake) => tokio::time::sleep_until(wake.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => shared.handle(DispatchInput::Tick),
            () = shared.rearm.notified() => {}
        }
    }
}
