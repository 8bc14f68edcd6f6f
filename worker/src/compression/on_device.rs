//! Gradients that a device encodes, with their residuals in its memory.

use std::convert::Infallible;
use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::{Codec, Residual};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;
use pushpull_device::{Buffer, ComputeError, Device, View};

use super::{Compression, Stretch, VariableCodec, VariableResidual, stretches};
use crate::error::Error;
use crate::gradients::part_buffer::PartBuffer;
use crate::gradients::sharding_plan::ShardingPlan;

/// The residual of a dense variable in the memory of a device.
#[derive(Debug)]
pub(crate) struct DeviceResidual {
    device: Device,
    left: Buffer<f32>,
}

impl DeviceResidual {
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }

    pub(super) fn read(&self) -> Result<Residual<f32>, Error> {
        let mut left = vec![0.0; self.left.len()];
        self.device.read(&self.left, &mut left)?;
        Ok(Residual::from_left(left))
    }
}

/// Gradients that a device has been told to encode.
#[derive(Debug)]
pub(crate) struct DeviceEncoding {
    /// The bytes that it writes.
    pub(crate) encoded: Buffer<u8>,
    stretches: Vec<EncodedStretch>,
    /// The residuals that it writes. The old ones count until these bytes are sent.
    residuals: Vec<(VariableId, DeviceResidual)>,
}

#[derive(Debug)]
struct EncodedStretch {
    codec: Codec,
    partition: Partition,
    before: u64,
    /// Its elements in the gradient.
    elements: Range<usize>,
    /// Its place in the encoded bytes, of which it may need fewer.
    bytes: Range<usize>,
}

impl Compression {
    /// Whether devices encode the gradient of a variable.
    pub(crate) fn encodes_on_devices(&self, plan: &ShardingPlan, id: VariableId) -> bool {
        let variable = plan.catalogue().variable(id);
        let is_dense = variable.dtype() == DType::F32 && !variable.is_sparse();
        is_dense && self.variables.get(&id).is_some_and(|found| Device::encodes(&found.codec))
    }

    /// Whether the codec of a variable refuses NaN and infinities.
    pub(crate) fn refuses_non_finite(&self, id: VariableId) -> bool {
        let found = self.variables.get(&id);
        found.is_some_and(|found| !found.codec.encoding().takes_non_finite())
    }

    /// Lets a device encode the gradients of variables, which are finite where they must be.
    /// `gradients` are laid out as the plan says. [`Compression::keep`] takes the result.
    pub(crate) fn encode_on(
        &self,
        device: &Device,
        plan: &ShardingPlan,
        ids: &[VariableId],
        gradients: View<'_, u8>,
    ) -> Result<DeviceEncoding, Error> {
        let mut stretches = Vec::new();
        let mut bytes = 0;
        for &id in ids {
            let Some(VariableCodec { codec, .. }) = self.variables.get(&id) else { continue };
            for (Stretch { before, elements, .. }, partition) in dense_stretches(codec, plan, id) {
                let start = bytes;
                bytes += Device::encoded_bytes_max(codec, elements.len());
                let codec = *codec;
                let partition = partition.clone();
                let bytes = start..bytes;
                stretches.push(EncodedStretch { codec, partition, before, elements, bytes });
            }
        }
        let mut encoded = device.buffer::<u8>(bytes)?;
        let mut residuals = Vec::new();
        for of_one in stretches.chunk_by(|a, b| a.partition.variable == b.partition.variable) {
            let id = of_one[0].partition.variable;
            let mut left = next_residual(device, &self.variables[&id].residual)?;
            let gradient = gradients.slice(plan.range(id)).cast::<f32>();
            for EncodedStretch { codec, elements, bytes, .. } in of_one {
                device.encode(
                    codec,
                    gradient.slice(elements.clone()),
                    left.view_mut().slice(elements.clone()),
                    encoded.view_mut().slice(bytes.clone()),
                )?;
            }
            residuals.push((id, DeviceResidual { device: device.clone(), left }));
        }
        Ok(DeviceEncoding { encoded, stretches, residuals })
    }

    /// Adds the parts of gradients that a device has encoded to `out`, and keeps their residuals.
    /// `bytes` are those of [`DeviceEncoding::encoded`]. Fails if they cannot be those of a device
    /// that works.
    pub(crate) fn keep(
        &mut self,
        encoding: DeviceEncoding,
        bytes: &[u8],
        out: &mut PartBuffer,
    ) -> Result<(), ComputeError> {
        let DeviceEncoding { stretches, residuals, .. } = encoding;
        for EncodedStretch { codec, partition, before, elements, bytes: place } in stretches {
            let bytes = &bytes[place];
            let elements = elements.len();
            let length = Device::encoded_bytes(&codec, elements, bytes)?;
            let copy = |out: &mut Vec<u8>| {
                out.extend_from_slice(&bytes[..length]);
                Ok::<(), Infallible>(())
            };
            let Ok(()) = out.add_encoded(&partition, before, elements, codec.encoding(), copy);
        }
        for (id, residual) in residuals {
            if let Some(found) = self.variables.get_mut(&id) {
                found.residual = VariableResidual::OnDevice(residual);
            }
        }
        Ok(())
    }
}

/// Returns the stretches of a dense variable of `f32`, with their partitions.
fn dense_stretches<'a>(
    codec: &'a Codec,
    plan: &'a ShardingPlan,
    id: VariableId,
) -> impl Iterator<Item = (Stretch, &'a Partition)> {
    plan.catalogue().partitions_of(id).iter().flat_map(move |partition| {
        let elements = partition.elements.start as usize..partition.elements.end as usize;
        stretches(codec, DType::F32, partition, plan.part_bytes(), elements)
            .map(move |stretch| (stretch, partition))
    })
}

/// Copies a residual to memory of a device, in which the next one is written.
fn next_residual(device: &Device, residual: &VariableResidual) -> Result<Buffer<f32>, Error> {
    let write = |left: &[f32]| {
        let mut next = device.buffer(left.len())?;
        device.write(left, &mut next)?;
        Ok(next)
    };
    match residual {
        VariableResidual::F32(left) => write(left.left()),
        VariableResidual::OnDevice(found) if found.device.is_same(device) => {
            let mut next = device.buffer(found.left.len())?;
            device.copy(&found.left, &mut next)?;
            Ok(next)
        }
        VariableResidual::OnDevice(found) => write(found.read()?.left()),
        VariableResidual::F64(_) | VariableResidual::RowsF32(_) | VariableResidual::RowsF64(_) => {
            unreachable!("devices encode dense variables of f32")
        }
    }
}
