//! Helpers that run a small cluster in this process.

use std::time::Duration;

use pushpull::blocking::Worker;
use pushpull::error::ServeError;
use pushpull::optim::Optimizer;
use pushpull::server::PsListener;
use pushpull::{ClusterSpec, Ps, PsConfig, PsHandle, Sgd, TaskId, VariableSpec, WorkerConfig};

/// Deadline that only ends a hang. No test depends on its length.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Runs a future to completion on this thread.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

pub(crate) fn listen() -> PsListener {
    block_on(Ps::listen("127.0.0.1:0")).unwrap()
}

/// Running servers and the spec of their cluster.
pub(crate) struct TestCluster {
    pub(crate) spec: ClusterSpec,
    pub(crate) servers: Vec<Ps>,
}

impl TestCluster {
    /// Starts `ps` ps tasks. The spec also lists `workers` worker tasks, which are not started.
    pub(crate) fn start(
        ps: usize,
        workers: usize,
        optimizer: impl Optimizer + Clone,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> TestCluster {
        let listeners: Vec<PsListener> = (0..ps).map(|_| listen()).collect();
        let spec = spec(listeners.iter().map(PsListener::address), workers);
        let servers = listeners.into_iter().enumerate().map(|(index, listener)| {
            let task = TaskId::ps(index as u32);
            let config = PsConfig::new(spec.clone(), task, optimizer.clone());
            listener.start(configure(config)).unwrap()
        });
        TestCluster { servers: servers.collect(), spec }
    }

    /// Starts one ps task with plain gradient descent at learning rate 1.
    pub(crate) fn sgd(workers: usize, configure: impl Fn(PsConfig) -> PsConfig) -> TestCluster {
        TestCluster::sgd_of(1, workers, configure)
    }

    /// Starts `ps` ps tasks with plain gradient descent at learning rate 1.
    pub(crate) fn sgd_of(
        ps: usize,
        workers: usize,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> TestCluster {
        TestCluster::start(ps, workers, Sgd::new(1.0), configure)
    }

    pub(crate) fn config(&self, worker: u32) -> WorkerConfig {
        WorkerConfig::new(self.spec.clone(), TaskId::worker(worker))
    }

    pub(crate) fn worker(&self, worker: u32) -> Worker {
        Worker::connect(self.config(worker)).unwrap()
    }

    pub(crate) fn handle(&self) -> PsHandle {
        self.servers[0].handle()
    }

    /// Stops all servers, to be started again, and waits until they have ended.
    pub(crate) fn suspend(self) {
        for server in &self.servers {
            server.handle().suspend();
        }
        for server in self.servers {
            wait_for_end(server).unwrap();
        }
    }

    /// Stops all servers for good and waits until they have ended.
    pub(crate) fn stop(self) {
        for server in &self.servers {
            server.handle().stop();
        }
        for server in self.servers {
            wait_for_end(server).unwrap();
        }
    }
}

/// Waits until a server has ended.
pub(crate) fn wait_for_end(server: Ps) -> Result<(), ServeError> {
    block_on(async {
        let serve = server.serve(std::future::pending());
        tokio::time::timeout(LONG, serve).await.expect("the server did not end")
    })
}

pub(crate) fn spec(ps: impl IntoIterator<Item = String>, workers: usize) -> ClusterSpec {
    // Workers accept no connections: the address only identifies the task.
    let workers = (0..workers).map(|index| format!("127.0.0.1:{}", index + 1));
    ClusterSpec::builder().job("ps", ps).job("worker", workers).build().unwrap()
}

/// A dense f32 variable of `elements` zeros.
pub(crate) fn vector(name: &str, elements: u64) -> VariableSpec {
    VariableSpec::f32(name, [elements]).unwrap()
}
