//! Planted bugs: every one that a whole cluster can show is found within a few seeds.

use std::process::ExitCode;
use std::time::Instant;

use pushpull_ps::{Bug, PlantedBugs};

use crate::failure::{Failure, catch};
use crate::scenario::{self, Scenario};
use crate::trace::Trace;
use crate::world::World;

/// The bugs of synchronous steps, those of what they stand on, and those of lent memory. The others need a crash in the
/// middle of a commit, a disk, a checkpoint, or a client with many pushes under way.
const SHOWN: &[Bug] = &[
    Bug::AcknowledgeBeforeCommit,
    Bug::NoIncarnation,
    Bug::KeepLostTokens,
    Bug::AdmitBeforeWhole,
    Bug::ForgetAdmissions,
    Bug::CommitAlone,
    Bug::BeginEarly,
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

/// By so many seeds a bug must have been found.
const SEEDS: u64 = 300;

/// Plants the bug that `PUSHPULL_SIM_BUG` names, if it names one.
pub(crate) fn planted(mut world: World) -> World {
    if let Some(name) = scenario::text("PUSHPULL_SIM_BUG") {
        let bug = SHOWN.iter().find(|bug| format!("{bug:?}") == name);
        world.plant(PlantedBugs::with(*bug.unwrap_or_else(|| panic!("no bug is called {name}"))));
    }
    world
}

/// Plants one bug after the other. Each is found, and shown by a smaller scenario than the one that it
/// was found in.
pub(crate) fn run(start: Instant) -> ExitCode {
    let mut missed = 0;
    for &bug in SHOWN {
        let fails = |scenario: &Scenario| {
            let mut world = World::new(scenario, start, Trace::new(false));
            world.plant(PlantedBugs::with(bug));
            catch(|| world.run()).err()
        };
        let found = (0..SEEDS).map(Scenario::of).find_map(|found| Some((fails(&found)?, found)));
        let Some((failure, found)) = found else {
            println!("{bug:?}: not in {SEEDS} seeds");
            missed += 1;
            continue;
        };
        let Failure { words, place } = &failure;
        let (smaller, reruns) = crate::smallest(&found, &failure, fails);
        println!("{bug:?}: seed {}: {}", found.seed, words.lines().next().unwrap_or_default());
        println!("  PUSHPULL_SIM_BUG={bug:?} {smaller} ({reruns} reruns)");
        // What is printed is what fails.
        let printed = Scenario::of_words(&smaller.to_string());
        let again = fails(&printed).map(|failure| failure.place);
        if smaller == found || again.as_ref() != Some(place) {
            println!("  which is no smaller, or does not fail there: {again:?}");
            missed += 1;
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
