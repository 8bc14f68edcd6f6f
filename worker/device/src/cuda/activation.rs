//! Activations with their biases, forwards and backwards.

use std::sync::Arc;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use crate::cpu::elementwise::ROWS_AT_ONCE;
use crate::error::ComputeError;
use crate::kernels::activation::Activation;

/// The code of an activation in `kernels/activation.cu`.
fn code(activation: Activation) -> u32 {
    match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::Tanh => 2,
        Activation::Sigmoid => 3,
        Activation::Gelu => 4,
    }
}

impl CudaDevice {
    pub(crate) fn activate(
        &self,
        activation: Activation,
        bias: CudaView<'_, f32>,
        sums: CudaViewMut<'_, f32>,
        outputs: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let count = sums.view().len();
        let arguments = [
            code(activation).into(),
            bias.into(),
            (&sums).into(),
            (&outputs).into(),
            count.into(),
            bias.len().into(),
        ];
        // SAFETY: These are the parameters of the kernel. Sums and outputs have `count` elements.
        unsafe { self.launch_over("activate", count, &arguments) }
    }

    pub(crate) fn activate_back(
        self: &Arc<CudaDevice>,
        activation: Activation,
        sums: CudaView<'_, f32>,
        outputs: CudaView<'_, f32>,
        gradients: CudaViewMut<'_, f32>,
        bias_gradients: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let count = gradients.view().len();
        let columns = bias_gradients.view().len();
        if activation != Activation::Identity {
            let arguments = [
                code(activation).into(),
                sums.into(),
                outputs.into(),
                (&gradients).into(),
                count.into(),
            ];
            // SAFETY: These are the parameters of the kernel. All have `count` elements.
            unsafe { self.launch_over("activate_back", count, &arguments)? };
        }
        // In two stages, as on the processor.
        let rows = count.checked_div(columns).unwrap_or(0);
        let chunks = rows.div_ceil(ROWS_AT_ONCE);
        let mut partial = CudaMemory::<f32>::new(self, chunks * columns)?;
        self.sum_rows(gradients.view(), rows, ROWS_AT_ONCE, partial.view_mut())?;
        if chunks == 0 {
            return self.change("fill", 0.0, bias_gradients);
        }
        self.sum_rows(partial.view(), chunks, chunks, bias_gradients)
    }

    /// Writes the sums of every `rows_at_once` rows, as many as `sums` has.
    fn sum_rows(
        &self,
        matrix: CudaView<'_, f32>,
        rows: usize,
        rows_at_once: usize,
        sums: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let columns = matrix.len().checked_div(rows).unwrap_or(0);
        let arguments =
            [matrix.into(), rows.into(), columns.into(), rows_at_once.into(), (&sums).into()];
        // SAFETY: These are the parameters of the kernel. The matrix has `rows` and `columns`,
        // and there is a row of sums for each chunk.
        unsafe { self.launch_over("sum_rows", sums.view().len(), &arguments) }
    }
}
