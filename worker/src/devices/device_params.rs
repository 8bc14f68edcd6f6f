//! [`DeviceParams`] and [`DeviceGradients`]: values and gradients in the memory of a device.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_device::{Buffer, ComputeError, Device, HostMemory};

use super::{StepGradients, StepValues};
use crate::gradients::params::{Gradients, Params};

/// The values of all dense variables where a device computes, for [`crate::Worker::pull_to`].
///
/// On the processor they are the pulled values themselves. A device with memory of its own has a
/// copy, laid out as they are.
#[derive(Debug)]
pub struct DeviceParams {
    device: Device,
    pub(crate) params: Params,
    /// `None` on the processor.
    copy: Option<Buffer<u8>>,
}

impl DeviceParams {
    /// Copies values to a device. On the processor nothing is copied.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, params: Params) -> Result<DeviceParams, ComputeError> {
        let mut all = DeviceParams { device: device.clone(), params, copy: None };
        if !device.uses_host_memory() {
            all.params.buffer.pin(device);
            let mut copy = device.buffer(all.params.plan.bytes())?;
            let values = all.params.buffer.bytes();
            device.write(values, &mut copy)?;
            all.copy = Some(copy);
        }
        Ok(all)
    }

    /// Where the values are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The values as they were pulled, in the processor's memory.
    pub fn host(&self) -> &Params {
        &self.params
    }

    /// The values on the device, for [`super::Compute::gradients`] and the kernels.
    pub fn values(&self) -> StepValues<'_> {
        StepValues::new(&self.params, self.copy.as_ref().map(Buffer::view))
    }

    /// Copies the pulled values to the device.
    pub(crate) async fn upload(&mut self) -> Result<(), ComputeError> {
        let Some(copy) = &mut self.copy else { return Ok(()) };
        // A change of the values may have left the pages.
        self.params.buffer.pin(&self.device);
        match self.params.buffer.pinned() {
            Some(values) => {
                let to = copy.view_mut().cast::<u64>();
                self.device.start_write_shared(values.clone(), to)?.await?;
            }
            None => self.device.write(self.params.buffer.bytes(), copy)?,
        }
        Ok(())
    }
}

/// Gradients where a device computes, from [`crate::Worker::gradients_on`]. See [`Gradients`].
///
/// On the processor they are the gradients of the push themselves. A device with memory of its own
/// computes in it, and [`crate::Worker::push_from`] copies them to the push.
#[derive(Debug)]
pub struct DeviceGradients {
    pub(crate) device: Device,
    pub(crate) gradients: Gradients,
    /// `None` on the processor.
    pub(crate) copy: Option<Buffer<u8>>,
    /// The variables whose gradients are on the device.
    pub(crate) viewed: BTreeSet<VariableId>,
}

impl DeviceGradients {
    /// Where the gradients are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The gradients on the device, for [`super::Compute::gradients`] and the kernels.
    pub fn out(&mut self) -> StepGradients<'_> {
        let copy = self.copy.as_mut().map(Buffer::view_mut);
        StepGradients::new(&mut self.gradients, copy.map(|copy| (copy, &mut self.viewed)))
    }
}

/// The memory of the push. A range is that of a variable.
impl HostMemory for Gradients {
    fn slices_mut(&mut self, ranges: &[Range<usize>]) -> Vec<&mut [u8]> {
        let mut slices: Vec<&mut [u8]> = ranges.iter().map(|_| &mut [][..]).collect();
        self.memory.buffer_mut().slices_mut(ranges, &mut slices);
        slices
    }
}
