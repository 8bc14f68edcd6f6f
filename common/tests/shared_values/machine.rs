//! Two threads on memory whose stores are seen late, and every order in which they can go on.
//!
//! A thread has a queue of stores that are made and not seen yet: they come to memory one by one,
//! in order, whenever the machine likes; it sees its own at once, and a fence waits for all.
//! That is how an x86-64 processor is, and what loads that acquire and stores that release are
//! at least as strict as.
//!
//! A program is a function. It is run from its start again for each of its steps, told what its
//! loads have found so far; what it does behind the first step that is new counts for nothing.

use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;

use pushpull_common::shared_values::AtomicWords;

use super::program::{Ending, Fault};

/// Which of the memories, and which word of it.
pub(crate) type Place = (Region, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Region {
    BlockTable,
    ReaderSlot,
    Values,
}

/// AtomicWords of each region, as many as the programs use.
const REGION_WORDS: usize = 24;

fn index((region, word): Place) -> usize {
    assert!(word < REGION_WORDS, "word {word} of {region:?}");
    region as usize * REGION_WORDS + word
}

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Load(Place),
    Store(Place, u64),
    Fence,
    /// The other may begin.
    Ready,
    Done(Option<Ending>),
}

/// What a program runs on: tells it what it has found, and notes what it wants next.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    found: &'a [u64],
    at: Cell<usize>,
    next: Cell<Option<Step>>,
    fault: Fault,
    /// What the first load of the turn has found, for [`Fault::SequenceNotLoadedAgain`].
    sequence: Cell<Option<u64>>,
    pub(crate) scratch: RefCell<Vec<u32>>,
}

impl Run<'_> {
    fn step(&self, step: Step) -> u64 {
        if self.next.get().is_some() {
            return 0;
        }
        let at = self.at.get();
        self.at.set(at + 1);
        self.found.get(at).copied().unwrap_or_else(|| {
            self.next.set(Some(step));
            0
        })
    }

    /// The other program may begin.
    pub(crate) fn ready(&self) {
        self.step(Step::Ready);
    }

    pub(crate) fn words(&self, region: Region, reads: bool) -> View<'_> {
        View { run: self, region, reads }
    }
}

/// One of the memories, as a program has it.
#[derive(Debug)]
pub(crate) struct View<'a> {
    run: &'a Run<'a>,
    region: Region,
    /// Whether it is the reader's.
    reads: bool,
}

const SEQUENCE: Place = (Region::BlockTable, 0);
const PIN: Place = (Region::ReaderSlot, 0);
const REVOKED: Place = (Region::ReaderSlot, 8);

impl AtomicWords for View<'_> {
    fn load(&self, word: usize) -> u64 {
        let (logical, fault, run) = ((self.region, word), self.run.fault, self.run);
        match (logical, self.reads) {
            (PIN, false) if fault == Fault::PinIgnored => return 0,
            (REVOKED, true) if fault == Fault::RevokedUnseen => return 0,
            (SEQUENCE, true) if fault == Fault::SequenceNotLoadedAgain => {
                if let Some(sequence) = run.sequence.get() {
                    return sequence;
                }
            }
            _ => {}
        }
        let found = run.step(Step::Load(logical));
        if logical == SEQUENCE {
            run.sequence.set(Some(found));
        }
        found
    }

    fn store(&self, word: usize, value: u64) {
        let logical = (self.region, word);
        let odd = logical == SEQUENCE && value % 2 == 1 && value != u64::MAX;
        if !(odd && self.run.fault == Fault::SequenceNeverOdd) {
            self.run.step(Step::Store(logical, value));
        }
    }

    fn fence(&self) {
        let left_out = match self.reads {
            true => self.run.fault == Fault::PinNotFenced,
            false => self.run.fault == Fault::SequenceNotFenced,
        };
        if !left_out {
            self.run.step(Step::Fence);
        }
    }
}

pub(crate) type Program<'a> = dyn Fn(&Run<'_>) -> Option<Ending> + 'a;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Thread {
    /// What each of its steps has found.
    found: Vec<u64>,
    /// Stores that are not seen yet.
    queue: VecDeque<(usize, u64)>,
    done: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    memory: Vec<u64>,
    threads: [Thread; 2],
}

fn next(program: &Program<'_>, fault: Fault, found: &[u64]) -> Step {
    let (at, next, sequence) = (Cell::new(0), Cell::new(None), Cell::new(None));
    let run = Run { found, at, next, fault, sequence, scratch: RefCell::default() };
    let ending = program(&run);
    run.next.get().unwrap_or(Step::Done(ending))
}

/// Goes through every order in which the two can go on, the first alone until it is ready; tells how
/// the second has ended, once for each state in which it can, until it is told to stop.
pub(crate) fn explore(
    fault: Fault,
    first: &Program<'_>,
    second: &Program<'_>,
    mut ended: impl FnMut(Ending) -> ControlFlow<()>,
) {
    let mut ending = None;
    let programs = [first, second];
    let threads = [Thread::default(), Thread::default()];
    let mut state = State { memory: vec![0; 3 * REGION_WORDS], threads };
    while next(first, fault, &state.threads[0].found) != Step::Ready {
        state = go_on(&state, 0, programs[0], fault, &mut ending).expect("it is not done");
        while let Some(seen) = see(&state, 0) {
            state = seen;
        }
    }
    state.threads[0].found.push(0);
    // So many states are told apart by a hash of 64 bits: that two share one is a chance in millions.
    let mut known = HashSet::from([hash_of(&state)]);
    let mut todo = vec![state];
    while let Some(state) = todo.pop() {
        for (thread, program) in programs.into_iter().enumerate() {
            let went = go_on(&state, thread, program, fault, &mut ending);
            if ending.take().is_some_and(|ending| ended(ending).is_break()) {
                return;
            }
            for after in [went, see(&state, thread)].into_iter().flatten() {
                if known.insert(hash_of(&after)) {
                    todo.push(after);
                }
            }
        }
    }
}

fn hash_of(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// The oldest store of a thread that is not seen yet is seen.
fn see(state: &State, thread: usize) -> Option<State> {
    let mut state = state.clone();
    let (at, value) = state.threads[thread].queue.pop_front()?;
    state.memory[at] = value;
    Some(state)
}

/// A thread makes its next step, if it can.
fn go_on(
    state: &State,
    thread: usize,
    program: &Program<'_>,
    fault: Fault,
    ended: &mut Option<Ending>,
) -> Option<State> {
    if state.threads[thread].done {
        return None;
    }
    let mut state = state.clone();
    let Thread { found, queue, done } = &mut state.threads[thread];
    let value = match next(program, fault, found) {
        Step::Load(logical) => {
            let own = queue.iter().rev().find(|(at, _)| *at == index(logical));
            own.map_or(state.memory[index(logical)], |(_, value)| *value)
        }
        Step::Store(logical, value) => {
            queue.push_back((index(logical), value));
            0
        }
        Step::Fence if !queue.is_empty() => return None,
        Step::Fence | Step::Ready => 0,
        Step::Done(ending) => {
            (*done, *ended) = (true, ending);
            0
        }
    };
    found.push(value);
    Some(state)
}
