//! Leader/follower scheduling of a session: its own thread or a waiting caller runs it.
//!
//! Passing an operation to another thread and the reply back takes two wake-ups, each of some
//! microseconds. A thread that waits for a reply can write the request and read the answer itself.
//! So the session's thread yields the session while callers wait one after the other. It takes the
//! session over again when an operation is open and no caller waits, or when no caller has led for
//! [`LEASE`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// How long the thread leaves the session to callers after the last leader. Unrequested messages
/// can wait that long, and the cost of a thread that wakes this often is not measurable.
const LEASE: Duration = Duration::from_millis(20);

/// Decides which thread runs a session.
#[derive(Debug, Default)]
pub struct Leadership {
    word: AtomicU64,
    /// Asks the thread to yield the session.
    release: Notify,
    /// Wakes the session to look for what callers have submitted.
    called: Notify,
    /// Tells the leader that a part of a body has arrived.
    part_arrived: Notify,
    thread: OnceLock<Thread>,
}

/// The content of [`Leadership::word`]. It changes as one word, so no operation is left without a
/// leader between two changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LeaderState {
    thread: ThreadState,
    /// Callers that have entered: while there are some, they lead if an operation is open.
    callers: u8,
    /// Entered callers that wait and lead the session.
    leading: u8,
    /// Counts the times that a caller has begun to lead; wraps around.
    terms: u8,
    /// The open operations.
    open: u32,
}

/// The party that must look for what a caller has submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Called {
    /// A caller that is about to lead.
    Nobody,
    /// The leader, which runs the session.
    Leader,
    /// The thread, which is parked.
    Thread,
}

/// The state of the session's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ThreadState {
    /// It runs the session, or is about to.
    Runs,
    /// It is parked and leaves the session to callers.
    Parked,
    /// It is parked and has been asked to take over.
    Requested,
}

