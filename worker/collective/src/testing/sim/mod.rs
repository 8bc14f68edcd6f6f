//! A simulator of rings: jobs under injected faults, each in one thread and in virtual time.
//!
//! The member, the rendezvous, the list of waiting links, the passes and the arithmetic are the
//! real ones. [`endpoint`] drives them as `Ring` and `runtime` do; connections, processes and the
//! clock are simulated.
//!
//! Run it with `cargo test -p pushpull-collective simulated -- --nocapture`:
//!
//! - `PUSHPULL_SIM_SEEDS=N` runs N seeds, from 0 or from `PUSHPULL_SIM_FIRST` on.
//! - `PUSHPULL_SEED=S` replays one seed and prints its events. Name the family in place of `simulated`:
//!   `spread` or `bursts`.
//!
//! With the feature `planted`, it also plants bugs, each of which must be found.

mod chance;
mod checker;
mod endpoint;
mod setting;
mod trainer;
mod world;

use std::env::var;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use self::checker::RingFigures;
use self::setting::{RingSetting, SettingFamily};
use self::world::RingWorld;
use crate::planted::PlantedRingBugs;

/// The seeds of a run that names none.
const SEEDS: u64 = 150;

fn number(name: &str) -> Option<u64> {
    let text = var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// Runs a seed. Returns the words of the rule that it breaks, if it breaks one.
fn run(
    family: SettingFamily,
    seed: u64,
    start: Instant,
    planted: PlantedRingBugs,
) -> Result<RingFigures, String> {
    let run = || RingWorld::new(RingSetting::draw(family, seed, planted), start, false).run();
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let fixed = panic.downcast_ref::<&str>().map(|&words| words.to_owned());
        panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default()
    })
}

#[test]
fn simulated_rings_keep_their_rules_when_faults_are_spread() {
    let figures = run_seeds(SettingFamily::Spread);
    let RingFigures { losses, shrinks, late_joins, returns, sums_checked, .. } = figures;
    show_everything([losses, shrinks, late_joins, returns, sums_checked]);
}

#[test]
fn simulated_rings_keep_their_rules_in_bursts_of_faults() {
    let figures = run_seeds(SettingFamily::Bursts);
    let RingFigures { losses, shrinks, returns, sums_checked, .. } = figures;
    show_everything([losses, shrinks, returns, sums_checked]);
}

/// A few seeds need not show everything.
fn show_everything<const N: usize>(counts: [u64; N]) {
    if number("PUSHPULL_SEED").is_none() && number("PUSHPULL_SIM_SEEDS").is_none_or(|n| n >= SEEDS)
    {
        assert!(counts.iter().all(|&count| count > 0), "no run shows one of {counts:?}");
    }
}

/// Runs the seeds of a family, or replays one.
fn run_seeds(family: SettingFamily) -> RingFigures {
    // Runs use only differences between instants. An `Instant` cannot be made in any other way.
    let start = Instant::now();
    if let Some(seed) = number("PUSHPULL_SEED") {
        let setting = RingSetting::draw(family, seed, PlantedRingBugs::default());
        println!("{setting:?}");
        let figures = RingWorld::new(setting, start, true).run();
        println!("{figures:?}");
        return figures;
    }
    let seeds = number("PUSHPULL_SIM_SEEDS").unwrap_or(SEEDS).max(1);
    let first = number("PUSHPULL_SIM_FIRST").unwrap_or(0);
    let next = AtomicU64::new(first);
    let results = Mutex::new((RingFigures::default(), Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed - first >= seeds {
                        return;
                    }
                    let ended = run(family, seed, start, PlantedRingBugs::default());
                    let (figures, failed) = &mut *results.lock().expect("no thread panics here");
                    match ended {
                        Ok(run) => figures.add(&run),
                        Err(words) => {
                            println!("FAULT: seed {seed}: {}", words.replace('\n', " "));
                            failed.push(seed);
                        }
                    }
                }
            });
        }
    });
    let (figures, mut failed) = results.into_inner().expect("no thread panics here");
    failed.sort_unstable();
    println!(
        "{{\"test\":\"sim\",\"family\":\"rings, {family:?}\",\"seeds\":{seeds},{figures},\
         \"seconds\":{:.1},\"failed\":{failed:?}}}",
        start.elapsed().as_secs_f64()
    );
    assert!(failed.is_empty(), "replay one with PUSHPULL_SEED={}", failed[0]);
    figures
}

/// The seeds within which a planted bug must be found.
#[cfg(all(feature = "planted", debug_assertions))]
const PLANTED_SEEDS: u64 = 3000;

#[cfg(all(feature = "planted", debug_assertions))]
#[test]
fn simulated_rings_find_planted_bugs() {
    use crate::planted::RingBug;
    let start = Instant::now();
    let bugs = [
        RingBug::FoldAsArrived,
        RingBug::ChunkOffByOne,
        RingBug::EpochNotChecked,
        RingBug::NoBroadcast,
    ];
    for bug in bugs {
        let planted = PlantedRingBugs::with(bug);
        let found = (0..PLANTED_SEEDS)
            .find_map(|seed| Some((seed, run(SettingFamily::Spread, seed, start, planted).err()?)));
        let (seed, words) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: seed {seed}: {}", words.lines().next().unwrap_or_default());
    }
}
