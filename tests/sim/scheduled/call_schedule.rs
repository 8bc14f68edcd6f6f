//! The calls of a seed, and the cluster that runs them.

use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use crate::chance::SimChance;
use crate::checker::digits::digits;
use crate::scenario::Sizes;
use crate::setting::{Setting, placed};

/// The name of the coordinator.
pub(crate) const COORDINATOR: &str = "calls";

/// The functions: one increments every element, one changes nothing, one makes a per-worker value.
pub(crate) const INCREMENT: &str = "increment";
pub(crate) const QUIET: &str = "quiet";
pub(crate) const MAKE: &str = "make";

/// A call of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedCall {
    /// The only worker task that may run it.
    pub(crate) pinned: Option<u32>,
    /// Whether its function pushes.
    pub(crate) pushes: bool,
    /// Whether it needs the per-worker value.
    pub(crate) uses_kept: bool,
}

/// What a program schedules, and how.
#[derive(Clone, Debug)]
pub(crate) struct CallSchedule {
    /// The calls, by their numbers less 1.
    pub(crate) calls: Vec<PlannedCall>,
    pub(crate) calls_per_worker: usize,
    pub(crate) queue_max: usize,
    /// The threads of a function server.
    pub(crate) threads: usize,
    /// Whether workers make a per-worker value.
    pub(crate) has_kept: bool,
    /// Whether a program that resumes skips the calls that have ended.
    pub(crate) skips: bool,
    /// Whether a program releases the per-worker values at its end.
    pub(crate) releases: bool,
}

impl CallSchedule {
    /// Draws the schedule of a seed. The bound does not change which calls the first ones are.
    pub(crate) fn draw(seed: u64, at_most: Sizes) -> CallSchedule {
        let chance = &mut SimChance::of(seed, "schedule");
        let few = chance.between(6, 40);
        let many = chance.between(70, 110);
        // Some seeds have more calls than the window of a shard.
        let count = if chance.percent(12) { many } else { few };
        let workers = workers(seed, at_most);
        let has_kept = chance.percent(60);
        let per_worker = chance.between(1, 3);
        let queue_max = if chance.percent(40) { chance.between(1, 8) } else { 1000 };
        let threads = chance.between(1, 3);
        let skips = chance.percent(50);
        let releases = chance.percent(50);
        let calls = (0..count.min(at_most.steps)).map(|_| {
            let pins = chance.percent(25);
            let draw = chance.next();
            let pushes = !chance.percent(10);
            let kept = chance.percent(40);
            let pinned = pins.then(|| (draw % u64::from(workers)) as u32);
            PlannedCall { pinned, pushes, uses_kept: has_kept && kept }
        });
        CallSchedule {
            calls: calls.collect(),
            calls_per_worker: per_worker as usize,
            queue_max: queue_max as usize,
            threads: threads as usize,
            has_kept,
            skips,
            releases,
        }
    }

    /// Returns the call of a number.
    pub(crate) fn call(&self, number: u64) -> PlannedCall {
        self.calls[number as usize - 1]
    }

    /// Returns the number of the last call.
    pub(crate) fn last(&self) -> u64 {
        self.calls.len() as u64
    }
}

fn workers(seed: u64, at_most: Sizes) -> u32 {
    SimChance::of(seed, "workers").between(1, 4).min(at_most.workers) as u32
}

/// Draws the setting of a seed, bounded by `at_most`.
pub(crate) fn setting(seed: u64, at_most: Sizes, schedule: &CallSchedule) -> Setting {
    let chance = &mut SimChance::of(seed, "servers");
    let drawn = Setting::draw(seed, at_most);
    let workers = workers(seed, at_most);
    let variables = chance.between(1, 4).min(at_most.variables);
    let hosts: Vec<String> = (0..workers).map(|task| format!("worker{task}:1")).collect();
    let ps: Vec<String> = (0..drawn.tasks).map(|task| format!("ps{task}:1")).collect();
    let cluster = ClusterSpec::builder().job("ps", ps).job("worker", hosts).build();
    let cluster = cluster.expect("every task has an address");
    let specs = (0..variables).map(|index| {
        let dtype = if index % 2 == 0 { DType::F64 } else { DType::F32 };
        // The first elements tell calls apart, and the others count them.
        let length = ledger_elements(schedule.calls.len(), dtype) as u64 + chance.between(1, 40);
        let shape = Shape::new([length]).expect("a small shape");
        VariableSpec::new(format!("v{index}"), dtype, shape).expect("a sound variable")
    });
    let catalogue = placed(specs.collect(), &cluster, drawn.shards);
    let reject_older = chance.between(0, 3);
    Setting {
        workers,
        last_step: Setting::ENDLESS,
        data: None,
        asynchronous: true,
        deterministic: false,
        clip: None,
        inbox_pushes: chance.between(1, 3) as usize,
        wait_ahead: None,
        reject_older: chance.percent(35).then_some(reject_older),
        token_timeout: chance.percent(60).then_some(Duration::from_millis(1500)),
        cluster,
        catalogue,
        ..drawn
    }
}

/// Returns how many elements of a variable tell the calls apart.
pub(crate) fn ledger_elements(calls: usize, dtype: DType) -> usize {
    calls.div_ceil(digits(dtype))
}
