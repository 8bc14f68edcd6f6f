//! Blocking forms of the worker and the reader, for threads without an async runtime.
//!
//! Each call blocks its thread until the operation is done, and sends and receives on that thread
//! meanwhile. Do not call them from within an async runtime.
//!
//! # Cancelling a call from another thread
//!
//! [`Worker::interrupt`] and [`Reader::interrupt`] return an [`Interrupt`]; one of
//! [`WorkerConfig::interrupt`] also reaches `connect`. Once it is raised, the pending and every
//! later call of the worker or the reader returns [`Error::Interrupted`].
//!
//! - The operation is cancelled as if its future were dropped, and the docs of each verb of
//!   [`crate::Worker`] say what that does. A token goes back to the step owner. A push is withdrawn
//!   if no shard can have its share in full, and counts once otherwise.
//! - [`Worker::finish`] and [`Worker::leave`] still work, so that the worker can leave in order.
//!   They wait for a silent server for at most a quarter of a second, and return
//!   [`Error::Interrupted`] then.
//! - The calls that only start an operation are not refused, and [`Started::wait`] returns the
//!   result of an operation that is done.

pub(crate) mod waiter;

use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{CoordinatorEpoch, Sequence};
use pushpull_common::placement::Placement;
use pushpull_common::protocol::EffectRef;
use pushpull_common::protocol::message::EndReason;
use pushpull_common::tensor::Element;
use pushpull_common::variable::VariableSpec;

use crate::config::WorkerConfig;
use crate::coordinators::OpenedCoordinator;
use crate::error::Error;
use crate::gradients::params::{Gradients, Params};
use crate::initial_values::InitialValues;
use crate::interrupt::Interrupt;
use crate::metrics::WorkerMetrics;
use crate::outcome::{DataBegun, Pulled, Push, RestoredCheckpoint, SavedCheckpoint, StepOutcome};
use crate::token::Token;

use waiter::Waiter;

/// A [`crate::Worker`] with blocking operations.
#[derive(Debug)]
pub struct Worker {
    pub(crate) inner: crate::Worker,
    pub(crate) waiter: Waiter,
}

impl Worker {
    /// See [`crate::Worker::connect`].
    pub fn connect(config: WorkerConfig) -> Result<Worker, Error> {
        let mut waiter = Waiter::new(&config);
        let inner = waiter.call_apart("connect", crate::Worker::connect(config))?;
        waiter.runner = Some(inner.runner().clone());
        Ok(Worker { inner, waiter })
    }

    /// Returns the interrupt that cancels the calls of this worker: that of
    /// [`WorkerConfig::interrupt`], or one of its own.
    #[doc(alias = "canceller")]
    pub fn interrupt(&self) -> Interrupt {
        self.waiter.interrupt.clone()
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
        self.waiter.call_apart("join", self.inner.join(variables, fill))
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

    /// See [`crate::Worker::metrics`].
    pub fn metrics(&self) -> WorkerMetrics {
        self.inner.metrics()
    }

    /// See [`crate::Worker::token`].
    pub fn token(&mut self) -> Result<Option<Token>, Error> {
        self.waiter.call("take a token", || self.inner.token())
    }

    /// See [`crate::Worker::end_reason`].
    pub fn end_reason(&self) -> Option<EndReason> {
        self.inner.end_reason()
    }

    /// See [`crate::Worker::pull`].
    pub fn pull(&mut self, token: &Token, params: &mut Params) -> Result<Pulled, Error> {
        self.waiter.call("pull", || self.inner.pull(token, params))
    }

    /// See [`crate::Worker::pull_variable`].
    pub fn pull_variable<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        values: &mut [T],
    ) -> Result<Pulled, Error> {
        self.waiter.call("pull", || self.inner.pull_variable(token, name, values))
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
        Started { handle, doing: "pull", waiter: self.waiter.clone() }
    }

    /// See [`crate::Worker::push_and_pull`].
    pub fn push_and_pull(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<StepOutcome, Error> {
        self.waiter.call("push", || self.inner.push_and_pull(token, gradients, params))
    }

    /// See [`crate::Worker::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        self.waiter.call("pull rows", || self.inner.pull_rows(token, name, ids, rows))
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
        self.waiter.call("push", || self.inner.push(token, gradients))
    }

    /// See [`crate::Worker::push_for_effect`].
    pub fn push_for_effect(
        &mut self,
        token: Token,
        gradients: Gradients,
        effect: EffectRef,
    ) -> Result<Push, Error> {
        self.waiter.call("push", || self.inner.push_for_effect(token, gradients, effect))
    }

    /// See [`crate::Worker::open_coordinator`].
    pub fn open_coordinator(&mut self, name: &str) -> Result<OpenedCoordinator, Error> {
        self.waiter.call("open a coordinator", || self.inner.open_coordinator(name))
    }

    /// See [`crate::Worker::settled_effects`].
    pub fn settled_effects(&mut self, name: &str) -> Result<OpenedCoordinator, Error> {
        self.waiter.call("ask for settled effects", || self.inner.settled_effects(name))
    }

    /// See [`crate::Worker::close_coordinator`].
    pub fn close_coordinator(&mut self, name: &str, epoch: CoordinatorEpoch) -> Result<(), Error> {
        self.waiter.call("close a coordinator", || self.inner.close_coordinator(name, epoch))
    }

    /// Starts [`Worker::push`] without waiting for it: see [`crate::Worker::push`].
    pub fn start_push(&mut self, token: Token, gradients: Gradients) -> Started<crate::PushHandle> {
        let handle = self.inner.push(token, gradients);
        Started { handle, doing: "push", waiter: self.waiter.clone() }
    }

