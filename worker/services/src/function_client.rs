//! Calls functions on the tasks of a cluster.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::device::DeviceSpec;
use pushpull_common::error::Chain;
use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::variable::VariableSpec;
use pushpull_net::Connector;
use pushpull_worker::internal::{CALLER_SPIN, Leadership, SessionRunner, declare};
use pushpull_worker::{InitialValues, WorkerConfig};
use tokio::sync::oneshot;

use super::block_on::block_on_call;
use super::call::Call;
use super::call_session::{CallCommand, CallReply, CallSession, LinkId};
use super::description::Description;
use super::error::ServiceError;
use super::function_client_config::{FunctionClientConfig, TIMEOUT};
use super::kept::{Keeping, Kept};
use super::outputs::Outputs;
use super::running::{Running, RunningSet};
use super::runtime::client_core::{ClientCore, ReplyFuture};

/// Calls functions on the tasks of a cluster.
///
/// Any server is a target: the client learns the cluster from it, and connects to the other tasks
/// as it calls them. Several clients may call the same servers, which take turns between them.
///
/// A client owns a thread that keeps its connections; that of a function has the server's. Its
/// futures run on any executor; to cancel a call, drop its future.
#[derive(Debug)]
#[doc(alias = "tf.Session")]
pub struct FunctionClient {
    core: ClientCore,
    timeout: Duration,
    target: TaskId,
    /// The link to the target, if it was found by its address instead of its task.
    target_link: Option<LinkId>,
    /// The thread of the client. A client of a function has that of the server.
    thread: Option<ClientThread>,
}

impl FunctionClient {
    /// Connects to the first of the targets that answers. An address is the configuration of a
    /// client with this target.
    ///
    /// # Errors
    /// [`ServiceError::Unavailable`] if none does in time, [`ServiceError::Invalid`] for a target
    /// that is no address, and [`ServiceError::Thread`].
    pub async fn connect(
        config: impl Into<FunctionClientConfig>,
    ) -> Result<FunctionClient, ServiceError> {
        let config = config.into();
        for target in &config.targets {
            check_target(target)?;
        }
        let incarnation = Incarnation(RandomState::new().build_hasher().finish());
        let thread = ClientThread::start(incarnation, &config)?;
        let core = thread.core.clone();
        let deadline = Instant::now().checked_add(config.connect_timeout);
        let (link, target, description) = describe_first(&core, &config.targets, deadline).await?;
        core.name_link(link, target.clone());
        core.set_cluster(description.cluster);
        let timeout = config.timeout;
        let target_link = Some(link);
        let thread = Some(thread);
        Ok(FunctionClient { core, timeout, target, target_link, thread })
    }

    /// Returns the client of a function on this task, which ends at the deadline.
    pub(crate) fn of_function(
        core: ClientCore,
        task: TaskId,
        deadline: Option<Instant>,
    ) -> FunctionClient {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.unwrap_or(TIMEOUT);
        let target = task;
        FunctionClient { core, timeout, target, target_link: None, thread: None }
    }

    /// Waits for a future of the client on a thread without an async runtime. Meanwhile the thread
    /// runs the client, which saves two wake-ups of threads.
    pub(crate) fn wait<T, F>(&self, begin: impl FnOnce() -> F) -> Result<T, ServiceError>
    where
        F: Future<Output = Result<T, ServiceError>>,
    {
        // An asynchronous function would block the thread that has to drive its calls.
        if self.thread.is_none() && tokio::runtime::Handle::try_current().is_ok() {
            let doing = "wait in an asynchronous function".to_owned();
            let reason = "use `client_async` there".to_owned();
            return Err(ServiceError::Invalid { doing, reason });
        }
        // The caller is registered before it submits an operation.
        match self.thread.as_ref().and_then(|thread| thread.runner.enter()) {
            Some(leading) => leading.wait(async {
                // Nobody has read since the last caller, and a server that has restarted has ended
                // its connection. The first pause polls the sockets, the second reads them.
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
                begin().await
            }),
            None => self.block_on(begin()),
        }
    }

