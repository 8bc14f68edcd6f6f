//! Pulls to a device and pushes from it.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_device::{Buffer, Device};

use super::Worker;
use crate::compute::{DeviceGradients, DeviceParams, buffer_for};
use crate::error::Error;
#[cfg(doc)]
use crate::gradients::params::Gradients;
use crate::outcome::{Pulled, Push};
use crate::token::Token;

impl Worker {
    /// Pulls the values for a token to a device: as [`Worker::pull`], and then a copy to the memory
    /// of the device, if it has its own. On the processor it costs what a pull does.
    ///
    /// On an error, on [`Pulled::Stale`] or if the future is dropped before the servers have
    /// answered, the values are unchanged. If the device fails, or if the future is dropped while it
    /// copies, those on the device are arbitrary until the next pull.
    ///
    /// # Errors
    /// Those of [`Worker::pull`], and [`Error::Device`].
    pub async fn pull_to(
        &mut self,
        token: &Token,
        params: &mut DeviceParams,
    ) -> Result<Pulled, Error> {
        let pulled = self.pull(token, &mut params.params).await?;
        if !pulled.is_stale() {
            params.upload().await?;
        }
        Ok(pulled)
    }

    /// Returns gradients to be computed on a device: as [`Worker::gradients`]. The memory of the
    /// device is reused.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has no memory for them.
    ///
    /// # Panics
    /// If the worker has not joined.
    pub fn gradients_on(&mut self, device: &Device) -> Result<DeviceGradients, Error> {
        let gradients = self.gradients();
        let mut copy = None;
        if !device.uses_host_memory() {
            let wanted = gradients.plan.bytes();
            let fits = |(of, buffer): &(Device, Buffer<u8>)| {
                of.is_same(device) && buffer.len() == wanted.next_multiple_of(8)
            };
            copy = Some(match self.device_pool.take().filter(fits) {
                Some((_, buffer)) => buffer,
                None => buffer_for(device, wanted)?,
            });
        }
        Ok(DeviceGradients { device: device.clone(), gradients, copy, viewed: BTreeSet::new() })
    }

    /// Pushes gradients from a device, and returns their fate: as [`Worker::push`].
    ///
    /// The device copies them to where the push takes them from, which on the host of a server is
    /// memory that it shares. On the processor this is [`Worker::push`].
    ///
    /// Scaling and clipping on the processor ([`Gradients::scale`] and others) do not see gradients
    /// that are on the device.
    ///
    /// If the future is dropped, or if the device fails, before the push has begun, the token is
    /// given back.
    ///
    /// # Errors
    /// Those of [`Worker::push`], and [`Error::Device`].
    pub async fn push_from(
        &mut self,
        token: Token,
        gradients: DeviceGradients,
    ) -> Result<Push, Error> {
        let DeviceGradients { device, mut gradients, copy, viewed } = gradients;
        let Some(copy) = copy else {
            return self.push(token, gradients).await;
        };
        if !self.model("push")?.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        // A variable that was omitted after it was viewed is not copied.
        let is_present = |id: &VariableId| gradients.memory.present[id.0 as usize];
        let viewed: Vec<VariableId> = viewed.into_iter().filter(is_present).collect();
        let ranges: Vec<Range<usize>> = viewed.iter().map(|&id| gradients.plan.range(id)).collect();
        for id in &viewed {
            gradients.factors.remove(id);
        }
        gradients.memory.buffer_mut().prepare_copies(&device, &ranges)?;
        let copied = device.start_read_ranges(&copy, &ranges, Box::new(gradients))?.await?;
        self.device_pool = Some((device, copy));
        self.push(token, *copied).await
    }
}
