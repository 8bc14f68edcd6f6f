//! A crash at every store of a shard's life, and at every store of the recoveries from it.
//!
//! A life is lived twice. The first time, what the shard must have kept is noted after each input.
//! The second time, every store is watched: at each, the files that a crash would leave are opened.
//! They must hold what was kept before the input under way or what is kept after it, and nothing
//! between. What the input before has answered was out by then, so it must be there.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::crash_life::{self, Life};
use super::images::Images;
use super::kept::{Files, PooledBuffers, open_on};
use super::random::{Random, is_thorough};
use crate::arena::shelf::Shelf;
use crate::arena::store_trace::{self, Event};
use crate::config::PsConfig;
use crate::layout::PAGE_BYTES;
use crate::optimizer::{Adam, Optimizer, Sgd};
use crate::planted::PlantedBugs;

/// One in so many images has its recovery watched in turn; more of those from which a recovery has
/// something to do. A thorough run, and one that looks for planted bugs, watches four times as many.
const NESTED: u64 = 384;
const NESTED_AT_WORK: u64 = 48;
const THOROUGH: u64 = 4;

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    events: usize,
    images: usize,
    recoveries: usize,
    nested_events: usize,
    nested_images: usize,
}

impl std::ops::AddAssign for Figures {
    fn add_assign(&mut self, more: Figures) {
        self.events += more.events;
        self.images += more.images;
        self.recoveries += more.recoveries;
        self.nested_events += more.nested_events;
        self.nested_images += more.nested_images;
    }
}

/// Opens what crashes leave and judges it.
struct Judge {
    config: Arc<PsConfig>,
    now: Instant,
    /// What is kept after each input.
    reference: Vec<PooledBuffers>,
    /// The inputs that are done, their outputs out; the first is the making of the shard.
    done: Rc<Cell<usize>>,
    random: Random,
    figures: Figures,
}

