//! The simulator: runs clusters under injected faults, each in one thread and in virtual time.
//!
//! The state machines of servers, workers and coordinators are the real ones; connections,
//! processes and the clock are simulated. There are two families of scenarios:
//!
//! - **Trainings**: workers train until the last step. A synchronous run is checked against a
//!   replay of its steps. An asynchronous run is checked by decoding from the values which pushes
//!   they are the sum of.
//! - **Calls**: a coordinator schedules calls on function servers, whose functions push. Every
//!   call must take effect once on every shard.
//!
//! Run it with `cargo test --test sim`:
//!
//! - `PUSHPULL_SIM_SEEDS=N` runs N seeds of each family, from 0 or from `PUSHPULL_SIM_FIRST` on.
//! - `PUSHPULL_SIM_FAMILY=training` or `calls` runs one family.
//! - `PUSHPULL_SEED=S` replays one seed and prints its events.
//! - `PUSHPULL_SIM_WITHOUT=1,4` leaves faults of the seed's plan out.
//! - `PUSHPULL_SIM_AT_MOST=workers=2,steps=3` bounds the sizes.
//!
//! If a seed fails, the simulator searches for a smaller scenario that fails at the same place and
//! prints the command that replays it. Each family ends with one JSON object on a line.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue panics with its location")]

mod chance;
mod checker;
mod failure;
mod faults;
mod joiner;
mod network;
#[cfg(feature = "planted")]
mod planted;
mod process_program;
mod scenario;
mod scheduled;
mod setting;
mod shrink;
mod trace;
mod trainer;
mod training;
mod world;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use failure::{SimFailure, catch};
use faults::FaultKind;
use scenario::{Family, Scenario, number};
use setting::Setting;
use trace::Trace;
use world::SimOutcome;

/// One seed in this many runs twice; both runs must have the same trace.
const TWICE: u64 = 20;

/// The maximum number of failing seeds for which a smaller scenario is searched.
const SHRUNK: usize = 3;

fn main() -> ExitCode {
    // Runs use only differences between instants. An `Instant` cannot be made in any other way.
    let start = Instant::now();
    if let Some(scenario) = Scenario::of_environment() {
        #[cfg(feature = "planted")]
        let plant = planted::of_environment();
        #[cfg(not(feature = "planted"))]
        let plant = |_: &mut Setting| {};
        println!("{:?}", run(&scenario, start, Trace::new(true), plant));
        return ExitCode::SUCCESS;
    }
    failure::install_hook();
    #[cfg(feature = "planted")]
    return planted::run(start);
    #[cfg(not(feature = "planted"))]
    {
        let chosen = Family::of_environment();
        let families = Family::ALL.into_iter().filter(|&one| chosen.is_none_or(|of| of == one));
        let codes: Vec<bool> = families.map(|family| check(family, start)).collect();
        if codes.contains(&false) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// Runs a scenario. `plant` may plant a bug in its setting.
fn run(
    scenario: &Scenario,
    start: Instant,
    trace: Trace,
    plant: impl Fn(&mut Setting),
) -> SimOutcome {
    match scenario.family {
        Family::Training => {
            let mut world = training::world(scenario, start, trace);
            plant(&mut world.setting);
            world.run()
        }
        Family::Calls => {
            let mut world = scheduled::world(scenario, start, trace);
            plant(&mut world.setting);
            world.run()
        }
    }
}

/// Runs the seeds of a family on all processors and prints the report. Returns false if one failed.
#[cfg_attr(feature = "planted", allow(dead_code, reason = "bugs are planted"))]
fn check(family: Family, start: Instant) -> bool {
    let default = match family {
        Family::Training => training::SEEDS,
        Family::Calls => scheduled::SEEDS,
    };
    let seeds = number("PUSHPULL_SIM_SEEDS").unwrap_or(default).max(1);
    let first = number("PUSHPULL_SIM_FIRST").unwrap_or(0);
    let next = AtomicU64::new(first);
    let results = Mutex::new((Vec::new(), Vec::new()));
    let begun = Instant::now();
    // Seeds are independent of each other.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed - first >= seeds {
                        return;
                    }
                    let scenario = Scenario::of(family, seed);
                    let ended =
                        check_one(&scenario, start, || results.lock().unwrap().1.len() < SHRUNK);
                    let (outcomes, failed) = &mut *results.lock().unwrap();
                    match ended {
                        Some(outcome) => outcomes.push(outcome),
                        None => failed.push(seed),
                    }
                }
            });
        }
    });
    let (outcomes, mut failed) = results.into_inner().unwrap();
    failed.sort_unstable();
    report(family, &outcomes, &failed, begun.elapsed())
}

