//! [`PeerAccess`]: who may be connected to a function server, and the report of those who may not.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pushpull_net::auth::{Credentials, DeniedPeer, ProvenPeer};
use pushpull_worker::internal::contained;

/// Receives the peers that have not proved that they may connect.
#[derive(Clone)]
pub(crate) struct DeniedReport(Arc<dyn Fn(&DeniedPeer) + Send + Sync>);

impl DeniedReport {
    pub(crate) fn new(report: impl Fn(&DeniedPeer) + Send + Sync + 'static) -> DeniedReport {
        DeniedReport(Arc::new(report))
    }
}

impl fmt::Debug for DeniedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeniedReport").finish_non_exhaustive()
    }
}

/// Who may be connected to a server.
#[derive(Debug, Default)]
pub(crate) struct PeerAccess {
    pub(crate) credentials: Option<Credentials>,
    pub(crate) report: Option<DeniedReport>,
}

/// The time between two looks at whether a peer may stay connected.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

impl PeerAccess {
    /// Reports a peer that may not connect.
    pub(crate) fn denied(&self, peer: &DeniedPeer) {
        if let Some(DeniedReport(report)) = &self.report {
            // The server goes on after a panic in the report. There is nobody to be told.
            let _ = contained("on_denied", || report(peer));
        }
    }

    /// Returns once what has let a peer in no longer does.
    pub(crate) async fn revoked(&self, peer: Option<&ProvenPeer>) {
        let Some((credentials, peer)) = self.credentials.as_ref().zip(peer) else {
            return std::future::pending().await;
        };
        while credentials.still_admit(peer) {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}
