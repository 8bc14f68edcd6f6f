//! [`FunctionServer`]: the function server of a task, its worker service and its master service.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pushpull_common::cluster::{ClusterError, ClusterSpec};
use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_net::auth::Credentials;
use pushpull_net::{AcceptLimits, Endpoints, HomeProcess, ListenError, ServicePeers};
use thiserror::Error;
use tokio::sync::watch;
use tokio::task::LocalSet;

use super::call_session::CallSession;
use super::description::Description;
use super::function_server_config::FunctionServerConfig;
use super::functions::Functions;
use super::inputs::InputResolver;
use super::invocation::ServerShared;
use super::nested_calls::NestedClients;
use super::runtime::client_core::ClientCore;
use super::runtime::descriptor_watch::DescriptorWatch;
use super::runtime::door::Door;
use super::runtime::server_core::ServerCore;
use super::server_devices::ServerDevices;
use super::service::{Service, ServiceConfig};
use super::states::States;
use super::value::Value;
use super::variables::ServerVariables;
use crate::planted::PlantedServiceBugs;

/// The reason why a server cannot start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FunctionServerError {
    /// The address cannot be used.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The cluster lacks the task of the server.
    #[error("cannot start {task}")]
    UnknownTask {
        /// The task in the configuration.
        task: TaskId,
        /// The reason why the cluster lacks the task.
        source: ClusterError,
    },
    /// A setting is out of its range.
    #[error("cannot start with {setting} = {value}: it must be {reason}")]
    Setting {
        /// The name of the setting in [`FunctionServerConfig`].
        setting: &'static str,
        /// The value that was set.
        value: u64,
        /// The allowed range, in words that follow "it must be".
        reason: &'static str,
    },
    /// The operating system did not start a thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The error of the operating system, in words.
        reason: String,
    },
}

/// The most asynchronous functions that run at once. Each takes memory for its inputs, and no
/// thread.
const ASYNCHRONOUS_MAX: usize = 1024;

/// The most executions of one function for one client that have passed their deadlines and not
/// returned. Each holds a thread.
const UNRETURNED_MAX: usize = 4;

/// A bound address before its server starts.
#[derive(Debug)]
pub struct FunctionServerListener {
    endpoints: Endpoints,
    credentials: Option<Credentials>,
}

impl FunctionServerListener {
    /// Returns the address as a cluster names it: `host:port` with the real port, or `unix:/path`.
    pub fn address(&self) -> String {
        self.endpoints.address()
    }

    /// Adds the addresses of another listener. The credentials of either are those of both.
    pub fn also(self, other: FunctionServerListener) -> FunctionServerListener {
        let endpoints = self.endpoints.also(other.endpoints);
        FunctionServerListener {
            endpoints,
            credentials: Credentials::stronger(self.credentials, other.credentials),
        }
    }

    /// Starts serving. When this returns, clients are answered.
    ///
    /// # Errors
    /// Every [`FunctionServerError`] but [`FunctionServerError::Listen`].
    pub fn start(
        self,
        config: FunctionServerConfig,
    ) -> Result<FunctionServer, FunctionServerError> {
        let credentials = self.credentials.or(config.credentials.clone());
        FunctionServer::start(Some(self.endpoints), config.credentials(credentials))
    }
}

/// A server of named functions: a task that clients ask to compute.
///
/// Every server may be the target of a client, and runs functions for any client. It connects to
/// other servers to fetch kept outputs, and to make the calls of its functions. It connects to the
/// parameter servers of its cluster when a function first needs a variable.
///
/// A server owns a thread for its connections and asynchronous functions, and threads for blocking
/// ones. Dropping it stops it.
///
/// ```
/// use pushpull_services::{Call, FunctionServer, Functions, blocking::FunctionClient};
///
/// let server = FunctionServer::local(Functions::new().add("hello", |_| Ok("Hello!")))?;
/// let client = FunctionClient::connect(server.target())?;
/// assert_eq!(client.call(Call::new("hello"))?.text()?, "Hello!");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "tf.train.Server")]
pub struct FunctionServer {
    handle: FunctionServerHandle,
    thread: Option<JoinHandle<()>>,
}

