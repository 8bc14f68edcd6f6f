//! Two threads on memory with store buffers, and an explorer of every order of their steps.
//!
//! Each thread has a store buffer: its stores reach memory one by one, in order, at any later time.
//! A thread's own loads see its buffered stores, and a fence waits until the buffer is empty. This
//! is the memory model of x86-64 (total store order). Acquire loads and release stores are at least
//! as strict.
//!
//! A program is a function. The machine runs it from the start for each of its steps and replays
//! the values of its earlier loads. Its effects after the first new step are ignored.

use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;

use pushpull_common::shared_values::AtomicWords;

use super::program::{Ending, PlantedFault};

/// A memory, and the number of a word in it.
pub(crate) type Place = (Region, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Region {
    BlockTable,
    ReaderSlot,
    Values,
}

/// The words of each region: as many as the programs use.
const REGION_WORDS: usize = 24;

fn index((region, word): Place) -> usize {
    assert!(word < REGION_WORDS, "word {word} of {region:?}");
    region as usize * REGION_WORDS + word
}

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MachineStep {
    Load(Place),
    Store(Place, u64),
    Fence,
    /// The other thread may begin.
    Ready,
    Done(Option<Ending>),
}

/// One run of a program: replays the values of its earlier steps and records its next step.
#[derive(Debug)]
pub(crate) struct ProgramRun<'a> {
    found: &'a [u64],
    at: Cell<usize>,
    next: Cell<Option<MachineStep>>,
    fault: PlantedFault,
    /// The value of the first load of the sequence, for [`PlantedFault::SequenceNotLoadedAgain`].
    sequence: Cell<Option<u64>>,
    pub(crate) scratch: RefCell<Vec<u32>>,
}

impl ProgramRun<'_> {
    fn step(&self, step: MachineStep) -> u64 {
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

    /// Lets the other program begin.
    pub(crate) fn ready(&self) {
        self.step(MachineStep::Ready);
    }

    pub(crate) fn words(&self, region: Region, reads: bool) -> View<'_> {
        View { run: self, region, reads }
    }
}

/// One of the memories, as one of the programs maps it.
#[derive(Debug)]
pub(crate) struct View<'a> {
    run: &'a ProgramRun<'a>,
    region: Region,
    /// Whether the program is the reader.
    reads: bool,
}

const SEQUENCE: Place = (Region::BlockTable, 0);
const PIN: Place = (Region::ReaderSlot, 0);
const REVOKED: Place = (Region::ReaderSlot, 8);

impl AtomicWords for View<'_> {
    fn load(&self, word: usize) -> u64 {
        let logical = (self.region, word);
        let fault = self.run.fault;
        let run = self.run;
        match (logical, self.reads) {
            (PIN, false) if fault == PlantedFault::PinIgnored => return 0,
            (REVOKED, true) if fault == PlantedFault::RevocationIgnored => return 0,
            (SEQUENCE, true) if fault == PlantedFault::SequenceNotLoadedAgain => {
                if let Some(sequence) = run.sequence.get() {
                    return sequence;
                }
            }
            _ => {}
        }
        let found = run.step(MachineStep::Load(logical));
        if logical == SEQUENCE {
            run.sequence.set(Some(found));
        }
        found
    }

    fn store(&self, word: usize, value: u64) {
        let logical = (self.region, word);
        let odd = logical == SEQUENCE && value % 2 == 1 && value != u64::MAX;
        if !(odd && self.run.fault == PlantedFault::SequenceNeverOdd) {
            self.run.step(MachineStep::Store(logical, value));
        }
    }

    fn fence(&self) {
        let left_out = match self.reads {
            true => self.run.fault == PlantedFault::PinNotFenced,
            false => self.run.fault == PlantedFault::SequenceNotFenced,
        };
        if !left_out {
            self.run.step(MachineStep::Fence);
        }
    }
}

pub(crate) type Program<'a> = dyn Fn(&ProgramRun<'_>) -> Option<Ending> + 'a;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Thread {
    /// The value of each of its steps: what a load returned, or 0.
    found: Vec<u64>,
    /// Stores that have not reached memory.
    queue: VecDeque<(usize, u64)>,
    done: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MachineState {
    memory: Vec<u64>,
    threads: [Thread; 2],
}

fn next(program: &Program<'_>, fault: PlantedFault, found: &[u64]) -> MachineStep {
    let at = Cell::new(0);
    let next = Cell::new(None);
    let sequence = Cell::new(None);
    let run = ProgramRun { found, at, next, fault, sequence, scratch: RefCell::default() };
    let ending = program(&run);
    run.next.get().unwrap_or(MachineStep::Done(ending))
}

/// Explores every order of the steps of both programs. The first runs alone until it is ready.
/// Calls `ended` with the ending of the second, once for each state in which it ends, until `ended`
/// breaks.
pub(crate) fn explore(
    fault: PlantedFault,
    first: &Program<'_>,
    second: &Program<'_>,
    mut ended: impl FnMut(Ending) -> ControlFlow<()>,
) {
    let mut ending = None;
    let programs = [first, second];
    let threads = [Thread::default(), Thread::default()];
    let mut state = MachineState { memory: vec![0; 3 * REGION_WORDS], threads };
    while next(first, fault, &state.threads[0].found) != MachineStep::Ready {
        state = step(&state, 0, programs[0], fault, &mut ending).expect("it is not done");
        while let Some(drained) = drain(&state, 0) {
            state = drained;
        }
    }
    state.threads[0].found.push(0);
    // States are known by a hash of 64 bits. With the number of states here, a collision has a
    // probability of one in millions.
    let mut known = HashSet::from([hash_of(&state)]);
    let mut todo = vec![state];
    while let Some(state) = todo.pop() {
        for (thread, program) in programs.into_iter().enumerate() {
            let stepped = step(&state, thread, program, fault, &mut ending);
            if ending.take().is_some_and(|ending| ended(ending).is_break()) {
                return;
            }
            for after in [stepped, drain(&state, thread)].into_iter().flatten() {
                if known.insert(hash_of(&after)) {
                    todo.push(after);
                }
            }
        }
    }
}

fn hash_of(state: &MachineState) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Moves the oldest store in a thread's buffer to memory, if there is one.
fn drain(state: &MachineState, thread: usize) -> Option<MachineState> {
    let mut state = state.clone();
    let (at, value) = state.threads[thread].queue.pop_front()?;
    state.memory[at] = value;
    Some(state)
}

/// Makes the next step of a thread, if it has one. A fence needs an empty store buffer.
fn step(
    state: &MachineState,
    thread: usize,
    program: &Program<'_>,
    fault: PlantedFault,
    ended: &mut Option<Ending>,
) -> Option<MachineState> {
    if state.threads[thread].done {
        return None;
    }
    let mut state = state.clone();
    let Thread { found, queue, done } = &mut state.threads[thread];
    let value = match next(program, fault, found) {
        MachineStep::Load(logical) => {
            let own = queue.iter().rev().find(|(at, _)| *at == index(logical));
            own.map_or(state.memory[index(logical)], |(_, value)| *value)
        }
        MachineStep::Store(logical, value) => {
            queue.push_back((index(logical), value));
            0
        }
        MachineStep::Fence if !queue.is_empty() => return None,
        MachineStep::Fence | MachineStep::Ready => 0,
        MachineStep::Done(ending) => {
            *done = true;
            *ended = ending;
            0
        }
    };
    found.push(value);
    Some(state)
}
