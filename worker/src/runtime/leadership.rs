//! Who runs a session: its own thread, or a caller that has nothing to do but wait for it.
//!
//! Handing an operation to another thread and its reply back takes two wakes, each of some microseconds.
//! A thread that waits for a reply can as well write the request and read the answer by itself. So the
//! session's thread lets go of the session while callers wait one after the other, and takes it back when
//! there is something to do and nobody waits, or when no caller has run it for a while.

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
pub(crate) struct Leadership {
    word: AtomicU64,
    /// Has the thread let go of the session.
    release: Notify,
    thread: OnceLock<Thread>,
}

/// What the word says. All of it changes at once, so that nothing can be left undone between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LeaderState {
    thread: ThreadState,
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
enum ThreadState {
    /// It runs the session, or is about to begin.
    Runs,
    /// It has left it to callers.
    Rests,
    /// It rests, and has been told to go on.
    IsCalled,
}

impl LeaderState {
    fn of(word: u64) -> LeaderState {
        let thread = match word & 3 {
            0 => ThreadState::Runs,
            1 => ThreadState::Rests,
            _ => ThreadState::IsCalled,
        };
        let [_, ran, callers, running, ..] = word.to_le_bytes();
        LeaderState { thread, callers, running, ran, open: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        let LeaderState { thread, callers, running, ran, open } = self;
        let low = u32::from_le_bytes([thread as u8, ran, callers, running]);
        u64::from(low) | u64::from(open) << 32
    }

    /// Something is open that nobody does.
    fn is_forgotten(self) -> bool {
        self.open > 0 && self.callers == 0 && self.thread == ThreadState::Rests
    }

    /// Has the thread called if nobody else does what is open; whether it is to be woken.
    fn called(mut self) -> (LeaderState, bool) {
        let forgotten = self.is_forgotten();
        if forgotten {
            self.thread = ThreadState::IsCalled;
        }
        (self, forgotten)
    }

    /// A caller comes, and whether it is to run the session if it has to wait: not beside a thread that is at it.
    fn come(mut self) -> (LeaderState, bool) {
        let its = self.thread != ThreadState::Runs || self.open == 0;
        let its = its && self.callers < u8::MAX;
        if its {
            self.callers += 1;
        }
        (self, its)
    }

    /// A caller has to wait and runs the session; whether the thread has to let go of it.
    fn run(mut self) -> (LeaderState, bool) {
        self.running += 1;
        self.ran = self.ran.wrapping_add(1);
        (self, self.thread == ThreadState::Runs)
    }

    /// A caller goes that has not had to wait; whether the thread is to be woken.
    fn go(mut self) -> (LeaderState, bool) {
        self.callers -= 1;
        self.called()
    }

    /// A caller goes that has run the session; whether the thread is to be woken.
    fn go_on(mut self) -> (LeaderState, bool) {
        self.running -= 1;
        let waited_for = self.may_go_on();
        let (state, forgotten) = self.go();
        (state, forgotten || waited_for)
    }

    /// The thread has been called, and nobody keeps it from the session.
    fn may_go_on(&self) -> bool {
        self.thread == ThreadState::IsCalled && self.running == 0
    }

    /// The thread wants to run the session, and whether it may. Callers that do not have to wait, one after the
    /// other, do not keep it from that.
    fn begin(mut self) -> (LeaderState, bool) {
        let may = self.running == 0;
        self.thread = match self.thread {
            _ if may => ThreadState::Runs,
            ThreadState::IsCalled => ThreadState::IsCalled,
            ThreadState::Runs | ThreadState::Rests => ThreadState::Rests,
        };
        (self, may)
    }

    /// The thread has been asked to let go, and whether it is to: who has asked may be gone.
    fn stop(mut self) -> (LeaderState, bool) {
        let row_requests = self.running > 0;
        if row_requests {
            self.thread = ThreadState::Rests;
        }
        (self, row_requests)
    }
}

impl Leadership {
    fn change<R>(&self, step: impl Fn(LeaderState) -> (LeaderState, R)) -> R {
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            let (next, result) = step(LeaderState::of(word));
            let order = (Ordering::SeqCst, Ordering::SeqCst);
            match self.word.compare_exchange_weak(word, next.word(), order.0, order.1) {
                Ok(_) => return result,
                Err(now) => word = now,
            }
        }
    }

    fn state(&self) -> LeaderState {
        LeaderState::of(self.word.load(Ordering::SeqCst))
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Something is asked for, until what is returned is dropped. Whoever runs the session must be able to find
    /// it before [`Leadership::call`] is called.
    pub(crate) fn open(self: &Arc<Leadership>) -> OpenOperation {
        self.change(|state| (LeaderState { open: state.open.saturating_add(1), ..state }, ()));
        OpenOperation(self.clone())
    }

    /// Sees to it that somebody does what is open.
    pub(crate) fn call(&self) {
        if self.change(LeaderState::called) {
            self.wake();
        }
    }

    /// Has the thread take the session back as soon as no caller has it, though nothing be open.
    pub(super) fn end(&self) {
        self.change(|state| match state.thread {
            ThreadState::Rests => (LeaderState { thread: ThreadState::IsCalled, ..state }, ()),
            ThreadState::Runs | ThreadState::IsCalled => (state, ()),
        });
        self.wake();
    }

    /// A caller begins to ask for something that it will wait for: its turn, unless the thread is busy.
    pub(super) fn come(self: &Arc<Leadership>) -> Option<LeaderGuard> {
        self.change(LeaderState::come)
            .then(|| LeaderGuard { leadership: self.clone(), runs: false })
    }

    /// Begins the thread's part; whether the session is its to run. The thread calls this and what follows.
    pub(super) fn begin(&self) -> bool {
        self.thread.get_or_init(std::thread::current);
        self.change(LeaderState::begin)
    }

    /// Waits, while the thread runs the session, until it is to let go of it, and says that it has.
    pub(super) async fn released(&self) {
        loop {
            self.release.notified().await;
            if self.change(LeaderState::stop) {
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
pub(crate) struct OpenOperation(Arc<Leadership>);

impl Drop for OpenOperation {
    fn drop(&mut self) {
        self.0.change(|state| (LeaderState { open: state.open.saturating_sub(1), ..state }, ()));
    }
}

/// A caller's turn, from before it asks for something until it has what it waits for.
#[derive(Debug)]
pub(super) struct LeaderGuard {
    leadership: Arc<Leadership>,
    runs: bool,
}

impl LeaderGuard {
    /// The caller has to wait, and runs the session: the thread, if it has that, lets go of it.
    pub(super) fn run(&mut self) {
        self.runs = true;
        if self.leadership.change(LeaderState::run) {
            self.leadership.release.notify_one();
        }
    }
}

impl Drop for LeaderGuard {
    fn drop(&mut self) {
        let gone = match self.runs {
            true => LeaderState::go_on,
            false => LeaderState::go,
        };
        if self.leadership.change(gone) {
            self.leadership.wake();
        }
    }
}

#[cfg(test)]
mod tests;
