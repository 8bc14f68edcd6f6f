//! [`StreamedStep`]: a step of a [`RingTrainer`] whose gradients are given one by one.

use pushpull_common::tensor::Element;

use super::ring_trainer::RingTrainer;
use crate::error::Error;
#[cfg(doc)]
use crate::error::ViewError;
use crate::gradients::params::Params;
#[cfg(doc)]
use pushpull_collective::RingError;

/// A step whose gradients are reduced as they become ready, from [`RingTrainer::begin`]. Its methods
/// have the names of [`crate::StreamingPush`].
///
/// Call [`StreamedStep::variable`] for each trainable variable, then [`StreamedStep::finish`].
/// Variables that follow each other in the declaration are reduced together, up to 4 MiB, the last
/// ones first. Their order of the calls changes no result: a bucket that is complete waits for those
/// behind it in the declaration.
///
/// **Dropping it** before `finish` gives the ring up if a part of the gradients is on its way: every
/// rank gets [`RingError::GivenUp`], before or after it has applied the step, and recovers. Otherwise
/// nothing has happened. Blocks the thread for the bucket under way, and for some 50 ms if that
/// stands still.
#[derive(Debug)]
#[must_use = "a step that is not finished is dropped"]
pub struct StreamedStep<'a> {
    pub(super) trainer: &'a mut RingTrainer,
}

impl<'a> StreamedStep<'a> {
    pub(super) fn new(trainer: &'a mut RingTrainer) -> StreamedStep<'a> {
        StreamedStep { trainer }
    }

    /// The values from which the gradients are computed.
    pub fn params(&self) -> &Params {
        &self.trainer.params
    }

    /// Gives the gradient of one variable: all its elements, in row-major order. Costs a copy, and
    /// never waits.
    ///
    /// # Errors
    /// [`Error::View`]: a variable that is unknown, has another type or length, is plain, or was
    /// given before. The step can continue with others. A fault of the ring is an error of
    /// [`StreamedStep::finish`].
    #[expect(clippy::unused_async, reason = "that of a streaming push waits")]
    pub async fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        self.trainer.worker.stream_variable(name, gradient)
    }

    /// Waits for the mean of all gradients and applies it. Returns the global step, as
    /// [`RingTrainer::apply`] does.
    ///
    /// # Errors
    /// - Those of [`RingTrainer::apply`]. A NaN that this rank has given is [`Error::NonFinite`] here,
    ///   on every rank.
    /// - [`ViewError::Missing`] if a trainable variable has no gradient. The other ranks wait for it,
    ///   so the ring is given up.
    /// - [`Error::EmptyPush`] if none has. Nothing has happened then.
    ///
    /// Dropping the future drops the step.
    pub async fn finish(self) -> Result<u64, Error> {
        let RingTrainer { worker, params, .. } = &mut *self.trainer;
        // All ranks want every step.
        let (_, reduced) = worker.end_stream().await?;
        reduced?;
        let step = worker.apply_streamed(params).await?;
        self.trainer.regroup_after(step).await
    }
}

impl Drop for StreamedStep<'_> {
    fn drop(&mut self) {
        self.trainer.worker.drop_stream();
    }
}
