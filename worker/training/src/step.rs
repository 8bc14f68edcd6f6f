//! [`Step`]: one step of a training session.

use pushpull_common::data_set::SampleRange;
use pushpull_common::tensor::Element;
use pushpull_worker::{Error, Gradients, Params, Pulled, ViewError};

use super::data::{Batch, DataError, GrantedBatches};
use super::gradient_outcome::GradientOutcome;
use super::lifecycle::PushRecovery;
use super::step_grant::StepGrant;
use super::streaming_step::StreamingStep;
use super::training_error::TrainingError;
use super::training_session::TrainingSession;
#[cfg(doc)]
use pushpull_worker::Token;

/// One step of a training session: a token, the values for it, and empty gradients.
///
/// [`Step::push`] consumes it, so a step is pushed at most once. Dropping it returns its token to
/// the step owner, and no gradient is pushed.
#[derive(Debug)]
#[must_use = "a step that is dropped returns its token"]
pub struct Step<'a> {
    pub(crate) session: &'a mut TrainingSession,
    pub(crate) grant: StepGrant,
}

impl<'a> Step<'a> {
    pub(crate) fn new(session: &'a mut TrainingSession, grant: StepGrant) -> Step<'a> {
        Step { session, grant }
    }

    /// The global step at which the token was granted.
    pub fn step(&self) -> u64 {
        self.grant.token.step()
    }

    /// The samples from which the gradients are to be computed: see [`Token::samples`].
    pub fn samples(&self) -> Option<SampleRange> {
        self.grant.token.samples()
    }

    /// The samples that this worker will probably be granted next: see [`Token::samples_ahead`].
    pub fn samples_ahead(&self) -> Option<SampleRange> {
        self.grant.token.samples_ahead()
    }

    /// Returns the batch of the step's samples, and begins to read the next one ahead.
    ///
    /// # Errors
    /// The errors of [`GrantedBatches::load`]; [`DataError::NotGranted`] if the worker has declared
    /// no data set ([`TrainingConfig::data`](super::TrainingConfig::data)), and
    /// [`DataError::Differs`] if it has declared another one than the loader's, or another order.
    pub async fn load<T: Send + 'static>(
        &self,
        batches: &mut GrantedBatches<T>,
    ) -> Result<Batch<T>, DataError> {
        let samples = self.granted(batches)?;
        batches.load(samples, self.samples_ahead()).await
    }

    /// Returns the samples of the step, from which these batches are read.
    pub(crate) fn granted<T>(&self, batches: &GrantedBatches<T>) -> Result<SampleRange, DataError> {
        let data_set = || batches.data_set().name().to_owned();
        let samples =
            self.samples().ok_or_else(|| DataError::NotGranted { data_set: data_set() })?;
        let declared = self.session.replica.declared_data();
        match declared.and_then(|declared| declared.difference_of_order(batches.data_set())) {
            Some(differs) => Err(DataError::Differs { data_set: data_set(), differs }),
            None => Ok(samples),
        }
    }

    /// Takes the step from its session, which can be used meanwhile. [`TrainingSession::attach`]
    /// continues it. This is for programs that cannot borrow the session while they compute, such
    /// as an optimizer of another library.
    pub fn detach(self) -> DetachedStep {
        DetachedStep { grant: self.grant }
    }

    /// Ends the step without a push, and spends its samples: see [`Token::skip`].
    pub fn skip(self) {
        self.grant.token.skip();
    }

    /// Returns the values, and the gradients to be computed from them.
    ///
    /// The caller may change the values. Those of variables that each replica changes by itself,
    /// such as running statistics, stay for the next step.
    pub fn parts(&mut self) -> (&mut Params, &mut Gradients) {
        (&mut self.session.replica.of_step().params, &mut self.grant.gradients)
    }

    /// Reports a number of this step, such as its loss, to the hooks.
    pub fn scalar(&mut self, name: &str, value: impl Into<f64>) {
        self.session.scalars.set(name, value.into());
    }

