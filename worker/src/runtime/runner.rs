//! What runs a session: a runtime of one thread, which may be now this and now that.

use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use pushpull_net::{AdaptiveSpin, Processors, SpinLimits};
use tokio::runtime::{Builder, Handle, Runtime};

use super::leadership::{LeaderGuard, Leadership};

/// Runs a session, on its own thread or on those of callers that wait.
#[derive(Debug)]
pub(crate) struct SessionRunner {
    /// There until it is dropped.
    runtime: Option<Runtime>,
    leadership: Arc<Leadership>,
    limits: SpinLimits,
    adaptive_spin: Mutex<AdaptiveSpin>,
    processors: Processors,
}

impl SessionRunner {
    pub(super) fn new(
        leadership: Arc<Leadership>,
        busy_poll: Duration,
    ) -> io::Result<SessionRunner> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let limits = CALLER_SPIN.with_longest(busy_poll);
        let (adaptive_spin, processors) =
            (Mutex::new(AdaptiveSpin::new(limits)), Processors::current());
        Ok(SessionRunner { runtime: Some(runtime), leadership, limits, adaptive_spin, processors })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is taken when the driver is dropped, not before")
    }

    /// For how long a caller polls in any case.
    pub(crate) fn polls_for(&self) -> Duration {
        self.limits.unconditional
    }

    fn adaptive_spin(&self) -> MutexGuard<'_, AdaptiveSpin> {
        self.adaptive_spin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of the session's thread: until the session has ended.
    pub(super) fn run(&self, session: impl Future<Output = ()> + Send + 'static) {
        let runtime = self.runtime();
        let mut session = runtime.spawn(session);
        loop {
            let ended = self.leadership.begin()
                && runtime.block_on(async {
                    tokio::select! {
                        biased;
                        // A panic of it has been seen by every caller, as an ended session.
                        _ = &mut session => true,
                        () = self.leadership.released() => false,
                    }
                });
            if ended {
                // Connections that were given up let go of their sockets now, whoever still has this.
                return runtime.block_on(tokio::task::yield_now());
            }
            self.leadership.rest();
        }
    }

    /// A caller begins to ask for something that it will wait for: it runs the session meanwhile, unless it has a
    /// runtime of its own on this thread, or the session's thread is busy with what others have asked for.
    pub(crate) fn come(&self) -> Option<LeadingCaller<'_>> {
        match Handle::try_current() {
            Err(error) if error.is_missing_context() => {}
            // There is a runtime, or the thread is ending and can run none.
            _ => return None,
        }
        self.leadership.come().map(|turn| LeadingCaller { runner: self, turn })
    }
}

impl Drop for SessionRunner {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A look-up of a name that still runs is not waited for.
            runtime.shutdown_background();
        }
    }
}

/// A caller that runs the session while it waits.
#[derive(Debug)]
pub(crate) struct LeadingCaller<'a> {
    runner: &'a SessionRunner,
    turn: LeaderGuard,
}

impl LeadingCaller<'_> {
    /// Runs the session until a future is ready.
    pub(crate) fn wait<F: Future>(mut self, future: F) -> F::Output {
        self.turn.run();
        let runner = self.runner;
        let mut wait = runner.adaptive_spin().begin(Instant::now());
        let pays = || {
            // To ask takes some 2 us, in which others are not kept from saying how they have waited.
            let pays = runner.adaptive_spin().pays();
            pays && !runner.processors.are_oversubscribed()
        };
        let output = runner.runtime().block_on(async {
            let mut future = pin!(future);
            std::future::poll_fn(|context| {
                if let Poll::Ready(output) = future.as_mut().poll(context) {
                    return Poll::Ready(output);
                }
                // The processor is not given up meanwhile: where another computes on it, it would come back when that
                // has had its slice, milliseconds later, though the answer were there. Whoever sleeps goes first.
                if wait.polls(Instant::now(), pays) {
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            })
            .await
        });
        runner.adaptive_spin().waited(Instant::now(), &wait);
        output
    }
}