/// Runs a scenario. If it fails, prints the failure, and a smaller scenario if `shorter` returns
/// true.
#[cfg_attr(feature = "planted", allow(dead_code, reason = "bugs are planted"))]
fn check_one(
    scenario: &Scenario,
    start: Instant,
    shorter: impl Fn() -> bool,
) -> Option<SimOutcome> {
    let seed = scenario.seed;
    let run = |scenario: &Scenario| run(scenario, start, Trace::new(false), |_| {});
    let twice = catch(|| {
        let outcome = run(scenario);
        let again = seed.is_multiple_of(TWICE).then(|| run(scenario).trace);
        assert_eq!(again.unwrap_or(outcome.trace), outcome.trace, "two runs of a seed differ");
        outcome
    });
    let failure = match twice {
        Ok(outcome) => return Some(outcome),
        Err(failure) => failure,
    };
    println!("FAULT: seed {seed}, at {}: {}", failure.place, failure.words);
    println!("replay with: {scenario} cargo test --test sim");
    if shorter() {
        let fails = |smaller: &Scenario| catch(|| run(smaller)).err();
        let (smaller, reruns) = smallest(scenario, &failure, fails);
        println!("seed {seed}, smaller: {smaller} cargo test --test sim ({reruns} reruns)");
    }
    None
}

/// Searches for a smaller scenario that fails at the same place. Also returns the number of reruns.
fn smallest(
    scenario: &Scenario,
    failure: &SimFailure,
    fails: impl Fn(&Scenario) -> Option<SimFailure>,
) -> (Scenario, u32) {
    let (faults, sizes) = match scenario.family {
        Family::Training => training::extent(scenario),
        Family::Calls => scheduled::extent(scenario),
    };
    shrink::shrink(scenario, faults, sizes, |smaller| {
        fails(smaller).is_some_and(|other| other.place == failure.place)
    })
}

/// Prints the figures of a family, and checks that its runs show what they are for. Returns false
/// if one failed.
fn report(family: Family, outcomes: &[SimOutcome], failed: &[u64], time: Duration) -> bool {
    let mut events: Vec<u64> = outcomes.iter().map(|outcome| outcome.events).collect();
    events.sort_unstable();
    let median = events.get(events.len() / 2).copied().unwrap_or(0);
    let all: &[FaultKind] = match family {
        Family::Training => &FaultKind::TRAINING,
        Family::Calls => &FaultKind::CALLS,
    };
    let counts: BTreeMap<&str, usize> = all
        .iter()
        .map(|&fault| {
            let with = outcomes.iter().filter(|outcome| outcome.faults.contains(&fault));
            (fault.name(), with.count())
        })
        .collect();
    let mut figures: BTreeMap<&str, u64> = BTreeMap::new();
    for (&figure, value) in outcomes.iter().flat_map(|outcome| &outcome.figures) {
        *figures.entry(figure).or_default() += value;
    }
    let mut result = serde_json::json!({
        "test": "sim",
        "family": family.name(),
        "seeds": outcomes.len() + failed.len(),
        "failed": failed,
        "events": events.iter().sum::<u64>(),
        "median_events": median,
        "faults": counts,
        "seconds": time.as_millis() as f64 / 1000.0,
    });
    figures.iter().for_each(|(&figure, &value)| result[figure] = value.into());
    println!("{result}");
    if !failed.is_empty() {
        return false;
    }
    match family {
        Family::Training => training::check_figures(outcomes, median, &figures),
        Family::Calls => scheduled::check_figures(outcomes, median, &figures),
    }
    // A few seeds need not show everything.
    if outcomes.len() >= 50 {
        for (fault, count) in counts {
            assert!(count * 10 >= outcomes.len(), "{fault} happens in only {count} seeds");
        }
    }
    true
}