    /// Waits for a future of the client. A function lends its thread meanwhile.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on_call(self.core.waits().map(Arc::as_ref), future)
    }

    pub(crate) fn core(&self) -> &ClientCore {
        &self.core
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the task of the target.
    pub fn target(&self) -> &TaskId {
        &self.target
    }

    /// Returns the cluster, as the target knows it.
    pub fn cluster(&self) -> ClusterSpec {
        self.core.cluster()
    }

    /// Returns the settings of a client of the cluster's parameter servers.
    pub(crate) fn worker_config(&self, task: TaskId) -> WorkerConfig {
        WorkerConfig::new(self.cluster(), task).credentials(self.core.credentials().cloned())
    }

    /// Declares variables on the parameter servers of the cluster and gives them values, so that
    /// functions may use them. The values are from `fill`, or from the initializers.
    ///
    /// Variables that the servers have keep their values, and `fill` is not called. A checkpoint is
    /// restored first, as by the chief in [`pushpull_worker::Worker::join`]. A program may call
    /// this at every start, and several may at once; workers that train are not disturbed.
    ///
    /// # Errors
    /// [`ServiceError::Servers`] if the servers have other variables, cannot be reached or refuse
    /// these; [`ServiceError::NoTask`] if the device filters exclude a task that holds variables.
    pub async fn declare(
        &self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<(), ServiceError> {
        let doing = || "declare the variables".to_owned();
        self.check_servers(&doing())?;
        declare(self.worker_config(TaskId::declaring_client()), variables, fill).await.map_err(
            |source| {
                let doing = doing();
                let source = Box::new(source);
                ServiceError::Servers { doing, source }
            },
        )
    }

    /// Checks that the device filters allow every task that holds variables.
    pub(crate) fn check_servers(&self, doing: &str) -> Result<(), ServiceError> {
        let cluster = self.cluster();
        let job = cluster.variables_job().unwrap_or(TaskId::PS_JOB);
        let mut tasks = cluster.ps_tasks().map(|(index, _)| TaskId::new(job, index));
        match tasks.find(|task| !self.uses(task)) {
            None => Ok(()),
            Some(excluded) => {
                let reason = format!("the device filters exclude {excluded}");
                Err(ServiceError::NoTask { doing: doing.to_owned(), reason })
            }
        }
    }

    /// Returns the description of a task: its functions and devices.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] for a task that the cluster lacks, [`ServiceError::Unavailable`],
    /// and [`ServiceError::Timeout`] after the timeout of the client.
    pub async fn describe(&self, task: &TaskId) -> Result<Description, ServiceError> {
        let doing = || "describe the server".to_owned();
        let link =
            self.link(task).map_err(|reason| ServiceError::NoTask { doing: doing(), reason })?;
        let deadline = Instant::now().checked_add(self.timeout);
        let (_, description) = describe(&self.core, link, deadline).await?;
        Ok(description)
    }

    /// Calls a function, and waits for its outputs.
    ///
    /// Dropping the future cancels the call.
    ///
    /// # Errors
    /// Every [`ServiceError`] of a call; each names the function and the task.
    pub async fn call(&self, call: Call) -> Result<Outputs, ServiceError> {
        self.start(call)?.await
    }

    /// Makes several calls at once, and waits for all their outputs. The first failure cancels the
    /// other calls.
    ///
    /// # Errors
    /// The error of the first call that fails, in the order of the calls.
    #[doc(alias = "Session.run")]
    pub async fn run<const N: usize>(
        &self,
        calls: [Call; N],
    ) -> Result<[Outputs; N], ServiceError> {
        let outputs = self.run_all(calls).await?;
        // One output for each call.
        Ok(outputs.try_into().unwrap_or_else(|_| [(); N].map(|()| Outputs::new())))
    }

    /// Makes any number of calls at once, like [`FunctionClient::run`].
    ///
    /// # Errors
    /// The errors of [`FunctionClient::run`].
    pub async fn run_all(
        &self,
        calls: impl IntoIterator<Item = Call>,
    ) -> Result<Vec<Outputs>, ServiceError> {
        let started: Result<Vec<Running>, _> = calls.into_iter().map(|c| self.start(c)).collect();
        RunningSet::new(started?).await
    }

    /// Starts a call without waiting for it.
    ///
    /// # Errors
    /// [`ServiceError::NoTask`] and [`ServiceError::Invalid`].
    pub fn start(&self, call: Call) -> Result<Running, ServiceError> {
        let (_, _, _, reply) = self.begin(&call, false)?;
        Ok(Running::new(reply))
    }

    /// Starts a call whose outputs stay on its server. They may be inputs of other calls at once:
    /// [`Keeping::kept`].
    ///
    /// # Errors
    /// The errors of [`FunctionClient::start`].
    pub fn keep(&self, call: Call) -> Result<Keeping, ServiceError> {
        let (link, task, number, reply) = self.begin(&call, true)?;
        let kept = Kept::new(self.core.without_execution(), link, task, number);
        Ok(Keeping { kept, reply })
    }

    fn begin(
        &self,
        call: &Call,
        retain: bool,
    ) -> Result<(LinkId, TaskId, u64, ReplyFuture), ServiceError> {
        let doing = call.doing();
        let (task, link) = self.place(&call.device).map_err(|reason| {
            let doing = doing.clone();
            ServiceError::NoTask { doing, reason }
        })?;
        let order = call.order(retain)?;
        let deadline = Instant::now().checked_add(call.timeout.unwrap_or(self.timeout));
        let (number, reply) = self.core.call(link, order, deadline);
        Ok((link, task, number, reply))
    }

    /// Returns the task and the link of a device, or the reason why there is none.
    fn place(&self, device: &str) -> Result<(TaskId, LinkId), String> {
        let device: DeviceSpec = device.parse().map_err(|error| format!("{error}"))?;
        let task = match (device.job(), device.task()) {
            (None, None) => self.target.clone(),
            (None, Some(index)) => TaskId::new(&self.target.job, index),
            (Some(job), Some(index)) => TaskId::new(job, index),
            (Some(job), None) => {
                let cluster = self.core.cluster();
                let indices = cluster.task_indices(job).map_err(|error| error.to_string())?;
                match indices[..] {
                    [only] => TaskId::new(job, only),
                    _ if job == &*self.target.job => self.target.clone(),
                    _ => return Err(format!("{device} names {} tasks", indices.len())),
                }
            }
        };
        let link = self.link(&task)?;
        Ok((task, link))
    }

    /// Returns whether the client calls a task.
    pub(crate) fn uses(&self, task: &TaskId) -> bool {
        *task == self.target || self.core.allows(task)
    }

    pub(crate) fn link(&self, task: &TaskId) -> Result<LinkId, String> {
        match self.target_link.filter(|_| *task == self.target) {
            Some(link) => Ok(link),
            None => self.core.link_of_task(task),
        }
    }

    /// Fetches an output that a call has left on its server.
    ///
    /// # Errors
    /// The errors of [`Kept::fetch`], after the timeout of the client.
    pub async fn fetch(&self, kept: &Kept, output: &str) -> Result<super::Value, ServiceError> {
        let of = kept.output(output)?;
        let doing = || format!("fetch {output:?}");
        let link = self.link(kept.task());
        let link = link.map_err(|reason| ServiceError::NoTask { doing: doing(), reason })?;
        self.core.fetch(link, of, Instant::now().checked_add(self.timeout)).await
    }
}

/// Checks the syntax of a target: an address as in a cluster, with an optional scheme. Also checks
/// that the path of a Unix socket is no other kind of file.
fn check_target(target: &str) -> Result<(), ServiceError> {
    let connector = Connector::new(target);
    let invalid = |reason| {
        let doing = format!("connect to {target:?}");
        Err(ServiceError::Invalid { doing, reason })
    };
    if let Err(problem) = ClusterSpec::check_address(target) {
        return invalid(problem.to_string());
    }
    connector.check_path().or_else(|error| invalid(Chain(&error).to_string()))
}

/// Returns the description of the first server that answers.
async fn describe_first(
    core: &ClientCore,
    targets: &[String],
    deadline: Option<Instant>,
) -> Result<(LinkId, TaskId, Description), ServiceError> {
    let mut waits: Vec<_> = targets
        .iter()
        .map(|target| {
            let link = core.link_of_address(target);
            (link, Box::pin(describe(core, link, deadline)))
        })
        .collect();
    let mut last = None;
    std::future::poll_fn(|context| {
        let mut index = 0;
        while index < waits.len() {
            let (link, wait) = &mut waits[index];
            match wait.as_mut().poll(context) {
                Poll::Ready(Ok((task, description))) => {
                    return Poll::Ready(Ok((*link, task, description)));
                }
                Poll::Ready(Err(error)) => {
                    last.get_or_insert(error);
                    drop(waits.remove(index));
                }
                Poll::Pending => index += 1,
            }
        }
        match waits.is_empty() {
            true => {
                let doing = "connect: there is no target".to_owned();
                Poll::Ready(Err(last.take().unwrap_or(ServiceError::Ended { doing })))
            }
            false => Poll::Pending,
        }
    })
    .await
}

pub(crate) async fn describe(
    core: &ClientCore,
    link: LinkId,
    deadline: Option<Instant>,
) -> Result<(TaskId, Description), ServiceError> {
    let doing = || "describe the server".to_owned();
    match core.command(link, CallCommand::Describe, deadline).await? {
        CallReply::Described(task, bytes) => match Description::decode(&bytes) {
            Ok(description) => Ok((task, description)),
            Err(what) => {
                let doing = doing();
                let task = task.to_string();
                Err(ServiceError::Protocol { doing, task, what })
            }
        },
        _ => Err(ServiceError::Ended { doing: doing() }),
    }
}

/// The thread of a client and its runtime. Dropping it ends the client.
#[derive(Debug)]
struct ClientThread {
    core: ClientCore,
    runner: Arc<SessionRunner>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ClientThread {
    fn start(
        incarnation: Incarnation,
        config: &FunctionClientConfig,
    ) -> Result<ClientThread, ServiceError> {
        let failed = |error: std::io::Error| ServiceError::Thread { reason: error.to_string() };
        let leadership = Arc::<Leadership>::default();
        let runner = SessionRunner::new(leadership.clone(), CALLER_SPIN.longest);
        let runner = Arc::new(runner.map_err(failed)?);
        let session = CallSession::new(incarnation, config.name.clone(), config.answer_bytes_max);
        let handle = runner.handle().clone();
        let filters = config.device_filters.clone();
        let cluster = ClusterSpec::default();
        let unreachable = config.unreachable.clone();
        let core = ClientCore::new(
            session,
            cluster,
            filters,
            config.credentials.clone(),
            handle,
            leadership,
            unreachable,
        );
        let (stop, stopped) = oneshot::channel();
        let runs = runner.clone();
        let times = core.clone();
        let session = async move {
            tokio::select! {
                () = times.run_timer() => {}
                _ = stopped => {}
            }
        };
        let thread = std::thread::Builder::new().name("client".to_owned());
        let thread = thread.spawn(move || runs.run(session)).map_err(failed)?;
        Ok(ClientThread { core, runner, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ClientThread {
    fn drop(&mut self) {
        if self.runner.home().is_elsewhere() {
            // The thread and the sockets are the parent's.
            let ours = (self.core.clone(), self.runner.clone());
            std::mem::forget((ours, self.stop.take(), self.thread.take()));
            return;
        }
        drop(self.stop.take());
        self.core.end();
        let this = std::thread::current().id();
        // A task of the client itself may be the last that holds it.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != this) {
            // Its callers see a panic of the thread as an ended client.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{Thread, ThreadId};

    use super::*;
    use crate::block_on::block_on;
    use crate::{FunctionServer, Functions};

    /// Runs a task of a client, and returns the thread on which it runs.
    async fn thread_of(core: ClientCore) -> Result<Thread, ServiceError> {
        let (sender, receiver) = oneshot::channel();
        core.spawn(async move {
            // The receiver waits.
            let _ = sender.send(std::thread::current());
        });
        Ok(receiver.await.expect("the client runs the task"))
    }

    #[test]
    fn the_syntax_of_a_target_is_that_of_addresses_in_a_cluster() {
        let good = ["a:1", "grpc://a:1", "[::1]:2", "grpc://[::1]:2", "unix:/a", "unix:80"];
        for target in good {
            assert_eq!(check_target(target), Ok(()), "{target}");
        }
        let bad =
            ["", "a", "a:", ":1", "a:0", "a:65536", "http://a:1", "grpc://", "grpc://grpc://a:1"];
        let paths = ["unix:", "unix:/", "unix:/dev/null"];
        let hosts = ["::1:80", "[::1]", "[a]:1", "grpc:///:1"];
        for target in bad.into_iter().chain(paths).chain(hosts) {
            let error = block_on(FunctionClient::connect(target)).unwrap_err();
            assert!(matches!(error, ServiceError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().contains(&format!("{target:?}")), "{error}");
        }
    }

    #[test]
    fn a_thread_that_waits_runs_the_client() {
        let server = FunctionServer::local(Functions::new()).unwrap();
        let client = block_on(FunctionClient::connect(server.target())).unwrap();
        let own: ThreadId = std::thread::current().id();
        // The client's own thread may run the first tasks before it yields.
        let until = Instant::now() + Duration::from_secs(60);
        let wait = || client.wait(|| thread_of(client.core().clone()));
        let leads =
            (0..).take_while(|_| Instant::now() < until).any(|_| wait().unwrap().id() == own);
        assert!(leads, "the thread that waits leads");
        let thread = block_on(thread_of(client.core().clone())).unwrap();
        assert_eq!(thread.name(), Some("client"), "its own thread runs it otherwise");
    }
}
