//! Blocking forms of the training session and its steps.

use pushpull_common::data_set::SampleRange;
use pushpull_common::tensor::Element;
use pushpull_worker::internal::Waiter;
use pushpull_worker::{Gradients, Params, Pulled, Worker, WorkerMetrics};

use crate::data::{Batch, DataError, GrantedBatches};
use crate::{
    DetachedStep, GradientOutcome, NextAction, PushRecovery, StepGrant, TrainingConfig,
    TrainingEnd, TrainingError,
};

/// A [`crate::TrainingSession`] with blocking operations.
///
/// ```no_run
/// # use pushpull_training::blocking::TrainingSession;
/// # use pushpull_training::TrainingConfig;
/// # fn gradients(_: &pushpull_worker::Params, _: &mut pushpull_worker::Gradients) -> f64 { 0.0 }
/// # fn run(config: TrainingConfig) -> Result<(), Box<dyn std::error::Error>> {
/// let mut session = TrainingSession::start(config)?;
/// while let Some(mut step) = session.step()? {
///     let (params, out) = step.parts();
///     let loss = gradients(params, out);
///     step.scalar("loss", loss);
///     step.push()?;
/// }
/// println!("{}", session.close()?.reason);
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[doc(alias = "MonitoredTrainingSession")]
pub struct TrainingSession {
    inner: crate::TrainingSession,
    waiter: Waiter,
}

impl TrainingSession {
    /// Blocking form of [`crate::TrainingSession::start`].
    pub fn start(config: TrainingConfig) -> Result<TrainingSession, TrainingError> {
        let mut waiter = Waiter::default();
        // Hooks may have a runtime of their own.
        let inner = waiter.wait_apart(crate::TrainingSession::start(config))?;
        waiter.runner = inner.runner().cloned();
        Ok(TrainingSession { inner, waiter })
    }

    /// Blocking form of [`crate::TrainingSession::step`].
    pub fn step(&mut self) -> Result<Option<Step<'_>>, TrainingError> {
        match self.advance() {
            Ok(Some(grant)) => {
                let inner = crate::Step::new(&mut self.inner, grant);
                Ok(Some(Step { inner, waiter: &mut self.waiter }))
            }
            Ok(None) => Ok(None),
            Err(error) => {
                self.waiter.wait_apart(self.inner.wind_up());
                Err(error)
            }
        }
    }

    /// Continues a detached step, like [`crate::TrainingSession::attach`].
    pub fn attach(&mut self, step: DetachedStep) -> Option<Step<'_>> {
        let TrainingSession { inner, waiter } = self;
        inner.attach(step).map(|inner| Step { inner, waiter })
    }

    fn advance(&mut self) -> Result<Option<StepGrant>, TrainingError> {
        let TrainingSession { inner, waiter } = self;
        loop {
            match inner.next_action()? {
                NextAction::Token => {
                    let taken = waiter.wait(|| inner.take_token());
                    inner.token_taken(taken)?;
                }
                NextAction::Pull => {
                    let pulled = waiter.wait(|| inner.pull());
                    if let Some(grant) = inner.pulled(pulled)? {
                        return Ok(Some(grant));
                    }
                }
                NextAction::Average { steps } => {
                    let averaged = waiter.wait(|| inner.average(steps));
                    inner.averaged(averaged)?;
                }
                NextAction::Over => return Ok(None),
                action => {
                    // Joins and leaves end a session, which a thread that runs it cannot wait for.
                    let acted = waiter.wait_apart(inner.act(action));
                    waiter.runner = inner.runner().cloned();
                    acted?;
                }
            }
        }
    }

    /// Blocking form of [`crate::TrainingSession::run`].
    pub fn run<E>(
        mut self,
        mut train: impl FnMut(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<TrainingEnd, TrainingError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        while let Some(mut step) = self.step()? {
            match train(&mut step) {
                Ok(()) => _ = step.push()?,
                Err(error) => {
                    let error = step.inner.fail(error.into());
                    self.waiter.wait_apart(self.inner.wind_up());
                    return Err(error);
                }
            }
        }
        self.close()
    }

    /// Blocking form of [`crate::TrainingSession::close`].
    pub fn close(mut self) -> Result<TrainingEnd, TrainingError> {
        self.waiter.wait_apart(self.inner.close())
    }

    /// Returns whether this worker is the chief, like [`crate::TrainingSession::is_chief`].
    pub fn is_chief(&self) -> bool {
        self.inner.is_chief()
    }

    /// Returns the global step, like [`crate::TrainingSession::global_step`].
    pub fn global_step(&self) -> u64 {
        self.inner.global_step()
    }

    /// Returns the metrics of this worker, like [`crate::TrainingSession::metrics`].
    pub fn metrics(&self) -> WorkerMetrics {
        self.inner.metrics()
    }

    /// Returns the worker of the session, like [`crate::TrainingSession::worker`].
    pub fn worker(&self) -> Option<&Worker> {
        self.inner.worker()
    }
}

/// A [`crate::Step`] with blocking operations.
#[derive(Debug)]
#[must_use = "a step that is dropped returns its token"]
pub struct Step<'a> {
    pub(crate) inner: crate::Step<'a>,
    waiter: &'a mut Waiter,
}

impl<'a> Step<'a> {
    /// Returns the number of the step, like [`crate::Step::step`].
    pub fn step(&self) -> u64 {
        self.inner.step()
    }

