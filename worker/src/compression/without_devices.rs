//! The residuals that devices keep, in a build without devices: there are none.

use pushpull_common::codec::Residual;

use crate::error::Error;

/// The residual of a dense variable in the memory of a device. No value of it exists.
#[derive(Debug)]
pub(crate) enum DeviceResidual {}

impl DeviceResidual {
    pub(super) fn len(&self) -> usize {
        match *self {}
    }

    pub(super) fn read(&self) -> Result<Residual<f32>, Error> {
        match *self {}
    }
}
