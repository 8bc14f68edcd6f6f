//! Gradient encoding as CUDA kernels, in the formats of `docs/codecs.md`.

use std::sync::Arc;

use cudarc::driver::result;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use super::driver::failed;
use crate::error::ComputeError;
use crate::memory::DeviceElement;

/// The threads of a block, which is also the number of elements that share a scale: `BLOCK` of the
/// kernels.
const BLOCK: u32 = 256;

/// The most blocks of threads that encode blocks of elements.
const BLOCKS_MAX: usize = 1 << 16;

/// The elements of a chunk, in which one block counts the sent elements: `CHUNK` of the kernels.
const CHUNK: usize = 2048;

/// The most blocks of threads for chunks. Each adds up the histograms of the passes before.
const CHUNKS_MAX: usize = 2048;

/// Passes over the digits of a magnitude, and their histograms: `PASSES` and `DIGITS` of the
/// kernels.
const PASSES: u32 = 4;
const DIGITS: usize = 256;

impl CudaDevice {
    pub(crate) fn first_non_finite(
        &self,
        values: CudaView<'_, f32>,
        mut index: CudaViewMut<'_, u64>,
    ) -> Result<(), ComputeError> {
        self.fill_bytes(0xff, index.reborrow())?;
        let count = values.len();
        let arguments = [values.into(), (&index).into(), count.into()];
        // SAFETY: These are the parameters of the kernel, and `index` has an element.
        unsafe { self.launch_over("first_non_finite", count, &arguments) }
    }

    /// Runs a kernel that writes 2 bytes for each element, and zeros up to whole words.
    pub(crate) fn encode_halves(
        &self,
        kernel: &'static str,
        gradient: CudaView<'_, f32>,
        residual: CudaViewMut<'_, f32>,
        out: CudaViewMut<'_, u64>,
    ) -> Result<(), ComputeError> {
        let count = gradient.len();
        let padded = 4 * out.view().len();
        let arguments =
            [gradient.into(), (&residual).into(), (&out).into(), count.into(), padded.into()];
        // SAFETY: These are the parameters of the kernel. Gradient and residual have `count`
        // elements, and `out` 2 bytes for each of `padded`.
        unsafe { self.launch_over(kernel, padded, &arguments) }
    }

    /// Runs a kernel that encodes each block of elements by itself.
    pub(crate) fn encode_blocks(
        &self,
        kernel: &'static str,
        gradient: CudaView<'_, f32>,
        residual: CudaViewMut<'_, f32>,
        out: CudaViewMut<'_, u64>,
    ) -> Result<(), ComputeError> {
        let count = gradient.len();
        let blocks = count.div_ceil(BLOCK as usize);
        if blocks == 0 {
            return Ok(());
        }
        let arguments =
            [gradient.into(), (&residual).into(), (&out).into(), count.into(), blocks.into()];
        let grid = blocks.min(BLOCKS_MAX) as u32;
        // SAFETY: These are the parameters of the kernel. Gradient and residual have `count`
        // elements, and `out` the bytes of their encoding.
        unsafe { self.launch(kernel, (grid, 1), (BLOCK, 1), &arguments) }
    }

    /// Encodes the `wanted` largest elements, which are at least 1 unless there is none.
    pub(crate) fn encode_top(
        self: &Arc<CudaDevice>,
        wanted: u32,
        gradient: CudaView<'_, f32>,
        residual: CudaViewMut<'_, f32>,
        out: CudaViewMut<'_, u64>,
    ) -> Result<(), ComputeError> {
        let count = gradient.len();
        if count == 0 {
            // No pairs.
            return self.fill_bytes(0, out);
        }
        let chunks = count.div_ceil(CHUNK);
        // The histograms begin as zeros.
        let histograms = PASSES as usize * DIGITS;
        let mut scratch = CudaMemory::<u32>::new(self, histograms + 2 * chunks)?;
        let (histograms, counts) = scratch.view_mut().split_at(histograms);
        let grid = (chunks.min(CHUNKS_MAX) as u32, 1);
        for pass in 0..PASSES {
            let arguments = [
                gradient.into(),
                (&residual).into(),
                count.into(),
                wanted.into(),
                pass.into(),
                (&histograms).into(),
            ];
            // SAFETY: These are the parameters of the kernel. Gradient and residual have `count`
            // elements, and there is a histogram for each pass.
            unsafe { self.launch("top_k_histogram", grid, (BLOCK, 1), &arguments)? };
        }
        let arguments = [
            (&residual).into(),
            count.into(),
            wanted.into(),
            (&histograms).into(),
            (&counts).into(),
            chunks.into(),
        ];
        // SAFETY: As above. There are two counts for each chunk.
        unsafe { self.launch("top_k_count", grid, (BLOCK, 1), &arguments)? };
        // SAFETY: As above.
        unsafe {
            let arguments = [(&counts).into(), chunks.into()];
            self.launch("top_k_scan", (1, 1), (BLOCK, 1), &arguments)?;
        }
        let arguments = [
            (&residual).into(),
            count.into(),
            wanted.into(),
            (&histograms).into(),
            (&counts).into(),
            chunks.into(),
            (&out).into(),
        ];
        // SAFETY: As above. `out` has the bytes of `wanted` pairs, of which at most these are
        // written.
        unsafe { self.launch("top_k_write", grid, (BLOCK, 1), &arguments) }
    }

    /// Sets every byte of some memory.
    pub(crate) fn fill_bytes<T: DeviceElement>(
        &self,
        byte: u8,
        memory: CudaViewMut<'_, T>,
    ) -> Result<(), ComputeError> {
        self.bind()?;
        let view = memory.view();
        // SAFETY: The context is bound. The memory has these bytes, and is borrowed exclusively.
        unsafe { result::memset_d8_async(view.pointer(), byte, view.bytes(), self.stream.handle()) }
            .map_err(failed("cuMemsetD8Async"))
    }
}
