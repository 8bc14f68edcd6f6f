//! Every planted bug is found by the suites that everybody runs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::planted::{Bug, PlantedBugs};

/// A suite, as it runs without bugs, too.
struct Layer {
    name: &'static str,
    run: fn(PlantedBugs),
    /// Whether it is worth the time to look for this bug in it.
    looks_for: fn(Bug) -> bool,
}

const LAYERS: &[Layer] = &[
    Layer { name: "window", run: crate::dedupe::tests::suite, looks_for: is_of_memory },
    Layer { name: "stories", run: stories, looks_for: is_of_memory },
    Layer {
        name: "random lives",
        run: |planted| super::model::suite(planted, 0..LIVES),
        looks_for: is_of_memory,
    },
    Layer {
        name: "crash model",
        run: |planted| _ = super::crash_model::suite(planted),
        looks_for: is_of_memory,
    },
    Layer { name: "power cuts", run: power_cuts, looks_for: is_of_memory },
    Layer { name: "saves", run: crate::checkpoint::tests::crashes::rot, looks_for: is_of_memory },
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    Layer {
        name: "stepping",
        run: super::stepping::suite,
        looks_for: |bug| is_of_memory(bug) && !UNSTEPPED.contains(&bug),
    },
    Layer {
        name: "rules",
        run: |planted| _ = crate::aggregate::exhaustive::suite(planted),
        looks_for: |bug| !is_of_memory(bug),
    },
];

/// Whether a bug is in what a shard keeps, and not in the rules of synchronous steps.
fn is_of_memory(bug: Bug) -> bool {
    !matches!(
        bug,
        Bug::KeepLostTokens
            | Bug::AdmitBeforeWhole
            | Bug::ForgetAdmissions
            | Bug::CommitAlone
            | Bug::BeginEarly
    )
}

/// Bugs that only a whole cluster shows: the simulator finds them.
const IN_CLUSTERS: &[Bug] = &[
    Bug::MeanOfAll,
    Bug::StaleEpoch,
    Bug::KeyByReplica,
    Bug::PinIgnored,
    Bug::RevokedUnseen,
    Bug::SequenceLate,
    Bug::SlotEarly,
    Bug::TakeBackUnasked,
    Bug::OwnerNotAsked,
];

/// Bugs that a process killed between two instructions cannot show.
const UNSTEPPED: &[Bug] = &[
    Bug::AcknowledgeBeforeCommit,
    Bug::NoIncarnation,
    Bug::SkipFsync,
    Bug::PublishBeforeVerify,
    Bug::EvictLiveOutcome,
];

/// Of the seeds of the random lives and of the power cuts, so many: most bugs need only one.
const LIVES: u64 = 60;
const CUTS: u64 = 10;

fn stories(planted: PlantedBugs) {
    super::handshakes::a_ghost_is_fenced(planted);
    super::resends::a_restarted_client_is_another(planted);
    super::chiefs::an_older_chief_is_fenced(planted);
}

fn power_cuts(planted: PlantedBugs) {
    super::power::cuts(0..CUTS, planted);
}

/// What the suite says if it fails.
fn caught_by(layer: &Layer, planted: PlantedBugs) -> Option<String> {
    let here = std::thread::current().id();
    let told = std::sync::Arc::new(std::panic::take_hook());
    let others = told.clone();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().id() != here {
            others(panic);
        }
    }));
    let caught = catch_unwind(AssertUnwindSafe(|| (layer.run)(planted))).err();
    drop(std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| told(panic)));
    let said = caught?;
    let said = said.downcast_ref::<String>().cloned().or_else(|| {
        let said = said.downcast_ref::<&str>()?;
        Some((*said).to_owned())
    });
    Some(said.unwrap_or_default())
}

#[test]
fn every_planted_bug_is_caught() {
    let mut matrix = format!("{:24}", "");
    LAYERS.iter().for_each(|layer| matrix += &format!(" | {:18}", layer.name));
    let (mut missed, mut reasons) = (Vec::new(), String::new());
    let bugs: Vec<Bug> =
        Bug::ALL.iter().copied().filter(|bug| !IN_CLUSTERS.contains(bug)).collect();
    for &bug in &bugs {
        matrix += &format!("\n{:24}", format!("{bug:?}"));
        let mut found = 0;
        for layer in LAYERS {
            if !(layer.looks_for)(bug) {
                matrix += &format!(" | {:18}", "not run");
                continue;
            }
            let start = Instant::now();
            let caught = caught_by(layer, PlantedBugs::with(bug));
            let (cell, time) = (if caught.is_some() { "caught" } else { "-" }, start.elapsed());
            if let Some(said) = caught {
                found += 1;
                let said: String =
                    said.lines().next().unwrap_or_default().chars().take(150).collect();
                reasons += &format!("\n{bug:?}, {}: {said}", layer.name);
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
