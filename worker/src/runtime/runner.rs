//! Runs a session in a single-threaded runtime that moves between threads.

use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pushpull_net::{AdaptiveSpin, HomeProcess, SpinLimits, timed_yield};
use tokio::runtime::{Builder, Handle, Runtime};

use super::leadership::{LeaderGuard, Leadership};

/// Runs a session on its own thread, or on the thread of a caller that waits.
#[derive(Debug)]
pub struct SessionRunner {
    /// `Some` until drop.
    runtime: Option<Runtime>,
    leadership: Arc<Leadership>,
    limits: SpinLimits,
    adaptive_spin: Mutex<AdaptiveSpin>,
    home: HomeProcess,
}

impl SessionRunner {
    /// Makes a runtime for a session that a caller polls for at most `busy_poll` while it waits.
    pub fn new(leadership: Arc<Leadership>, busy_poll: Duration) -> io::Result<SessionRunner> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let limits = CALLER_SPIN.with_longest(busy_poll);
        let adaptive_spin = Mutex::new(AdaptiveSpin::new(limits));
        let runtime = Some(runtime);
        let home = HomeProcess::current();
        Ok(SessionRunner { runtime, leadership, limits, adaptive_spin, home })
    }

    /// Returns the handle of the runtime.
    pub fn handle(&self) -> &Handle {
        self.runtime().handle()
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime is taken only on drop")
    }

    /// Returns the process of the session.
    pub fn home(&self) -> &HomeProcess {
        &self.home
    }

    /// Returns how long a caller polls while another thread runs the session.
    pub(crate) fn apart(&self) -> SpinLimits {
        self.limits.with_longest(self.limits.unconditional)
    }

    fn adaptive_spin(&self) -> MutexGuard<'_, AdaptiveSpin> {
        self.adaptive_spin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the session's thread until the session has ended.
    pub fn run(&self, session: impl Future<Output = ()> + Send + 'static) {
        let runtime = self.runtime();
        let mut session = runtime.spawn(session);
        loop {
            let ended = self.leadership.take_over()
                && runtime.block_on(async {
                    self.leadership.begin();
                    tokio::select! {
                        biased;
                        // Every caller sees a panic of the session as an ended session.
                        _ = &mut session => true,
                        () = self.leadership.released() => false,
                    }
                });
            if ended {
                // Lets the tasks of given-up connections close their sockets now, even if the
                // runner stays alive.
                return runtime.block_on(tokio::task::yield_now());
            }
            self.leadership.park();
        }
    }

    /// Registers a caller that is about to submit an operation and wait for it, so that it can
    /// lead.
    ///
    /// Returns `None` if this thread has a runtime of its own or is ending, if the session's thread
    /// is busy with other operations, or in a child of `fork`.
    pub fn enter(&self) -> Option<LeadingCaller<'_>> {
        if self.home.is_elsewhere() {
            return None;
        }
        match Handle::try_current() {
            Err(error) if error.is_missing_context() => {}
            // This thread has a runtime, or it is ending and cannot run one.
            _ => return None,
        }
        self.leadership.enter().map(|guard| LeadingCaller { runner: self, guard })
    }
}

impl Drop for SessionRunner {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not wait for a name resolution that is still running.
            runtime.shutdown_background();
        }
    }
}

/// A registered caller, which runs the session while it waits.
#[derive(Debug)]
pub struct LeadingCaller<'a> {
    runner: &'a SessionRunner,
    guard: LeaderGuard,
}

impl LeadingCaller<'_> {
    /// Runs the session until a future is ready.
    pub fn wait<F: Future>(self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut output = None;
        self.run_until(&mut |context| {
            future.as_mut().poll(context).map(|ready| output = Some(ready))
        });
        output.expect("the future was polled until it was ready")
    }

    /// Runs the session until `poll` is ready. Compiled once for all that callers await: the
    /// runtime's part would otherwise be a tenth of this crate's code.
    fn run_until(mut self, poll: &mut dyn FnMut(&mut Context<'_>) -> Poll<()>) {
        self.guard.lead();
        let runner = self.runner;
        let mut wait = runner.adaptive_spin().begin(Instant::now());
        let mut part_arrived = pin!(runner.leadership.part_arrived());
        let mut has_begun = false;
        runner.runtime().block_on(std::future::poll_fn(|context| {
            if !std::mem::replace(&mut has_begun, true) {
                runner.leadership.begin();
            }
            let polled = poll(context);
            // The thread waits for the peer before each part of a long answer, and not while it
            // copies them.
            while polled.is_pending() && part_arrived.as_mut().poll(context).is_ready() {
                part_arrived.set(runner.leadership.part_arrived());
                let now = Instant::now();
                let mut spin = runner.adaptive_spin();
                spin.waited(now, &wait);
                wait = spin.begin(now);
            }
            if polled.is_pending() && wait.polls(Instant::now(), timed_yield) {
                context.waker().wake_by_ref();
            }
            polled
        }));
        runner.adaptive_spin().waited(Instant::now(), &wait);
    }
}

