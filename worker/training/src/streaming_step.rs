//! [`StreamingStep`]: a step whose gradients are sent one by one.

use std::time::Duration;

use pushpull_common::ids::Sequence;
use pushpull_common::tensor::Element;
use pushpull_worker::{Advice, Error, Params, Push};
#[cfg(doc)]
use pushpull_worker::{StreamingPush, ViewError};

use super::gradient_outcome::GradientOutcome;
use super::lifecycle::PushRecovery;
use super::replica_worker::ReplicaStream;
use super::session_replica::JoinedWorker;
use super::step_grant::StepGrant;
use super::training_error::TrainingError;
use super::training_session::{INTERRUPTED_PUSH, TrainingSession};

/// A step whose gradients are sent as they become ready, from
/// [`Step::begin`](super::Step::begin). Its methods have the names of [`StreamingPush`], and the same
/// program runs with servers and on a ring.
///
/// Call [`StreamingStep::variable`] or [`StreamingStep::rows`] for each variable, then
/// [`StreamingStep::finish`].
///
/// - **With servers** it is a [`StreamingPush`]: variables may be left out, and dropping it withdraws
///   the push.
/// - **On a ring** buckets of the last variables are reduced while the program computes the others,
///   and every trainable variable needs a gradient. The ranks agree on the step before they reduce
///   its first bucket. Dropped before that, the step counts on no rank, as a [`Step`](super::Step)
///   that is dropped; later the ring is given up as well, and the sessions recover.
/// - **With servers and a ring** ([`TrainingConfig::dense_by`](super::TrainingConfig::dense_by)) the
///   gradients are collected, and sent by [`StreamingStep::finish`].
#[derive(Debug)]
#[must_use = "a step that is not finished is dropped"]
pub struct StreamingStep<'a> {
    session: &'a mut TrainingSession,
    state: StreamState,
}

#[derive(Debug)]
enum StreamState {
    Open(ReplicaStream),
    /// A hook withholds the gradient: nothing is sent.
    Withheld,
    /// The push has failed, and [`StreamingStep::finish`] says what follows.
    Failed(Error),
}

impl<'a> StreamingStep<'a> {
    pub(crate) fn new(session: &'a mut TrainingSession) -> StreamingStep<'a> {
        StreamingStep { session, state: StreamState::Withheld }
    }

    /// Asks the hooks, and begins the push.
    pub(crate) async fn begin(&mut self, grant: StepGrant) -> Result<(), TrainingError> {
        if !self.session.before_push(&grant.gradients)? {
            return Ok(());
        }
        let interrupt = self.session.replica.interrupt.clone();
        let begin = self.session.replica.of_step().worker.begin(grant.token);
        self.state = match interrupt.race(begin).await.unwrap_or(Err(INTERRUPTED_PUSH)) {
            Ok(stream) => StreamState::Open(stream),
            Err(error) => StreamState::Failed(error),
        };
        Ok(())
    }

    /// Does what remains after an error of this step.
    pub(crate) async fn wind_up(&mut self) {
        self.drop_push();
        self.session.wind_up().await;
    }

    /// Drops what was sent.
    fn drop_push(&mut self) {
        self.state = StreamState::Withheld;
        if let Some(joined) = &mut self.session.replica.joined {
            joined.worker.drop_stream();
        }
    }

    /// The values from which the gradients are computed; see [`Step::parts`](super::Step::parts).
    pub fn params(&mut self) -> &mut Params {
        &mut self.session.replica.of_step().params
    }

    /// Reports a number of this step, such as its loss, to the hooks after the step.
    pub fn scalar(&mut self, name: &str, value: impl Into<f64>) {
        self.session.scalars.set(name, value.into());
    }

    /// Sends the gradient of one dense variable: all its elements, in row-major order. It is copied
    /// or encoded.
    ///
    /// # Errors
    /// A fault of the program, such as [`ViewError`], is [`TrainingError::Worker`], and ends the
    /// training. After other faults, such as lost servers, the rest of the gradients is not sent, and
    /// [`StreamingStep::finish`] returns their outcome.
    ///
    /// Dropping the future makes the push unusable, and its outcome is an error.
    pub async fn variable<T: Element>(
        &mut self,
        name: &str,
        gradient: &[T],
    ) -> Result<(), TrainingError> {
        let sent = self.try_variable(name, gradient).await;
        self.sent(sent)
    }

    /// Sends the gradient of a sparse variable, with all its rows at once, as
    /// [`StreamingPush::rows`] does. A ring has no such variables.
    ///
    /// # Errors
    /// As [`StreamingStep::variable`].
    pub async fn rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), TrainingError> {
        let sent = self.try_rows(name, ids, rows).await;
        self.sent(sent)
    }

