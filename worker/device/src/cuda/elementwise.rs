//! Elementwise operations and sums as CUDA kernels.

use std::sync::Arc;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use super::launch::Argument;
use crate::error::ComputeError;

/// The elements of a chunk, whose sum one block computes.
const CHUNK: usize = 1 << 15;

/// The most blocks of threads for chunks.
const CHUNKS_MAX: usize = 1 << 16;

/// Threads of a block that computes a sum: `SUM_THREADS` of the kernels.
const SUM_THREADS: u32 = 256;

impl CudaDevice {
    /// Runs a kernel that changes `y` by `x`, a slice of the same length.
    pub(crate) fn combine(
        &self,
        kernel: &'static str,
        factor: Option<f32>,
        x: CudaView<'_, f32>,
        y: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let count = x.len();
        let mut arguments: Vec<Argument> = Vec::with_capacity(4);
        arguments.extend(factor.map(Argument::from));
        let rest: [Argument; 3] = [x.into(), (&y).into(), count.into()];
        arguments.extend(rest);
        // SAFETY: These are the parameters of the kernel, and both have `count` elements.
        unsafe { self.launch_over(kernel, count, &arguments) }
    }

    /// Runs a kernel that changes values by one number: `scale` or `fill`.
    pub(crate) fn change(
        &self,
        kernel: &'static str,
        number: f32,
        values: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let count = values.view().len();
        let arguments = [number.into(), (&values).into(), count.into()];
        // SAFETY: These are the parameters of the kernel.
        unsafe { self.launch_over(kernel, count, &arguments) }
    }

    /// Waits for the sum of the values, and returns it.
    pub(crate) fn sum(
        self: &Arc<CudaDevice>,
        values: CudaView<'_, f32>,
    ) -> Result<f64, ComputeError> {
        if values.len() == 0 {
            return Ok(0.0);
        }
        let chunks = values.len().div_ceil(CHUNK);
        let mut sums = CudaMemory::<f64>::new(self, chunks)?;
        let out = sums.view_mut();
        let arguments =
            [values.into(), values.len().into(), CHUNK.into(), (&out).into(), chunks.into()];
        let grid = (chunks.min(CHUNKS_MAX) as u32, 1);
        // SAFETY: These are the parameters of the kernel. There is a sum for each chunk.
        unsafe { self.launch("sum_chunks", grid, (SUM_THREADS, 1), &arguments)? };
        let arguments = [(&out).into(), chunks.into()];
        // SAFETY: These are the parameters of the kernel.
        unsafe { self.launch("sum_sums", (1, 1), (SUM_THREADS, 1), &arguments)? };
        let mut sum = [0.0];
        self.read(sums.view().slice(0..1), &mut sum)?;
        Ok(sum[0])
    }
}
