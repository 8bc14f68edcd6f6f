//! Who runs a session: its own thread, or a caller that has nothing to do but wait for it.
//!
//! Handing an operation to another thread and its reply back takes two wakes, each of some microseconds.
//! A thread that waits for a reply can as well write the request and read the answer by itself. So the
//! session's thread lets go of the session while callers wait one after the other, and takes it back when
//! there is something to do and nobody waits, or when no caller has come for a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use tokio::sync::Notify;

/// How long the session is left to callers after the last of them: what may come meanwhile without having been
/// asked for can wait as long, and a thread that looks so often costs nothing that could be measured.
const LEASE: Duration = Duration::from_millis(20);

/// Whose turn it is to run a session.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    word: AtomicU64,
    /// Has the thread let go of the session.
    release: Notify,
    thread: OnceLock<Thread>,
}

/// What the word says. All of it changes at once, so that nothing can be left undone between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    thread: Doing,
    /// Callers that run the session, or are about to.
    callers: u16,
    /// How many callers have come, by and by.
    came: u8,
    /// What has been asked for and is not done yet.
    open: u32,
}

/// What the session's thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doing {
    /// It runs the session, or is about to begin.
    Runs,
    /// It has left it to callers.
    Rests,
    /// It rests, and has been told to go on.
    IsCalled,
}

impl State {
    fn of(word: u64) -> State {
        let thread = match word & 3 {
            0 => Doing::Runs,
            1 => Doing::Rests,
            _ => Doing::IsCalled,
        };
        let (came, callers, open) = ((word >> 8) as u8, (word >> 16) as u16, (word >> 32) as u32);
        State { thread, callers, came, open }
    }

    fn word(self) -> u64 {
        let State { thread, callers, came, open } = self;
        thread as u64 | u64::from(came) << 8 | u64::from(callers) << 16 | u64::from(open) << 32
    }

    /// Something is open that nobody does.
    fn is_forgotten(self) -> bool {
        self.open > 0 && self.callers == 0 && self.thread == Doing::Rests
    }

    /// Has the thread called if nobody else does what is open; whether it is to be woken.
    fn called(mut self) -> (State, bool) {
        let forgotten = self.is_forgotten();
        if forgotten {
            self.thread = Doing::IsCalled;
        }
        (self, forgotten)
    }

    /// A caller comes, and whether it is to run the session: not beside a thread that is at it.
    fn come(mut self) -> (State, bool) {
        let runs = self.thread != Doing::Runs || self.open == 0;
        let runs = runs && self.callers < u16::MAX;
        if runs {
            self.callers += 1;
            self.came = self.came.wrapping_add(1);
        }
        (self, runs)
    }

    /// A caller goes; whether the thread is to be woken.
    fn go(mut self) -> (State, bool) {
        self.callers -= 1;
        self.called()
    }

    /// The thread wants to run the session, and whether it may.
    fn begin(mut self) -> (State, bool) {
        let may = self.callers == 0;
        self.thread = if may { Doing::Runs } else { Doing::Rests };
        (self, may)
    }

    /// The thread has been asked to let go, and whether it is to: who has asked may be gone.
    fn stop(mut self) -> (State, bool) {
        let wanted = self.callers > 0;
        if wanted {
            self.thread = Doing::Rests;
        }
        (self, wanted)
    }
}

impl Turns {
    fn change<R>(&self, step: impl Fn(State) -> (State, R)) -> R {
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            let (next, result) = step(State::of(word));
            let order = (Ordering::SeqCst, Ordering::SeqCst);
            match self.word.compare_exchange_weak(word, next.word(), order.0, order.1) {
                Ok(_) => return result,
                Err(now) => word = now,
            }
        }
    }

    fn state(&self) -> State {
        State::of(self.word.load(Ordering::SeqCst))
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Something is asked for, until what is returned is dropped. Whoever runs the session must be able to find
    /// it before [`Turns::call`] is called.
    pub(crate) fn open(self: &Arc<Turns>) -> Open {
        self.change(|state| (State { open: state.open.saturating_add(1), ..state }, ()));
        Open(self.clone())
    }

    /// Sees to it that somebody does what is open.
    pub(crate) fn call(&self) {
        if self.change(State::called) {
            self.wake();
        }
    }

    /// Has the thread take the session back as soon as no caller has it, though nothing be open.
    pub(super) fn end(&self) {
        self.change(|state| match state.thread {
            Doing::Rests => (State { thread: Doing::IsCalled, ..state }, ()),
            Doing::Runs | Doing::IsCalled => (state, ()),
        });
        self.wake();
    }

    /// A caller begins to wait: it is to run the session meanwhile, unless the thread is at it.
    pub(super) fn come(self: &Arc<Turns>) -> Option<Turn> {
        self.change(State::come).then(|| Turn(self.clone()))
    }

    /// Begins the thread's part; whether the session is its to run. The thread calls this and what follows.
    pub(super) fn begin(&self) -> bool {
        self.thread.get_or_init(std::thread::current);
        self.change(State::begin)
    }

    /// Waits, while the thread runs the session, until it is to let go of it, and says that it has.
    pub(super) async fn released(&self) {
        loop {
            self.release.notified().await;
            if self.change(State::stop) {
                return;
            }
        }
    }

    /// Rests until it is called, or no caller has come for a while.
    pub(super) fn rest(&self) {
        let mut came = self.state().came;
        loop {
            std::thread::park_timeout(LEASE);
            let state = self.state();
            let left_alone = state.callers == 0 && state.came == came;
            if state.thread == Doing::IsCalled || left_alone {
                return;
            }
            came = state.came;
        }
    }
}

