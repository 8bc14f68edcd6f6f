//! Memory that must be made and cannot be had: the push that needs it waits, and all who wait are told why.
//!
//! The push is not refused. Other shards may have applied their share of it, so a refusal here would leave a
//! gradient that counts on some shards and not on others. What waits is whole in the inbox: it is applied once
//! there is space, without a restart, or by the next process that opens the state.

use std::time::{Duration, Instant};

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use super::Shard;
use super::output::Output;
use super::work::Work;
use crate::error::StorageError;
use crate::event::Event;

/// How long until a shard tries again. Whoever makes space does not tell.
const RETRY: Duration = Duration::from_secs(1);

/// Memory that a shard waits for.
#[derive(Debug)]
pub(super) struct AwaitedGrowth {
    since: Instant,
    tried: Instant,
    cause: String,
}

impl Shard {
    /// Whether the work that is due waits for memory, and it is not yet time to try again.
    pub(super) fn awaits_growth(&self, now: Instant) -> bool {
        let growth = self.growth.as_ref().filter(|_| self.has_work());
        growth.is_some_and(|growth| now.saturating_duration_since(growth.tried) < RETRY)
    }

    /// The work under way needs memory that cannot be had: it is tried again after a while.
    pub(super) fn growth_failed(&mut self, now: Instant, error: &StorageError) -> Work {
        self.counters.growths_failed.add(1);
        self.counters.shards_waiting_to_grow.set(1);
        let cause = error.to_string();
        let told = self.growth.as_ref().is_some_and(|growth| growth.cause == cause);
        if !told {
            let event = Event::GrowthFailed { shard: self.id, cause: cause.clone() };
            self.outputs.push_back(Output::Event(event));
        }
        let since = self.growth.as_ref().map_or(now, |growth| growth.since);
        self.growth = Some(AwaitedGrowth { since, tried: now, cause });
        Work::Growing
    }

    /// Work goes on: memory is there, if some was awaited.
    pub(super) fn growth_succeeded(&mut self, now: Instant) {
        let Some(growth) = self.growth.take() else { return };
        self.counters.shards_waiting_to_grow.set(0);
        let waited = now.saturating_duration_since(growth.since);
        self.outputs.push_back(Output::Event(Event::GrowthResumed { shard: self.id, waited }));
    }

    /// What nobody works on any more needs no memory.
    pub(super) fn forget_growth(&mut self, now: Instant) {
        if !self.has_work() {
            self.growth_succeeded(now);
        }
    }

    /// What a heartbeat is answered with while the shard waits for memory: clients that wait for it
    /// learn why.
    pub(super) fn growth_refusal(&self) -> Option<Refusal> {
        let growth = self.growth.as_ref()?;
        Some(Refusal::Storage { detail: Detail::clipped(&*growth.cause) })
    }

    /// What somebody waits for, and why that may not come soon.
    pub(super) fn with_growth(&self, awaited: String) -> String {
        match &self.growth {
            None => awaited,
            Some(growth) => format!("{awaited}; {} cannot grow: {}", self.id, growth.cause),
        }
    }
}
