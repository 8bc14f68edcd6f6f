//! Networks of the kernels: losses with derivatives that are written by hand.

mod classes;
pub(crate) mod embedding_bag;
pub(crate) mod logistic;
pub(crate) mod mlp;
mod scratch_buffer;

use crate::device::Device;
use crate::error::ComputeError;
use crate::memory::{View, ViewMut};

/// A loss with its derivatives, computed on a device from batches of type `B`.
///
/// A network holds no parameters, only reused buffers, so the caller may keep the parameters
/// anywhere in the memory of the device. All tensors are stored row by row.
pub trait Network<B> {
    /// Returns the device on which the network computes.
    fn device(&self) -> &Device;

    /// Returns the shapes of the parameters, in their order.
    fn shapes(&self) -> Vec<Vec<u64>>;

    /// Returns the mean loss over a batch, and overwrites `gradients` with its derivatives by each
    /// parameter.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if a tensor does not have the length of its shape, and the errors
    /// that the network names.
    fn gradients(
        &mut self,
        params: &[View<'_, f32>],
        batch: B,
        gradients: Vec<ViewMut<'_, f32>>,
    ) -> Result<f64, ComputeError>;
}

/// Returns the tensors of a network that has `N` of them.
fn tensors<'a, const N: usize>(
    network: &'static str,
    params: &[View<'a, f32>],
) -> Result<[View<'a, f32>; N], ComputeError> {
    let found = params.len();
    let length =
        ComputeError::Length { kernel: network, argument: "parameters", found, expected: N };
    <[View<'a, f32>; N]>::try_from(params).map_err(|_| length)
}

/// Returns the gradients of a network that has `N` tensors.
fn tensors_mut<'a, const N: usize>(
    network: &'static str,
    gradients: Vec<ViewMut<'a, f32>>,
) -> Result<[ViewMut<'a, f32>; N], ComputeError> {
    let found = gradients.len();
    let length =
        ComputeError::Length { kernel: network, argument: "gradients", found, expected: N };
    <[ViewMut<'a, f32>; N]>::try_from(gradients).map_err(|_| length)
}
