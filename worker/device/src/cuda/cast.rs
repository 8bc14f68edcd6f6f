//! Casts between `f32` and the half types.

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaView, CudaViewMut};
use crate::cast::Half;
use crate::error::ComputeError;

impl CudaDevice {
    pub(crate) fn round<H: Half>(
        &self,
        values: CudaView<'_, f32>,
        halves: CudaViewMut<'_, H>,
    ) -> Result<(), ComputeError> {
        let count = values.len();
        let arguments = [values.into(), (&halves).into(), count.into()];
        // SAFETY: These are the parameters of the kernel, and both have `count` elements.
        unsafe { self.launch_over(H::ROUND, count, &arguments) }
    }

    pub(crate) fn widen<H: Half>(
        &self,
        halves: CudaView<'_, H>,
        values: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let count = halves.len();
        let arguments = [halves.into(), (&values).into(), count.into()];
        // SAFETY: As above.
        unsafe { self.launch_over(H::WIDEN, count, &arguments) }
    }
}