/// How long a caller polls: in any case about as long as a wake-up takes, and longer where that pays. A wake-up takes an
/// eighth of the longest poll.
pub(crate) const CALLER_SPIN: SpinLimits = SpinLimits {
    unconditional: Duration::from_micros(50),
    longest: Duration::from_micros(400),
    recheck: Duration::from_micros(50),
};

#[cfg(test)]
mod tests {
    use std::thread::{JoinHandle, ThreadId};

    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::runtime::OpenOperation;

    /// Asks a session who runs it, or to panic.
    type Asked = Option<oneshot::Sender<ThreadId>>;

    /// A session that says on which thread it is run, until nobody can ask any more.
    struct Session {
        runner: Arc<SessionRunner>,
        ask: mpsc::UnboundedSender<(Asked, OpenOperation)>,
        thread: JoinHandle<()>,
    }

    impl Session {
        fn start() -> Session {
            let runner = Arc::new(SessionRunner::new(Arc::default(), CALLER_SPIN.longest).unwrap());
            let (ask, mut asked) = mpsc::unbounded_channel::<(Asked, OpenOperation)>();
            let session = async move {
                while let Some((reply, open)) = asked.recv().await {
                    let reply = reply.expect("asked to panic");
                    let _ = reply.send(std::thread::current().id());
                    drop(open);
                }
            };
            let runs = runner.clone();
            let thread = std::thread::spawn(move || runs.run(session));
            Session { runner, ask, thread }
        }

        fn ask(&self) -> oneshot::Receiver<ThreadId> {
            let (reply, replied) = oneshot::channel();
            self.reply(Some(reply));
            replied
        }

        fn reply(&self, asked: Asked) {
            let leadership = &self.runner.leadership;
            // Where it has ended, that is found out by what was to be replied.
            let _ = self.ask.send((asked, leadership.open()));
            leadership.call();
        }

        /// Asks, and waits as callers do.
        fn wait(&self) -> Option<ThreadId> {
            match self.runner.come() {
                Some(waiting) => waiting.wait(self.ask()).ok(),
                None => self.ask().blocking_recv().ok(),
            }
        }
    }

    #[test]
    fn a_caller_that_waits_runs_the_session_by_itself() {
        let session = Session::start();
        let own = std::thread::current().id();
        // The first may be done by the thread before it has let go.
        assert!((0..1_000).any(|_| session.wait() == Some(own)));
    }

    #[test]
    fn what_nobody_waits_for_is_done_by_the_thread_whoever_had_the_session_before() {
        let session = Session::start();
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
    fn many_callers_at_once_are_all_answered() {
        let session = Session::start();
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
    async fn a_caller_in_a_runtime_of_its_own_leaves_the_session_to_its_thread() {
        let session = Session::start();
        assert!(session.runner.come().is_none());
        assert_ne!(session.ask().await.unwrap(), std::thread::current().id());
    }

    #[test]
    fn a_thread_that_ends_leaves_the_session_to_its_own() {
        struct Held(Arc<Session>);
        impl Drop for Held {
            fn drop(&mut self) {
                assert!(self.0.runner.come().is_none());
                let mut asked = self.0.ask();
                while asked.try_recv().is_err() {
                    std::thread::yield_now();
                }
            }
        }
        thread_local!(static HELD: std::cell::OnceCell<Held> = const { std::cell::OnceCell::new() });
        let session = Arc::new(Session::start());
        let asks = session.clone();
        let ending = std::thread::spawn(move || {
            // What a thread has had first goes last: behind what a runtime keeps there.
            HELD.with(|held| assert!(held.set(Held(asks.clone())).is_ok()));
            asks.wait().unwrap();
        });
        ending.join().unwrap();
    }

    #[test]
    fn a_session_that_panics_or_ends_leaves_nobody_waiting() {
        let session = Session::start();
        session.wait().unwrap();
        session.reply(None);
        assert_eq!(session.wait(), None);
        assert_eq!(session.wait(), None, "and nobody who comes later");
        session.thread.join().unwrap();
        let session = Session::start();
        session.wait().unwrap();
        drop(session.ask);
        session.runner.leadership.end();
        session.thread.join().unwrap();
    }
}
