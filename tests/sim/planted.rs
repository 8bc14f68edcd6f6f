//! Checks that the simulator finds every planted bug that a whole cluster can show.

use std::process::ExitCode;
use std::time::Instant;

use pushpull_ps::{Bug, PlantedBugs};

use crate::failure::{SimFailure, catch};
use crate::scenario::{self, Scenario};
use crate::trace::Trace;
use crate::world::SimWorld;

/// The bugs that the simulator must find: in synchronous steps, in their foundations, and in shared
/// memory. The others need a crash in the middle of a commit, a disk, a checkpoint, or a client
/// with many pushes in flight.
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
    Bug::StaleSequence,
    Bug::SlotReusedEarly,
    Bug::TakeBackUnasked,
    Bug::OwnerNotAsked,
    Bug::KeepStaleBatch,
    Bug::GrantReturnedBatchTwice,
];

/// The number of seeds within which a bug must be found.
const SEEDS: u64 = 300;

/// Plants the bug that `PUSHPULL_SIM_BUG` names, if it is set.
pub(crate) fn planted(mut world: SimWorld) -> SimWorld {
    if let Some(name) = scenario::text("PUSHPULL_SIM_BUG") {
        let bug = SHOWN.iter().find(|bug| format!("{bug:?}") == name);
        world.plant(PlantedBugs::with(*bug.unwrap_or_else(|| panic!("unknown bug {name}"))));
    }
    world
}

/// Plants the bugs one by one. Each must be found, and a scenario smaller than the first must show
/// it.
pub(crate) fn run(start: Instant) -> ExitCode {
    let mut missed = 0;
    for &bug in SHOWN {
        let fails = |scenario: &Scenario| {
            let mut world = SimWorld::new(scenario, start, Trace::new(false));
            world.plant(PlantedBugs::with(bug));
            catch(|| world.run()).err()
        };
        let found = (0..SEEDS).map(Scenario::of).find_map(|found| Some((fails(&found)?, found)));
        let Some((failure, found)) = found else {
            println!("{bug:?}: not found in {SEEDS} seeds");
            missed += 1;
            continue;
        };
        let SimFailure { words, place } = &failure;
        let (smaller, reruns) = crate::smallest(&found, &failure, fails);
        println!("{bug:?}: seed {}: {}", found.seed, words.lines().next().unwrap_or_default());
        println!("  PUSHPULL_SIM_BUG={bug:?} {smaller} ({reruns} reruns)");
        // The printed scenario must fail in the same way.
        let printed = Scenario::of_words(&smaller.to_string());
        let again = fails(&printed).map(|failure| failure.place);
        if smaller == found || again.as_ref() != Some(place) {
            println!("  not smaller, or fails at another place: {again:?}");
            missed += 1;
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
