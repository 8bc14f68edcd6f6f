//! [`ComputeFn`]: a closure as a model.

use std::fmt;

use pushpull_common::variable::VariableSpec;
use pushpull_device::Device;

use super::{Compute, ModelError, StepGradients, StepValues};

/// A closure as a model, from [`compute_fn`].
pub struct ComputeFn<F> {
    device: Device,
    variables: Vec<VariableSpec>,
    compute: F,
}

/// Makes a model of a closure: it computes on `device`, trains `variables`, returns the loss of a
/// batch, and writes the gradients.
///
/// ```
/// # use pushpull_common::variable::VariableSpec;
/// # use pushpull_device::Device;
/// use pushpull_worker::devices::{ComputeFn, StepGradients, StepValues, compute_fn};
///
/// // Half the squared distance of w from the batch.
/// let variables = vec![VariableSpec::f32("w", [2])?];
/// let model = compute_fn(
///     Device::cpu()?,
///     variables,
///     |values: StepValues<'_>, batch: [f32; 2], gradients: &mut StepGradients<'_>| {
///         let w = values.host().view::<f32>("w")?;
///         let out = gradients.host_mut().view_mut::<f32>("w")?;
///         let errors = w.iter().zip(batch).map(|(w, x)| w - x);
///         out.iter_mut().zip(errors.clone()).for_each(|(g, error)| *g = error);
///         Ok(errors.map(|error| 0.5 * f64::from(error * error)).sum())
///     },
/// );
/// # let _: ComputeFn<_> = model;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn compute_fn<B, F>(device: Device, variables: Vec<VariableSpec>, compute: F) -> ComputeFn<F>
where
    F: FnMut(StepValues<'_>, B, &mut StepGradients<'_>) -> Result<f64, ModelError>,
{
    ComputeFn { device, variables, compute }
}

impl<F> fmt::Debug for ComputeFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ComputeFn { device, variables, compute: _ } = self;
        let mut text = f.debug_struct("ComputeFn");
        text.field("device", device).field("variables", variables).finish_non_exhaustive()
    }
}

impl<B, F> Compute<B> for ComputeFn<F>
where
    F: FnMut(StepValues<'_>, B, &mut StepGradients<'_>) -> Result<f64, ModelError>,
{
    fn device(&self) -> &Device {
        &self.device
    }

    fn variables(&self) -> Result<Vec<VariableSpec>, ModelError> {
        Ok(self.variables.clone())
    }

    fn gradients(
        &mut self,
        values: StepValues<'_>,
        batch: B,
        gradients: &mut StepGradients<'_>,
    ) -> Result<f64, ModelError> {
        (self.compute)(values, batch, gradients)
    }
}
