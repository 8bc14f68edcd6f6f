//! The normal suites must find every planted bug.
//!
//! Once a suite has found a bug, the others are not searched for it, except with
//! `PUSHPULL_THOROUGH`: that shows which suites find which bugs, and takes eight minutes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pushpull_store::planted::{Bug, PlantedBugs};

use super::random::is_thorough;

/// A suite, which runs without planted bugs, too.
struct Layer {
    name: &'static str,
    run: fn(PlantedBugs),
    /// Whether the suite is run to search for this bug.
    looks_for: fn(Bug) -> bool,
}

/// The suites, the quick ones first.
const LAYERS: &[Layer] = &[
    Layer { name: "window", run: crate::push_window::tests::suite, looks_for: is_of_state },
    Layer {
        name: "push slots",
        run: |planted| _ = crate::inbox::tests::model::suite(planted),
        looks_for: |bug| bug == Bug::KeepSlotReservation,
    },
    Layer {
        name: "scenarios",
        run: scenarios,
        looks_for: |bug| is_of_state(bug) || is_of_effects(bug),
    },
    Layer {
        name: "random runs",
        run: |planted| super::model::suite(planted, 0..RUNS),
        looks_for: is_of_state,
    },
    Layer { name: "power cuts", run: power_cuts, looks_for: is_of_state },
    Layer {
        name: "crash model",
        run: |planted| _ = super::crash_model::suite(planted),
        looks_for: is_of_state,
    },
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    Layer {
        name: "stepping",
        run: super::stepping::suite,
        looks_for: |bug| is_of_state(bug) && !UNSTEPPED.contains(&bug),
    },
    Layer {
        name: "rules",
        run: |planted| _ = crate::aggregate::tests::exhaustive::suite(planted),
        looks_for: is_of_rules,
    },
    Layer {
        name: "effects",
        run: |planted| _ = crate::coordinators::model::suite(planted),
        looks_for: is_of_effects,
    },
];

/// Whether a bug is in the state of a shard, and not in the rules of tokens, synchronous steps or
/// push slots.
fn is_of_state(bug: Bug) -> bool {
    !matches!(
        bug,
        Bug::KeepLostTokens
            | Bug::AdmitBeforeWhole
            | Bug::ForgetAdmissions
            | Bug::CommitAlone
            | Bug::BeginEarly
            | Bug::KeepStaleBatch
            | Bug::SpendBatchEarly
            | Bug::PositionNotRestored
            | Bug::GrantReturnedBatchTwice
            | Bug::KeepSlotReservation
    ) && !is_of_effects(bug)
}

/// Whether a bug is in the rules of effects.
fn is_of_effects(bug: Bug) -> bool {
    matches!(bug, Bug::EffectNotRecorded | Bug::EffectWatermarkAhead)
}

/// Whether a bug is in the rules of tokens and synchronous steps.
fn is_of_rules(bug: Bug) -> bool {
    !is_of_state(bug) && !is_of_effects(bug) && bug != Bug::KeepSlotReservation
}

/// Bugs that only a whole cluster shows. The simulator finds them.
const IN_CLUSTERS: &[Bug] = &[
    Bug::MeanOfAll,
    Bug::StaleEpoch,
    Bug::KeyByReplica,
    Bug::PinIgnored,
    Bug::RevokedUnseen,
    Bug::StaleSequence,
    Bug::SlotReusedEarly,
    Bug::TakeBackUnasked,
    Bug::OwnerNotAsked,
];

/// Bugs that a process killed between two instructions cannot show.
const UNSTEPPED: &[Bug] =
    &[Bug::AcknowledgeBeforeCommit, Bug::NoIncarnation, Bug::SkipFsync, Bug::EvictLiveOutcome];

/// The number of seeds for the random runs and for the power cuts. Most bugs need only one.
const RUNS: u64 = 60;
const CUTS: u64 = 10;

fn scenarios(planted: PlantedBugs) {
    super::handshakes::an_older_incarnation_is_fenced(planted);
    super::resends::a_restarted_client_is_another(planted);
    super::chiefs::an_older_chief_is_fenced(planted);
    super::effects::every_effect_counts_once(planted);
}

fn power_cuts(planted: PlantedBugs) {
    super::power::cuts(0..CUTS, planted);
}

/// Runs a suite, and returns its panic message if it fails.
fn caught_by(layer: &Layer, planted: PlantedBugs) -> Option<String> {
    let test_thread = std::thread::current().id();
    let hook = std::sync::Arc::new(std::panic::take_hook());
    let others = hook.clone();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().id() != test_thread {
            others(panic);
        }
    }));
    let caught = catch_unwind(AssertUnwindSafe(|| (layer.run)(planted))).err();
    drop(std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| hook(panic)));
    let message = caught?;
    let message = message.downcast_ref::<String>().cloned().or_else(|| {
        let message = message.downcast_ref::<&str>()?;
        Some((*message).to_owned())
    });
    Some(message.unwrap_or_default())
}

#[test]
fn every_planted_bug_is_caught() {
    let mut matrix = format!("{:24}", "");
    LAYERS.iter().for_each(|layer| matrix += &format!(" | {:18}", layer.name));
    let mut missed = Vec::new();
    let mut reasons = String::new();
    let bugs: Vec<Bug> =
        Bug::ALL.iter().copied().filter(|bug| !IN_CLUSTERS.contains(bug)).collect();
    for &bug in &bugs {
        matrix += &format!("\n{:24}", format!("{bug:?}"));
        let mut found = 0;
        for layer in LAYERS {
            if !(layer.looks_for)(bug) || (found > 0 && !is_thorough()) {
                matrix += &format!(" | {:18}", "not run");
                continue;
            }
            let start = Instant::now();
            let caught = caught_by(layer, PlantedBugs::with(bug));
            let cell = if caught.is_some() { "caught" } else { "-" };
            let time = start.elapsed();
            if let Some(message) = caught {
                found += 1;
                let message: String =
                    message.lines().next().unwrap_or_default().chars().take(150).collect();
                reasons += &format!("\n{bug:?}, {}: {message}", layer.name);
            }
            matrix += &format!(" | {:18}", format!("{cell} ({:.1} s)", time.as_secs_f64()));
        }
        if found == 0 {
            missed.push(bug);
        }
    }
    println!("{reasons}\n\n{matrix}");
    println!("{} of {} bugs caught", bugs.len() - missed.len(), bugs.len());
    assert!(missed.is_empty(), "caught by no suite: {missed:?}");
}
