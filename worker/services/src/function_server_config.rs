//! [`FunctionServerConfig`]: the settings of a function server.

use std::time::Duration;

use pushpull_common::access::AccessEvent;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::device::DeviceFilters;
use pushpull_common::ids::TaskId;
use pushpull_net::auth::{AccessReport, Credentials};

use super::function_server::FunctionServerError;
use super::functions::Functions;
use super::out_of_descriptors::OutOfDescriptors;
use super::runtime::descriptor_watch::DescriptorReport;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct FunctionServerConfig {
    pub(super) cluster: ClusterSpec,
    pub(super) task: TaskId,
    pub(super) functions: Functions,
    pub(super) threads: usize,
    pub(super) device_threads: Option<usize>,
    pub(super) cuda: bool,
    pub(super) lease: Duration,
    pub(super) calls_max: usize,
    pub(super) client_bytes_max: u64,
    pub(super) bytes_max: u64,
    pub(super) clients_max: usize,
    pub(super) grace: Duration,
    device_filters: DeviceFilters,
    pub(super) out_of_descriptors: Option<DescriptorReport>,
    pub(super) credentials: Option<Credentials>,
    pub(super) access: AccessReport,
}

impl FunctionServerConfig {
    /// Creates the settings of a server for this task of a cluster. The task may be of any job.
    pub fn new(cluster: ClusterSpec, task: TaskId, functions: Functions) -> FunctionServerConfig {
        FunctionServerConfig {
            cluster,
            task,
            functions,
            threads: std::thread::available_parallelism().map_or(1, usize::from).max(2),
            device_threads: None,
            cuda: true,
            lease: Duration::from_secs(10),
            calls_max: 64,
            client_bytes_max: 1 << 30,
            bytes_max: 4 << 30,
            clients_max: 1024,
            grace: Duration::from_secs(30),
            device_filters: DeviceFilters::default(),
            out_of_descriptors: None,
            credentials: None,
            access: AccessReport::default(),
        }
    }

    /// Whom the server lets in, and what it proves itself with to servers that its functions call.
    /// Those of the listener ([`super::FunctionServer::listen_secured`]) come first. Default: none, so
    /// everybody who can connect may call.
    pub fn credentials(self, credentials: impl Into<Option<Credentials>>) -> FunctionServerConfig {
        FunctionServerConfig { credentials: credentials.into(), ..self }
    }

    /// The number of blocking functions of one client that run at once. Each has a thread, which it
    /// lends to others while it waits. Default: one for each processor, at least 2.
    pub fn threads(self, threads: usize) -> FunctionServerConfig {
        FunctionServerConfig { threads, ..self }
    }

    /// The number of threads that compute an operation of [`super::Invocation::device`] on the
    /// processor. Default: one for each processor.
    pub fn device_threads(self, threads: usize) -> FunctionServerConfig {
        FunctionServerConfig { device_threads: Some(threads), ..self }
    }

    /// Whether the server offers the CUDA devices of the machine, and opens the CUDA driver to list
    /// them. Default `true`.
    pub fn cuda(self, cuda: bool) -> FunctionServerConfig {
        FunctionServerConfig { cuda, ..self }
    }

    /// The time for which a client is remembered that is silent, or not connected. After that its
    /// calls are cancelled, and its kept outputs are dropped. Default 10 s.
    pub fn lease(self, lease: Duration) -> FunctionServerConfig {
        FunctionServerConfig { lease, ..self }
    }

    /// The number of calls of one client that may be under way. A client sends no more. Default 64.
    pub fn calls_max(self, calls: usize) -> FunctionServerConfig {
        FunctionServerConfig { calls_max: calls, ..self }
    }

    /// The size in bytes that the inputs and outputs of one client may have. Default 1 GiB.
    pub fn client_bytes_max(self, bytes: u64) -> FunctionServerConfig {
        FunctionServerConfig { client_bytes_max: bytes, ..self }
    }

    /// The size in bytes that the inputs and outputs of all clients may have together. Inputs and
    /// outputs beyond it are refused. Default 4 GiB.
    pub fn bytes_max(self, bytes: u64) -> FunctionServerConfig {
        FunctionServerConfig { bytes_max: bytes, ..self }
    }

    /// The number of clients that are remembered. A newcomer displaces a client without calls here.
    /// Default 1024.
    pub fn clients_max(self, clients: usize) -> FunctionServerConfig {
        FunctionServerConfig { clients_max: clients, ..self }
    }

    /// The longest time that a stopping server waits for the calls that it has accepted. Default 30
    /// s.
    pub fn grace(self, grace: Duration) -> FunctionServerConfig {
        FunctionServerConfig { grace, ..self }
    }

    /// The tasks that the server connects to, beside itself: for variables, for kept outputs, and
    /// for calls of its functions. Default: all.
    pub fn device_filters(self, filters: DeviceFilters) -> FunctionServerConfig {
        FunctionServerConfig { device_filters: filters, ..self }
    }

    /// Calls `report` when the process has no file descriptor left for a connection, at most once a
    /// minute. Newcomers are refused then. A server beside a ps reports nothing of the connections
    /// that the ps accepts; that has the event `out-of-descriptors`. Default: no reports.
    ///
    /// The thread of the server calls `report`, which must not wait for this server. The server
    /// goes on after a panic in it.
    pub fn on_out_of_descriptors(
        self,
        report: impl Fn(&OutOfDescriptors) + Send + Sync + 'static,
    ) -> FunctionServerConfig {
        FunctionServerConfig { out_of_descriptors: Some(DescriptorReport::new(report)), ..self }
    }

    /// Calls `report` for what happens to those who may connect: peers that have not proved that they
    /// may, for the first attempt of a host and then every ten seconds at most; connections that are
    /// closed because an access token was removed; credentials that have become unusable. Default: no
    /// reports.
    ///
    /// A server beside another one ([`super::FunctionServer::beside`]) reports the closed connections
    /// alone: the other server reports the rest.
    ///
    /// The thread of the server calls `report`, which must not wait for this server. The server
    /// goes on after a panic in it.
    pub fn on_access(
        self,
        report: impl Fn(&AccessEvent) + Send + Sync + 'static,
    ) -> FunctionServerConfig {
        FunctionServerConfig { access: AccessReport::new(report), ..self }
    }

    /// Returns the device filters, which never exclude the task itself.
    pub(super) fn filters(&self) -> DeviceFilters {
        self.device_filters.clone().and_task(&self.task)
    }

    pub(super) fn check(&self) -> Result<(), FunctionServerError> {
        let TaskId { job, index } = &self.task;
        self.cluster.require(job, *index).map_err(|source| {
            let task = self.task.clone();
            FunctionServerError::UnknownTask { task, source }
        })?;
        let counts = [
            ("threads", self.threads, 4096, "1 to 4096"),
            ("calls_max", self.calls_max, 4096, "1 to 4096"),
            ("clients_max", self.clients_max, 65_536, "1 to 65536"),
        ];
        for (setting, value, most, reason) in counts {
            if !(1..=most).contains(&value) {
                let value = value as u64;
                return Err(FunctionServerError::Setting { setting, value, reason });
            }
        }
        if self.lease < Duration::from_millis(10) {
            let setting = "lease_ms";
            let value = self.lease.as_millis() as u64;
            return Err(FunctionServerError::Setting { setting, value, reason: "at least 10" });
        }
        Ok(())
    }
}
