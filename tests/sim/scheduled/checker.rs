//! The checker of scheduled calls: every call has its effect once on every shard.
//!
//! The push of a call adds 1 to every element of a variable, except to the first ones. These are a
//! ledger, in which every call has a base-4 digit of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::effect_window::{EffectWindow, Settlement};
use pushpull_common::ids::{EffectNumber, ShardId};
use pushpull_common::tensor::DType;
use pushpull_ps::testing::ShardEndpoint;

use super::call_schedule::{COORDINATOR, CallSchedule, ledger_elements};
use crate::checker::Elements;
use crate::checker::digits::{counts, place, sums};

/// The checker of one run.
#[derive(Debug)]
pub(crate) struct CallChecker {
    pub(crate) schedule: CallSchedule,
    catalogue: Arc<Catalogue>,
    /// What has settled on each shard when it was last checked.
    windows: BTreeMap<ShardId, Option<EffectWindow>>,
    /// The calls that have ended well for a program.
    done: BTreeSet<u64>,
    /// Whether a program has begun to close its calls. All have ended then.
    pub(crate) closing: bool,
    /// Whether the calls are closed.
    pub(crate) closed: bool,
    /// Since when no coordinator runs any more.
    pub(crate) quiet_since: Option<Instant>,
    pub(crate) figures: BTreeMap<&'static str, u64>,
}

impl CallChecker {
    pub(crate) fn new(schedule: CallSchedule, catalogue: Arc<Catalogue>) -> CallChecker {
        let figures =
            ["executions", "ended", "ended_before", "without_effect", "repeated", "opens"];
        CallChecker {
            schedule,
            catalogue,
            windows: BTreeMap::new(),
            done: BTreeSet::new(),
            closing: false,
            closed: false,
            quiet_since: None,
            figures: figures.map(|figure| (figure, 0)).into(),
        }
    }

    pub(crate) fn count(&mut self, figure: &'static str) {
        *self.figures.entry(figure).or_default() += 1;
    }

    /// Returns the gradient of a call for a variable of this type and length.
    pub(crate) fn gradient(&self, number: u64, dtype: DType, length: usize) -> Elements {
        let (element, digit) = place(number as usize - 1, dtype);
        let ledger = ledger_elements(self.schedule.calls.len(), dtype);
        Elements::of(dtype, length, |index| match index {
            _ if index == element => 1 << (2 * digit),
            _ if index < ledger => 0,
            _ => 1,
        })
    }

    /// Checks that an execution is on the worker to which its call is pinned.
    pub(crate) fn executed(&mut self, number: u64, worker: u32) {
        self.count("executions");
        let pinned = self.schedule.call(number).pinned;
        let is_right = pinned.is_none_or(|pinned| pinned == worker);
        assert!(is_right, "call {number} is pinned to worker {pinned:?}, and runs on {worker}");
    }

    /// Returns the calls that have ended well so far.
    pub(crate) fn done(&self) -> BTreeSet<u64> {
        self.done.clone()
    }

    /// Checks the calls that a coordinator has opened. `known` had ended well when it asked.
    pub(crate) fn opened(&mut self, window: EffectWindow, known: &BTreeSet<u64>) {
        self.count("opens");
        if self.closing {
            return;
        }
        for number in known.iter().copied().filter(|&number| self.pushes(number)) {
            assert_eq!(
                window.state(EffectNumber(number)),
                Settlement::Settled,
                "call {number} has ended well, and a coordinator that resumes does not know"
            );
        }
    }

