//! [`DeviceCopy`]: the values and gradients of a replica in the memory of a device of its own.

use std::collections::BTreeSet;

use pushpull_device::{Buffer, ComputeError, Device};

use super::{Compute, ModelError, StepGradients, StepValues};
use crate::gradients::params::{Gradients, Params};

/// Memory of a device that does not compute in the processor's: a copy of the values, and the
/// gradients until they are copied to those of a push. Both are laid out as the variables are.
#[derive(Debug)]
pub struct DeviceCopy {
    device: Device,
    values: Buffer<u8>,
    gradients: Buffer<u8>,
}

impl DeviceCopy {
    fn new(device: &Device, bytes: usize) -> Result<DeviceCopy, ComputeError> {
        let values = device.buffer(bytes)?;
        let gradients = device.buffer(bytes)?;
        Ok(DeviceCopy { device: device.clone(), values, gradients })
    }

    /// Whether it is of this device and of as many bytes.
    fn is_for(&self, device: &Device, bytes: usize) -> bool {
        self.device.is_same(device) && self.values.len() == bytes
    }

    /// Computes the gradients of a batch on the model's device, and pins the pages of the values, to
    /// which the next pulls are as well. `copy` is the memory there, which is made if the device
    /// needs it.
    pub fn compute_pinned<B>(
        copy: &mut Option<DeviceCopy>,
        model: &mut (impl Compute<B> + ?Sized),
        params: &mut Params,
        batch: B,
        gradients: &mut Gradients,
    ) -> Result<f64, ModelError> {
        if !model.device().uses_host_memory() {
            params.buffer.pin(model.device());
        }
        DeviceCopy::compute(copy, model, params, batch, gradients)
    }

    /// Computes as `compute_pinned` does, with the pages as they are.
    pub(crate) fn compute<B>(
        copy: &mut Option<DeviceCopy>,
        model: &mut (impl Compute<B> + ?Sized),
        params: &Params,
        batch: B,
        gradients: &mut Gradients,
    ) -> Result<f64, ModelError> {
        let device = model.device().clone();
        if device.uses_host_memory() {
            return model.gradients(params.into(), batch, &mut gradients.into());
        }
        let bytes = params.plan.bytes();
        if !copy.as_ref().is_some_and(|copy| copy.is_for(&device, bytes)) {
            *copy = None;
        }
        let copy = match copy {
            Some(copy) => copy,
            None => copy.insert(DeviceCopy::new(&device, bytes)?),
        };
        device.write(&params.buffer.bytes()[..bytes], &mut copy.values)?;
        let values = StepValues::new(params, Some(copy.values.view()));
        device.zero(&mut copy.gradients)?;
        let mut viewed = BTreeSet::new();
        let mut out = StepGradients::new(gradients, Some((copy.gradients.view_mut(), &mut viewed)));
        let loss = model.gradients(values, batch, &mut out)?;
        let ranges: Vec<_> = viewed.into_iter().map(|id| gradients.plan.range(id)).collect();
        let target = gradients.memory.buffer_mut();
        target.prepare_copies(&device, &ranges);
        for range in ranges {
            let from = copy.gradients.view().slice(range.clone());
            device.read(from, target.slice_mut(range))?;
        }
        Ok(loss)
    }
}
