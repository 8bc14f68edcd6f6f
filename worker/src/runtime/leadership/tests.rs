//! Every order in which a thread and three callers can take their turns, and rules that are broken.

use std::collections::HashSet;

use super::*;

type Step<R> = fn(LeaderState) -> (LeaderState, R);

/// The rules, so that a test can break one.
#[derive(Clone, Copy)]
struct Rules {
    come: Step<bool>,
    called: Step<bool>,
    go: Step<bool>,
    go_on: Step<bool>,
    run: Step<bool>,
    begin: Step<bool>,
    stop: Step<bool>,
}

const RULES: Rules = Rules {
    come: LeaderState::come,
    called: LeaderState::called,
    go: LeaderState::go,
    go_on: LeaderState::go_on,
    run: LeaderState::run,
    begin: LeaderState::begin,
    stop: LeaderState::stop,
};

/// Where a caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Outside,
    /// Its turn has come, or not, and it has asked for nothing yet.
    Came(bool),
    /// It has asked, and not looked whether anybody does it.
    Asked(bool),
    /// It has looked, and not had the thread let go yet.
    Called,
    /// It waits, and runs the session if that is free and it may.
    WaitHistory(bool),
    /// It has what it waited for.
    Has,
    Done,
}

/// All there is, between two steps of anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    state: LeaderState,
    /// The thread has been told to let go.
    permit: bool,
    /// The thread is to wake, or not to fall asleep.
    unpark: bool,
    /// The thread sleeps; otherwise it is about to begin, or runs.
    sleeps: bool,
    /// Who has the session: the thread is the last.
    holder: Option<usize>,
    callers: [At; CALLERS],
}

const CALLERS: usize = 3;
const THREAD: usize = CALLERS;
/// It never runs the session: it waits in a runtime of its own.
const ASYNCHRONOUS: usize = CALLERS - 1;

impl World {
    fn new(thread: ThreadState) -> World {
        let state = LeaderState { thread, callers: 0, running: 0, ran: 0, open: 0 };
        let (callers, sleeps) = ([At::Outside; CALLERS], thread == ThreadState::Rests);
        World { state, permit: false, unpark: false, sleeps, holder: None, callers }
    }

    fn apply<R>(&mut self, step: Step<R>) -> R {
        let (state, result) = step(self.state);
        // How many have run it is for the clock, which this world does not have.
        self.state = LeaderState { ran: 0, ..state };
        result
    }

    /// Whoever has the session has done what a caller has asked for.
    fn answer(&mut self, caller: usize) {
        self.state.open -= 1;
        self.callers[caller] = match self.callers[caller] {
            At::WaitHistory(true) => At::Has,
            // It was there before it had to wait.
            At::Called => At::Came(true),
            _ => At::Done,
        };
    }

    /// What may come next, whoever it is that goes on.
    fn next(self, rules: &Rules) -> Vec<World> {
        let mut worlds = Vec::new();
        for caller in 0..CALLERS {
            let mut world = self;
            match self.callers[caller] {
                At::Outside if caller == ASYNCHRONOUS => {
                    world.state.open += 1;
                    world.callers[caller] = At::Asked(false);
                }
                At::Outside => {
                    let runs = world.apply(rules.come);
                    world.callers[caller] = At::Came(runs);
                }
                At::Came(runs) => {
                    // It asks for something, or has what it wanted and goes.
                    if runs {
                        let mut gone = self;
                        gone.unpark |= gone.apply(rules.go);
                        gone.callers[caller] = At::Done;
                        worlds.push(gone);
                    }
                    world.state.open += 1;
                    world.callers[caller] = At::Asked(runs);
                }
                At::Asked(runs) => {
                    world.unpark |= world.apply(rules.called);
                    world.callers[caller] = if runs { At::Called } else { At::WaitHistory(false) };
                }
                At::Called => {
                    world.permit |= world.apply(rules.run);
                    world.callers[caller] = At::WaitHistory(true);
                }
                At::WaitHistory(true) if self.holder.is_none() => world.holder = Some(caller),
                // It lets go of the session, and then of its turn; another may follow.
                At::Has if self.holder == Some(caller) => world.holder = None,
                At::Has => {
                    world.unpark |= world.apply(rules.go_on);
                    world.callers[caller] = At::Outside;
                    worlds.push(world);
                    world.callers[caller] = At::Done;
                }
                At::WaitHistory(_) | At::Done => continue,
            }
            worlds.push(world);
        }
        let asks = |at| matches!(at, At::Asked(false) | At::Called | At::WaitHistory(_));
        for caller in (0..CALLERS).filter(|&caller| asks(self.callers[caller])) {
            if self.holder.is_some() {
                let mut world = self;
                world.answer(caller);
                worlds.push(world);
            }
        }
        worlds.extend(self.thread(rules));
        worlds
    }