    /// Returns the samples of the step, like [`crate::Step::samples`].
    pub fn samples(&self) -> Option<SampleRange> {
        self.inner.samples()
    }

    /// Returns the samples ahead of the step, like [`crate::Step::samples_ahead`].
    pub fn samples_ahead(&self) -> Option<SampleRange> {
        self.inner.samples_ahead()
    }

    /// Blocking form of [`crate::Step::load`].
    pub fn load<T: Send + 'static>(
        &self,
        batches: &mut GrantedBatches<T>,
    ) -> Result<Batch<T>, DataError> {
        let samples = self.inner.granted(batches)?;
        batches.blocking_load(samples, self.inner.samples_ahead())
    }

    /// Detaches the step from its session, like [`crate::Step::detach`].
    pub fn detach(self) -> DetachedStep {
        self.inner.detach()
    }

    /// Skips the step, like [`crate::Step::skip`].
    pub fn skip(self) {
        self.inner.skip();
    }

    /// Returns the values and the gradients of the step, like [`crate::Step::parts`].
    pub fn parts(&mut self) -> (&mut Params, &mut Gradients) {
        self.inner.parts()
    }

    /// Sets a scalar of the step, like [`crate::Step::scalar`].
    pub fn scalar(&mut self, name: &str, value: impl Into<f64>) {
        self.inner.scalar(name, value);
    }

    /// Blocking form of [`crate::Step::pull_rows`].
    pub fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, TrainingError> {
        let Step { inner, waiter } = self;
        let pulled = waiter.wait(|| inner.try_pull_rows(name, ids, rows));
        inner.rows_pulled(pulled)
    }

    /// Blocking form of [`crate::Step::begin`].
    pub fn begin(self) -> Result<StreamingStep<'a>, TrainingError> {
        let Step { inner, waiter } = self;
        let (session, grant) = inner.into_parts();
        let mut inner = crate::StreamingStep::new(session);
        match waiter.wait(|| inner.begin(grant)) {
            Ok(()) => Ok(StreamingStep { inner, waiter }),
            Err(error) => {
                waiter.wait_apart(inner.wind_up());
                Err(error)
            }
        }
    }

    /// Blocking form of [`crate::Step::push`].
    pub fn push(self) -> Result<GradientOutcome, TrainingError> {
        let Step { inner, waiter } = self;
        let (session, grant) = inner.into_parts();
        let ended = push(session, grant, waiter);
        if ended.is_err() {
            waiter.wait_apart(session.wind_up());
        }
        ended
    }
}

/// A [`crate::StreamingStep`] with blocking operations.
#[derive(Debug)]
#[must_use = "a step that is not finished is dropped"]
pub struct StreamingStep<'a> {
    inner: crate::StreamingStep<'a>,
    waiter: &'a mut Waiter,
}

impl StreamingStep<'_> {
    /// Returns the values of the step, like [`crate::StreamingStep::params`].
    pub fn params(&mut self) -> &mut Params {
        self.inner.params()
    }

    /// Sets a scalar of the step, like [`crate::StreamingStep::scalar`].
    pub fn scalar(&mut self, name: &str, value: impl Into<f64>) {
        self.inner.scalar(name, value);
    }

    /// Blocking form of [`crate::StreamingStep::variable`].
    pub fn variable<T: Element>(
        &mut self,
        name: &str,
        gradient: &[T],
    ) -> Result<(), TrainingError> {
        let StreamingStep { inner, waiter } = self;
        let sent = waiter.wait(|| inner.try_variable(name, gradient));
        inner.sent(sent)
    }

    /// Blocking form of [`crate::StreamingStep::rows`].
    pub fn rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), TrainingError> {
        let StreamingStep { inner, waiter } = self;
        let sent = waiter.wait(|| inner.try_rows(name, ids, rows));
        inner.sent(sent)
    }

    /// Blocking form of [`crate::StreamingStep::finish`].
    pub fn finish(self) -> Result<GradientOutcome, TrainingError> {
        let StreamingStep { mut inner, waiter } = self;
        let ended = finish(&mut inner, waiter);
        if ended.is_err() {
            waiter.wait_apart(inner.wind_up());
        }
        ended
    }
}

fn finish(
    step: &mut crate::StreamingStep<'_>,
    waiter: &mut Waiter,
) -> Result<GradientOutcome, TrainingError> {
    let Some(mut result) = waiter.wait(|| step.try_finish())? else {
        return Ok(GradientOutcome::Withheld);
    };
    loop {
        result = match step.settled(result)? {
            PushRecovery::Ended(outcome) => return Ok(outcome),
            PushRecovery::Resume(sequence, pause) => {
                waiter.wait_apart(step.resume(sequence, pause))
            }
        };
    }
}

fn push(
    session: &mut crate::TrainingSession,
    grant: StepGrant,
    waiter: &mut Waiter,
) -> Result<GradientOutcome, TrainingError> {
    if !session.before_push(&grant.gradients)? {
        return Ok(GradientOutcome::Withheld);
    }
    let mut result = waiter.wait(|| session.push(grant));
    loop {
        result = match session.push_settled(result)? {
            PushRecovery::Ended(outcome) => return Ok(outcome),
            PushRecovery::Resume(sequence, pause) => {
                waiter.wait_apart(session.resume_push(sequence, pause))
            }
        };
    }
}
