//! The jobs and the faults of seeds.

use std::time::Duration;

use super::chance::SimChance;
use super::endpoint::SimulatedMeeting;
use crate::planted::PlantedRingBugs;

/// The lease of simulated rings.
pub(super) const LEASE: Duration = Duration::from_millis(1000);

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RingFault {
    /// The network between two hosts is cut for a while; bytes in flight arrive afterwards.
    Partition,
    /// The network between one host and all others is cut.
    Isolate,
    /// A connection is lost with the bytes in flight.
    Loss,
    /// A process is killed; usually it is started again.
    Kill,
    /// A process is stopped, often for longer than a lease.
    Pause,
    /// A process leaves in the middle.
    Leave,
    /// A program drops an operation.
    Drop,
    /// A program performs another operation than the others.
    Differ,
    /// A process starts late that no launcher knows.
    Late,
}

impl RingFault {
    pub(super) const ALL: [RingFault; 9] = [
        RingFault::Partition,
        RingFault::Isolate,
        RingFault::Loss,
        RingFault::Kill,
        RingFault::Pause,
        RingFault::Leave,
        RingFault::Drop,
        RingFault::Differ,
        RingFault::Late,
    ];
}

/// A fault of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedFault {
    /// The time since the start.
    pub(super) at: Duration,
    pub(super) fault: RingFault,
    /// Chooses the process, the connection and so on.
    pub(super) draw: u64,
}

/// A family of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SettingFamily {
    /// Faults of all kinds, spread over the run.
    Spread,
    /// Members that fall silent, break and end in bursts: several within one lease.
    Bursts,
}

/// A job, its training and its faults.
#[derive(Clone, Debug)]
pub(super) struct RingSetting {
    pub(super) seed: u64,
    pub(super) size: u32,
    pub(super) steps: u64,
    pub(super) elements: usize,
    pub(super) meeting: SimulatedMeeting,
    /// Whether the launcher gives indices.
    pub(super) has_index: bool,
    /// Whether gradients are gathered, as small tensors are.
    pub(super) is_gathered: bool,
    pub(super) latency_max_micros: u64,
    pub(super) plan: Vec<PlannedFault>,
    pub(super) planted: PlantedRingBugs,
}

impl RingSetting {
    pub(super) fn draw(family: SettingFamily, seed: u64, planted: PlantedRingBugs) -> RingSetting {
        let mut chance = SimChance::new(seed, 1);
        let size = chance.between(2, 6) as u32;
        let steps = chance.between(8, 60);
        let mut plan = match family {
            SettingFamily::Spread => spread(&mut chance),
            SettingFamily::Bursts => bursts(&mut chance),
        };
        plan.sort_by_key(|planned| planned.at);
        RingSetting {
            seed,
            size,
            steps,
            elements: chance.between(3, 17) as usize,
            meeting: match chance.percent(50) {
                true => SimulatedMeeting::Address,
                false => SimulatedMeeting::Folder,
            },
            has_index: chance.percent(60),
            is_gathered: chance.percent(50),
            latency_max_micros: [300, 3_000, 30_000][chance.between(0, 2) as usize],
            plan,
            planted,
        }
    }
}

/// Draws faults of some kinds at any time.
fn spread(chance: &mut SimChance) -> Vec<PlannedFault> {
    let kinds: Vec<RingFault> = RingFault::ALL.into_iter().filter(|_| chance.percent(45)).collect();
    let count = if kinds.is_empty() { 0 } else { chance.between(0, 8) };
    let mut plan: Vec<PlannedFault> = (0..count)
        .map(|_| {
            let fault = kinds[chance.between(0, kinds.len() as u64 - 1) as usize];
            PlannedFault { at: chance.micros(0, 5_000_000), fault, draw: chance.next() }
        })
        .collect();
    // Operations that differ end the whole job.
    let mut differs = !chance.percent(50);
    plan.retain(|planned| {
        planned.fault != RingFault::Differ || !std::mem::replace(&mut differs, true)
    });
    plan
}

/// Draws bursts of faults: each has several within one lease, mostly of different processes.
fn bursts(chance: &mut SimChance) -> Vec<PlannedFault> {
    let mut plan = Vec::new();
    for _ in 0..chance.between(1, 3) {
        let begin = chance.micros(0, 5_000_000);
        for _ in 0..chance.between(2, 5) {
            let fault = match chance.between(0, 9) {
                0..=4 => RingFault::Pause,
                5..=6 => RingFault::Isolate,
                7 => RingFault::Partition,
                8 => RingFault::Loss,
                _ => RingFault::Kill,
            };
            let at = begin + chance.micros(0, LEASE.as_micros() as u64);
            plan.push(PlannedFault { at, fault, draw: chance.next() });
        }
    }
    plan
}
