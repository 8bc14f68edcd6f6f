//! Function servers in this process.

use std::time::{Duration, Instant};

use pushpull::blocking::{FunctionClient, FunctionServer};
use pushpull::services::{
    FunctionClientConfig, FunctionServerConfig, FunctionServerListener, Functions,
};
use pushpull::{ClusterSpec, TaskId};

/// Deadline that only ends a hang. No test depends on its length.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Binds this many addresses.
pub(crate) fn listen(count: usize) -> Vec<FunctionServerListener> {
    (0..count).map(|_| FunctionServer::listen("127.0.0.1:0").unwrap()).collect()
}

/// Starts this many tasks of a job with the same functions.
pub(crate) fn start(
    job: &str,
    count: usize,
    functions: &Functions,
    configure: impl Fn(FunctionServerConfig) -> FunctionServerConfig,
) -> (ClusterSpec, Vec<FunctionServer>) {
    let listeners = listen(count);
    let addresses = listeners.iter().map(FunctionServerListener::address);
    let cluster = ClusterSpec::builder().job(job, addresses).build().unwrap();
    let start = |(index, listener): (usize, FunctionServerListener)| {
        let task = TaskId::new(job, index as u32);
        let config = FunctionServerConfig::new(cluster.clone(), task, functions.clone());
        FunctionServer::start(listener, configure(config)).unwrap()
    };
    let servers = listeners.into_iter().enumerate().map(start).collect();
    (cluster, servers)
}

/// Starts one server.
pub(crate) fn start_one(functions: Functions) -> (FunctionServer, FunctionClient) {
    let server = FunctionServer::local(functions).unwrap();
    let client = connect(server.target());
    (server, client)
}

pub(crate) fn connect(target: &str) -> FunctionClient {
    FunctionClient::connect(FunctionClientConfig::new(target).connect_timeout(LONG).timeout(LONG))
        .unwrap()
}

/// Runs a future on a runtime of its own.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

/// Asks again until it is so.
pub(crate) fn until(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "it is not so yet");
    }
}
