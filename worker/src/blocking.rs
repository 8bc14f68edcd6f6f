//! The same verbs for callers that are not asynchronous. Each blocks its thread until it is done, and sends and
//! receives on that thread meanwhile; do not call them from within an asynchronous runtime.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::Sequence;
use pushpull_common::placement::Placement;
use pushpull_common::tensor::Element;
use pushpull_common::variable::VariableSpec;

use crate::compression::ResidualsError;
use crate::config::WorkerConfig;
use crate::error::{ConnectError, Error, JoinError};
use crate::initial_values::InitialValues;
use crate::outcome::{Pulled, Push, RestoredCheckpoint, SavedCheckpoint, StepOutcome};
use crate::params::{Gradients, Params};
use crate::reader::ReaderError;
use crate::runtime::SessionRunner;
use crate::token::Token;

/// [`crate::Worker`], blocking.
#[derive(Debug)]
pub struct Worker {
    inner: crate::Worker,
    waiter: Waiter,
}

impl Worker {
    /// See [`crate::Worker::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Worker, ConnectError> {
        let mut waiter = Waiter::default();
        let inner = waiter.wait_apart(crate::Worker::connect(config))?;
        waiter.runner = Some(inner.runner().clone());
        Ok(Worker { inner, waiter })
    }

    /// See [`crate::Worker::is_chief`].
    pub fn is_chief(&self) -> bool {
        self.inner.is_chief()
    }

    /// See [`crate::Worker::join`].
    pub fn join(
        &mut self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<Params, JoinError> {
        // What the caller fills the values with may have a runtime of its own.
        self.waiter.wait_apart(self.inner.join(variables, fill))
    }

    /// See [`crate::Worker::catalogue`].
    pub fn catalogue(&self) -> Option<&Catalogue> {
        self.inner.catalogue()
    }

    /// See [`crate::Worker::placement`].
    pub fn placement(&self) -> Option<&Placement> {
        self.inner.placement()
    }

    /// See [`crate::Worker::restored`].
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.inner.restored()
    }

    /// See [`crate::Worker::token`].
    pub fn token(&mut self) -> Result<Option<Token>, Error> {
        self.waiter.wait(|| self.inner.token())
    }

    /// See [`crate::Worker::pull`].
    pub fn pull(&mut self, token: &Token, params: &mut Params) -> Result<Pulled, Error> {
        self.waiter.wait(|| self.inner.pull(token, params))
    }

    /// See [`crate::Worker::pull_variable`].
    pub fn pull_variable<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        values: &mut [T],
    ) -> Result<Pulled, Error> {
        self.waiter.wait(|| self.inner.pull_variable(token, name, values))
    }

    /// Begins what [`Worker::pull_variable`] does and does not wait for it: see
    /// [`crate::Worker::pull_variable`].
    pub fn start_pull_variable<'a, T: Element>(
        &mut self,
        token: &'a Token,
        name: &str,
        values: &'a mut [T],
    ) -> Started<crate::VariableHandle<'a>> {
        let handle = self.inner.pull_variable(token, name, values);
        Started { handle, waiter: self.waiter.clone() }
    }

    /// See [`crate::Worker::push_and_pull`].
    pub fn push_and_pull(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<StepOutcome, Error> {
        self.waiter.wait(|| self.inner.push_and_pull(token, gradients, params))
    }

    /// See [`crate::Worker::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        self.waiter.wait(|| self.inner.pull_rows(token, name, ids, rows))
    }

    /// See [`crate::Worker::gradients`].
    ///
    /// # Panics
    /// If the worker has not joined.
    pub fn gradients(&mut self) -> Gradients {
        self.inner.gradients()
    }

    /// See [`crate::Worker::push`].
    pub fn push(&mut self, token: Token, gradients: Gradients) -> Result<Push, Error> {
        self.waiter.wait(|| self.inner.push(token, gradients))
    }

    /// Begins what [`Worker::push`] does and does not wait for it: see [`crate::Worker::push`].
    pub fn start_push(&mut self, token: Token, gradients: Gradients) -> Started<crate::PushHandle> {
        Started { handle: self.inner.push(token, gradients), waiter: self.waiter.clone() }
    }

    /// Begins what [`Worker::pull`] does and does not wait for it: see [`crate::Worker::pull`].
    pub fn start_pull<'a>(
        &mut self,
        token: &'a Token,
        params: &'a mut Params,
    ) -> Started<crate::PullHandle<'a>> {
        Started { handle: self.inner.pull(token, params), waiter: self.waiter.clone() }
    }

    /// See [`crate::Worker::begin`].
    pub fn begin(&mut self, token: Token) -> Result<StreamingPush, Error> {
        let inner = self.waiter.wait(|| self.inner.begin(token))?;
        Ok(StreamingPush { inner, waiter: self.waiter.clone() })
    }

    /// See [`crate::Worker::assign`].
    pub fn assign<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.assign(name, values))
    }

    /// See [`crate::Worker::assign_add`].
    pub fn assign_add<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.assign_add(name, values))
    }

    /// See [`crate::Worker::assign_rows`].
    pub fn assign_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.assign_rows(name, ids, rows))
    }

    /// See [`crate::Worker::outcome`].
    pub fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        self.waiter.wait(|| self.inner.outcome(sequence))
    }

    /// See [`crate::Worker::resume`].
    pub fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        self.waiter.wait(|| self.inner.resume(sequence))
    }

    /// See [`crate::Worker::residuals`].
    pub fn residuals(&self) -> Vec<u8> {
        self.inner.residuals()
    }

    /// See [`crate::Worker::restore_residuals`].
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), ResidualsError> {
        self.inner.restore_residuals(bytes)
    }

    /// See [`crate::Worker::finish`].
    pub fn finish(&mut self) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.finish())
    }

    /// See [`crate::Worker::save`].
    pub fn save(&mut self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        self.waiter.wait(|| self.inner.save(user))
    }

    /// See [`crate::Worker::leave`].
    pub fn leave(mut self) -> Result<(), Error> {
        // The session ends with it, which nobody can wait for who runs it.
        self.waiter.wait_apart(self.inner.leave())
    }
}