    /// Starts [`Worker::pull`] without waiting for it: see [`crate::Worker::pull`].
    pub fn start_pull<'a>(
        &mut self,
        token: &'a Token,
        params: &'a mut Params,
    ) -> Started<crate::PullHandle<'a>> {
        let handle = self.inner.pull(token, params);
        Started { handle, doing: "pull", waiter: self.waiter.clone() }
    }

    /// See [`crate::Worker::begin`].
    pub fn begin(&mut self, token: Token) -> Result<StreamingPush, Error> {
        let inner = self.waiter.call("push", || self.inner.begin(token))?;
        Ok(StreamingPush { inner, waiter: self.waiter.clone() })
    }

    /// See [`crate::Worker::assign`].
    pub fn assign<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        self.waiter.call("assign", || self.inner.assign(name, values))
    }

    /// See [`crate::Worker::assign_add`].
    pub fn assign_add<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        self.waiter.call("add", || self.inner.assign_add(name, values))
    }

    /// See [`crate::Worker::assign_rows`].
    pub fn assign_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        self.waiter.call("assign rows", || self.inner.assign_rows(name, ids, rows))
    }

    /// See [`crate::Worker::average`].
    pub fn average(&mut self, params: &mut Params, steps: u64) -> Result<(), Error> {
        self.waiter.call("average", || self.inner.average(params, steps))
    }

    /// See [`crate::Worker::publish`].
    pub fn publish(&mut self, params: &Params) -> Result<(), Error> {
        self.waiter.call("publish", || self.inner.publish(params))
    }

    /// See [`crate::Worker::outcome`].
    pub fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        self.waiter.call("ask for an outcome", || self.inner.outcome(sequence))
    }

    /// See [`crate::Worker::resume`].
    pub fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        self.waiter.call("push", || self.inner.resume(sequence))
    }

    /// See [`crate::Worker::residuals`].
    pub fn residuals(&self) -> Result<Vec<u8>, Error> {
        self.inner.residuals()
    }

    /// See [`crate::Worker::restore_residuals`].
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.inner.restore_residuals(bytes)
    }

    /// See [`crate::Worker::finish`].
    pub fn finish(&mut self) -> Result<(), Error> {
        let interrupt = self.waiter.interrupt.clone();
        let finished = self.waiter.wait(|| interrupt.race_with_grace(self.inner.finish()));
        finished.unwrap_or(Err(Error::Interrupted { doing: "finish the training" }))
    }

    /// See [`crate::Worker::pull_final`].
    pub fn pull_final(&mut self, params: &mut Params) -> Result<u64, Error> {
        self.waiter.call("pull the final values", || self.inner.pull_final(params))
    }

    /// See [`crate::Worker::save`].
    pub fn save(&mut self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        self.waiter.call("save a checkpoint", || self.inner.save(user))
    }

    /// See [`crate::Worker::leave`].
    pub fn leave(mut self) -> Result<(), Error> {
        let interrupt = self.waiter.interrupt.clone();
        // This ends the session, which the thread that runs it cannot wait for.
        let left = self.waiter.wait_apart(interrupt.race_with_grace(self.inner.leave()));
        left.unwrap_or(Err(Error::Interrupted { doing: "leave" }))
    }
}

/// An operation under way. [`Started::wait`] waits for it; other operations can be started
/// meanwhile, and waited for in any order. The docs of the handle `H` say what dropping it does.
#[derive(Debug)]
#[must_use = "dropping it may cancel the operation"]
pub struct Started<H> {
    handle: H,
    /// The operation, as in "cannot push".
    doing: &'static str,
    waiter: Waiter,
}

impl<H> Started<H> {
    /// Waits until the operation is done, and returns its result. An interrupt cancels an operation
    /// that is not done.
    pub fn wait<T>(mut self) -> Result<T, Error>
    where
        H: Future<Output = Result<T, Error>>,
    {
        self.waiter.await_started(self.doing, || self.handle)
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
        self.waiter.call("push", || self.inner.variable(name, gradient))
    }

    /// See [`crate::StreamingPush::rows`].
    pub fn rows<T: Element>(&mut self, name: &str, ids: &[u64], rows: &[T]) -> Result<(), Error> {
        self.waiter.call("push", || self.inner.rows(name, ids, rows))
    }

    /// See [`crate::StreamingPush::finish`].
    pub fn finish(mut self) -> Result<Push, Error> {
        self.waiter.call("push", || self.inner.finish())
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
        let mut waiter = Waiter::new(&config);
        let inner = waiter.call_apart("connect", crate::Reader::connect(config))?;
        waiter.runner = Some(inner.runner().clone());
        Ok(Reader { inner, waiter })
    }

    /// Returns the interrupt that cancels the calls of this reader: that of
    /// [`WorkerConfig::interrupt`], or one of its own.
    #[doc(alias = "canceller")]
    pub fn interrupt(&self) -> Interrupt {
        self.waiter.interrupt.clone()
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
        self.waiter.call("pull", || self.inner.pull(params))
    }

    /// See [`crate::Reader::training_end`].
    pub fn training_end(&mut self, within: Duration) -> Result<Option<EndReason>, Error> {
        self.waiter.call("wait for the end of the training", || self.inner.training_end(within))
    }

    /// See [`crate::Reader::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<u64, Error> {
        self.waiter.call("pull rows", || self.inner.pull_rows(name, ids, rows))
    }
}