    /// Pulls rows of a sparse variable, as [`Worker::pull_rows`](pushpull_worker::Worker::pull_rows) does.
    ///
    /// If the result is [`Pulled::Stale`], drop this step and take the next: its time has passed,
    /// the servers were lost, or the interrupt was raised.
    ///
    /// # Errors
    /// [`TrainingError::Worker`] if neither another attempt nor a rejoin can help, and
    /// [`TrainingError::GaveUp`]. The training has failed then.
    pub async fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, TrainingError> {
        let pulled = self.try_pull_rows(name, ids, rows).await;
        self.rows_pulled(pulled)
    }

    pub(crate) async fn try_pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        let interrupt = self.session.replica.interrupt.clone();
        let replica = &mut self.session.replica.of_step().worker;
        // A ring has no sparse variables.
        let Some(worker) = replica.of_servers_mut() else {
            return Err(ViewError::Dense { name: name.to_owned() }.into());
        };
        let pull = worker.pull_rows(&self.grant.token, name, ids, rows);
        interrupt.race(pull).await.unwrap_or(Ok(Pulled::Stale))
    }

    /// Records a pull of rows.
    pub(crate) fn rows_pulled(
        &mut self,
        pulled: Result<Pulled, Error>,
    ) -> Result<Pulled, TrainingError> {
        pulled.or_else(|error| self.session.rows_failed(error).map(|()| Pulled::Stale))
    }

    /// Pushes the gradients, and returns their fate. The loop goes on with the next step after
    /// each of them.
    ///
    /// # Errors
    /// An error ends the training: see [`TrainingSession::step`]. A fault of the program, such as
    /// a push without a gradient, is [`TrainingError::Worker`].
    ///
    /// Dropping the future withdraws the push if no shard can have received its share in full.
    pub async fn push(self) -> Result<GradientOutcome, TrainingError> {
        let session = self.session;
        let grant = self.grant;
        let ended = push(session, grant).await;
        if ended.is_err() {
            session.wind_up().await;
        }
        ended
    }

    /// Begins a push whose gradients are sent as they become ready. A backward pass makes those of
    /// the last layer first, so they are on their way while it computes the others.
    ///
    /// Hooks decide here whether the gradient counts. They see the scalars so far, and the gradients
    /// of [`Step::parts`], which are not pushed.
    ///
    /// # Errors
    /// Those of hooks. The training has failed then.
    ///
    /// Dropping the future drops the step.
    pub async fn begin(self) -> Result<StreamingStep<'a>, TrainingError> {
        let mut streaming = StreamingStep::new(self.session);
        match streaming.begin(self.grant).await {
            Ok(()) => Ok(streaming),
            Err(error) => {
                streaming.wind_up().await;
                Err(error)
            }
        }
    }

    /// Splits the step, for its blocking twin.
    pub(crate) fn into_parts(self) -> (&'a mut TrainingSession, StepGrant) {
        (self.session, self.grant)
    }

    /// Fails the training by an error of the caller's function, and returns that error.
    pub(crate) fn fail(self, source: Box<dyn std::error::Error + Send + Sync>) -> TrainingError {
        let step = self.step();
        self.session.lifecycle.fail(TrainingError::Step { step, source })
    }
}

/// A step without its session, from [`Step::detach`]. Dropping it returns its token.
#[derive(Debug)]
#[must_use = "a step that is dropped returns its token"]
pub struct DetachedStep {
    pub(crate) grant: StepGrant,
}

impl DetachedStep {
    /// The global step at which the token was granted.
    pub fn step(&self) -> u64 {
        self.grant.token.step()
    }

    /// The samples of the step: see [`Token::samples`].
    pub fn samples(&self) -> Option<SampleRange> {
        self.grant.token.samples()
    }

    /// The samples that this worker will probably be granted next: see [`Token::samples_ahead`].
    pub fn samples_ahead(&self) -> Option<SampleRange> {
        self.grant.token.samples_ahead()
    }
}

async fn push(
    session: &mut TrainingSession,
    grant: StepGrant,
) -> Result<GradientOutcome, TrainingError> {
    if !session.before_push(&grant.gradients)? {
        return Ok(GradientOutcome::Withheld);
    }
    let mut result = session.push(grant).await;
    loop {
        result = match session.push_settled(result)? {
            PushRecovery::Ended(outcome) => return Ok(outcome),
            PushRecovery::Resume(sequence, pause) => session.resume_push(sequence, pause).await,
        };
    }
}
