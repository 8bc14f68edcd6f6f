//! Whole clusters in one thread, with virtual time and everything that can go wrong: the real state
//! machines of servers and workers train in synchronous mode, and every run is checked against a
//! replay of its steps.
//!
//! `cargo test --test sim`. `PUSHPULL_SIM_SEEDS=N` runs N seeds, from 0 or `PUSHPULL_SIM_FIRST` on;
//! `PUSHPULL_SEED=S` replays one and prints what happens. The last line is one JSON object.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod chance;
mod checker;
mod faults;
mod network;
mod setting;
mod trace;
mod trainer;
mod world;
#[cfg(feature = "zoo")]
mod zoo;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use faults::Fault;
use trace::Trace;
use world::{Outcome, World};

/// Seeds, if nobody says otherwise.
const SEEDS: u64 = 500;

/// Every so many seeds one is run twice, and must do the same.
const TWICE: u64 = 20;

fn main() -> ExitCode {
    // Only the distance between instants counts; there is no other way to have a first one.
    let start = Instant::now();
    if let Some(seed) = number("PUSHPULL_SEED") {
        let outcome = World::new(seed, start, Trace::new(true)).run();
        println!("{outcome:?}");
        return ExitCode::SUCCESS;
    }
    #[cfg(feature = "zoo")]
    return zoo::run(start);
    #[cfg(not(feature = "zoo"))]
    check(start)
}

/// Runs the seeds, and tells how it went.
#[cfg_attr(feature = "zoo", allow(dead_code, reason = "bugs are planted"))]
fn check(start: Instant) -> ExitCode {
    let seeds = number("PUSHPULL_SIM_SEEDS").unwrap_or(SEEDS).max(1);
    let mut outcomes = Vec::new();
    let mut failed = Vec::new();
    let first = number("PUSHPULL_SIM_FIRST").unwrap_or(0);
    for seed in first..first.saturating_add(seeds) {
        let run = || World::new(seed, start, Trace::new(false)).run();
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(outcome) => {
                if seed % TWICE == 0 {
                    assert_eq!(run().trace, outcome.trace, "seed {seed} does the same again");
                }
                outcomes.push(outcome);
            }
            Err(_) => {
                eprintln!("FAULT: replay with PUSHPULL_SEED={seed} cargo test --test sim");
                failed.push(seed);
            }
        }
    }
    report(&outcomes, &failed)
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text}")))
}

fn report(outcomes: &[Outcome], failed: &[u64]) -> ExitCode {
    let mut events: Vec<u64> = outcomes.iter().map(|outcome| outcome.events).collect();
    events.sort_unstable();
    let median = events.get(events.len() / 2).copied().unwrap_or(0);
    let counts: BTreeMap<&str, usize> = Fault::ALL
        .into_iter()
        .map(|fault| {
            let with = outcomes.iter().filter(|outcome| outcome.faults.contains(&fault));
            (fault.name(), with.count())
        })
        .collect();
    let committed = outcomes.iter().filter(|outcome| outcome.commits > 0).count();
    let result = serde_json::json!({
        "test": "sim",
        "seeds": outcomes.len() + failed.len(),
        "failed": failed,
        "events": events.iter().sum::<u64>(),
        "median_events": median,
        "commits": outcomes.iter().map(|outcome| outcome.commits).sum::<u64>(),
        "pulls": outcomes.iter().map(|outcome| outcome.pulls).sum::<u64>(),
        "faults": counts,
    });
    println!("{result}");
    if !failed.is_empty() {
        return ExitCode::FAILURE;
    }
    assert!(median >= 500, "a seed is worth {median} events");
    assert!(committed * 100 >= outcomes.len() * 95, "{committed} seeds have made steps");
    // Of a few seeds nothing can be said.
    if outcomes.len() >= 50 {
        for (fault, count) in counts {
            assert!(count * 10 >= outcomes.len(), "{fault} comes in {count} seeds only");
        }
    }
    ExitCode::SUCCESS
}