/// Something that has been asked for and is not done yet.
#[derive(Debug)]
pub(crate) struct Open(Arc<Turns>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.change(|state| (State { open: state.open.saturating_sub(1), ..state }, ()));
    }
}

/// A caller's turn, from before it asks for something until it has what it waits for.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turn {
    /// The caller has to wait: the thread, if it has the session, lets go of it.
    pub(super) fn take(&self) {
        if self.0.state().thread == Doing::Runs {
            self.0.release.notify_one();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.0.change(State::go) {
            self.0.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    type Step<R> = fn(State) -> (State, R);

    /// The rules, so that a test can break one.
    #[derive(Clone, Copy)]
    struct Rules {
        come: Step<bool>,
        called: Step<bool>,
        go: Step<bool>,
        begin: Step<bool>,
        stop: Step<bool>,
    }

    const RULES: Rules = Rules {
        come: State::come,
        called: State::called,
        go: State::go,
        begin: State::begin,
        stop: State::stop,
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
        Waits(bool),
        Done,
    }

    /// All there is, between two steps of anybody.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct World {
        state: State,
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
        fn new(thread: Doing) -> World {
            let state = State { thread, callers: 0, came: 0, open: 0 };
            let (callers, sleeps) = ([At::Outside; CALLERS], thread == Doing::Rests);
            World { state, permit: false, unpark: false, sleeps, holder: None, callers }
        }

        fn apply<R>(&mut self, step: Step<R>) -> R {
            let (state, result) = step(self.state);
            // How many have come is for the clock, which this world does not have.
            self.state = State { came: 0, ..state };
            result
        }

        /// Whoever has the session has done what a caller has asked for.
        fn answer(&mut self, caller: usize) {
            self.state.open -= 1;
            self.callers[caller] = match self.callers[caller] {
                At::Waits(true) => At::Came(true),
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
                            gone.holder = gone.holder.filter(|&holder| holder != caller);
                            worlds.push(gone);
                        }
                        if self.holder == Some(caller) {
                            continue;
                        }
                        world.state.open += 1;
                        world.callers[caller] = At::Asked(runs);
                    }
                    At::Asked(runs) => {
                        world.unpark |= world.apply(rules.called);
                        world.callers[caller] = if runs { At::Called } else { At::Waits(false) };
                    }
                    At::Called => {
                        world.permit |= world.state.thread == Doing::Runs;
                        world.callers[caller] = At::Waits(true);
                    }
                    At::Waits(true) if self.holder.is_none() => world.holder = Some(caller),
                    At::Waits(_) | At::Done => continue,
                }
                worlds.push(world);
            }
            if let Some(holder) = self.holder {
                for caller in 0..CALLERS {
                    if matches!(self.callers[caller], At::Asked(false) | At::Waits(_)) {
                        let mut world = self;
                        world.answer(caller);
                        worlds.push(world);
                    }
                }
                // A caller that has what it wanted lets go of the session, and then of its turn.
                if holder != THREAD && !matches!(self.callers[holder], At::Waits(_)) {
                    worlds.push(World { holder: None, ..self });
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
                world.sleeps = self.state.thread != Doing::IsCalled;
            } else if self.state.thread == Doing::Runs && self.holder.is_none() {
                world.holder = Some(THREAD);
            } else if self.state.thread != Doing::Runs {
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
        let mut todo = vec![World::new(Doing::Runs), World::new(Doing::Rests)];
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
    fn each_rule_is_needed() {
        let forgets: Step<bool> = |state| (state, false);
        let goes: Step<bool> = |state| (State { callers: state.callers - 1, ..state }, false);
        let stops: Step<bool> = |state| (State { thread: Doing::Rests, ..state }, true);
        let broken = [
            ("a call is not heard", Rules { called: forgets, ..RULES }),
            ("a caller goes and leaves something open", Rules { go: goes, ..RULES }),
            ("the thread stops for a caller that has gone", Rules { stop: stops, ..RULES }),
        ];
        for (what, rules) in broken {
            assert!(stuck(&rules).0.is_some(), "{what}, and nobody waits in vain");
        }
    }

    #[test]
    fn the_word_holds_all_that_is_said() {
        for thread in [Doing::Runs, Doing::Rests, Doing::IsCalled] {
            let state = State { thread, callers: 0xabc, came: 0xde, open: 0xf123_4567 };
            assert_eq!(State::of(state.word()), state);
        }
        assert_eq!(State::of(0).thread, Doing::Runs, "a session begins with its thread");
    }
}
