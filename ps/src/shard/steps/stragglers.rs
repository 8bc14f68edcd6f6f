//! [`Stragglers`]: how long a synchronous step has waited for replicas.

use std::time::{Duration, Instant};

/// How long a synchronous step has waited for replicas.
#[derive(Debug, Default)]
pub(in crate::shard) struct Stragglers {
    /// When the first replica joined this process.
    first_join: Option<Instant>,
    /// Since when the step has had too few replicas.
    short_since: Option<Instant>,
}

impl Stragglers {
    /// Records that a replica has joined.
    pub(in crate::shard) fn replica_joins(&mut self, now: Instant) {
        self.first_join.get_or_insert(now);
    }

    /// Records whether the step has too few replicas. Returns for how long it has had too few, once
    /// that is `timeout`.
    pub(in crate::shard) fn overdue(
        &mut self,
        now: Instant,
        is_short: bool,
        timeout: Option<Duration>,
    ) -> Option<Duration> {
        self.short_since = self.short_since.filter(|_| is_short).or(is_short.then_some(now));
        let (since, timeout) = self.short_since.zip(timeout)?;
        Some(now.saturating_duration_since(since)).filter(|&short| short >= timeout)
    }

    /// Returns how long replicas have had to join.
    pub(super) fn waited(&self, now: Instant) -> Duration {
        self.first_join.map_or(Duration::ZERO, |first| now.duration_since(first))
    }
}
