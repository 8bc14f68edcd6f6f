//! The simulator: trains clusters under injected faults, each in one thread and in virtual time.
//!
//! The state machines of servers and workers are the real ones; connections, processes and the
//! clock are simulated. A synchronous run is checked against a replay of its steps. An asynchronous
//! run is checked by decoding from the values which pushes they are the sum of.
//!
//! Run it with `cargo test --test sim`:
//!
//! - `PUSHPULL_SIM_SEEDS=N` runs N seeds, from 0 or from `PUSHPULL_SIM_FIRST` on.
//! - `PUSHPULL_SEED=S` replays one seed and prints its events.
//! - `PUSHPULL_SIM_WITHOUT=1,4` leaves faults of the seed's plan out.
//! - `PUSHPULL_SIM_AT_MOST=workers=2,steps=3` bounds the sizes.
//!
//! If a seed fails, the simulator searches for a smaller scenario that fails at the same place and
//! prints the command that replays it. The last line of the output is one JSON object.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue panics with its location")]

mod chance;
mod checker;
mod failure;
mod faults;
mod network;
#[cfg(feature = "planted")]
mod planted;
mod scenario;
mod setting;
mod shrink;
mod trace;
mod trainer;
mod world;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use failure::{SimFailure, catch};
use faults::FaultKind;
use scenario::{Scenario, number};
use trace::Trace;
use world::{SimOutcome, SimWorld};

/// The default number of seeds.
const SEEDS: u64 = 500;

/// One seed in this many runs twice; both runs must have the same trace.
const TWICE: u64 = 20;

/// The maximum number of failing seeds for which a smaller scenario is searched.
const SHRUNK: usize = 3;

fn main() -> ExitCode {
    // Runs use only differences between instants. An `Instant` cannot be made in any other way.
    let start = Instant::now();
    if let Some(scenario) = Scenario::of_environment() {
        let world = SimWorld::new(&scenario, start, Trace::new(true));
        #[cfg(feature = "planted")]
        let world = planted::planted(world);
        println!("{:?}", world.run());
        return ExitCode::SUCCESS;
    }
    failure::install_hook();
    #[cfg(feature = "planted")]
    return planted::run(start);
    #[cfg(not(feature = "planted"))]
    check(start)
}

/// Runs the seeds on all processors and prints the report.
#[cfg_attr(feature = "planted", allow(dead_code, reason = "bugs are planted"))]
fn check(start: Instant) -> ExitCode {
    let seeds = number("PUSHPULL_SIM_SEEDS").unwrap_or(SEEDS).max(1);
    let first = number("PUSHPULL_SIM_FIRST").unwrap_or(0);
    let next = AtomicU64::new(first);
    let results = Mutex::new((Vec::new(), Vec::new()));
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
                    let ended = check_one(seed, start, || results.lock().unwrap().1.len() < SHRUNK);
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
    report(&outcomes, &failed)
}

/// Runs a seed. If it fails, prints the failure, and a smaller scenario if `shorter` returns true.
#[cfg_attr(feature = "planted", allow(dead_code, reason = "bugs are planted"))]
fn check_one(seed: u64, start: Instant, shorter: impl Fn() -> bool) -> Option<SimOutcome> {
    let run = |scenario: &Scenario| SimWorld::new(scenario, start, Trace::new(false)).run();
    let scenario = Scenario::of(seed);
    let twice = catch(|| {
        let outcome = run(&scenario);
        let again = seed.is_multiple_of(TWICE).then(|| run(&scenario).trace);
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
        let (smaller, reruns) = smallest(&scenario, &failure, fails);
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
    let setting = setting::Setting::draw(scenario.seed, scenario.at_most);
    let (plan, _) = faults::plan(&setting);
    shrink::shrink(scenario, plan.len(), setting.sizes(), |smaller| {
        fails(smaller).is_some_and(|other| other.place == failure.place)
    })
}

fn report(outcomes: &[SimOutcome], failed: &[u64]) -> ExitCode {
    let mut events: Vec<u64> = outcomes.iter().map(|outcome| outcome.events).collect();
    events.sort_unstable();
    let median = events.get(events.len() / 2).copied().unwrap_or(0);
    let counts: BTreeMap<&str, usize> = FaultKind::ALL
        .into_iter()
        .map(|fault| {
            let with = outcomes.iter().filter(|outcome| outcome.faults.contains(&fault));
            (fault.name(), with.count())
        })
        .collect();
    let committed = outcomes.iter().filter(|outcome| outcome.commits > 0).count();
    let early_errors: u64 = outcomes.iter().map(|outcome| outcome.early_errors).sum();
    let direct: u64 = outcomes.iter().map(|outcome| outcome.direct_pulls).sum();
    let named: u64 = outcomes.iter().map(|outcome| outcome.named).sum();
    let result = serde_json::json!({
        "test": "sim",
        "seeds": outcomes.len() + failed.len(),
        "failed": failed,
        "events": events.iter().sum::<u64>(),
        "median_events": median,
        "commits": outcomes.iter().map(|outcome| outcome.commits).sum::<u64>(),
        "pulls": outcomes.iter().map(|outcome| outcome.pulls).sum::<u64>(),
        "direct_pulls": direct,
        "named": named,
        "told": early_errors,
        "faults": counts,
    });
    println!("{result}");
    if !failed.is_empty() {
        return ExitCode::FAILURE;
    }
    assert!(median >= 500, "the median seed has only {median} events");
    assert!(committed * 100 >= outcomes.len() * 95, "only {committed} seeds have made steps");
    // A few seeds need not show everything.
    if outcomes.len() >= 50 {
        assert!(early_errors > 0, "no worker was told of stragglers before its deadline");
        assert!(direct > 0 || !cfg!(target_os = "linux"), "no worker has read shared values");
        assert!(named > 0 || !cfg!(target_os = "linux"), "no worker has used a push buffer");
        for (fault, count) in counts {
            assert!(count * 10 >= outcomes.len(), "{fault} happens in only {count} seeds");
        }
    }
    ExitCode::SUCCESS
}