impl Judge {
    fn judge(&mut self, event: Event, files: &Files) {
        self.figures.images += 1;
        let done = self.done.get();
        let (shard, kept) = self.open(files, &format!("at {event:?} of input {done}"));
        let before = &self.reference[done.saturating_sub(1)];
        let after = self.reference.get(done).unwrap_or(before);
        let between = before.tables.generation != after.tables.generation;
        let right = kept == *before || kept == *after || between && kept == before.undeclared();
        assert!(
            right,
            "at {event:?} of input {done} a crash leaves what was never there: {}",
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

    fn open(&self, files: &Files, when: &str) -> (Shelf, PooledBuffers) {
        let shelf = Shelf::with(files.clone());
        let kept = match open_on(&shelf, &self.config, self.now) {
            Ok(shard) => {
                shard.check_invariants();
                PooledBuffers::of(&shard)
            }
            Err(error) => panic!("a crash {when} leaves what cannot be opened: {error}"),
        };
        (shelf, kept)
    }

    /// The recovery from these files is killed at each of its stores, and begun again; and what it
    /// leaves at its end is opened.
    fn crash_the_recovery(&mut self, files: &Files, expected: &PooledBuffers) {
        self.figures.recoveries += 1;
        let shelf = Shelf::with(files.clone());
        let images = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::new(Cell::new(0));
        let (left, told) = (images.clone(), seen.clone());
        let mut follow = Images::new(shelf.clone(), self.random.below(u64::MAX));
        let watch = store_trace::watch(move |event| {
            told.set(told.get() + 1);
            left.borrow_mut().extend(follow.at(event).into_iter().map(|files| (event, files)));
        });
        let shard = open_on(&shelf, &self.config, self.now).expect("it was opened before");
        drop(watch);
        drop(shard);
        self.figures.nested_events += seen.get();
        for (event, files) in images.borrow().iter() {
            self.figures.nested_images += 1;
            let (_, kept) = self.open(files, &format!("at {event:?} of a recovery"));
            let what = || difference(&kept, expected, expected);
            assert!(kept == *expected, "a recovery killed at {event:?} ends otherwise: {}", what());
        }
        let (_, again) = self.open(&shelf.contents(), "after a recovery");
        assert!(again == *expected, "a second recovery ends otherwise");
    }
}

/// Whether a recovery from these files has something to do: a committed intent, or rows to put
/// back.
fn is_at_work(files: &Files) -> bool {
    let state = |name: &str| files.get(name).and_then(|content| content.word(PAGE_BYTES));
    let undo = files.keys().find(|name| name.starts_with("undo"));
    let idle = [0, 0x5555_aaaa_c3c3_3c3c, 0x5a5a_a5a5_0ff0_f00f];
    let mut states = [state("intent"), undo.and_then(|name| state(name))].into_iter().flatten();
    states.any(|state| !idle.contains(&state))
}

fn difference(kept: &PooledBuffers, before: &PooledBuffers, after: &PooledBuffers) -> String {
    let values = |kept: &PooledBuffers, other: &PooledBuffers| match kept.values == other.values {
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

/// Lives the life, with a crash at every store.
fn crash_everywhere(life: &Life) -> Figures {
    let now = Instant::now();
    let reference = Rc::new(RefCell::new(Vec::new()));
    let noted = reference.clone();
    let sound = Life { planted: PlantedBugs::default(), ..life.clone() };
    let config = crash_life::live(
        &sound,
        Shelf::default(),
        Box::new(move |shard| noted.borrow_mut().push(PooledBuffers::of(shard))),
    );
    let done = Rc::new(Cell::new(0));
    let planted = life.planted;
    let judge = Judge {
        config: Arc::new(PsConfig { planted, ..(*config).clone() }),
        now,
        reference: reference.take(),
        done: done.clone(),
        random: Random::new(life.seed),
        figures: Figures::default(),
    };
    let judge = Rc::new(RefCell::new(judge));
    let shelf = Shelf::default();
    let mut images = Images::new(shelf.clone(), life.seed);
    let judging = judge.clone();
    let watch = store_trace::watch(move |event| {
        let mut judge = judging.borrow_mut();
        judge.figures.events += 1;
        for files in images.at(event) {
            judge.judge(event, &files);
        }
    });
    crash_life::live(life, shelf, Box::new(move |_| done.set(done.get() + 1)));
    drop(watch);
    let judge = judge.borrow();
    assert_eq!(judge.done.get(), judge.reference.len(), "both lives have the same inputs");
    judge.figures
}

/// All lives but [`mixed`], each with a crash at every store.
pub(super) fn suite(planted: PlantedBugs) -> Figures {
    let mut figures = Figures::default();
    for (seed, past_cache) in [(1, false), (2, true)] {
        // Both change rows where they lie, the second slots as well.
        let lazy = Arc::new(Adam::new(0.1).lazy());
        for optimizer in [Arc::new(Sgd::new(0.5)) as Arc<dyn Optimizer>, lazy] {
            // Once is enough: the optimizer has no part in it.
            let crowd = optimizer.slots().is_empty() && !past_cache;
            let life = Life { optimizer, mixed: false, past_cache, crowd, planted, seed };
            figures += crash_everywhere(&life);
        }
    }
    figures
}

/// A life in which each variable has a rule of its own. No planted bug is looked for in it: they show
/// in the others, and sooner.
fn mixed() -> Life {
    let optimizer = Arc::new(Adam::new(0.1).lazy());
    Life {
        optimizer,
        mixed: true,
        past_cache: true,
        crowd: false,
        planted: PlantedBugs::default(),
        seed: 3,
    }
}

#[test]
fn a_crash_at_any_store_leaves_what_was_before_or_after_it() {
    let start = Instant::now();
    let mut figures = suite(PlantedBugs::default());
    figures += crash_everywhere(&mixed());
    println!("{figures:?} in {:.1} s", start.elapsed().as_secs_f64());
}
