//! Explores every interleaving of a session's thread and three callers, with the correct rules and
//! with broken ones.

use std::collections::HashSet;

use super::*;

type LeaderStep<R> = fn(LeaderState) -> (LeaderState, R);

/// The transitions of [`LeaderState`], so that a test can break one.
#[derive(Clone, Copy)]
struct Rules {
    enter: LeaderStep<bool>,
    call: LeaderStep<Called>,
    leave: LeaderStep<bool>,
    leave_lead: LeaderStep<bool>,
    lead: LeaderStep<bool>,
    take_over: LeaderStep<bool>,
    yield_lead: LeaderStep<bool>,
    /// Whether a new leader looks for what was submitted.
    begins: bool,
}

const RULES: Rules = Rules {
    enter: LeaderState::enter,
    call: LeaderState::call,
    leave: LeaderState::leave,
    leave_lead: LeaderState::leave_lead,
    lead: LeaderState::lead,
    take_over: LeaderState::take_over,
    yield_lead: LeaderState::yield_lead,
    begins: true,
};

/// The progress of one caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum CallerProgress {
    Outside,
    /// It has entered, and may lead or not; it has submitted nothing yet.
    Entered(bool),
    /// It has submitted an operation, and called nobody yet.
    Opened(bool),
    /// It has called whom it must, and not begun to lead yet.
    Called,
    /// It waits, and leads if it may and the session is free.
    Waiting(bool),
    /// It has the reply.
    Answered,
    Done,
}

/// The state of the model between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LeadershipModel {
    state: LeaderState,
    /// The permit of `Notify`: the thread is asked to yield.
    permit: bool,
    /// The unpark token of the thread: it wakes, or does not park.
    unpark: bool,
    /// Whether the thread is parked; otherwise it is about to take over, or runs.
    sleeps: bool,
    /// The caller that runs the session, or [`THREAD`].
    holder: Option<usize>,
    /// The permit of `Notify`: the session is to look for what was submitted.
    called: bool,
    /// The callers whose operation the session has found.
    found: [bool; CALLERS],
    callers: [CallerProgress; CALLERS],
}

const CALLERS: usize = 3;
const THREAD: usize = CALLERS;
/// A caller that never leads: it waits in a runtime of its own.
const ASYNCHRONOUS: usize = CALLERS - 1;

impl LeadershipModel {
    fn new(thread: ThreadState) -> LeadershipModel {
        let state = LeaderState { thread, callers: 0, leading: 0, terms: 0, open: 0 };
        let callers = [CallerProgress::Outside; CALLERS];
        let sleeps = thread == ThreadState::Parked;
        LeadershipModel {
            state,
            permit: false,
            unpark: false,
            sleeps,
            holder: None,
            called: false,
            found: [false; CALLERS],
            callers,
        }
    }

    fn apply<R>(&mut self, step: LeaderStep<R>) -> R {
        let (state, result) = step(self.state);
        // The model has no clock, so it ignores the count of leaders.
        self.state = LeaderState { terms: 0, ..state };
        result
    }

    /// A thread begins to run the session.
    fn hold(&mut self, holder: usize, rules: &Rules) {
        self.holder = Some(holder);
        self.called |= rules.begins;
    }

    /// A caller submits an operation.
    fn open(&mut self, caller: usize, leads: bool) {
        self.state.open += 1;
        self.found[caller] = false;
        self.callers[caller] = CallerProgress::Opened(leads);
    }

    /// The holder of the session answers a caller.
    fn answer(&mut self, caller: usize) {
        self.state.open -= 1;
        self.callers[caller] = match self.callers[caller] {
            CallerProgress::Waiting(true) => CallerProgress::Answered,
            // The answer came before the caller had to wait.
            CallerProgress::Called => CallerProgress::Entered(true),
            _ => CallerProgress::Done,
        };
    }

    /// Returns the states after any one step of any participant.
    fn next(self, rules: &Rules) -> Vec<LeadershipModel> {
        let mut models = Vec::new();
        for caller in 0..CALLERS {
            let mut model = self;
            match self.callers[caller] {
                CallerProgress::Outside if caller == ASYNCHRONOUS => {
                    model.open(caller, false);
                }
                CallerProgress::Outside => {
                    let leads = model.apply(rules.enter);
                    model.callers[caller] = CallerProgress::Entered(leads);
                }
                CallerProgress::Entered(leads) => {
                    // The caller opens an operation, or has its answer and leaves.
                    if leads {
                        let mut left = self;
                        left.unpark |= left.apply(rules.leave);
                        left.callers[caller] = CallerProgress::Done;
                        models.push(left);
                    }
                    model.open(caller, leads);
                }
                CallerProgress::Opened(leads) => {
                    match model.apply(rules.call) {
                        Called::Nobody => {}
                        Called::Leader => model.called = true,
                        Called::Thread => model.unpark = true,
                    }
                    model.callers[caller] =
                        if leads { CallerProgress::Called } else { CallerProgress::Waiting(false) };
                }
                CallerProgress::Called => {
                    model.permit |= model.apply(rules.lead);
                    model.callers[caller] = CallerProgress::Waiting(true);
                }
                CallerProgress::Waiting(true) if self.holder.is_none() => {
                    model.hold(caller, rules);
                }
                // It releases the session, then leaves; it may enter again.
                CallerProgress::Answered if self.holder == Some(caller) => model.holder = None,
                CallerProgress::Answered => {
                    model.unpark |= model.apply(rules.leave_lead);
                    model.callers[caller] = CallerProgress::Outside;
                    models.push(model);
                    model.callers[caller] = CallerProgress::Done;
                }
                CallerProgress::Waiting(_) | CallerProgress::Done => continue,
            }
            models.push(model);
        }
        if self.holder.is_some() && self.called {
            let mut model = self;
            model.called = false;
            let has_submitted = |caller: usize| {
                matches!(
                    self.callers[caller],
                    CallerProgress::Opened(_) | CallerProgress::Called | CallerProgress::Waiting(_)
                )
            };
            (0..CALLERS).for_each(|caller| model.found[caller] |= has_submitted(caller));
            models.push(model);
        }
        let awaits_answer = |at| {
            matches!(
                at,
                CallerProgress::Opened(false) | CallerProgress::Called | CallerProgress::Waiting(_)
            )
        };
        let is_found = |&caller: &usize| self.found[caller] && awaits_answer(self.callers[caller]);
        for caller in (0..CALLERS).filter(is_found) {
            if self.holder.is_some() {
                let mut model = self;
                model.answer(caller);
                models.push(model);
            }
        }
        models.extend(self.thread(rules));
        models
    }