/// How long a caller polls: for about the time of a wake-up, and longer if that pays. A wake-up
/// takes an eighth of the longest poll.
pub const CALLER_SPIN: SpinLimits = SpinLimits {
    unconditional: Duration::from_micros(50),
    longest: Duration::from_micros(400),
    yields: Duration::from_micros(50),
};

#[cfg(test)]
mod tests {
    use std::thread::{JoinHandle, ThreadId};

    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::runtime::OpenOperation;

    /// The reply channel of a request for the running thread; `None` makes the session panic.
    type ThreadQuery = Option<oneshot::Sender<ThreadId>>;

    /// A session that answers each request with the thread that runs it, until all senders are
    /// dropped.
    struct QueriedSession {
        runner: Arc<SessionRunner>,
        queries: mpsc::UnboundedSender<(ThreadQuery, OpenOperation)>,
        thread: JoinHandle<()>,
    }

    impl QueriedSession {
        fn start() -> QueriedSession {
            let runner = Arc::new(SessionRunner::new(Arc::default(), CALLER_SPIN.longest).unwrap());
            let (queries, mut received) = mpsc::unbounded_channel::<(ThreadQuery, OpenOperation)>();
            let session = async move {
                while let Some((reply, open)) = received.recv().await {
                    let reply = reply.expect("a request to panic");
                    let _ = reply.send(std::thread::current().id());
                    drop(open);
                }
            };
            let runs = runner.clone();
            let thread = std::thread::spawn(move || runs.run(session));
            QueriedSession { runner, queries, thread }
        }

        fn ask(&self) -> oneshot::Receiver<ThreadId> {
            let (reply, replied) = oneshot::channel();
            self.send_query(Some(reply));
            replied
        }

        fn send_query(&self, query: ThreadQuery) {
            let leadership = &self.runner.leadership;
            // If the session has ended, the reply channel closes.
            let _ = self.queries.send((query, leadership.open()));
            leadership.call();
        }

        /// Sends a request and waits as callers do.
        fn wait(&self) -> Option<ThreadId> {
            match self.runner.enter() {
                Some(waiting) => waiting.wait(self.ask()).ok(),
                None => self.ask().blocking_recv().ok(),
            }
        }
    }

    #[test]
    fn a_waiting_caller_runs_the_session() {
        let session = QueriedSession::start();
        let own = std::thread::current().id();
        // The session's thread may answer the first requests before it yields.
        assert!((0..1_000).any(|_| session.wait() == Some(own)));
    }

    #[test]
    fn the_thread_answers_requests_without_a_waiting_caller() {
        let session = QueriedSession::start();
        let own = std::thread::current().id();
        for _ in 0..100 {
            session.wait().unwrap();
            let asked = [session.ask(), session.ask()];
            for reply in asked {
                assert_ne!(reply.blocking_recv().unwrap(), own);
            }
        }
    }

    #[test]
    fn concurrent_callers_are_all_answered() {
        let session = QueriedSession::start();
        std::thread::scope(|scope| {
            for caller in 0..4 {
                let session = &session;
                scope.spawn(move || {
                    for _ in 0..200 {
                        match caller {
                            0 => session.ask().blocking_recv().ok(),
                            _ => session.wait(),
                        }
                        .unwrap();
                    }
                });
            }
        });
    }

    #[tokio::test]
    async fn a_caller_in_a_runtime_does_not_lead() {
        let session = QueriedSession::start();
        assert!(session.runner.enter().is_none());
        assert_ne!(session.ask().await.unwrap(), std::thread::current().id());
    }

    #[test]
    fn an_ending_thread_does_not_lead() {
        struct QueryAtExit(Arc<QueriedSession>);
        impl Drop for QueryAtExit {
            fn drop(&mut self) {
                assert!(self.0.runner.enter().is_none());
                let mut asked = self.0.ask();
                while asked.try_recv().is_err() {
                    std::thread::yield_now();
                }
            }
        }
        thread_local!(static AT_EXIT: std::cell::OnceCell<QueryAtExit> = const { std::cell::OnceCell::new() });
        let session = Arc::new(QueriedSession::start());
        let caller_session = session.clone();
        let ending = std::thread::spawn(move || {
            // Thread-local values are dropped in reverse order, so this one after those of the
            // runtime.
            AT_EXIT.with(|cell| assert!(cell.set(QueryAtExit(caller_session.clone())).is_ok()));
            caller_session.wait().unwrap();
        });
        ending.join().unwrap();
    }

    #[test]
    fn a_panic_or_the_end_of_a_session_fails_all_waits() {
        let session = QueriedSession::start();
        session.wait().unwrap();
        session.send_query(None);
        assert_eq!(session.wait(), None);
        assert_eq!(session.wait(), None, "a later caller");
        session.thread.join().unwrap();
        let session = QueriedSession::start();
        session.wait().unwrap();
        drop(session.queries);
        session.runner.leadership.end();
        session.thread.join().unwrap();
    }
}