impl FunctionServer {
    /// Binds `host:port` on loopback, or `unix:/path`. Port 0 takes a free port.
    ///
    /// # Errors
    /// Every [`ListenError`].
    pub fn listen(address: &str) -> Result<FunctionServerListener, FunctionServerError> {
        let endpoints = Endpoints::bind(address, false)?;
        Ok(FunctionServerListener { endpoints, credentials: None })
    }

    /// Binds an address that other machines may reach, for those whom the credentials let in:
    /// connections are encrypted, and each client proves who it is. Otherwise like
    /// [`FunctionServer::listen`].
    ///
    /// # Errors
    /// Every [`ListenError`]; [`ListenError::Exposed`] if the credentials have no certificate, or
    /// neither access tokens nor an authority, and other machines may reach the address.
    pub fn listen_secured(
        address: &str,
        credentials: &Credentials,
    ) -> Result<FunctionServerListener, FunctionServerError> {
        let endpoints = Endpoints::bind(address, credentials.protect())?;
        Ok(FunctionServerListener { endpoints, credentials: Some(credentials.clone()) })
    }

    /// Binds an address that other machines may reach; otherwise like [`FunctionServer::listen`].
    /// Any client that can connect can call the functions.
    ///
    /// # Errors
    /// Every [`ListenError`].
    pub fn listen_insecure(address: &str) -> Result<FunctionServerListener, FunctionServerError> {
        let endpoints = Endpoints::bind(address, true)?;
        Ok(FunctionServerListener { endpoints, credentials: None })
    }

    /// Starts a cluster of one task in this process, `/job:local/task:0`, on a free port.
    ///
    /// # Errors
    /// [`FunctionServerError::Listen`] and [`FunctionServerError::Thread`].
    #[doc(alias = "create_local_server")]
    pub fn local(functions: Functions) -> Result<FunctionServer, FunctionServerError> {
        let listener = FunctionServer::listen("127.0.0.1:0")?;
        let task = TaskId::new("local", 0);
        let cluster = ClusterSpec::builder().job("local", [listener.address()]).build();
        let cluster = cluster.map_err(|source| {
            let task = task.clone();
            FunctionServerError::UnknownTask { task, source }
        })?;
        listener.start(FunctionServerConfig::new(cluster, task, functions))
    }

    /// Starts a server whose clients another server of the same task accepts, on its own addresses.
    /// [`FunctionServer::peers`] takes them.
    ///
    /// # Errors
    /// Every [`FunctionServerError`] but [`FunctionServerError::Listen`].
    pub fn beside(config: FunctionServerConfig) -> Result<FunctionServer, FunctionServerError> {
        FunctionServer::start(None, config)
    }

    fn start(
        endpoints: Option<Endpoints>,
        config: FunctionServerConfig,
    ) -> Result<FunctionServer, FunctionServerError> {
        config.check()?;
        let failed =
            |error: std::io::Error| FunctionServerError::Thread { reason: error.to_string() };
        let address = endpoints.as_ref().map(Endpoints::address).unwrap_or_default();
        let is_alone = endpoints.is_some();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let client = client_of(&config, runtime.handle());
        let core = Arc::new(core_of(&config, is_alone, client.clone(), runtime.handle().clone()));
        let (stop, stopped) = watch::channel(Phase::Serving);
        let handle = FunctionServerHandle {
            core: core.clone(),
            stop: Arc::new(stop),
            address: address.into(),
            home: HomeProcess::current(),
        };
        let name = format!("server-{}-{}", config.task.job, config.task.index);
        let phase = handle.stop.clone();
        let doors = endpoints.map(|endpoints| (endpoints, config.credentials.clone()));
        let run = move || {
            let local = LocalSet::new();
            let serving = core.clone();
            local.block_on(&runtime, serve(serving, client.clone(), doors, config.grace, stopped));
            client.end();
            core.end_nested_calls();
            drop(core);
            // The tasks of connections end with their set.
            drop(local);
            runtime.shutdown_background();
            phase.send_replace(Phase::Stopped);
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(failed)?;
        Ok(FunctionServer { handle, thread: Some(thread) })
    }

    /// Returns the address of the server as a client's target.
    pub fn target(&self) -> &str {
        &self.handle.address
    }

    /// Returns the task of the server.
    pub fn task(&self) -> &TaskId {
        self.handle.core.task()
    }

    /// Returns a handle that stops the server from elsewhere.
    pub fn handle(&self) -> FunctionServerHandle {
        self.handle.clone()
    }

    /// Returns the admission of clients that another server has accepted: see
    /// [`FunctionServer::beside`].
    pub fn peers(&self) -> Arc<dyn ServicePeers> {
        Arc::new(Door(self.handle.core.clone()))
    }

    /// Serves until `shutdown` completes or [`FunctionServerHandle::stop`] is called; then ends the
    /// server, and frees its port.
    ///
    /// Dropping the future also stops the server.
    #[doc(alias = "join")]
    pub async fn serve(mut self, shutdown: impl Future<Output = ()>) {
        tokio::select! {
            () = shutdown => self.handle.stop(),
            () = self.handle.stopped() => {}
        }
        self.handle.stopped().await;
        self.end();
    }

    fn end(&mut self) {
        if self.handle.home.is_elsewhere() {
            // The server runs in the process that has forked this one.
            std::mem::forget((self.handle.clone(), self.thread.take()));
            return;
        }
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            // Clients see a panic of the thread as a lost server.
            let _ = thread.join();
        }
    }
}

