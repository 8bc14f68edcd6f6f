//! [`Compute`]: what computes the gradients of a step, and on which device.

mod blocking_steps;
mod compute_fn;
mod device_copy;
mod device_params;
mod device_steps;
#[cfg(feature = "kernels")]
mod divided_samples;
#[cfg(feature = "kernels")]
mod model;
mod model_error;
mod step_memory;
mod towers;
mod weighted_sum;

use pushpull_common::variable::VariableSpec;
use pushpull_device::Device;

pub use compute_fn::{ComputeFn, compute_fn};
pub use device_copy::DeviceCopy;
pub use device_params::{DeviceGradients, DeviceParams};
pub(crate) use device_steps::DevicePool;
#[cfg(feature = "kernels")]
pub use model::Model;
pub use model_error::ModelError;
pub use step_memory::{StepGradients, StepValues};
pub use towers::{DeviceTowers, Divide};

/// A model that computes the gradients of a step from batches of type `B`.
///
/// `Model` is a network of `pushpull::compute`, [`compute_fn`] a closure, and [`DeviceTowers`]
/// are several of them on several devices. `Step::compute` of a training session runs one.
pub trait Compute<B> {
    /// Where it computes. The values and the gradients are in the memory of this device.
    fn device(&self) -> &Device;

    /// Returns the variables that it trains.
    ///
    /// # Errors
    /// [`ModelError::Variable`].
    fn variables(&self) -> Result<Vec<VariableSpec>, ModelError>;

    /// Returns the mean loss over a batch, and writes its derivatives by the variables to
    /// `gradients`.
    ///
    /// # Errors
    /// What prevents it. The gradients are arbitrary then.
    fn gradients(
        &mut self,
        values: StepValues<'_>,
        batch: B,
        gradients: &mut StepGradients<'_>,
    ) -> Result<f64, ModelError>;
}
