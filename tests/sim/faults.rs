//! What goes wrong in a run, and when.

use std::time::Duration;

use crate::chance::Chance;
use crate::setting::Setting;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A connection is cut; what was on its way is lost.
    Cut,
    /// A part of a frame arrived before a cut.
    Half,
    /// A connection is slow for the rest of the faults.
    Slow,
    /// A worker's process is killed, and started again.
    KillWorker,
    /// The same of the chief.
    KillChief,
    /// A ps task is killed, with all its shards, and started again.
    KillShards,
    /// The same of the task with the step owner.
    KillOwner,
    /// A worker is stopped for longer than its lease, and goes on.
    Pause,
    /// The same, and another process has taken its place.
    Ghost,
    /// A worker's data ends before the training does. It comes back if steps wait for it.
    Leave,
    /// A worker comes late.
    Late,
    /// A worker takes longer for a gradient than a token may be held.
    Hold,
    /// A worker waits no longer for what it has asked for.
    Cancel,
}

impl Fault {
    pub(crate) const ALL: [Fault; 13] = [
        Fault::Cut,
        Fault::Half,
        Fault::Slow,
        Fault::KillWorker,
        Fault::KillChief,
        Fault::KillShards,
        Fault::KillOwner,
        Fault::Pause,
        Fault::Ghost,
        Fault::Leave,
        Fault::Late,
        Fault::Hold,
        Fault::Cancel,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Fault::Cut => "cut",
            Fault::Half => "half_frame",
            Fault::Slow => "slow",
            Fault::KillWorker => "kill_worker",
            Fault::KillChief => "kill_chief",
            Fault::KillShards => "kill_shards",
            Fault::KillOwner => "kill_owner",
            Fault::Pause => "pause",
            Fault::Ghost => "ghost",
            Fault::Leave => "leave",
            Fault::Late => "late",
            Fault::Hold => "hold",
            Fault::Cancel => "cancel",
        }
    }
}

/// A fault that is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Planned {
    /// From the beginning of the run.
    pub(crate) at: Duration,
    pub(crate) fault: Fault,
    /// The worker task that comes late.
    pub(crate) task: u32,
}

/// Which faults are tried when, and when they stop. Each seed has its own kinds and its own number of
/// them; some have none.
pub(crate) fn plan(setting: &Setting) -> (Vec<Planned>, Duration) {
    let chance = &mut Chance::of(setting.seed, "faults");
    let end = chance.millis(1500, 6000);
    let mut kinds: Vec<Fault> = Fault::ALL.into_iter().filter(|_| chance.percent(55)).collect();
    let possible = |kind: &Fault| match kind {
        // These come about otherwise.
        Fault::Half | Fault::Late => false,
        Fault::KillShards => setting.tasks > 1,
        Fault::Hold => setting.token_timeout.is_some(),
        _ => true,
    };
    kinds.retain(possible);
    let mut faults = Vec::new();
    let count = chance.between(0, 16);
    let mut add = |chance: &mut Chance, fault| {
        let at = chance.micros(100_000, end.as_micros() as u64);
        faults.push(Planned { at, fault, task: 0 });
    };
    for &kind in &kinds {
        // Each kind once, and more of any.
        add(chance, kind);
    }
    for _ in 0..count {
        if let Some(&kind) = chance.pick(&kinds) {
            add(chance, if kind == Fault::Leave { Fault::Cut } else { kind });
        }
    }
    for task in 1..setting.workers {
        if chance.percent(20) {
            faults.push(Planned { at: chance.millis(800, 4000), fault: Fault::Late, task });
        }
    }
    faults.sort();
    (faults, end)
}
