//! Planted bugs: every one that a whole cluster can show is found within a few seeds.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::process::ExitCode;
use std::time::Instant;

use pushpull_ps::{Bug, Zoo};

use crate::trace::Trace;
use crate::world::World;

/// The bugs of synchronous steps, and those of what they stand on. The others need a crash in the
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
];

/// By so many seeds a bug must have been found.
const SEEDS: u64 = 300;

/// Plants one bug after the other.
pub(crate) fn run(start: Instant) -> ExitCode {
    set_hook(Box::new(|_| {}));
    let mut missed = 0;
    for &bug in SHOWN {
        let shows = |seed: u64| {
            let run = || {
                let mut world = World::new(seed, start, Trace::new(false));
                world.plant(Zoo::with(bug));
                world.run()
            };
            let panic = catch_unwind(AssertUnwindSafe(run)).err()?;
            let fixed = panic.downcast_ref::<&str>().map(|&words| words.to_owned());
            Some((seed, panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default()))
        };
        match (0..SEEDS).find_map(shows) {
            Some((seed, words)) => {
                let line = words.lines().next().unwrap_or_default();
                println!("{bug:?}: seed {seed}: {line}");
            }
            None => {
                println!("{bug:?}: not in {SEEDS} seeds");
                missed += 1;
            }
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
