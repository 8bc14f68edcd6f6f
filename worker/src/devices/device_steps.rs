//! Pulls to a device and pushes from it.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_device::{Buffer, ComputeError, Device, Pinned};

use super::{DeviceGradients, DeviceParams};
use crate::error::Error;
#[cfg(doc)]
use crate::gradients::params::Gradients;
use crate::joined_model::JoinedModel;
use crate::outcome::{Pulled, Push};
use crate::token::Token;
use crate::worker::Worker;

impl Worker {
    /// Pulls the values for a token to a device: as [`Worker::pull`], and then a copy to the memory
    /// of the device, if it has its own. On the processor it costs what a pull does.
    ///
    /// On an error, on [`Pulled::Stale`] or if the future is dropped before the servers have
    /// answered, the values are unchanged, unless pulls are in place
    /// ([`WorkerConfig::in_place_pulls`](crate::WorkerConfig::in_place_pulls)). If the device fails, or if the future is dropped while
    /// it copies, those on the device are arbitrary until the next pull.
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
    /// device is reused, and zeroed before.
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
            let pool = self.device_pool.take().filter(|pool| pool.device.is_same(device));
            let mut pool = pool.unwrap_or_else(|| DevicePool::new(device));
            copy = Some(match pool.gradients.take().filter(|buffer| buffer.len() == bytes) {
                Some(mut buffer) => {
                    device.zero(&mut buffer)?;
                    buffer
                }
                None => device.buffer(bytes)?,
            });
            self.device_pool = Some(pool);
        }
        Ok(DeviceGradients { device: device.clone(), gradients, copy, viewed: BTreeSet::new() })
    }

    /// Pushes gradients from a device, and returns their fate: as [`Worker::push`].
    ///
    /// The device copies them to where the push takes them from, which on the host of a server is
    /// memory that it shares. Gradients of `f32` with a codec ([`crate::WorkerConfig::codec`]) are
    /// encoded by the device, except for `threshold`; only their encoded bytes are copied. On the
    /// processor this is [`Worker::push`].
    ///
    /// Scaling and clipping on the processor ([`Gradients::scale`] and others) do not see gradients
    /// that are on the device.
    ///
    /// If the future is dropped, or if the device fails, before the push has begun, the token is
    /// given back, and residuals are as they were.
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
        let model = self.model("push")?.clone();
        if !model.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        let pool = self.device_pool.take().filter(|pool| pool.device.is_same(&device));
        let mut pool = pool.unwrap_or_else(|| DevicePool::new(&device));
        // A variable that was omitted after it was viewed is not copied.
        let is_present = |id: &VariableId| gradients.memory.present[id.0 as usize];
        let viewed = viewed.into_iter().filter(is_present);
        let (encoded, copied): (Vec<VariableId>, Vec<VariableId>) =
            viewed.partition(|&id| model.encodes_on_devices(id));
        for id in encoded.iter().chain(&copied) {
            gradients.factors.remove(id);
        }
        let ranges: Vec<Range<usize>> = copied.iter().map(|&id| gradients.plan.range(id)).collect();
        gradients.memory.buffer_mut().prepare_copies(&device, &ranges);
        let reading = device.start_read_ranges(&copy, &ranges, Box::new(gradients))?;
        let mut gradients = *reading.await?;
        if !encoded.is_empty() {
            // They are among the staged parts instead.
            encoded.iter().for_each(|id| gradients.memory.present[id.0 as usize] = false);
            pool.check_finite(&model, &encoded, &copy).await?;
            // All are checked before any is encoded.
            model.check(&gradients)?;
            let encoding =
                model.compression().encode_on(&device, &model.plan, &encoded, copy.view())?;
            let bytes = pool.read(&encoding.encoded).await?;
            let copies = &mut gradients.memory.staged_mut().copies;
            model.compression().keep(encoding, bytes, copies)?;
        }
        pool.gradients = Some(copy);
        self.device_pool = Some(pool);
        self.push(token, gradients).await
    }
}

impl JoinedModel {
    /// Whether devices encode the gradient of a variable.
    fn encodes_on_devices(&self, id: VariableId) -> bool {
        self.compression().encodes_on_devices(&self.plan, id)
    }

    /// Whether NaN and infinities are refused in the gradient of a variable.
    fn refuses_non_finite(&self, id: VariableId) -> bool {
        self.non_finite == (NonFinitePolicy::Reject {}) || self.compression().refuses_non_finite(id)
    }
}

/// Memory for pushes from a device, for reuse.
#[derive(Debug)]
pub(crate) struct DevicePool {
    device: Device,
    /// Memory of the device for gradients.
    gradients: Option<Buffer<u8>>,
    /// Pages to which it copies bytes that are then put elsewhere.
    pages: Option<Pinned<u8>>,
}

impl DevicePool {
    fn new(device: &Device) -> DevicePool {
        DevicePool { device: device.clone(), gradients: None, pages: None }
    }

    /// Reads bytes from the device.
    async fn read(&mut self, from: &Buffer<u8>) -> Result<&[u8], ComputeError> {
        let pages = match self.pages.take().filter(|pages| pages.len() >= from.len()) {
            Some(pages) => pages,
            None => self.device.pinned(from.len())?,
        };
        let pages = self.device.start_read(from, pages)?.await?;
        Ok(&self.pages.insert(pages)[..from.len()])
    }

    /// Checks gradients on the device for NaN and infinity, if their codecs or the servers refuse
    /// those.
    async fn check_finite(
        &mut self,
        model: &JoinedModel,
        ids: &[VariableId],
        gradients: &Buffer<u8>,
    ) -> Result<(), Error> {
        let device = self.device.clone();
        let plan = &model.plan;
        let elements = |id: VariableId| gradients.view().slice(plan.range(id)).cast::<f32>();
        let mut found = device.buffer::<u8>(8 * ids.len())?;
        for (place, &id) in ids.iter().enumerate() {
            let index = found.view_mut().slice(8 * place..8 * place + 8).cast::<u64>();
            device.first_non_finite(elements(id), index)?;
        }
        let found = self.read(&found).await?.as_chunks().0.iter();
        for (&id, element) in ids.iter().zip(found.map(|bytes| u64::from_ne_bytes(*bytes))) {
            if element == u64::MAX || !model.refuses_non_finite(id) {
                continue;
            }
            let element = element as usize;
            let mut value = [0.0];
            device.read(elements(id).slice(element..element + 1), &mut value)?;
            let variable = plan.catalogue().variable(id).name().to_owned();
            return Err(Error::NonFinite { variable, element, value: value[0].into() });
        }
        Ok(())
    }
}
