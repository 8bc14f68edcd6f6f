//! Pulls to a device and pushes from it.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, bf16, f16};
use pushpull_device::Device;

use super::Worker;
use crate::compute::{DeviceGradients, DeviceMemory, DeviceParams};
use crate::error::Error;
use crate::gradients::params::Gradients;
use crate::outcome::{Pulled, Push};
use crate::streaming_push::StreamingPush;
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
            let bytes = gradients.plan.bytes();
            let fits = |(of, memory): &(Device, DeviceMemory)| {
                of.is_same(device) && memory.buffer.len() == bytes
            };
            copy = Some(match self.device_pool.take().filter(fits) {
                Some((_, memory)) => memory,
                None => DeviceMemory::new(device, bytes)?,
            });
        }
        Ok(DeviceGradients { device: device.clone(), gradients, copy, viewed: BTreeSet::new() })
    }

    /// Pushes gradients from a device, and returns their fate: as [`Worker::push`].
    ///
    /// From a device with memory of its own they are sent as a [`StreamingPush`]: while one variable
    /// is sent, the next is copied. Gradients that were scaled, clipped or set on the processor are
    /// sent with them. On the processor this is [`Worker::push`].
    ///
    /// Dropping the future withdraws the push if no shard can have received its share in full.
    ///
    /// # Errors
    /// Those of [`Worker::push`] and [`StreamingPush`], and [`Error::Device`]. The push is withdrawn
    /// if the device fails.
    pub async fn push_from(
        &mut self,
        token: Token,
        gradients: DeviceGradients,
    ) -> Result<Push, Error> {
        let DeviceGradients { device, mut gradients, copy, viewed } = gradients;
        let Some(mut memory) = copy else {
            return self.push(token, gradients).await;
        };
        if !self.model("push")?.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        // A variable that was omitted after it was viewed is not sent.
        let is_present = |id: &VariableId| gradients.memory.present[id.0 as usize];
        let viewed: Vec<VariableId> = viewed.into_iter().filter(is_present).collect();
        let ranges: Vec<Range<usize>> = viewed.iter().map(|&id| gradients.plan.range(id)).collect();
        let mut push = self.begin(token).await?;
        let send =
            async |index: usize, bytes: &[u8]| push.variable_bytes(viewed[index], bytes).await;
        memory.download(&device, &ranges, send).await?;
        self.device_pool = Some((device, memory));
        send_host(&mut push, &mut gradients, &viewed).await?;
        push.finish().await
    }
}

/// Sends the gradients that are in the processor's memory: all but those that `sent` names.
async fn send_host(
    push: &mut StreamingPush,
    gradients: &mut Gradients,
    sent: &[VariableId],
) -> Result<(), Error> {
    let factors: Vec<VariableId> = gradients.factors.keys().copied().collect();
    factors.into_iter().for_each(|id| gradients.apply_factor(id));
    for id in gradients.present().filter(|id| !sent.contains(id)) {
        push.variable_bytes(id, gradients.bytes_of(id)).await?;
    }
    for rows in gradients.memory.rows().iter() {
        let spec = gradients.plan.catalogue().variable(rows.variable);
        let (name, ids) = (spec.name(), rows.ids);
        match spec.dtype() {
            DType::F32 => push.rows::<f32>(name, ids, &rows.elements()).await?,
            DType::F64 => push.rows::<f64>(name, ids, &rows.elements()).await?,
            DType::F16 => push.rows::<f16>(name, ids, &rows.elements()).await?,
            DType::Bf16 => push.rows::<bf16>(name, ids, &rows.elements()).await?,
            _ => unreachable!("only floating-point variables have gradients"),
        }
    }
    Ok(())
}