impl LeaderState {
    fn of(word: u64) -> LeaderState {
        let thread = match word & 3 {
            0 => ThreadState::Runs,
            1 => ThreadState::Parked,
            _ => ThreadState::Requested,
        };
        let [_, terms, callers, leading, ..] = word.to_le_bytes();
        LeaderState { thread, callers, leading, terms, open: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        let LeaderState { thread, callers, leading, terms, open } = self;
        let low = u32::from_le_bytes([thread as u8, terms, callers, leading]);
        u64::from(low) | u64::from(open) << 32
    }

    /// Returns whether an operation is open without a leader.
    fn is_unattended(self) -> bool {
        self.open > 0 && self.callers == 0 && self.thread == ThreadState::Parked
    }

    /// A caller has submitted something; returns whom to wake. A caller that has entered looks for
    /// it when it leads.
    fn call(self) -> (LeaderState, Called) {
        let has_leader = self.thread == ThreadState::Runs || self.leading > 0;
        let (state, unattended) = self.call_thread();
        let called = match (unattended, has_leader) {
            (true, _) => Called::Thread,
            (false, true) => Called::Leader,
            (false, false) => Called::Nobody,
        };
        (state, called)
    }

    /// Calls the thread if an operation is open without a leader; returns whether to wake it.
    fn call_thread(mut self) -> (LeaderState, bool) {
        let unattended = self.is_unattended();
        if unattended {
            self.thread = ThreadState::Requested;
        }
        (self, unattended)
    }

    /// A caller enters; returns whether it may lead. It may not if the thread runs open operations.
    fn enter(mut self) -> (LeaderState, bool) {
        let may_lead = self.thread != ThreadState::Runs || self.open == 0;
        let may_lead = may_lead && self.callers < u8::MAX;
        if may_lead {
            self.callers += 1;
        }
        (self, may_lead)
    }

    /// A caller begins to wait and leads the session; returns whether the thread must yield it.
    fn lead(mut self) -> (LeaderState, bool) {
        self.leading += 1;
        self.terms = self.terms.wrapping_add(1);
        (self, self.thread == ThreadState::Runs)
    }

    /// A caller leaves that has not led; returns whether to wake the thread.
    fn leave(mut self) -> (LeaderState, bool) {
        self.callers -= 1;
        self.call_thread()
    }

    /// A caller leaves that has led; returns whether to wake the thread.
    fn leave_lead(mut self) -> (LeaderState, bool) {
        self.leading -= 1;
        let thread_waits = self.can_take_over();
        let (state, unattended) = self.leave();
        (state, unattended || thread_waits)
    }

    /// Returns whether the thread has been called and no caller leads.
    fn can_take_over(&self) -> bool {
        self.thread == ThreadState::Requested && self.leading == 0
    }

    /// The thread takes the session over unless a caller leads; returns whether it does. Callers
    /// that have only entered do not prevent it.
    fn take_over(mut self) -> (LeaderState, bool) {
        let may = self.leading == 0;
        self.thread = match self.thread {
            _ if may => ThreadState::Runs,
            ThreadState::Requested => ThreadState::Requested,
            ThreadState::Runs | ThreadState::Parked => ThreadState::Parked,
        };
        (self, may)
    }

    /// The thread yields the session if a caller still leads; returns whether it does.
    fn yield_lead(mut self) -> (LeaderState, bool) {
        let requested = self.leading > 0;
        if requested {
            self.thread = ThreadState::Parked;
        }
        (self, requested)
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

    /// Opens an operation until the returned guard is dropped. The leader must be able to find the
    /// operation before [`Leadership::call`] is called.
    pub fn open(self: &Arc<Leadership>) -> OpenOperation {
        self.change(|state| (LeaderState { open: state.open.saturating_add(1), ..state }, ()));
        OpenOperation(self.clone())
    }

    /// Ensures that the leader of the session finds what was submitted: wakes it, or calls the
    /// thread if there is none.
    pub fn call(&self) {
        match self.change(LeaderState::call) {
            Called::Thread => self.wake(),
            Called::Leader => self.called.notify_one(),
            Called::Nobody => {}
        }
    }

    /// Waits until something may have been submitted. Awaited by the session.
    pub(super) async fn called(&self) {
        self.called.notified().await;
    }

    /// Makes the session look for what was submitted before its new leader began. Within the
    /// runtime of the session that wakes no thread.
    pub(super) fn begin(&self) {
        self.called.notify_one();
    }

    /// Tells the leader that a part of a body has arrived.
    pub(super) fn part_arrives(&self) {
        self.part_arrived.notify_one();
    }

    /// Waits until a part of a body has arrived.
    pub(super) fn part_arrived(&self) -> Notified<'_> {
        self.part_arrived.notified()
    }

    /// Makes the thread take the session over as soon as no caller leads, even if no operation is
    /// open.
    pub fn end(&self) {
        self.change(|state| match state.thread {
            ThreadState::Parked => (LeaderState { thread: ThreadState::Requested, ..state }, ()),
            ThreadState::Runs | ThreadState::Requested => (state, ()),
        });
        self.called.notify_one();
        self.wake();
    }

    /// Registers a caller that is about to submit an operation and wait for it. Returns `None` if
    /// the thread is busy with open operations.
    pub(super) fn enter(self: &Arc<Leadership>) -> Option<LeaderGuard> {
        self.change(LeaderState::enter)
            .then(|| LeaderGuard { leadership: self.clone(), leads: false })
    }

    /// Takes the session over for its thread unless a caller leads; returns whether it did. Only
    /// the thread calls this method, `released` and `park`.
    pub(super) fn take_over(&self) -> bool {
        self.thread.get_or_init(std::thread::current);
        self.change(LeaderState::take_over)
    }

    /// Waits until the thread must yield the session, and yields it. Awaited while the thread runs
    /// the session.
    pub(super) async fn released(&self) {
        loop {
            self.release.notified().await;
            if self.change(LeaderState::yield_lead) {
                return;
            }
        }
    }

    /// Parks the thread until it is called, or until no caller has led for [`LEASE`].
    pub(super) fn park(&self) {
        let mut terms = self.state().terms;
        loop {
            std::thread::park_timeout(LEASE);
            let state = self.state();
            let is_idle = state.leading == 0 && state.terms == terms;
            if state.can_take_over() || is_idle {
                return;
            }
            terms = state.terms;
        }
    }
}

/// Counts an operation as open until it is dropped.
#[derive(Debug)]
pub struct OpenOperation(Arc<Leadership>);

impl Drop for OpenOperation {
    fn drop(&mut self) {
        self.0.change(|state| (LeaderState { open: state.open.saturating_sub(1), ..state }, ()));
    }
}

/// A registered caller, from before it submits an operation until it has the reply.
#[derive(Debug)]
pub(super) struct LeaderGuard {
    leadership: Arc<Leadership>,
    leads: bool,
}

impl LeaderGuard {
    /// Begins to lead the session. If the thread runs it, the thread is asked to yield.
    pub(super) fn lead(&mut self) {
        self.leads = true;
        if self.leadership.change(LeaderState::lead) {
            self.leadership.release.notify_one();
        }
    }
}

impl Drop for LeaderGuard {
    fn drop(&mut self) {
        let leave = match self.leads {
            true => LeaderState::leave_lead,
            false => LeaderState::leave,
        };
        if self.leadership.change(leave) {
            self.leadership.wake();
        }
    }
}

#[cfg(test)]
mod tests;
