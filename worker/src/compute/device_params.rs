//! [`DeviceParams`] and [`DeviceGradients`]: values and gradients in the memory of a device.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_device::{Buffer, ComputeError, Device, Pinned};

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
    copy: Option<DeviceMemory>,
}

impl DeviceParams {
    /// Copies values to a device. On the processor nothing is copied.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, params: Params) -> Result<DeviceParams, ComputeError> {
        let mut all = DeviceParams { device: device.clone(), params, copy: None };
        if !device.uses_host_memory() {
            all.copy = Some(DeviceMemory::new(device, all.params.plan.bytes())?);
            let bytes = all.params.plan.bytes();
            if let Some(copy) = &mut all.copy {
                device.write(&all.params.buffer.bytes()[..bytes], &mut copy.buffer)?;
            }
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
        StepValues::new(&self.params, self.copy.as_ref().map(|copy| copy.buffer.view()))
    }

    /// Copies the pulled values to the device.
    pub(crate) async fn upload(&mut self) -> Result<(), ComputeError> {
        let Some(copy) = &mut self.copy else { return Ok(()) };
        let mut staging = copy.take_staging(&self.device)?;
        let bytes = staging.len();
        staging.copy_from_slice(&self.params.buffer.bytes()[..bytes]);
        let transfer = self.device.start_write(staging, &mut copy.buffer)?;
        copy.staging = Some(transfer.await?);
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
    pub(crate) copy: Option<DeviceMemory>,
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
        let copy = self.copy.as_mut().map(|copy| copy.buffer.view_mut());
        StepGradients::new(&mut self.gradients, copy.map(|copy| (copy, &mut self.viewed)))
    }
}

/// Memory of a device for all dense variables, and pinned memory for copies of them.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) buffer: Buffer<u8>,
    staging: Option<Pinned<u8>>,
}

impl DeviceMemory {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<DeviceMemory, ComputeError> {
        Ok(DeviceMemory { buffer: device.buffer(bytes)?, staging: None })
    }

    /// Takes the pinned memory. It is allocated the first time, and after a copy that was dropped.
    fn take_staging(&mut self, device: &Device) -> Result<Pinned<u8>, ComputeError> {
        match self.staging.take() {
            Some(staging) => Ok(staging),
            None => device.pinned(self.buffer.len()),
        }
    }

    /// Copies ranges from the device, and calls `each` with the bytes of one after another. While
    /// `each` handles one, the next is copied.
    pub(crate) async fn download<E: From<ComputeError>>(
        &mut self,
        device: &Device,
        ranges: &[Range<usize>],
        mut each: impl AsyncFnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let longest = ranges.iter().map(Range::len).max().unwrap_or(0);
        let mut free = match self.staging.take() {
            Some(staging) if staging.len() >= longest => staging,
            _ => device.pinned(longest)?,
        };
        let start = |range: &Range<usize>, to| {
            device.start_read(self.buffer.view().slice(range.clone()), to)
        };
        let mut ranges = ranges.iter().enumerate();
        let Some((mut index, first)) = ranges.next() else { return Ok(()) };
        let (mut length, mut copying) = (first.len(), start(first, free)?);
        let mut other = None;
        loop {
            let copied = copying.await?;
            let Some((next, range)) = ranges.next() else {
                each(index, &copied[..length]).await?;
                free = copied;
                break;
            };
            let to = match other.take() {
                Some(to) => to,
                None => device.pinned(longest)?,
            };
            copying = start(range, to)?;
            each(index, &copied[..length]).await?;
            (index, length, other) = (next, range.len(), Some(copied));
        }
        self.staging = Some(free);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn ranges_are_downloaded_in_their_order() {
        let device = Device::cpu_threads(1).unwrap();
        let mut memory = DeviceMemory::new(&device, 10).unwrap();
        device.write(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &mut memory.buffer).unwrap();
        for ranges in [vec![], vec![2..4, 4..5], vec![7..10, 0..0, 1..2, 3..9]] {
            let mut found = Vec::new();
            let each = async |index: usize, bytes: &[u8]| {
                found.push((index, bytes.to_vec()));
                Ok::<(), ComputeError>(())
            };
            let mut download = Box::pin(memory.download(&device, &ranges, each));
            let done = download.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(done, Poll::Ready(Ok(())));
            drop(download);
            let bytes = |range: &Range<usize>| range.clone().map(|byte| byte as u8).collect();
            let expected: Vec<(usize, Vec<u8>)> = ranges.iter().map(bytes).enumerate().collect();
            assert_eq!(found, expected);
        }
    }
}
