//! A whole cluster in this process: servers on loopback, and configurations of workers.

use pushpull_common::cluster::{ClusterError, ClusterSpec};
use pushpull_common::ids::TaskId;
use pushpull_ps::{ListenError, PsConfig, PsHandle, ServeError, StartError, blocking::Ps};
use pushpull_worker::WorkerConfig;
use thiserror::Error;

/// Parameter servers in this process, each on a free port of loopback.
///
/// The servers run on threads of their own, so a cluster needs no async runtime, and may be used
/// within one. Workers connect as to any other cluster, with [`Cluster::worker_config`] or with
/// [`Cluster::spec`], from threads or from other processes of this host.
///
/// Dropping the cluster stops all servers, and waits until their ports and files are free.
///
/// Every process of this machine may connect. With [`Credentials::generated`] in the configurations of
/// all servers and workers, only those with a clone may.
///
/// ```
/// use pushpull::blocking::Worker;
/// use pushpull::local::Cluster;
/// use pushpull::{PsConfig, Sgd, VariableSpec};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Two servers and two workers, each in a thread.
/// let cluster = Cluster::start(2, 2, |cluster, task| {
///     PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(10)
/// })?;
/// let train = |index| -> Result<(), pushpull::Error> {
///     let mut worker = Worker::connect(cluster.worker_config(index))?;
///     let mut params = worker.join(&[VariableSpec::f32("w", [2]).expect("valid")], |_| ())?;
///     while let Some(token) = worker.token()? {
///         worker.pull(&token, &mut params)?;
///         let mut gradients = worker.gradients();
///         gradients.view_mut::<f32>("w")?.fill(1.0);
///         worker.push(token, gradients)?;
///     }
///     worker.leave()
/// };
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| train(1));
///     train(0)?;
///     other.join().expect("the other worker")
/// })?;
/// assert_eq!(cluster.handle().metrics().global_step, 10);
/// cluster.stop()?;
/// # Ok(()) }
/// ```
/// [`Credentials::generated`]: crate::security::Credentials::generated
#[doc(alias = "create_local_server")]
#[doc(alias = "create_local_cluster")]
#[derive(Debug)]
pub struct Cluster {
    spec: ClusterSpec,
    /// Never empty: the first owns the step.
    servers: Vec<Ps>,
}

/// The reason why a cluster cannot be started in this process.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalClusterError {
    /// A cluster of no parameter servers is requested.
    #[error("cannot start a cluster of 0 parameter servers: one must hold the variables")]
    NoServers,
    /// The numbers of tasks exceed the limits of a cluster.
    #[error(transparent)]
    Spec(#[from] ClusterError),
    /// A server cannot listen on loopback.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A server cannot be started.
    #[error("cannot start {task}")]
    Start {
        /// The ps task.
        task: TaskId,
        /// The error of its start.
        source: StartError,
    },
}

impl Cluster {
    /// Starts `ps` parameter servers in a cluster of `workers` workers, which connect later.
    /// `configure` returns the configuration of each server, from the cluster and its task.
    ///
    /// # Errors
    /// If there are no servers or too many tasks, if a port cannot be bound, or if a server cannot
    /// start. Servers that were started are stopped then.
    pub fn start(
        ps: u32,
        workers: u32,
        mut configure: impl FnMut(ClusterSpec, TaskId) -> PsConfig,
    ) -> Result<Cluster, LocalClusterError> {
        if ps == 0 {
            return Err(LocalClusterError::NoServers);
        }
        // The limits are checked before thousands of ports are bound.
        let names = (0..ps).map(|index| format!("ps-{index}:1"));
        ClusterSpec::builder().job("ps", names).workers(workers).build()?;
        let listeners = (0..ps).map(|_| Ps::listen("127.0.0.1:0"));
        let listeners = listeners.collect::<Result<Vec<_>, _>>()?;
        let addresses = listeners.iter().map(|listener| listener.address());
        let spec = ClusterSpec::builder().job("ps", addresses).workers(workers).build()?;
        let mut cluster = Cluster { spec, servers: Vec::new() };
        for (index, listener) in (0..).zip(listeners) {
            let task = TaskId::ps(index);
            let config = configure(cluster.spec.clone(), task.clone());
            let started = Ps::start(listener, config);
            let server = started.map_err(|source| LocalClusterError::Start { task, source })?;
            cluster.servers.push(server);
        }
        Ok(cluster)
    }

    /// Returns the spec: the servers with their ports, and the workers without addresses.
    pub fn spec(&self) -> &ClusterSpec {
        &self.spec
    }

    /// Returns the configuration of a worker. [`blocking::Worker::connect`] and
    /// [`Worker::connect`] refuse an index that the cluster does not have.
    ///
    /// [`blocking::Worker::connect`]: crate::blocking::Worker::connect
    /// [`Worker::connect`]: crate::Worker::connect
    pub fn worker_config(&self, index: u32) -> WorkerConfig {
        WorkerConfig::new(self.spec.clone(), TaskId::worker(index))
    }

