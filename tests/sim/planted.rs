//! Checks that the simulator finds every planted bug that a whole cluster can show.

use std::process::ExitCode;
use std::time::Instant;

use pushpull_ps::planted::{Bug, PlantedBugs};
use pushpull_services::planted::{PlantedServiceBugs, ServiceBug};

use crate::failure::{SimFailure, catch};
use crate::scenario::{self, Family, Scenario};
use crate::setting::Setting;
use crate::trace::Trace;

/// A bug of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimBug {
    Server(Bug),
    Worker(ServiceBug),
}

impl SimBug {
    fn name(self) -> String {
        match self {
            SimBug::Server(bug) => format!("{bug:?}"),
            SimBug::Worker(bug) => format!("{bug:?}"),
        }
    }

    fn plant(self, setting: &mut Setting) {
        match self {
            SimBug::Server(bug) => setting.planted = PlantedBugs::with(bug),
            SimBug::Worker(bug) => setting.planted_worker = PlantedServiceBugs::with(bug),
        }
    }
}

/// The bugs that trainings must find: in synchronous steps, in their foundations, and in shared
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

/// The bugs that scheduled calls must find.
const SHOWN_BY_CALLS: &[SimBug] = &[
    SimBug::Server(Bug::EffectNotRecorded),
    SimBug::Server(Bug::EffectWatermarkAhead),
    SimBug::Worker(ServiceBug::LeaseOutputsForEver),
    SimBug::Worker(ServiceBug::RetryPinnedElsewhere),
    SimBug::Worker(ServiceBug::EndWithoutEffect),
];

/// The number of seeds within which a bug must be found.
const SEEDS: u64 = 300;

/// Yields the bugs with the families that must find them.
fn shown() -> impl Iterator<Item = (Family, SimBug)> {
    let by_trainings = SHOWN.iter().map(|&bug| (Family::Training, SimBug::Server(bug)));
    by_trainings.chain(SHOWN_BY_CALLS.iter().map(|&bug| (Family::Calls, bug)))
}

/// Plants the bug that `PUSHPULL_SIM_BUG` names, if it is set.
pub(crate) fn of_environment() -> impl Fn(&mut Setting) {
    let named = scenario::text("PUSHPULL_SIM_BUG").map(|name| {
        let bug = shown().find(|(_, bug)| bug.name() == name);
        bug.unwrap_or_else(|| panic!("unknown bug {name}")).1
    });
    move |setting| {
        if let Some(bug) = named {
            bug.plant(setting);
        }
    }
}

/// Plants the bugs one by one. Each must be found, and a scenario smaller than the first must show
/// it.
pub(crate) fn run(start: Instant) -> ExitCode {
    let mut missed = 0;
    let chosen = Family::of_environment();
    for (family, bug) in shown().filter(|(family, _)| chosen.is_none_or(|of| of == *family)) {
        let begun = Instant::now();
        let name = bug.name();
        let fails = |scenario: &Scenario| {
            let trace = Trace::new(false);
            catch(|| crate::run(scenario, start, trace, |setting| bug.plant(setting))).err()
        };
        let mut scenarios = (0..SEEDS).map(|seed| Scenario::of(family, seed));
        let Some((failure, found)) = scenarios.find_map(|found| Some((fails(&found)?, found)))
        else {
            println!("{name}: not found in {SEEDS} seeds");
            missed += 1;
            continue;
        };
        let SimFailure { words, place } = &failure;
        let (smaller, reruns) = crate::smallest(&found, &failure, fails);
        println!("{name}: seed {}: {}", found.seed, words.lines().next().unwrap_or_default());
        let seconds = begun.elapsed().as_secs_f64();
        println!("  PUSHPULL_SIM_BUG={name} {smaller} ({reruns} reruns, {seconds:.1} s)");
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
