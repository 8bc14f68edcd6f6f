//! [`Coordinator`]: schedules calls on the workers of a cluster.

pub(crate) mod call_digests;
mod config;
pub(crate) mod decisions;
mod shared;

use std::fmt;
use std::sync::Arc;

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::TaskId;
use pushpull_worker::Reader;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use self::call_digests::CallDigests;
use self::shared::{CoordinatorState, Named, OpenCall};
use super::call::Call;
use super::dispatch::{DispatchInput, ResourceId, WorkerId};
use super::error::ServiceError;
use super::function_client::FunctionClient;
use super::per_worker::PerWorker;
use super::remote_value::RemoteValue;

pub use self::config::CoordinatorConfig;
pub(crate) use self::shared::CoordinatorCore;

/// Schedules calls on the workers of a cluster: the next call runs on the next worker that is free.
///
/// A call moves to another worker if its worker is lost. The coordinator uses workers as they
/// appear, and does not wait for lost ones.
///
/// **The first error** of a function that is final cancels every call that has not begun. The next
/// [`Coordinator::join`], [`Coordinator::done`] or [`Coordinator::schedule`] returns it, once the
/// calls under way have ended. After that the coordinator may be used again.
///
/// **Effects count once.** With a name ([`Coordinator::resume`]), a gradient that a function pushes
/// with [`super::Invocation::push`] carries the number of its call. Every shard counts a number
/// once, however often the call is executed. This also holds for a coordinator that was killed and
/// resumes. Its program schedules the same calls in the same order, and those that have ended are
/// not executed again.
///
/// Dropping the coordinator cancels its calls.
#[doc(alias = "ClusterCoordinator")]
pub struct Coordinator {
    shared: Arc<CoordinatorCore>,
    client: Arc<FunctionClient>,
    /// The tasks that probe absent workers and that wake the dispatch.
    tasks: Vec<AbortHandle>,
}

impl Coordinator {
    /// Starts a coordinator without a name. Each execution of a call has its effects. The client
    /// may have other users.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] if the cluster lacks the job.
    pub fn start(
        client: impl Into<Arc<FunctionClient>>,
        config: CoordinatorConfig,
    ) -> Result<Coordinator, ServiceError> {
        Coordinator::of_client(client.into(), config, None)
    }

    /// Opens a coordinator with a name, for the first time or again. It asks the parameter servers
    /// of the cluster which of its calls have ended, and fences an earlier coordinator of the name.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] if the cluster lacks the job, or the device filters of the client
    /// exclude a task that it needs. [`ServiceError::Servers`] if the servers cannot be reached or
    /// refuse the name; they remember 64 names.
    pub async fn resume(
        client: impl Into<Arc<FunctionClient>>,
        name: &str,
        config: CoordinatorConfig,
    ) -> Result<Coordinator, ServiceError> {
        let client = client.into();
        let failed = |source| {
            let doing = format!("resume coordinator {name:?}");
            let source = Box::new(source);
            ServiceError::Servers { doing, source }
        };
        client.check_servers(&format!("resume coordinator {name:?}"))?;
        let task = TaskId::new("coordinator", 0);
        let reader = Reader::connect(client.worker_config(task)).await;
        let reader = reader.map_err(failed)?;
        let opened = reader.open_coordinator(name).await.map_err(failed)?;
        let named = Named { opened, reader, name: name.to_owned() };
        Coordinator::of_client(client, config, Some(named))
    }

    fn of_client(
        client: Arc<FunctionClient>,
        config: CoordinatorConfig,
        named: Option<Named>,
    ) -> Result<Coordinator, ServiceError> {
        let no_task = |reason| ServiceError::NoTask { doing: "coordinate".to_owned(), reason };
        let indices = client.cluster().task_indices(&config.job);
        let indices = indices.map_err(|error| no_task(error.to_string()))?;
        let tasks = indices.into_iter().map(|index| TaskId::new(&config.job, index));
        let workers = tasks.filter(|task| client.uses(task)).map(|task| {
            let link = client.link(&task).map_err(no_task)?;
            Ok((task, link))
        });
        let workers: Vec<_> = workers.collect::<Result<_, ServiceError>>()?;
        if workers.is_empty() {
            let reason = format!("there is no task of the job {:?} that it may call", config.job);
            return Err(no_task(reason));
        }
        let opened = named.as_ref().map(|named| &named.opened);
        let digests = named.as_ref().map(|it| CallDigests::new(&it.name, it.opened.digests));
        let dispatch = decisions::dispatch(&config, workers.len(), opened);
        let state = CoordinatorState::new(dispatch, workers, digests);
        let shared = Arc::new(CoordinatorCore::new(state, client.clone(), named));
        let tasks = shared.start_tasks();
        Ok(Coordinator { shared, client, tasks })
    }

    /// Returns the client by which the coordinator calls.
    pub fn client(&self) -> &FunctionClient {
        &self.client
    }

    /// Schedules a call, and waits while the queue is full. The calls of a coordinator are numbered
    /// from 1 in this order. A call that ended in an earlier run is not executed again, if it is
    /// the same call. The servers keep a digest of the functions and inputs of the calls that have
    /// counted.
    ///
    /// A task in [`Call::on`] pins the call: it waits for that worker, if need be.
    ///
    /// # Errors
    /// The first error of an earlier call, once; [`ServiceError::NoTask`] if the call is pinned to
    /// no worker; [`ServiceError::SignaturesDiffer`] if two workers have different functions of
    /// this name; [`ServiceError::CallsDiffer`] if the calls are not those of the earlier run, from
    /// then on; [`ServiceError::Invalid`].
    pub async fn schedule(&self, call: Call) -> Result<RemoteValue, ServiceError> {
        call.without_per_worker().order(false)?;
        let pinned = self.pinned(&call)?;
        self.shared.lock().check_signature(&call)?;
        loop {
            let changed = self.shared.changed.notified();
            self.raise()?;
            if let Some(value) = self.try_schedule(&call, pinned)? {
                return Ok(value);
            }
            changed.await;
        }
    }

