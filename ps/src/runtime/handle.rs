//! A running server, seen from outside.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::metrics::{Counters, Metrics};

/// A handle on a running server; cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) addresses: Arc<[String]>,
    pub(super) stop: CancellationToken,
    pub(super) counters: Arc<[Arc<Counters>]>,
}

impl Handle {
    /// The first address the server listens on.
    pub fn address(&self) -> &str {
        self.addresses.first().map_or("", String::as_str)
    }

    /// All addresses the server listens on.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Makes the server stop: it finishes the pushes that are whole, sends their answers, closes
    /// its connections, and `serve` returns. Returns at once; stopping twice is stopping once.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// What the server has done so far, summed over its shards. Costs one load per counter.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum(self.counters.iter().map(|counters| &**counters))
    }
}
