//! [`AccessReport`]: a user's function that hears who may connect, and who may not.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pushpull_common::access::AccessEvent;

use super::gate::ProvenPeer;

/// Receives what the operator must know about who may connect. The default receives nothing.
#[derive(Clone, Default)]
pub struct AccessReport(Option<Arc<Report>>);

/// A function of the user.
type Report = dyn Fn(&AccessEvent) + Send + Sync;

impl AccessReport {
    /// Reports to a function.
    pub fn new(report: impl Fn(&AccessEvent) + Send + Sync + 'static) -> AccessReport {
        AccessReport(Some(Arc::new(report)))
    }

    /// Reports an event. A panic in the function is contained: there is nobody to be told.
    pub fn report(&self, event: &AccessEvent) {
        if let Some(report) = &self.0 {
            let _ = catch_unwind(AssertUnwindSafe(|| report(event)));
        }
    }

    /// Returns once what has let a peer in no longer does, and reports it. A peer that was not asked
    /// who it is stays.
    pub async fn revoked(&self, peer: Option<&ProvenPeer>) {
        match peer {
            Some(peer) => self.report(&peer.revoked().await),
            None => std::future::pending().await,
        }
    }
}

impl fmt::Debug for AccessReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessReport").finish_non_exhaustive()
    }
}
