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
    /// Callers whose turn it is: if something is open they see to it.
    callers: u8,
    /// Those of them that have to wait, and run the session.
    running: u8,
    /// How many have, by and by.
    ran: u8,
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
        let [_, ran, callers, running, ..] = word.to_le_bytes();
        State { thread, callers, running, ran, open: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        let State { thread, callers, running, ran, open } = self;
        let low = u32::from_le_bytes([thread as u8, ran, callers, running]);
        u64::from(low) | u64::from(open) << 32
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

    /// A caller comes, and whether it is to run the session if it has to wait: not beside a thread that is at it.
    fn come(mut self) -> (State, bool) {
        let its = self.thread != Doing::Runs || self.open == 0;
        let its = its && self.callers < u8::MAX;
        if its {
            self.callers += 1;
        }
        (self, its)
    }

    /// A caller has to wait and runs the session; whether the thread has to let go of it.
    fn run(mut self) -> (State, bool) {
        self.running += 1;
        self.ran = self.ran.wrapping_add(1);
        (self, self.thread == Doing::Runs)
    }

    /// A caller goes that has not had to wait; whether the thread is to be woken.
    fn go(mut self) -> (State, bool) {
        self.callers -= 1;
        self.called()
    }

    /// A caller goes that has run the session; whether the thread is to be woken.
    fn go_on(mut self) -> (State, bool) {
        self.running -= 1;
        let waited_for = self.may_go_on();
        let (state, forgotten) = self.go();
        (state, forgotten || waited_for)
    }

    /// The thread has been called, and nobody keeps it from the session.
    fn may_go_on(&self) -> bool {
        self.thread == Doing::IsCalled && self.running == 0
    }

    /// The thread wants to run the session, and whether it may. Callers that do not have to wait, one after the
    /// other, do not keep it from that.
    fn begin(mut self) -> (State, bool) {
        let may = self.running == 0;
        self.thread = match self.thread {
            _ if may => Doing::Runs,
            Doing::IsCalled => Doing::IsCalled,
            Doing::Runs | Doing::Rests => Doing::Rests,
        };
        (self, may)
    }

    /// The thread has been asked to let go, and whether it is to: who has asked may be gone.
    fn stop(mut self) -> (State, bool) {
        let wanted = self.running > 0;
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

    /// A caller begins to ask for something that it will wait for: its turn, unless the thread is busy.
    pub(super) fn come(self: &Arc<Turns>) -> Option<Turn> {
        self.change(State::come).then(|| Turn { turns: self.clone(), runs: false })
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

    /// Rests until it is called, or no caller has run the session for a while.
    pub(super) fn rest(&self) {
        let mut ran = self.state().ran;
        loop {
            std::thread::park_timeout(LEASE);
            let state = self.state();
            let left_alone = state.running == 0 && state.ran == ran;
            if state.may_go_on() || left_alone {
                return;
            }
            ran = state.ran;
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
pub(super) struct Turn {
    turns: Arc<Turns>,
    runs: bool,
}

impl Turn {
    /// The caller has to wait, and runs the session: the thread, if it has that, lets go of it.
    pub(super) fn run(&mut self) {
        self.runs = true;
        if self.turns.change(State::run) {
            self.turns.release.notify_one();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let gone = match self.runs {
            true => State::go_on,
            false => State::go,
        };
        if self.turns.change(gone) {
            self.turns.wake();
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
        go_on: Step<bool>,
        run: Step<bool>,
        begin: Step<bool>,
        stop: Step<bool>,
    }

    const RULES: Rules = Rules {
        come: State::come,
        called: State::called,
        go: State::go,
        go_on: State::go_on,
        run: State::run,
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
        /// It has what it waited for.
        Has,
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
            let state = State { thread, callers: 0, running: 0, ran: 0, open: 0 };
            let (callers, sleeps) = ([At::Outside; CALLERS], thread == Doing::Rests);
            World { state, permit: false, unpark: false, sleeps, holder: None, callers }
        }

        fn apply<R>(&mut self, step: Step<R>) -> R {
            let (state, result) = step(self.state);
            // How many have run it is for the clock, which this world does not have.
            self.state = State { ran: 0, ..state };
            result
        }

        /// Whoever has the session has done what a caller has asked for.
        fn answer(&mut self, caller: usize) {
            self.state.open -= 1;
            self.callers[caller] = match self.callers[caller] {
                At::Waits(true) => At::Has,
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
                        world.callers[caller] = if runs { At::Called } else { At::Waits(false) };
                    }
                    At::Called => {
                        world.permit |= world.apply(rules.run);
                        world.callers[caller] = At::Waits(true);
                    }
                    At::Waits(true) if self.holder.is_none() => world.holder = Some(caller),
                    // It lets go of the session, and then of its turn; another may follow.
                    At::Has if self.holder == Some(caller) => world.holder = None,
                    At::Has => {
                        world.unpark |= world.apply(rules.go_on);
                        world.callers[caller] = At::Outside;
                        worlds.push(world);
                        world.callers[caller] = At::Done;
                    }
                    At::Waits(_) | At::Done => continue,
                }
                worlds.push(world);
            }
            let asks = |at| matches!(at, At::Asked(false) | At::Called | At::Waits(_));
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
    fn callers_that_never_wait_do_not_keep_the_session_from_its_thread() {
        let turns = Arc::new(Turns::default());
        assert!(turns.begin());
        let mut first = turns.come().unwrap();
        first.run();
        assert!(turns.change(State::stop), "it leaves the session to whoever waits");
        assert!(!turns.begin());
        drop(first);
        std::thread::scope(|scope| {
            let rests = scope.spawn(|| turns.rest());
            let mut turn = None;
            while !rests.is_finished() {
                // One comes before the other goes.
                turn = turns.come();
            }
            assert!(turns.begin());
            drop(turn);
        });
    }

    #[test]
    fn each_rule_is_needed() {
        let forgets: Step<bool> = |state| (state, false);
        let goes: Step<bool> = |state| (State { callers: state.callers - 1, ..state }, false);
        let goes_on: Step<bool> = |state| (state.go_on().0, false);
        let stops: Step<bool> = |state| (State { thread: Doing::Rests, ..state }, true);
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
        for thread in [Doing::Runs, Doing::Rests, Doing::IsCalled] {
            let state = State { thread, callers: 0xab, running: 3, ran: 0xde, open: 0xf123_4567 };
            assert_eq!(State::of(state.word()), state);
        }
        assert_eq!(State::of(0).thread, Doing::Runs, "a session begins with its thread");
    }
}
