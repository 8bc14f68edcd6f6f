//! The plan of a run: which faults happen, and when.

use std::time::Duration;

use crate::chance::SimChance;
use crate::setting::Setting;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FaultKind {
    /// A connection is cut; bytes in flight are lost.
    Cut,
    /// Part of the bytes in flight arrives before a cut.
    Half,
    /// A connection is slow until the faults end.
    Slow,
    /// A worker's process is killed and started again.
    KillWorker,
    /// The chief's process is killed and started again.
    KillChief,
    /// A ps task other than the step owner's is killed with all its shards and started again.
    KillShards,
    /// The step owner's ps task is killed and started again.
    KillOwner,
    /// A worker is stopped for longer than its lease, then resumes.
    Pause,
    /// A worker is stopped for longer than its lease, and resumes after another process of its task
    /// has started.
    Ghost,
    /// A worker's data ends before the training does. The worker returns if steps wait for it.
    Leave,
    /// A worker starts late.
    Late,
    /// A worker computes a gradient for longer than the token timeout.
    Hold,
    /// A worker cancels the operation that it waits for.
    Cancel,
    /// A server's connections are refused for a while, after one is cut.
    Refuse,
    /// All state is lost, and the training begins again in the same restore epoch, while a worker is
    /// stopped that must be told.
    LoseState,
    /// The coordinator's process is killed and started again.
    KillCoordinator,
    /// Another process of the coordinator starts while the first runs.
    Replace,
}

impl FaultKind {
    /// The faults of trainings.
    pub(crate) const TRAINING: [FaultKind; 14] = [
        FaultKind::Cut,
        FaultKind::Half,
        FaultKind::Slow,
        FaultKind::KillWorker,
        FaultKind::KillChief,
        FaultKind::KillShards,
        FaultKind::KillOwner,
        FaultKind::Pause,
        FaultKind::Ghost,
        FaultKind::Leave,
        FaultKind::Late,
        FaultKind::Hold,
        FaultKind::Cancel,
        FaultKind::LoseState,
    ];

    /// The faults of scheduled calls.
    pub(crate) const CALLS: [FaultKind; 10] = [
        FaultKind::Cut,
        FaultKind::Half,
        FaultKind::Slow,
        FaultKind::Refuse,
        FaultKind::KillWorker,
        FaultKind::KillShards,
        FaultKind::KillOwner,
        FaultKind::KillCoordinator,
        FaultKind::Replace,
        FaultKind::Pause,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            FaultKind::Cut => "cut",
            FaultKind::Half => "half_frame",
            FaultKind::Slow => "slow",
            FaultKind::KillWorker => "kill_worker",
            FaultKind::KillChief => "kill_chief",
            FaultKind::KillShards => "kill_shards",
            FaultKind::KillOwner => "kill_owner",
            FaultKind::Pause => "pause",
            FaultKind::Ghost => "ghost",
            FaultKind::Leave => "leave",
            FaultKind::Late => "late",
            FaultKind::Hold => "hold",
            FaultKind::Cancel => "cancel",
            FaultKind::Refuse => "refuse",
            FaultKind::LoseState => "lose_state",
            FaultKind::KillCoordinator => "kill_coordinator",
            FaultKind::Replace => "replace",
        }
    }
}

/// A planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Planned {
    /// The time since the start of the run.
    pub(crate) at: Duration,
    pub(crate) fault: FaultKind,
    /// The worker task that starts late, for [`FaultKind::Late`]; else 0.
    pub(crate) task: u32,
}

/// Draws the faults of a seed, in order of time, and the time at which faults end. `all` has the
/// kinds of the family.
///
/// Each seed has its own kinds of faults and its own number of them; some seeds have none.
pub(crate) fn plan(setting: &Setting, all: &[FaultKind]) -> (Vec<Planned>, Duration) {
    let chance = &mut SimChance::of(setting.seed, "faults");
    let end = chance.millis(1500, 6000);
    let mut kinds: Vec<FaultKind> = all.iter().copied().filter(|_| chance.percent(55)).collect();
    let possible = |kind: &FaultKind| match kind {
        // A cut may cause `Half`; `Late` is drawn per worker below.
        FaultKind::Half | FaultKind::Late => false,
        FaultKind::KillShards => setting.tasks > 1,
        FaultKind::Hold => setting.token_timeout.is_some(),
        _ => true,
    };
    kinds.retain(possible);
    let mut faults = Vec::new();
    let count = chance.between(0, 16);
    let mut add = |chance: &mut SimChance, fault| {
        let at = chance.micros(100_000, end.as_micros() as u64);
        faults.push(Planned { at, fault, task: 0 });
    };
    for &kind in &kinds {
        // Each kind once; the loop below adds more of any kind.
        add(chance, kind);
    }
    for _ in 0..count {
        if let Some(&kind) = chance.pick(&kinds) {
            add(chance, if kind == FaultKind::Leave { FaultKind::Cut } else { kind });
        }
    }
    let late = if all.contains(&FaultKind::Late) { setting.workers } else { 0 };
    for task in 1..late {
        if chance.percent(20) {
            faults.push(Planned { at: chance.millis(800, 4000), fault: FaultKind::Late, task });
        }
    }
    faults.sort();
    (faults, end)
}