    /// Checks a call that has ended well.
    pub(crate) fn ended<'a>(
        &mut self,
        number: u64,
        shards: impl Iterator<Item = &'a ShardEndpoint>,
    ) {
        self.count("ended");
        self.done.insert(number);
        self.check_effects(number, shards);
    }

    /// Checks a call that is not executed, because it has settled.
    pub(crate) fn ended_before<'a>(
        &mut self,
        number: u64,
        shards: impl Iterator<Item = &'a ShardEndpoint>,
    ) {
        self.count("ended_before");
        self.check_effects(number, shards);
    }

    fn check_effects<'a>(&self, number: u64, shards: impl Iterator<Item = &'a ShardEndpoint>) {
        if !self.pushes(number) {
            return;
        }
        for endpoint in shards.filter(|endpoint| self.has_variables(endpoint.id())) {
            for (variable, effects) in self.effects(endpoint) {
                let count = effects[number as usize - 1];
                assert_eq!(count, 1, "the effect of call {number} in {variable}, which has ended");
            }
        }
    }

    /// Checks a shard if its window has changed.
    pub(crate) fn shard_changed(&mut self, endpoint: &ShardEndpoint) {
        let shard = endpoint.id();
        let window = endpoint.settled_effects(COORDINATOR);
        if self.windows.insert(shard, window) == Some(window) {
            return;
        }
        if !self.has_variables(shard) {
            return;
        }
        let Some(window) = window else {
            let may_forget = self.done.is_empty() || self.closing;
            assert!(may_forget, "{shard} has forgotten the coordinator");
            return;
        };
        let effects = self.effects(endpoint);
        for number in 1..=self.schedule.last() {
            let settled = window.state(EffectNumber(number)) == Settlement::Settled;
            if !self.pushes(number) {
                continue;
            }
            if settled {
                for (variable, effects) in &effects {
                    let count = effects[number as usize - 1];
                    assert_eq!(
                        count, 1,
                        "{shard}: the effect of call {number} in {variable}, which has settled"
                    );
                }
            }
            assert!(
                settled || self.closing || !self.done.contains(&number),
                "{shard}: call {number} has ended well, and has not settled"
            );
        }
        let newest = window.settled().0;
        assert!(newest <= self.schedule.last(), "{shard}: {newest} calls have settled");
    }

    /// Forgets what a shard had before its process was killed.
    pub(crate) fn shard_opened(&mut self, shard: ShardId) {
        self.windows.remove(&shard);
    }

    /// Checks that every call has its effect, once.
    pub(crate) fn finish<'a>(&self, shards: impl Iterator<Item = &'a ShardEndpoint>) {
        let pushing = self.schedule.calls.iter().filter(|call| call.pushes).count() as u64;
        for endpoint in shards.filter(|endpoint| self.has_variables(endpoint.id())) {
            let shard = endpoint.id();
            for (variable, effects) in self.effects(endpoint) {
                for (number, count) in (1..).zip(effects) {
                    let expected = u64::from(self.pushes(number));
                    assert_eq!(
                        count, expected,
                        "{shard}: the effects of call {number}, {variable}"
                    );
                }
            }
            let values = endpoint.committed_values();
            for partition in self.partitions(shard) {
                let ledger = ledger_elements(self.schedule.calls.len(), partition.dtype);
                for sum in sums(partition.dtype, bytes_of(&partition, &values)).skip(ledger) {
                    assert_eq!(sum, pushing, "{shard}: the increments of {}", partition.variable);
                }
            }
        }
    }

    fn pushes(&self, number: u64) -> bool {
        self.schedule.call(number).pushes
    }

    fn has_variables(&self, shard: ShardId) -> bool {
        self.catalogue.shards().any(|other| other == shard)
    }

    fn partitions(&self, shard: ShardId) -> Vec<Partition> {
        self.catalogue.layout(shard).partitions().to_vec()
    }

    /// Returns how often each call counts in each variable of a shard.
    fn effects(&self, endpoint: &ShardEndpoint) -> Vec<(String, Vec<u64>)> {
        let values = endpoint.committed_values();
        let calls = self.schedule.calls.len();
        let decode = |partition: Partition| {
            let ledger = ledger_elements(calls, partition.dtype);
            let mut effects = vec![0; calls];
            // A shard without values has no effects.
            if !values.is_empty() {
                let sums = sums(partition.dtype, bytes_of(&partition, &values)).take(ledger);
                for (number, count) in
                    sums.enumerate().flat_map(|(at, sum)| counts(partition.dtype, at, sum))
                {
                    assert!(count < 2, "call {} counts {count} times", number + 1);
                    match effects.get_mut(number) {
                        Some(effect) => *effect = count,
                        None => assert_eq!(count, 0, "call {} was never scheduled", number + 1),
                    }
                }
            }
            (partition.variable.to_string(), effects)
        };
        self.partitions(endpoint.id()).into_iter().map(decode).collect()
    }
}

fn bytes_of<'a>(partition: &Partition, values: &'a [u8]) -> &'a [u8] {
    let elements = partition.elements.end - partition.elements.start;
    let start = partition.offset as usize;
    &values[start..start + elements as usize * partition.dtype.size()]
}