/// Something that is under way, which [`Started::wait`] waits for. Others can be begun meanwhile, and
/// waited for in any order; what dropping it does is said where its handle is.
#[derive(Debug)]
#[must_use = "what is under way may be given up when it is dropped"]
pub struct Started<H> {
    handle: H,
    waiter: Waiter,
}

impl<H: Future> Started<H> {
    /// Waits until it is done, and returns what came of it.
    pub fn wait(mut self) -> H::Output {
        self.waiter.wait(|| self.handle)
    }
}

/// [`crate::StreamingPush`], blocking.
#[derive(Debug)]
#[must_use = "a push that is not finished is withdrawn"]
pub struct StreamingPush {
    inner: crate::StreamingPush,
    waiter: Waiter,
}

impl StreamingPush {
    /// See [`crate::StreamingPush::variable`].
    pub fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.variable(name, gradient))
    }

    /// See [`crate::StreamingPush::rows`].
    pub fn rows<T: Element>(&mut self, name: &str, ids: &[u64], rows: &[T]) -> Result<(), Error> {
        self.waiter.wait(|| self.inner.rows(name, ids, rows))
    }

    /// See [`crate::StreamingPush::finish`].
    pub fn finish(mut self) -> Result<Push, Error> {
        self.waiter.wait(|| self.inner.finish())
    }
}

/// [`crate::Reader`], blocking.
#[derive(Debug)]
pub struct Reader {
    inner: crate::Reader,
    waiter: Waiter,
}