impl Drop for FunctionServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// The phase of a server's life, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    Stopping,
    Stopped,
}

/// Stops a server. A clone stops the same one.
#[derive(Clone)]
pub struct FunctionServerHandle {
    core: Arc<ServerCore>,
    stop: Arc<watch::Sender<Phase>>,
    address: Arc<str>,
    home: HomeProcess,
}

impl FunctionServerHandle {
    /// Returns the address of the server as a client's target.
    pub fn target(&self) -> &str {
        &self.address
    }

    /// Tells the server to stop, without waiting for the end. It accepts no more calls, waits for
    /// the accepted ones for at most [`FunctionServerConfig::grace`], says goodbye to its clients
    /// and frees its port.
    pub fn stop(&self) {
        // A child of `fork` does not have the server.
        if self.home.is_elsewhere() {
            return;
        }
        self.stop.send_if_modified(|phase| {
            let serves = *phase == Phase::Serving;
            if serves {
                *phase = Phase::Stopping;
            }
            serves
        });
    }

    /// Returns once the server has stopped.
    pub async fn stopped(&self) {
        if self.home.is_elsewhere() {
            return;
        }
        let mut phase = self.stop.subscribe();
        // The handle holds the sender, so the channel is open.
        let _ = phase.wait_for(|phase| *phase == Phase::Stopped).await;
    }
}

impl fmt::Debug for FunctionServerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = *self.stop.borrow();
        let mut handle = f.debug_struct("FunctionServerHandle");
        handle.field("task", self.core.task()).field("phase", &phase).finish_non_exhaustive()
    }
}

/// Creates the client by which a server calls others.
fn client_of(config: &FunctionServerConfig, runtime: &tokio::runtime::Handle) -> ClientCore {
    let incarnation = Incarnation(RandomState::new().build_hasher().finish());
    ClientCore::new(
        CallSession::new(incarnation, config.task.clone(), config.client_bytes_max),
        config.cluster.clone(),
        config.filters(),
        config.credentials.clone(),
        runtime.clone(),
        // The thread of the server runs the client; nobody else leads it.
        Arc::default(),
        None,
    )
}

