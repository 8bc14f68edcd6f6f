//! Failed growth: a push that needs more memory waits, and its clients learn why.
//!
//! The push is not refused. Other shards may have applied their share of it, so a refusal here
//! would leave a gradient that counts on some shards only. The push is complete in the inbox. It is
//! applied once there is space, without a restart, or by the next process that opens the state.

use std::time::{Duration, Instant};

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use super::applier::{Applier, WorkOutcome};
use super::output::{ShardOutput, ShardOutputs};
use crate::error::StorageError;
use crate::event::Event;

/// The interval of attempts. A shard is not notified when space becomes free.
const RETRY: Duration = Duration::from_secs(1);

/// A failed growth that the shard repeats.
#[derive(Debug)]
pub(super) struct AwaitedGrowth {
    since: Instant,
    tried: Instant,
    cause: String,
}

impl Applier {
    /// Returns whether the current work waits for memory, and the next attempt is not due.
    pub(super) fn awaits_growth(&self, now: Instant) -> bool {
        let growth = self.growth.as_ref().filter(|_| self.has_work());
        growth.is_some_and(|growth| now.saturating_duration_since(growth.tried) < RETRY)
    }

    /// The current work needs memory that cannot be reserved. It is repeated later.
    pub(super) fn growth_failed(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        error: &StorageError,
    ) -> WorkOutcome {
        self.counters.growths_failed.add(1);
        self.counters.shards_waiting_to_grow.set(1);
        let cause = error.to_string();
        let reported = self.growth.as_ref().is_some_and(|growth| growth.cause == cause);
        if !reported {
            let event = Event::GrowthFailed { shard: self.id, cause: cause.clone() };
            out.push(ShardOutput::Event(event));
        }
        let since = self.growth.as_ref().map_or(now, |growth| growth.since);
        self.growth = Some(AwaitedGrowth { since, tried: now, cause });
        WorkOutcome::Growing
    }

    /// Work has continued, so any awaited memory is there.
    pub(super) fn growth_succeeded(&mut self, out: &mut ShardOutputs, now: Instant) {
        let Some(growth) = self.growth.take() else { return };
        self.counters.shards_waiting_to_grow.set(0);
        let waited = now.saturating_duration_since(growth.since);
        out.push(ShardOutput::Event(Event::GrowthResumed { shard: self.id, waited }));
    }

    /// Forgets the awaited memory if no work is left.
    pub(super) fn forget_growth(&mut self, out: &mut ShardOutputs, now: Instant) {
        if !self.has_work() {
            self.growth_succeeded(out, now);
        }
    }

    /// Returns the refusal of heartbeats while the shard waits for memory, which tells waiting
    /// clients the reason.
    pub(super) fn growth_refusal(&self) -> Option<Refusal> {
        let growth = self.growth.as_ref()?;
        Some(Refusal::Storage { detail: Detail::clipped(&*growth.cause) })
    }

    /// Adds to the text of a wait that the shard cannot grow, if so.
    pub(super) fn with_growth(&self, awaited: String) -> String {
        match &self.growth {
            None => awaited,
            Some(growth) => format!("{awaited}; {} cannot grow: {}", self.id, growth.cause),
        }
    }
}