impl Reader {
    /// See [`crate::Reader::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Reader, ReaderError> {
        let mut waiter = Waiter::default();
        let inner = waiter.wait_apart(crate::Reader::connect(config))?;
        waiter.runner = Some(inner.runner().clone());
        Ok(Reader { inner, waiter })
    }

    /// See [`crate::Reader::catalogue`].
    pub fn catalogue(&self) -> &Catalogue {
        self.inner.catalogue()
    }

    /// See [`crate::Reader::params`].
    pub fn params(&self) -> Params {
        self.inner.params()
    }

    /// See [`crate::Reader::pull`].
    pub fn pull(&mut self, params: &mut Params) -> Result<u64, Error> {
        self.waiter.wait(|| self.inner.pull(params))
    }

    /// See [`crate::Reader::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<u64, Error> {
        self.waiter.wait(|| self.inner.pull_rows(name, ids, rows))
    }
}

/// Waits on a thread for futures of this crate, and runs their session meanwhile where it can: what is waited for
/// is then written and read by the very thread that waits, and costs no wakes but the server's.
///
/// It keeps what wakes the thread from call to call, as most callers stay on one.
#[derive(Clone, Debug, Default)]
struct Waiter {
    kept: Option<(Arc<Sleeper>, Waker)>,
    /// What runs the session; none before it is there.
    runner: Option<Arc<SessionRunner>>,
}

impl Waiter {
    /// Begins something and waits for it.
    fn wait<F: Future>(&mut self, begin: impl FnOnce() -> F) -> F::Output {
        let runner = self.runner.clone();
        let Some(waiting) = runner.as_ref().and_then(|runner| runner.come()) else {
            return self.wait_apart(begin());
        };
        let mut future = pin!(begin());
        // What needs no answer is there at once, and the session stays whosever it is.
        let waker = &self.waker().1;
        match future.as_mut().poll(&mut Context::from_waker(waker)) {
            Poll::Ready(output) => output,
            Poll::Pending => waiting.wait(future),
        }
    }

    /// Waits while another thread runs the session.
    fn wait_apart<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        let polls_for = self.runner.as_ref().map_or(Duration::ZERO, |runner| runner.polls_for());
        let (sleeper, waker) = self.waker();
        let mut context = Context::from_waker(waker);
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => sleeper.sleep(polls_for),
            }
        }
    }

    /// What wakes the thread that calls.
    fn waker(&mut self) -> &(Arc<Sleeper>, Waker) {
        let thread = std::thread::current();
        let id = thread.id();
        let kept = self.kept.take().filter(|(kept, _)| kept.thread.id() == id);
        self.kept.insert(kept.unwrap_or_else(|| {
            let sleeper = Arc::new(Sleeper { thread, is_woken: AtomicBool::new(false) });
            (sleeper.clone(), Waker::from(sleeper))
        }))
    }
}

/// A thread that waits.
#[derive(Debug)]
struct Sleeper {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Sleeper {
    /// Waits until it is woken, or spuriously: polls for a while, then sleeps.
    fn sleep(&self, polls_for: Duration) {
        let since = Instant::now();
        while !self.is_woken.swap(false, Ordering::Acquire) {
            if since.elapsed() >= polls_for {
                // Who has woken it meanwhile has seen to it that this ends at once.
                return std::thread::park();
            }
            std::hint::spin_loop();
        }
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::sync::oneshot;

    use super::*;

    /// Waits on this thread for what another sends once this one has asked for it.
    fn hear(waiter: &mut Waiter) -> Waker {
        let (told, tell) = mpsc::channel::<oneshot::Sender<u32>>();
        let other = std::thread::spawn(move || tell.recv().unwrap().send(7).unwrap());
        let (sender, receiver) = oneshot::channel();
        told.send(sender).unwrap();
        assert_eq!(waiter.wait_apart(receiver), Ok(7));
        other.join().unwrap();
        waiter.kept.clone().unwrap().1
    }

    #[test]
    fn one_waker_serves_all_calls_of_a_thread_and_no_other_thread() {
        let mut waiter = Waiter::default();
        let first = hear(&mut waiter);
        assert!(hear(&mut waiter).will_wake(&first));
        // A worker may be moved to another thread between two calls.
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!hear(&mut waiter).will_wake(&first))).join().unwrap();
        });
        assert!(!hear(&mut waiter).will_wake(&first), "what was kept is another thread's");
    }
}
