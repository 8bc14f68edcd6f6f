//! Blocking forms of the worker and the reader, for threads without an async runtime.
//!
//! Each call blocks its thread until the operation is done, and sends and receives on that thread
//! meanwhile. Do not call them from within an async runtime.

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

use crate::config::WorkerConfig;
use crate::error::Error;
use crate::gradients::params::{Gradients, Params};
use crate::initial_values::InitialValues;
use crate::outcome::{DataBegun, Pulled, Push, RestoredCheckpoint, SavedCheckpoint, StepOutcome};
use crate::runtime::SessionRunner;
use crate::token::Token;

/// A [`crate::Worker`] with blocking operations.
#[derive(Debug)]
pub struct Worker {
    inner: crate::Worker,
    waiter: Waiter,
}

impl Worker {
    /// See [`crate::Worker::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Worker, Error> {
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
    ) -> Result<Params, Error> {
        // The caller's `fill` may have a runtime of its own.
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

    /// See [`crate::Worker::data_begun`].
    pub fn data_begun(&self) -> Option<DataBegun> {
        self.inner.data_begun()
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

    /// Starts [`Worker::pull_variable`] without waiting for it: see
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

    /// Starts [`Worker::push`] without waiting for it: see [`crate::Worker::push`].
    pub fn start_push(&mut self, token: Token, gradients: Gradients) -> Started<crate::PushHandle> {
        Started { handle: self.inner.push(token, gradients), waiter: self.waiter.clone() }
    }

    /// Starts [`Worker::pull`] without waiting for it: see [`crate::Worker::pull`].
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
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), Error> {
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
        // This ends the session, which the thread that runs it cannot wait for.
        self.waiter.wait_apart(self.inner.leave())
    }
}

/// An operation under way. [`Started::wait`] waits for it; other operations can be started
/// meanwhile, and waited for in any order. The docs of the handle `H` say what dropping it does.
#[derive(Debug)]
#[must_use = "dropping it may cancel the operation"]
pub struct Started<H> {
    handle: H,
    waiter: Waiter,
}

impl<H: Future> Started<H> {
    /// Waits until the operation is done, and returns its result.
    pub fn wait(mut self) -> H::Output {
        self.waiter.wait(|| self.handle)
    }
}

/// A [`crate::StreamingPush`] with blocking operations.
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

/// A [`crate::Reader`] with blocking operations.
#[derive(Debug)]
pub struct Reader {
    inner: crate::Reader,
    waiter: Waiter,
}

impl Reader {
    /// See [`crate::Reader::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Reader, Error> {
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

/// Waits for futures of this crate on the calling thread, and runs their session meanwhile if
/// possible. Then the same thread writes the request and reads the answer, and no thread has to be
/// woken on this side.
///
/// It keeps the thread's waker from call to call, as most callers stay on one thread.
#[derive(Clone, Debug, Default)]
struct Waiter {
    cached: Option<(Arc<Sleeper>, Waker)>,
    /// Runs the session; `None` before there is one.
    runner: Option<Arc<SessionRunner>>,
}

impl Waiter {
    /// Starts an operation and waits for it.
    fn wait<F: Future>(&mut self, begin: impl FnOnce() -> F) -> F::Output {
        let runner = self.runner.clone();
        let Some(waiting) = runner.as_ref().and_then(|runner| runner.enter()) else {
            return self.wait_apart(begin());
        };
        let mut future = pin!(begin());
        // An operation that needs no answer is ready at once, whichever thread runs the session.
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

    /// Returns a waker of the calling thread.
    fn waker(&mut self) -> &(Arc<Sleeper>, Waker) {
        let thread = std::thread::current();
        let id = thread.id();
        let cached = self.cached.take().filter(|(cached, _)| cached.thread.id() == id);
        self.cached.insert(cached.unwrap_or_else(|| {
            let sleeper = Arc::new(Sleeper { thread, is_woken: AtomicBool::new(false) });
            (sleeper.clone(), Waker::from(sleeper))
        }))
    }
}

/// A waiting thread.
#[derive(Debug)]
struct Sleeper {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Sleeper {
    /// Polls for a while, then sleeps. Returns once woken, and possibly without a reason.
    fn sleep(&self, polls_for: Duration) {
        let since = Instant::now();
        while !self.is_woken.swap(false, Ordering::Acquire) {
            if since.elapsed() >= polls_for {
                // A wake in the meantime makes this return at once.
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

    /// Waits for a value from another thread, and returns the waker that was used.
    fn wait_once(waiter: &mut Waiter) -> Waker {
        let (sender, request) = mpsc::channel::<oneshot::Sender<u32>>();
        let other = std::thread::spawn(move || request.recv().unwrap().send(7).unwrap());
        let (reply, receiver) = oneshot::channel();
        sender.send(reply).unwrap();
        assert_eq!(waiter.wait_apart(receiver), Ok(7));
        other.join().unwrap();
        waiter.cached.clone().unwrap().1
    }

    #[test]
    fn a_waker_serves_the_calls_of_one_thread() {
        let mut waiter = Waiter::default();
        let first = wait_once(&mut waiter);
        assert!(wait_once(&mut waiter).will_wake(&first));
        // A worker may be moved to another thread between two calls.
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!wait_once(&mut waiter).will_wake(&first))).join().unwrap();
        });
        assert!(!wait_once(&mut waiter).will_wake(&first), "the kept waker is another thread's");
    }
}