    /// What the thread may do next.
    fn thread(self, rules: &Rules) -> Option<World> {
        let mut world = self;
        if self.holder == Some(THREAD) {
            if !self.permit {
                return None;
            }
            world.permit = false;
            if world.apply(rules.stop) {
                (world.holder, world.sleeps) = (None, true);
            }
        } else if self.sleeps {
            if !self.unpark {
                return None;
            }
            world.unpark = false;
            world.sleeps = !self.state.may_go_on();
        } else if self.state.thread == ThreadState::Runs && self.holder.is_none() {
            world.holder = Some(THREAD);
        } else if self.state.thread != ThreadState::Runs {
            world.sleeps = !world.apply(rules.begin);
        } else {
            return None;
        }
        Some(world)
    }

    fn is_over(&self) -> bool {
        self.callers == [At::Done; CALLERS] && self.state.open == 0 && self.state.callers == 0
    }
}

/// Goes every way there is; a world in which nothing goes on though somebody waits, and how many there were.
fn stuck(rules: &Rules) -> (Option<World>, usize) {
    let mut todo = vec![World::new(ThreadState::Runs), World::new(ThreadState::Rests)];
    let mut seen: HashSet<World> = todo.iter().copied().collect();
    while let Some(world) = todo.pop() {
        let next = world.next(rules);
        if next.is_empty() && !world.is_over() {
            return (Some(world), seen.len());
        }
        todo.extend(next.into_iter().filter(|world| seen.insert(*world)));
    }
    (None, seen.len())
}

#[test]
fn whoever_asks_is_answered_though_no_clock_runs() {
    let (stuck, worlds) = stuck(&RULES);
    assert_eq!(stuck, None);
    assert!(worlds > 1_000, "{worlds} are not all");
}

#[test]
fn callers_that_never_wait_do_not_keep_the_session_from_its_thread() {
    let leadership = Arc::new(Leadership::default());
    assert!(leadership.begin());
    let mut first = leadership.come().unwrap();
    first.run();
    assert!(leadership.change(LeaderState::stop), "it leaves the session to whoever waits");
    assert!(!leadership.begin());
    drop(first);
    std::thread::scope(|scope| {
        let rests = scope.spawn(|| leadership.rest());
        let mut turn = None;
        while !rests.is_finished() {
            // One comes before the other goes.
            turn = leadership.come();
        }
        assert!(leadership.begin());
        drop(turn);
    });
}

#[test]
fn each_rule_is_needed() {
    let forgets: Step<bool> = |state| (state, false);
    let goes: Step<bool> = |state| (LeaderState { callers: state.callers - 1, ..state }, false);
    let goes_on: Step<bool> = |state| (state.go_on().0, false);
    let stops: Step<bool> = |state| (LeaderState { thread: ThreadState::Rests, ..state }, true);
    let broken = [
        ("a call is not heard", Rules { called: forgets, ..RULES }),
        ("a caller goes and leaves something open", Rules { go: goes, ..RULES }),
        ("a caller that has run the session does", Rules { go_on: goes_on, ..RULES }),
        ("the thread stops for a caller that has gone", Rules { stop: stops, ..RULES }),
    ];
    for (what, rules) in broken {
        assert!(stuck(&rules).0.is_some(), "{what}, and nobody waits in vain");
    }
}

#[test]
fn the_word_holds_all_that_is_said() {
    for thread in [ThreadState::Runs, ThreadState::Rests, ThreadState::IsCalled] {
        let state = LeaderState { thread, callers: 0xab, running: 3, ran: 0xde, open: 0xf123_4567 };
        assert_eq!(LeaderState::of(state.word()), state);
    }
    assert_eq!(LeaderState::of(0).thread, ThreadState::Runs, "a session begins with its thread");
}