    fn pinned(&self, call: &Call) -> Result<Option<WorkerId>, ServiceError> {
        let no_task = |reason: String| ServiceError::NoTask { doing: call.doing(), reason };
        let device: DeviceSpec =
            call.device.parse().map_err(|error| no_task(format!("{error}")))?;
        let Some(index) = device.task() else { return Ok(None) };
        let state = self.shared.lock();
        let found = state.workers.iter().position(|(task, _)| {
            task.index == index && device.job().is_none_or(|job| *job == *task.job)
        });
        let found = found.ok_or_else(|| no_task(format!("{device} is no worker")))?;
        Ok(Some(WorkerId(found as u32)))
    }

    fn try_schedule(
        &self,
        call: &Call,
        pinned: Option<WorkerId>,
    ) -> Result<Option<RemoteValue>, ServiceError> {
        let mut state = self.shared.lock();
        if state.is_given_up {
            return Err(ended());
        }
        if !state.dispatch.has_room() {
            return Ok(None);
        }
        let number = state.dispatch.number_call();
        let digest = state.digest(number, call)?;
        if state.dispatch.has_ended(number) {
            let ended = Err(ServiceError::EndedBefore { number });
            return Ok(Some(RemoteValue::ended(number, ended)));
        }
        let (sender, receiver) = watch::channel(None);
        state.calls.insert(number, OpenCall { call: call.clone(), digest, value: sender });
        drop(state);
        let resources = call.resources();
        self.shared.handle(DispatchInput::Schedule { number, pinned, resources });
        Ok(Some(RemoteValue::new(number, receiver, Arc::downgrade(&self.shared))))
    }

    /// Makes a per-worker value: each worker calls a function whose outputs stay there, now and
    /// whenever the worker comes back. [`Call::per_worker`] gives them to a call, which runs only
    /// on workers that have them.
    ///
    /// A worker on which the function fails runs no such call until it restarts. A call for which
    /// no worker is left has the error of the function.
    ///
    /// # Errors
    /// [`ServiceError::Invalid`].
    #[doc(alias = "create_per_worker_dataset")]
    pub fn per_worker(&self, call: Call) -> Result<PerWorker, ServiceError> {
        call.order(true)?;
        let resource = {
            let mut state = self.shared.lock();
            state.makers.push(call);
            ResourceId(state.makers.len() as u32 - 1)
        };
        self.shared.handle(DispatchInput::Resource { resource });
        Ok(PerWorker::new(resource))
    }

    /// Waits until every scheduled call has ended.
    ///
    /// # Errors
    /// The first error of a call that is final, once. Every other call has ended by then.
    pub async fn join(&self) -> Result<(), ServiceError> {
        loop {
            let changed = self.shared.changed.notified();
            self.raise()?;
            if self.shared.lock().dispatch.is_idle() {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Whether every scheduled call has ended. Does not wait.
    ///
    /// # Errors
    /// The errors of [`Coordinator::join`].
    pub fn done(&self) -> Result<bool, ServiceError> {
        self.raise()?;
        Ok(self.shared.lock().dispatch.is_idle())
    }

    /// Returns the number up to which all calls have ended. A program that resumes may begin with
    /// the next call, if it tells [`Coordinator::skip_to`].
    pub fn settled(&self) -> u64 {
        self.shared.lock().dispatch.settled()
    }

    /// Gives the next call this number, if it is above the numbers of earlier calls. A program that
    /// knows the earlier calls need not schedule them again.
    pub fn skip_to(&self, number: u64) {
        self.shared.lock().dispatch.skip_to(number);
    }

    /// Ends the coordinator for good: the parameter servers forget its name and its calls. Waits
    /// for the calls under way.
    ///
    /// # Errors
    /// The errors of [`Coordinator::join`], and [`ServiceError::Servers`].
    pub async fn close(self) -> Result<(), ServiceError> {
        self.join().await?;
        let Some(Named { opened, reader, name }) = &self.shared.named else { return Ok(()) };
        reader.close_coordinator(name, opened.epoch).await.map_err(|source| {
            let doing = format!("close coordinator {name:?}");
            let source = Box::new(source);
            ServiceError::Servers { doing, source }
        })
    }

    /// Reports a check of the program to the dispatch, and returns the error that the program is to
    /// get.
    fn raise(&self) -> Result<(), ServiceError> {
        if self.client.core().is_over() {
            return Err(ended());
        }
        self.shared.handle(DispatchInput::Look);
        let mut state = self.shared.lock();
        if let Some(differ) = &state.differ {
            return Err(differ.clone());
        }
        match state.dispatch.take_error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Returns the error after the end of the client.
fn ended() -> ServiceError {
    ServiceError::Ended { doing: "coordinate".to_owned() }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.shared.give_up();
    }
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.lock();
        f.debug_struct("Coordinator")
            .field("settled", &state.dispatch.settled())
            .field("calls", &state.calls.len())
            .finish_non_exhaustive()
    }
}
