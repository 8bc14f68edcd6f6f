//! The same verbs for callers that are not asynchronous. Each blocks its thread until it is done;
//! do not call them from within an asynchronous runtime.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::Sequence;
use pushpull_common::placement::Placement;
use pushpull_common::tensor::Element;
use pushpull_common::variable::VariableSpec;

use crate::compression::ResidualsError;
use crate::config::WorkerConfig;
use crate::error::{ConnectError, Error, JoinError};
use crate::initial::Initial;
use crate::outcome::{Pulled, Push, Restored, SavedCheckpoint};
use crate::params::{Gradients, Params};
use crate::reader::ReaderError;
use crate::token::Token;

/// [`crate::Worker`], blocking.
#[derive(Debug)]
pub struct Worker(crate::Worker);

impl Worker {
    /// See [`crate::Worker::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Worker, ConnectError> {
        wait(crate::Worker::connect(config)).map(Worker)
    }

    /// See [`crate::Worker::is_chief`].
    pub fn is_chief(&self) -> bool {
        self.0.is_chief()
    }

    /// See [`crate::Worker::join`].
    pub fn join(
        &mut self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut Initial<'_>),
    ) -> Result<Params, JoinError> {
        wait(self.0.join(variables, fill))
    }

    /// See [`crate::Worker::catalogue`].
    pub fn catalogue(&self) -> Option<&Catalogue> {
        self.0.catalogue()
    }

    /// See [`crate::Worker::placement`].
    pub fn placement(&self) -> Option<&Placement> {
        self.0.placement()
    }

    /// See [`crate::Worker::restored`].
    pub fn restored(&self) -> Option<&Restored> {
        self.0.restored()
    }

    /// See [`crate::Worker::token`].
    pub fn token(&mut self) -> Result<Option<Token>, Error> {
        wait(self.0.token())
    }

    /// See [`crate::Worker::pull`].
    pub fn pull(&mut self, token: &Token, params: &mut Params) -> Result<Pulled, Error> {
        wait(self.0.pull(token, params))
    }

    /// See [`crate::Worker::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        wait(self.0.pull_rows(token, name, ids, rows))
    }

    /// See [`crate::Worker::gradients`].
    ///
    /// # Panics
    /// If the worker has not joined.
    pub fn gradients(&mut self) -> Gradients {
        self.0.gradients()
    }

    /// See [`crate::Worker::push`].
    pub fn push(&mut self, token: Token, gradients: Gradients) -> Result<Push, Error> {
        wait(self.0.push(token, gradients))
    }

    /// See [`crate::Worker::begin`].
    pub fn begin(&mut self, token: Token) -> Result<Pushing<'_>, Error> {
        wait(self.0.begin(token)).map(Pushing)
    }

    /// See [`crate::Worker::assign`].
    pub fn assign<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        wait(self.0.assign(name, values))
    }

    /// See [`crate::Worker::assign_add`].
    pub fn assign_add<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        wait(self.0.assign_add(name, values))
    }

    /// See [`crate::Worker::assign_rows`].
    pub fn assign_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        wait(self.0.assign_rows(name, ids, rows))
    }

    /// See [`crate::Worker::outcome`].
    pub fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        wait(self.0.outcome(sequence))
    }

    /// See [`crate::Worker::resume`].
    pub fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        wait(self.0.resume(sequence))
    }

    /// See [`crate::Worker::residuals`].
    pub fn residuals(&self) -> Vec<u8> {
        self.0.residuals()
    }

    /// See [`crate::Worker::restore_residuals`].
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), ResidualsError> {
        self.0.restore_residuals(bytes)
    }

    /// See [`crate::Worker::finish`].
    pub fn finish(&mut self) -> Result<(), Error> {
        wait(self.0.finish())
    }

    /// See [`crate::Worker::save`].
    pub fn save(&mut self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        wait(self.0.save(user))
    }

    /// See [`crate::Worker::leave`].
    pub fn leave(self) -> Result<(), Error> {
        wait(self.0.leave())
    }
}

/// [`crate::Pushing`], blocking.
#[derive(Debug)]
#[must_use = "a push that is not finished is withdrawn"]
pub struct Pushing<'a>(crate::Pushing<'a>);

impl Pushing<'_> {
    /// See [`crate::Pushing::variable`].
    pub fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        wait(self.0.variable(name, gradient))
    }

    /// See [`crate::Pushing::rows`].
    pub fn rows<T: Element>(&mut self, name: &str, ids: &[u64], rows: &[T]) -> Result<(), Error> {
        wait(self.0.rows(name, ids, rows))
    }

    /// See [`crate::Pushing::finish`].
    pub fn finish(self) -> Result<Push, Error> {
        wait(self.0.finish())
    }
}

/// [`crate::Reader`], blocking.
#[derive(Debug)]
pub struct Reader(crate::Reader);

impl Reader {
    /// See [`crate::Reader::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Reader, ReaderError> {
        wait(crate::Reader::connect(config)).map(Reader)
    }

    /// See [`crate::Reader::catalogue`].
    pub fn catalogue(&self) -> &Catalogue {
        self.0.catalogue()
    }

    /// See [`crate::Reader::params`].
    pub fn params(&self) -> Params {
        self.0.params()
    }

    /// See [`crate::Reader::pull`].
    pub fn pull(&mut self, params: &mut Params) -> Result<u64, Error> {
        wait(self.0.pull(params))
    }

    /// See [`crate::Reader::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<u64, Error> {
        wait(self.0.pull_rows(name, ids, rows))
    }
}

/// Wakes a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits on this thread for a future. Those of this crate are driven by the session's thread and
/// need no runtime here.
fn wait<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
