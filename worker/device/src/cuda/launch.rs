//! Kernel launches: arguments, grids and blocks.

use std::ffi::c_void;

use cudarc::driver::result;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaView, CudaViewMut};
use super::driver::failed;
use crate::error::ComputeError;
use crate::memory::DeviceElement;

/// The value of one parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    /// A count of elements or an address on the device.
    U64(u64),
    U32(u32),
    F32(f32),
}

impl From<usize> for Argument {
    fn from(count: usize) -> Argument {
        Argument::U64(count as u64)
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Argument {
        Argument::U32(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Argument {
        Argument::F32(value)
    }
}

impl<T: DeviceElement> From<CudaView<'_, T>> for Argument {
    fn from(view: CudaView<'_, T>) -> Argument {
        Argument::U64(view.pointer())
    }
}

impl<T: DeviceElement> From<&CudaViewMut<'_, T>> for Argument {
    fn from(view: &CudaViewMut<'_, T>) -> Argument {
        Argument::U64(view.view().pointer())
    }
}

/// Threads of a block for loops over elements.
const BLOCK: u32 = 256;

/// The most blocks for a loop over elements: enough to fill any device.
const BLOCKS_MAX: u64 = 4096;

impl CudaDevice {
    /// Queues a kernel that loops over this number of elements.
    ///
    /// # Safety
    ///
    /// The conditions of [`CudaDevice::launch`].
    pub(super) unsafe fn launch_over(
        &self,
        kernel: &'static str,
        elements: usize,
        arguments: &[Argument],
    ) -> Result<(), ComputeError> {
        if elements == 0 {
            return Ok(());
        }
        let blocks = (elements as u64).div_ceil(BLOCK.into()).min(BLOCKS_MAX) as u32;
        // SAFETY: The caller guarantees it.
        unsafe { self.launch(kernel, (blocks, 1), (BLOCK, 1), arguments) }
    }

    /// Queues a kernel with a grid of blocks and blocks of threads. In each dimension the grid has
    /// at most as many blocks as the device was opened with: the kernels are right for any grid.
    ///
    /// # Safety
    ///
    /// - The arguments are the parameters of the kernel, in their order and of their types.
    /// - Addresses are of memory of this device with as many elements as the kernel uses, and no
    ///   other memory is written.
    /// - Memory that is written is borrowed exclusively. Its owner frees it on the same stream.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        grid: (u32, u32),
        block: (u32, u32),
        arguments: &[Argument],
    ) -> Result<(), ComputeError> {
        self.bind()?;
        let pointer = |argument: &Argument| -> *mut c_void {
            match argument {
                Argument::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            }
        };
        let mut parameters: Vec<*mut c_void> = arguments.iter().map(pointer).collect();
        let function = self.modules.function(kernel);
        let stream = self.stream.handle();
        let [across, down] = [grid.0, grid.1].map(|blocks| blocks.min(self.blocks_max.get()));
        let grid = (across, down, 1);
        let block = (block.0, block.1, 1);
        // SAFETY: The function and the stream are of the bound context. The driver reads the
        // parameters before the call returns. The caller guarantees the rest.
        unsafe { result::launch_kernel(function, grid, block, 0, stream, &mut parameters) }
            .map_err(failed("cuLaunchKernel"))
    }
}
