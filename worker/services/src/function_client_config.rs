//! [`FunctionClientConfig`]: the settings of a client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::device::DeviceFilters;
use pushpull_common::ids::TaskId;
use pushpull_net::auth::Credentials;

use super::runtime::client_core::UnreachableReport;
use super::unreachable::Unreachable;

/// The default timeout of a call.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a client.
#[derive(Clone)]
pub struct FunctionClientConfig {
    pub(super) targets: Vec<String>,
    pub(super) name: TaskId,
    pub(super) connect_timeout: Duration,
    pub(super) timeout: Duration,
    pub(super) answer_bytes_max: u64,
    pub(super) device_filters: DeviceFilters,
    pub(super) unreachable: Option<UnreachableReport>,
    pub(super) credentials: Option<Credentials>,
}

impl fmt::Debug for FunctionClientConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionClientConfig")
            .field("targets", &self.targets)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl FunctionClientConfig {
    /// A client of the server at this address, its target: `host:port`, which may be written
    /// `grpc://host:port`, or `unix:` and a path.
    pub fn new(target: &str) -> FunctionClientConfig {
        FunctionClientConfig {
            targets: vec![target.to_owned()],
            name: TaskId::new("client", 0),
            connect_timeout: Duration::from_secs(60),
            timeout: TIMEOUT,
            answer_bytes_max: 4 << 30,
            device_filters: DeviceFilters::default(),
            unreachable: None,
            credentials: None,
        }
    }

    /// Adds another address to be tried if the target cannot be reached.
    pub fn or(mut self, target: &str) -> FunctionClientConfig {
        self.targets.push(target.to_owned());
        self
    }

    /// The longest wait for a target. Default 60 s.
    pub fn connect_timeout(self, timeout: Duration) -> FunctionClientConfig {
        FunctionClientConfig { connect_timeout: timeout, ..self }
    }

    /// The longest time of a call, unless it has its own. Default 60 s.
    pub fn timeout(self, timeout: Duration) -> FunctionClientConfig {
        FunctionClientConfig { timeout, ..self }
    }

    /// The largest answer that the client accepts, in bytes. Default 4 GiB.
    pub fn answer_bytes_max(self, bytes: u64) -> FunctionClientConfig {
        FunctionClientConfig { answer_bytes_max: bytes, ..self }
    }

    /// The tasks that the client calls, beside its target. A coordinator schedules on no others.
    /// Default: all.
    pub fn device_filters(self, filters: DeviceFilters) -> FunctionClientConfig {
        FunctionClientConfig { device_filters: filters, ..self }
    }

    /// What the client proves itself with: the first access token that suits its name, or a
    /// certificate. With an authority the servers must be reached over TLS. Default: none.
    pub fn credentials(self, credentials: impl Into<Option<Credentials>>) -> FunctionClientConfig {
        FunctionClientConfig { credentials: credentials.into(), ..self }
    }

    /// Calls `report` for each attempt to connect to a server that fails, such as a target whose
    /// name cannot be resolved. The client tries again until a call's time is over. Default: no
    /// reports; the error of the call has the last reason.
    ///
    /// The thread of the client calls `report`, which must not wait for this client. A panic in it
    /// becomes part of the reason for which the server was not reached.
    pub fn on_unreachable(self, report: impl Fn(&Unreachable) + Send + Sync + 'static) -> Self {
        FunctionClientConfig { unreachable: Some(Arc::new(report)), ..self }
    }
}

impl<S: AsRef<str> + ?Sized> From<&S> for FunctionClientConfig {
    /// Returns the settings of a client of the server at an address.
    fn from(target: &S) -> FunctionClientConfig {
        FunctionClientConfig::new(target.as_ref())
    }
}
