//! Crashes at every store of a scenario, and at every store of the recoveries from them.
//!
//! The scenario runs twice. The first run records the persistent state after each input. The second
//! run traces every store, and at each opens the files that a crash there would leave. They must
//! hold the state before the current input or the state after it, and nothing between. The answers
//! to earlier inputs are out by then, so their effects must be there.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::error::Chain;
use pushpull_optim::optimizer::{Adam, Optimizer, Sgd};
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::planted::PlantedBugs;
use pushpull_store::testing::store_trace::{self, StoreEvent};
use pushpull_store::testing::test_files::TestFiles;

use super::crash_life::{self, CrashScenario};
use super::images::Images;
use super::kept::{FileCopies, PersistentState, open_on};
use super::random::{Random, is_thorough};
use crate::config::PsConfig;

/// One image in `NESTED` has its recovery crashed as well, or one in `NESTED_AT_WORK` if that
/// recovery has work to do. Thorough runs, and runs with the feature `planted`, take four times as
/// many.
const NESTED: u64 = 384;
const NESTED_AT_WORK: u64 = 48;
const THOROUGH: u64 = 4;

/// Counts of what a suite has checked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CrashFigures {
    events: usize,
    images: usize,
    recoveries: usize,
    nested_events: usize,
    nested_images: usize,
}

impl std::ops::AddAssign for CrashFigures {
    fn add_assign(&mut self, more: CrashFigures) {
        self.events += more.events;
        self.images += more.images;
        self.recoveries += more.recoveries;
        self.nested_events += more.nested_events;
        self.nested_images += more.nested_images;
    }
}

/// Opens the files that crashes leave, and checks them.
struct Judge {
    config: Arc<PsConfig>,
    now: Instant,
    /// The persistent state after each input.
    reference: Vec<PersistentState>,
    /// The number of inputs that are done, with their outputs out. The first is the creation of the
    /// shard.
    done: Rc<Cell<usize>>,
    random: Random,
    figures: CrashFigures,
}

impl Judge {
    fn judge(&mut self, event: StoreEvent, files: &FileCopies) {
        self.figures.images += 1;
        let done = self.done.get();
        let (shard, kept) = self.open(files, &format!("at {event:?} of input {done}"));
        let before = &self.reference[done.saturating_sub(1)];
        let after = self.reference.get(done).unwrap_or(before);
        let between = before.tables.generation != after.tables.generation;
        let right = kept == *before || kept == *after || between && kept == before.undeclared();
        assert!(
            right,
            "at {event:?} of input {done} a crash leaves a state that never existed: {}",
            difference(&kept, before, after)
        );
        drop(shard);
        let at_work = is_at_work(files);
        let times = if at_work { NESTED_AT_WORK } else { NESTED };
        let all = cfg!(feature = "planted") || is_thorough();
        if self.random.one_in(times / if all { THOROUGH } else { 1 }) {
            self.crash_the_recovery(files, &kept);
        }
    }

    fn open(&self, files: &FileCopies, when: &str) -> (TestFiles, PersistentState) {
        let test_files = TestFiles::with(files.clone());
        let kept = match open_on(&test_files, &self.config, self.now) {
            Ok(shard) => {
                shard.check_invariants();
                PersistentState::of(&shard)
            }
            Err(error) => panic!("cannot open what a crash {when} leaves: {}", Chain(&error)),
        };
        (test_files, kept)
    }

    /// Kills the recovery from these files at each of its stores, and recovers again. Also recovers
    /// from the files of the completed recovery.
    fn crash_the_recovery(&mut self, files: &FileCopies, expected: &PersistentState) {
        self.figures.recoveries += 1;
        let test_files = TestFiles::with(files.clone());
        let images = Rc::new(RefCell::new(Vec::new()));
        let event_count = Rc::new(Cell::new(0));
        let left = images.clone();
        let counter = event_count.clone();
        let mut follow = Images::new(test_files.clone(), self.random.below(u64::MAX));
        let watch = store_trace::watch(move |event| {
            counter.set(counter.get() + 1);
            left.borrow_mut().extend(follow.at(event).into_iter().map(|files| (event, files)));
        });
        let shard =
            open_on(&test_files, &self.config, self.now).expect("the files were opened before");
        drop(watch);
        drop(shard);
        self.figures.nested_events += event_count.get();
        for (event, files) in images.borrow().iter() {
            self.figures.nested_images += 1;
            let (_, kept) = self.open(files, &format!("at {event:?} of a recovery"));
            let what = || difference(&kept, expected, expected);
            assert!(
                kept == *expected,
                "a recovery killed at {event:?} ends in another state: {}",
                what()
            );
        }
        let (_, again) = self.open(&test_files.contents(), "after a recovery");
        assert!(again == *expected, "a second recovery ends in another state");
    }
}

