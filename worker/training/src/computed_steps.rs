//! Steps whose gradients a model computes on a device.

use pushpull_worker::devices::{Compute, ModelError};
use pushpull_worker::internal::DeviceCopy;

use crate::blocking;
use crate::step::Step;
use crate::training_session::TrainingSession;

/// The name of a model's loss among the scalars of a step.
const LOSS: &str = "loss";

impl Step<'_> {
    /// Computes the gradients of the step with a model, on its device. Returns the loss, and
    /// reports it to the hooks as `loss`.
    ///
    /// The session keeps memory of one device that has its own. A model on another one makes it
    /// allocate that memory again.
    ///
    /// # Errors
    /// The errors of the model. The step can be dropped then; nothing was pushed.
    pub fn compute<B>(
        &mut self,
        model: &mut (impl Compute<B> + ?Sized),
        batch: B,
    ) -> Result<f64, ModelError> {
        let TrainingSession { replica, device_copy, .. } = &mut *self.session;
        let params = &mut replica.of_step().params;
        let gradients = &mut self.grant.gradients;
        let loss = DeviceCopy::compute_pinned(device_copy, model, params, batch, gradients)?;
        self.scalar(LOSS, loss);
        Ok(loss)
    }
}

impl blocking::Step<'_> {
    /// Blocking form of [`crate::Step::compute`].
    pub fn compute<B>(
        &mut self,
        model: &mut (impl Compute<B> + ?Sized),
        batch: B,
    ) -> Result<f64, ModelError> {
        self.inner.compute(model, batch)
    }
}
