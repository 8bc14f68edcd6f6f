//! The addresses that a server has bound, before it is configured. So a cluster spec can contain
//! the real port when port 0 was requested.

use std::fmt;
use std::sync::Arc;

use pushpull_net::auth::Credentials;
use pushpull_net::{Endpoints, ListenError, ServicePeers};

/// Bound addresses that are not served yet.
pub struct PsListener {
    pub(super) endpoints: Endpoints,
    pub(super) services: Option<Arc<dyn ServicePeers>>,
    pub(super) credentials: Option<Credentials>,
}

impl PsListener {
    pub(crate) fn bind(address: &str, insecure: bool) -> Result<PsListener, ListenError> {
        let endpoints = Endpoints::bind(address, insecure)?;
        Ok(PsListener { endpoints, services: None, credentials: None })
    }

    /// Adds the addresses of another listener, for example a Unix socket for workers on the same
    /// host. The credentials of either are those of both.
    pub fn also(self, other: PsListener) -> PsListener {
        let credentials = Credentials::stronger(self.credentials, other.credentials);
        PsListener { endpoints: self.endpoints.also(other.endpoints), credentials, ..self }
    }

    /// Passes the clients of functions to another server of the same task. Default: they are
    /// refused.
    pub fn services(self, services: Arc<dyn ServicePeers>) -> PsListener {
        PsListener { services: Some(services), ..self }
    }

    /// Returns the first address as a cluster spec names it: `host:port` with the real port, or
    /// `unix:/path`.
    pub fn address(&self) -> String {
        self.endpoints.address()
    }

    /// Returns all addresses.
    pub fn addresses(&self) -> Vec<String> {
        self.endpoints.addresses()
    }
}

impl fmt::Debug for PsListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let services = self.services.is_some();
        f.debug_struct("PsListener")
            .field("endpoints", &self.endpoints)
            .field("services", &services)
            .finish()
    }
}
