//! Pulls to a device and pushes from it, with blocking operations.

use pushpull_device::Device;

use super::{DeviceGradients, DeviceParams};
use crate::blocking::Worker;
use crate::error::Error;
use crate::outcome::{Pulled, Push};
use crate::token::Token;

impl Worker {
    /// See [`crate::Worker::pull_to`].
    pub fn pull_to(&mut self, token: &Token, params: &mut DeviceParams) -> Result<Pulled, Error> {
        self.waiter.call("pull", || self.inner.pull_to(token, params))
    }

    /// See [`crate::Worker::gradients_on`].
    ///
    /// # Panics
    /// If the worker has not joined.
    pub fn gradients_on(&mut self, device: &Device) -> Result<DeviceGradients, Error> {
        self.inner.gradients_on(device)
    }

    /// See [`crate::Worker::push_from`].
    pub fn push_from(&mut self, token: Token, gradients: DeviceGradients) -> Result<Push, Error> {
        self.waiter.call("push", || self.inner.push_from(token, gradients))
    }
}