    pub(crate) async fn try_variable<T: Element>(
        &mut self,
        name: &str,
        gradient: &[T],
    ) -> Result<(), Error> {
        let StreamState::Open(stream) = &mut self.state else { return Ok(()) };
        let interrupt = self.session.replica.interrupt.clone();
        let worker = &mut self.session.replica.of_step().worker;
        let send = worker.send_variable(stream, name, gradient);
        interrupt.race(send).await.unwrap_or(Err(INTERRUPTED_PUSH))
    }

    pub(crate) async fn try_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let StreamState::Open(stream) = &mut self.state else { return Ok(()) };
        let interrupt = self.session.replica.interrupt.clone();
        let worker = &mut self.session.replica.of_step().worker;
        let send = worker.send_rows(stream, name, ids, rows);
        interrupt.race(send).await.unwrap_or(Err(INTERRUPTED_PUSH))
    }

    /// Records that a gradient was sent. After an error the push is withdrawn.
    pub(crate) fn sent(&mut self, sent: Result<(), Error>) -> Result<(), TrainingError> {
        let Err(error) = sent else { return Ok(()) };
        self.drop_push();
        match error.advice() {
            Advice::Stop if !matches!(error, Error::Interrupted { .. }) => {
                self.session.push_settled(Err(error)).map(|_| ())
            }
            _ => {
                self.state = StreamState::Failed(error);
                Ok(())
            }
        }
    }

    /// Ends the push, and returns the fate of the gradients, as [`Step::push`](super::Step::push)
    /// does.
    ///
    /// # Errors
    /// Those of [`Step::push`](super::Step::push). On a ring, [`ViewError::Missing`] if a trainable
    /// variable has no gradient; the other ranks get the reason.
    ///
    /// Dropping the future drops the step.
    pub async fn finish(mut self) -> Result<GradientOutcome, TrainingError> {
        let ended = self.end().await;
        if ended.is_err() {
            self.wind_up().await;
        }
        ended
    }

    async fn end(&mut self) -> Result<GradientOutcome, TrainingError> {
        let Some(mut result) = self.try_finish().await? else {
            return Ok(GradientOutcome::Withheld);
        };
        loop {
            result = match self.settled(result)? {
                PushRecovery::Ended(outcome) => return Ok(outcome),
                PushRecovery::Resume(sequence, pause) => self.resume(sequence, pause).await,
            };
        }
    }

    /// Ends the push; `None` if it was withheld.
    pub(crate) async fn try_finish(
        &mut self,
    ) -> Result<Option<Result<Push, Error>>, TrainingError> {
        let stream = match std::mem::replace(&mut self.state, StreamState::Withheld) {
            StreamState::Open(stream) => stream,
            StreamState::Failed(error) => return Ok(Some(Err(error))),
            StreamState::Withheld if self.session.lifecycle.has_failed() => {
                return Err(TrainingError::Failed);
            }
            StreamState::Withheld => return Ok(None),
        };
        self.session.computed();
        let interrupt = self.session.replica.interrupt.clone();
        let JoinedWorker { worker, params } = self.session.replica.of_step();
        let finished = interrupt.race_with_grace(worker.finish_stream(stream, params)).await;
        Ok(Some(finished.unwrap_or_else(|| {
            worker.drop_stream();
            Err(INTERRUPTED_PUSH)
        })))
    }

    pub(crate) fn settled(
        &mut self,
        result: Result<Push, Error>,
    ) -> Result<PushRecovery, TrainingError> {
        self.session.push_settled(result)
    }

    pub(crate) async fn resume(
        &mut self,
        sequence: Sequence,
        pause: Duration,
    ) -> Result<Push, Error> {
        self.session.resume_push(sequence, pause).await
    }
}

impl Drop for StreamingStep<'_> {
    fn drop(&mut self) {
        self.drop_push();
    }
}
