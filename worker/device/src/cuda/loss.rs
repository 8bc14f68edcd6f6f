//! Losses and their derivatives as CUDA kernels.

use std::sync::Arc;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use crate::error::ComputeError;

/// Threads of a block that computes a row: `ROW_THREADS` of the kernels.
const ROW_THREADS: u32 = 128;

/// The most blocks of rows at once.
const ROWS_MAX: usize = 1 << 16;

impl CudaDevice {
    /// Returns the sum of the losses. Each label is below `classes`.
    pub(crate) fn softmax_cross_entropy(
        self: &Arc<CudaDevice>,
        logits: CudaViewMut<'_, f32>,
        classes: usize,
        labels: &[u32],
    ) -> Result<f64, ComputeError> {
        let rows = labels.len();
        let mut on_device = CudaMemory::new(self, rows)?;
        self.write(labels, on_device.view_mut())?;
        let mut losses = CudaMemory::<f32>::new(self, rows)?;
        let out = losses.view_mut();
        let scale = 1.0 / rows as f32;
        let arguments = [
            (&logits).into(),
            on_device.view().into(),
            (&out).into(),
            rows.into(),
            classes.into(),
            scale.into(),
        ];
        let blocks = rows.min(ROWS_MAX) as u32;
        // SAFETY: These are the parameters of the kernel. There are `rows` of `classes`,
        // with a label and a loss for each.
        unsafe {
            self.launch("softmax_cross_entropy", (blocks, 1), (ROW_THREADS, 1), &arguments)?;
        };
        self.sum(losses.view())
    }

    /// Runs a kernel with a loss for each output by itself, and returns their sum.
    pub(crate) fn sum_of_losses(
        self: &Arc<CudaDevice>,
        kernel: &'static str,
        outputs: CudaViewMut<'_, f32>,
        targets: CudaView<'_, f32>,
    ) -> Result<f64, ComputeError> {
        let count = targets.len();
        let mut losses = CudaMemory::<f32>::new(self, count)?;
        let out = losses.view_mut();
        let scale = 1.0 / count as f32;
        let arguments =
            [(&outputs).into(), targets.into(), (&out).into(), count.into(), scale.into()];
        // SAFETY: These are the parameters of the kernel. All have `count` elements.
        unsafe { self.launch_over(kernel, count, &arguments)? };
        self.sum(losses.view())
    }
}
