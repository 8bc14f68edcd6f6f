//! Matrix products on CUDA devices, by a kernel or by cuBLAS.

use super::cublas::Cublas;
use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaView, CudaViewMut};
use crate::error::ComputeError;

/// The rows and columns of the part of a product that one block computes.
const TILE: usize = 64;
const SIDE: u32 = 16;

/// The most blocks of a grid in its second dimension.
const GRID_Y_MAX: usize = 65_535;

/// The fewest multiplications for which cuBLAS is used. Its start costs a moment, and it is hardly
/// faster for fewer.
const CUBLAS_OPERATIONS_MIN: usize = 1 << 20;

/// A matrix in the memory of a device, whose strides stay within its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaMatrix<'a> {
    pub(crate) values: CudaView<'a, f32>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) strides: (usize, usize),
}

/// Rows and columns, and the distances in values between them.
pub(super) type StridedShape = ((usize, usize), (usize, usize));

impl CudaMatrix<'_> {
    pub(super) fn shape(&self) -> StridedShape {
        ((self.rows, self.columns), self.strides)
    }
}

impl CudaDevice {
    /// Returns cuBLAS if the machine has it, and binds the context.
    pub(crate) fn cublas(&self) -> Result<Option<&Cublas>, ComputeError> {
        self.bind()?;
        Ok(self.cublas.get_or_init(|| Cublas::open(self.stream.handle())).as_ref())
    }

    /// Writes `a * b + beta * product`. The caller has checked the shapes.
    pub(crate) fn multiply(
        &self,
        a: CudaMatrix<'_>,
        b: CudaMatrix<'_>,
        beta: f32,
        product: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        if a.rows == 0 || b.columns == 0 {
            return Ok(());
        }
        let operations = a.rows.saturating_mul(a.columns).saturating_mul(b.columns);
        if operations >= CUBLAS_OPERATIONS_MIN
            && let Some(cublas) = self.cublas()?
        {
            // SAFETY: The strides stay within the values, the product has `a.rows * b.columns`
            // elements, and there is a term.
            let queued = unsafe { cublas.multiply(a, b, beta, product.view().pointer()) };
            if let Some(queued) = queued {
                return queued;
            }
        }
        let [across, down] = [b.columns, a.rows].map(|count| count.div_ceil(TILE));
        let grid = (across.min(i32::MAX as usize) as u32, down.min(GRID_Y_MAX) as u32);
        let arguments = [
            a.values.into(),
            a.strides.0.into(),
            a.strides.1.into(),
            b.values.into(),
            b.strides.0.into(),
            b.strides.1.into(),
            beta.into(),
            (&product).into(),
            a.rows.into(),
            a.columns.into(),
            b.columns.into(),
        ];
        // SAFETY: These are the parameters of the kernel. The strides stay within the values, and
        // the product has `a.rows * b.columns` elements.
        unsafe { self.launch("multiply", grid, (SIDE, SIDE), &arguments) }
    }
}