/// Whether a recovery from these files has work to do: a committed intent, or rows to undo.
fn is_at_work(files: &FileCopies) -> bool {
    let state = |name: &str| files.get(name).and_then(|content| content.word(PAGE_BYTES));
    let undo = files.keys().find(|name| name.starts_with("undo"));
    let idle = [0, 0x5555_aaaa_c3c3_3c3c, 0x5a5a_a5a5_0ff0_f00f];
    let mut states = [state("intent"), undo.and_then(|name| state(name))].into_iter().flatten();
    states.any(|state| !idle.contains(&state))
}

fn difference(kept: &PersistentState, before: &PersistentState, after: &PersistentState) -> String {
    let values = |kept: &PersistentState, other: &PersistentState| match kept.values == other.values
    {
        true => "the same values",
        false => "other values",
    };
    format!(
        "{:#?}\nwith {} as before it and {} as after it, which is\n{:#?}\nafter\n{:#?}",
        kept.tables,
        values(kept, before),
        values(kept, after),
        after.tables,
        before.tables
    )
}

/// Runs the scenario with a crash at every store.
fn crash_everywhere(scenario: &CrashScenario) -> CrashFigures {
    let now = Instant::now();
    let reference = Rc::new(RefCell::new(Vec::new()));
    let noted = reference.clone();
    let sound = CrashScenario { planted: PlantedBugs::default(), ..scenario.clone() };
    let config = crash_life::run(
        &sound,
        TestFiles::default(),
        Box::new(move |shard| noted.borrow_mut().push(PersistentState::of(shard))),
    );
    let done = Rc::new(Cell::new(0));
    let planted = scenario.planted;
    let judge = Judge {
        config: Arc::new(PsConfig { planted, ..(*config).clone() }),
        now,
        reference: reference.take(),
        done: done.clone(),
        random: Random::new(scenario.seed),
        figures: CrashFigures::default(),
    };
    let judge = Rc::new(RefCell::new(judge));
    let test_files = TestFiles::default();
    let mut images = Images::new(test_files.clone(), scenario.seed);
    let judging = judge.clone();
    let watch = store_trace::watch(move |event| {
        let mut judge = judging.borrow_mut();
        judge.figures.events += 1;
        for files in images.at(event) {
            judge.judge(event, &files);
        }
    });
    crash_life::run(scenario, test_files, Box::new(move |_| done.set(done.get() + 1)));
    drop(watch);
    let judge = judge.borrow();
    assert_eq!(judge.done.get(), judge.reference.len(), "both runs have the same inputs");
    judge.figures
}

/// All scenarios but [`mixed`], each with a crash at every store.
pub(super) fn suite(planted: PlantedBugs) -> CrashFigures {
    let mut figures = CrashFigures::default();
    for (seed, past_cache) in [(1, false), (2, true)] {
        // Both optimizers change rows in place; the second changes slots in place, too.
        let lazy = Arc::new(Adam::new(0.1).lazy());
        for optimizer in [Arc::new(Sgd::new(0.5)) as Arc<dyn Optimizer>, lazy] {
            // Once is enough: the optimizer makes no difference.
            let many_clients = optimizer.slots().is_empty() && !past_cache;
            let scenario =
                CrashScenario { optimizer, mixed: false, past_cache, many_clients, planted, seed };
            figures += crash_everywhere(&scenario);
        }
    }
    figures
}

/// A scenario with an optimizer for each variable. Planted bugs are not searched for in it: the
/// others show them sooner.
fn mixed() -> CrashScenario {
    let optimizer = Arc::new(Adam::new(0.1).lazy());
    CrashScenario {
        optimizer,
        mixed: true,
        past_cache: true,
        many_clients: false,
        planted: PlantedBugs::default(),
        seed: 3,
    }
}

// S-1, S-2, S-6.
#[test]
fn a_crash_at_any_store_leaves_the_state_before_or_after_an_input() {
    let start = Instant::now();
    let mut figures = suite(PlantedBugs::default());
    figures += crash_everywhere(&mixed());
    println!("{figures:?} in {:.1} s", start.elapsed().as_secs_f64());
}