    /// Returns the state after a step of the thread, if it can make one.
    fn thread(self, rules: &Rules) -> Option<LeadershipModel> {
        let mut model = self;
        if self.holder == Some(THREAD) {
            if !self.permit {
                return None;
            }
            model.permit = false;
            if model.apply(rules.yield_lead) {
                model.holder = None;
                model.sleeps = true;
            }
        } else if self.sleeps {
            if !self.unpark {
                return None;
            }
            model.unpark = false;
            model.sleeps = !self.state.can_take_over();
        } else if self.state.thread == ThreadState::Runs && self.holder.is_none() {
            model.hold(THREAD, rules);
        } else if self.state.thread != ThreadState::Runs {
            model.sleeps = !model.apply(rules.take_over);
        } else {
            return None;
        }
        Some(model)
    }

    fn is_over(&self) -> bool {
        self.callers == [CallerProgress::Done; CALLERS]
            && self.state.open == 0
            && self.state.callers == 0
    }
}

/// Searches all reachable states. Returns a deadlock, if one is found, and the number of states.
fn find_deadlock(rules: &Rules) -> (Option<LeadershipModel>, usize) {
    let mut todo =
        vec![LeadershipModel::new(ThreadState::Runs), LeadershipModel::new(ThreadState::Parked)];
    let mut visited: HashSet<LeadershipModel> = todo.iter().copied().collect();
    while let Some(model) = todo.pop() {
        let next = model.next(rules);
        if next.is_empty() && !model.is_over() {
            return (Some(model), visited.len());
        }
        todo.extend(next.into_iter().filter(|model| visited.insert(*model)));
    }
    (None, visited.len())
}

#[test]
fn every_operation_is_answered_without_a_timeout() {
    let (deadlock, models) = find_deadlock(&RULES);
    assert_eq!(deadlock, None);
    assert!(models > 1_000, "only {models} states were reached");
}

#[test]
fn callers_that_do_not_wait_do_not_block_the_thread() {
    let leadership = Arc::new(Leadership::default());
    assert!(leadership.take_over());
    let mut first = leadership.enter().unwrap();
    first.lead();
    assert!(
        leadership.change(LeaderState::yield_lead),
        "the thread does not yield to a waiting caller"
    );
    assert!(!leadership.take_over());
    drop(first);
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| leadership.park());
        let mut guard = None;
        while !parked.is_finished() {
            // The next caller enters before the last one leaves.
            guard = leadership.enter();
        }
        assert!(leadership.take_over());
        drop(guard);
    });
}

#[test]
fn each_rule_is_needed() {
    let loses_call: LeaderStep<Called> = |state| match state.call() {
        (_, Called::Thread) => (state, Called::Nobody),
        call => call,
    };
    let lets_lead: LeaderStep<Called> = |state| match state.call() {
        (state, Called::Leader) => (state, Called::Nobody),
        call => call,
    };
    let leaves: LeaderStep<bool> =
        |state| (LeaderState { callers: state.callers - 1, ..state }, false);
    let leaves_lead: LeaderStep<bool> = |state| (state.leave_lead().0, false);
    let always_yields: LeaderStep<bool> =
        |state| (LeaderState { thread: ThreadState::Parked, ..state }, true);
    let broken = [
        ("a call of the thread is lost", Rules { call: loses_call, ..RULES }),
        ("a call of the leader is lost", Rules { call: lets_lead, ..RULES }),
        ("a new leader looks for nothing", Rules { begins: false, ..RULES }),
        ("a caller leaves an open operation without a call", Rules { leave: leaves, ..RULES }),
        ("a leader leaves without a call", Rules { leave_lead: leaves_lead, ..RULES }),
        (
            "the thread yields to a caller that has left",
            Rules { yield_lead: always_yields, ..RULES },
        ),
    ];
    for (what, rules) in broken {
        assert!(find_deadlock(&rules).0.is_some(), "no deadlock is found if {what}");
    }
}

#[test]
fn the_word_encodes_the_whole_state() {
    for thread in [ThreadState::Runs, ThreadState::Parked, ThreadState::Requested] {
        let state =
            LeaderState { thread, callers: 0xab, leading: 3, terms: 0xde, open: 0xf123_4567 };
        assert_eq!(LeaderState::of(state.word()), state);
    }
    assert_eq!(
        LeaderState::of(0).thread,
        ThreadState::Runs,
        "a session does not start on its thread"
    );
}
