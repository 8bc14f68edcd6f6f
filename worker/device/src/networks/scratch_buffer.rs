//! [`ScratchBuffer`]: memory for the intermediate results of networks.

use crate::device::Device;
use crate::error::ComputeError;
use crate::memory::{Buffer, View, ViewMut};

/// Memory for intermediate results, which grows and is reused. A clone is empty.
#[derive(Debug, Default)]
pub(crate) struct ScratchBuffer {
    buffer: Option<Buffer<f32>>,
    length: usize,
}

impl ScratchBuffer {
    /// Sets the number of elements. Their content is arbitrary.
    pub(crate) fn fit(&mut self, device: &Device, length: usize) -> Result<(), ComputeError> {
        let capacity = self.buffer.as_ref().map_or(0, Buffer::len);
        if capacity < length {
            // The old memory is free before the new one is allocated.
            self.buffer = None;
            self.buffer = Some(device.buffer(length)?);
        }
        self.length = length;
        Ok(())
    }

    pub(crate) fn view(&self) -> View<'_, f32> {
        let all = self.buffer.as_ref().map(Buffer::view);
        all.map_or(View::from(&[]), |all| all.slice(0..self.length))
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, f32> {
        let all = self.buffer.as_mut().map(Buffer::view_mut);
        all.map_or(ViewMut::from(&mut []), |all| all.slice(0..self.length))
    }
}

impl Clone for ScratchBuffer {
    fn clone(&self) -> ScratchBuffer {
        ScratchBuffer::default()
    }
}