    /// Returns a handle on the first server, which owns the global step.
    pub fn handle(&self) -> PsHandle {
        self.servers[0].handle()
    }

    /// Returns a handle on each server, by index.
    pub fn handles(&self) -> Vec<PsHandle> {
        self.servers.iter().map(Ps::handle).collect()
    }

    /// Blocks until all servers have ended: each by [`PsHandle::stop`], or because all workers are
    /// gone ([`PsConfig::exit_when_done`]).
    ///
    /// # Errors
    /// Returns the first failure, once all servers have ended.
    pub fn serve(mut self) -> Result<(), ServeError> {
        let servers = std::mem::take(&mut self.servers);
        servers.into_iter().map(Ps::serve).fold(Ok(()), Result::and)
    }

    /// Stops all servers, and blocks until their ports and files are free. Whole pushes are
    /// finished first.
    ///
    /// # Errors
    /// Returns the first failure, once all servers have ended.
    pub fn stop(self) -> Result<(), ServeError> {
        self.stop_all();
        self.serve()
    }

    /// Tells all servers to stop, so that none waits for another.
    fn stop_all(&self) {
        self.servers.iter().for_each(|server| server.handle().stop());
    }
}

/// Stops all servers and waits for their threads. Failures are lost.
impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop_all();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use pushpull_common::error::Chain;
    use pushpull_ps::Sgd;

    use super::*;
    use crate::blocking::Worker;
    use crate::security::Credentials;
    use crate::{Error, VariableSpec};

    fn start(ps: u32, workers: u32) -> Result<Cluster, LocalClusterError> {
        Cluster::start(ps, workers, |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0)))
    }

    fn ports_are_free(cluster: &ClusterSpec) -> bool {
        let addresses = cluster.tasks().filter(|(task, _)| *task.job == *"ps");
        addresses.into_iter().all(|(_, address)| TcpListener::bind(address).is_ok())
    }

    #[test]
    fn stopping_and_dropping_end_all_servers_beneath_a_worker() {
        for drops in [false, true] {
            let cluster = start(3, 1).unwrap();
            let spec = cluster.spec().clone();
            let mut worker = Worker::connect(cluster.worker_config(0)).unwrap();
            worker.join(&[VariableSpec::f32("w", [4]).unwrap()], |_| ()).unwrap();
            assert_eq!((cluster.handles().len(), spec.num_tasks("worker")), (3, Ok(1)));
            match drops {
                true => drop(cluster),
                false => cluster.stop().unwrap(),
            }
            assert!(ports_are_free(&spec));
        }
    }

    #[test]
    fn generated_credentials_close_a_cluster_to_who_has_none() {
        let own = Credentials::generated().unwrap();
        let cluster = Cluster::start(2, 1, |cluster, task| {
            PsConfig::new(cluster, task, Sgd::new(1.0)).credentials(own.clone())
        });
        let cluster = cluster.unwrap();
        let join = |config: WorkerConfig| {
            let mut worker = Worker::connect(config)?;
            worker.join(&[VariableSpec::f32("w", [4]).unwrap()], |_| ()).map(drop)
        };
        let config = || cluster.worker_config(0);
        let error = join(config()).unwrap_err();
        assert!(error.to_string().contains("denied"), "{error:?}");
        // A token of another process, which has the same name.
        let other = Credentials::generated().unwrap();
        assert_ne!(own, other);
        let error = join(config().credentials(other)).unwrap_err();
        assert!(Chain(&error).to_string().contains("does not prove"), "{error:?}");
        join(config().credentials(own.clone())).unwrap();
    }

    #[test]
    fn a_cluster_serves_until_its_handles_stop_it() {
        let cluster = start(2, 1).unwrap();
        let spec = cluster.spec().clone();
        let handles = cluster.handles();
        let serving = std::thread::spawn(move || cluster.serve());
        handles.iter().for_each(PsHandle::stop);
        serving.join().unwrap().unwrap();
        assert!(ports_are_free(&spec));
    }

    #[test]
    fn faults_are_named_and_leave_nothing_running() {
        assert!(matches!(start(0, 1), Err(LocalClusterError::NoServers)));
        assert!(matches!(start(1, u32::MAX), Err(LocalClusterError::Spec(_))));
        assert!(matches!(start(u32::MAX, 1), Err(LocalClusterError::Spec(_))));
        let mut spec = None;
        let error = Cluster::start(2, 1, |cluster, task| {
            spec = Some(cluster.clone());
            let shards = if task.index == 1 { 0 } else { 1 };
            PsConfig::new(cluster, task, Sgd::new(1.0)).shards(shards)
        });
        let error = Chain(&error.unwrap_err()).to_string();
        assert!(error.starts_with("cannot start /job:ps/task:1: "), "{error}");
        assert!(ports_are_free(&spec.unwrap()));
        let cluster = start(1, 1).unwrap();
        let error = Worker::connect(cluster.worker_config(1)).unwrap_err();
        assert!(matches!(error, Error::Config(_)), "{error}");
    }
}