/// Creates the core of a server. It is alone if it has addresses of its own.
fn core_of(
    config: &FunctionServerConfig,
    is_alone: bool,
    client: ClientCore,
    runtime: tokio::runtime::Handle,
) -> ServerCore {
    let table = Arc::new(config.functions.table());
    let devices = ServerDevices::of_task(&config.task, config.device_threads, config.cuda);
    let description = Description::new(config.cluster.clone(), &table, &devices.names()).encode();
    let service = Service::new(
        ServiceConfig {
            task: config.task.clone(),
            incarnation: client.incarnation(),
            lease: config.lease,
            calls_max: config.calls_max,
            bytes_max: config.client_bytes_max.min(config.bytes_max),
            total_bytes_max: config.bytes_max,
            threads: config.threads,
            asynchronous_max: ASYNCHRONOUS_MAX,
            unreturned_max: UNRETURNED_MAX,
            clients_max: config.clients_max,
            devices: devices.names(),
            description: Value::bytes(&description).unwrap_or_else(|_| Value::from("")),
            planted: PlantedServiceBugs::default(),
        },
        table.clone(),
    );
    let variables = Arc::new(ServerVariables::new(
        &config.cluster,
        &config.task,
        is_alone,
        &config.filters(),
        config.credentials.clone(),
    ));
    let task = config.task.clone();
    let states = States::default();
    let resolver = InputResolver { variables: variables.clone(), client };
    let of_clients = config.clone();
    let handle = runtime.clone();
    let clients = NestedClients::new(move || {
        let client = client_of(&of_clients, &handle);
        let timed = client.clone();
        handle.spawn(async move { timed.run_timer().await });
        client
    });
    let descriptors = DescriptorWatch::new(config.out_of_descriptors.clone());
    let access = config.access.clone();
    let shared =
        Arc::new(ServerShared { task, states, devices, variables, clients, descriptors, access });
    ServerCore::new(service, config.functions.clone(), table, shared, resolver, runtime)
}

/// The limits of connections that have not said hello.
const ACCEPT_LIMITS: AcceptLimits =
    AcceptLimits { handshake_timeout: Duration::from_secs(5), waiting_connections_max: 1024 };

/// Serves until the server is told to stop.
async fn serve(
    core: Arc<ServerCore>,
    client: ClientCore,
    doors: Option<(Endpoints, Option<Credentials>)>,
    grace: Duration,
    mut stop: watch::Receiver<Phase>,
) {
    let accepting = LocalSet::new();
    if let Some((endpoints, credentials)) = doors {
        let receiver = Door(core.clone());
        accepting.spawn_local(async move {
            pushpull_net::accept(endpoints, ACCEPT_LIMITS, credentials, receiver);
            std::future::pending::<()>().await;
        });
    }
    let timers = async {
        tokio::join!(core.run_timer(), client.run_timer());
    };
    let mut timers = std::pin::pin!(timers);
    let stopping = async {
        // A dropped sender is a dropped server.
        let _ = stop.wait_for(|phase| *phase != Phase::Serving).await;
    };
    tokio::select! {
        () = stopping => {}
        () = accepting.run_until(timers.as_mut()) => {}
    }
    // The port is free from here on; the connections go on until their calls have ended.
    drop(accepting);
    tokio::select! {
        _ = core.drain(grace) => {}
        () = timers => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;
    use crate::block_on::block_on;
    use crate::{Call, FunctionClient, ServiceError};

    #[test]
    fn calls_for_which_no_thread_can_be_started_may_be_repeated() {
        let (release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let functions = Functions::new().add("f", |_| Ok(1_i64)).add("wait", move |_| {
            let _ = gate.lock().unwrap().recv();
            Ok(2_i64)
        });
        let listener = FunctionServer::listen("127.0.0.1:0").unwrap();
        let cluster = ClusterSpec::builder().job("local", [listener.address()]).build().unwrap();
        let task = TaskId::new("local", 0);
        let config = FunctionServerConfig::new(cluster, task.clone(), functions);
        let server = listener.start(config.threads(1).calls_max(4096).cuda(false)).unwrap();
        let client = block_on(FunctionClient::connect(server.target())).unwrap();
        let waits = client.start(Call::new("wait")).unwrap();
        // A thread's stack has no room for as many calls that begin inside each other.
        let calls: Vec<_> = (0..2_000).map(|_| client.start(Call::new("f")).unwrap()).collect();
        // The server has queued them by the time that it answers.
        block_on(client.describe(&task)).unwrap();
        let pool = server.handle.core.pool();
        pool.refuse(true);
        drop(release);
        assert!(block_on(waits).is_ok());
        // The thread that waited is free, and may take some of them.
        let mut without_thread = 0;
        for call in calls {
            match block_on(call) {
                Ok(_) => {}
                Err(ServiceError::Failed { retry: true, detail, .. }) => {
                    assert!(detail.contains("no thread could be started"), "{detail}");
                    without_thread += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!(without_thread > 0);
        pool.refuse(false);
        assert!(block_on(client.call(Call::new("f"))).is_ok());
    }
}
