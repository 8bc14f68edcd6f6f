//! [`GradientCodecs`]: the gradients of a ring that travel encoded, with the residuals of one rank.

use std::collections::BTreeMap;

use pushpull_collective::{EncodedTensor, Reduction, Ring, RingElement};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::{Codec, Encoding, Real, Residual};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::RingCodec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;

use super::local_model::widened;
use crate::compression::{CodecRule, Compression, VariableCodec, VariableResidual};
use crate::error::{ConfigError, Error};
use crate::gradients::params::cast_elements;
use crate::gradients::sharding_plan::ShardingPlan;

/// The codecs of a ring's variables, with the residuals of this rank.
///
/// A residual changes when a gradient is encoded. It stays on its rank through every change of the
/// ring. What a step has sent is lost if that step is not applied.
#[derive(Debug, Default)]
pub(super) struct GradientCodecs {
    compression: Compression,
}

impl GradientCodecs {
    /// Gives each variable the codec of the last rule that decides for it.
    ///
    /// # Errors
    /// [`ConfigError`] for invalid codecs, those that a ring does not have, and rules that match
    /// nothing or do not suit a variable.
    pub(super) fn new(catalogue: &Catalogue, rules: &[CodecRule]) -> Result<GradientCodecs, Error> {
        for codec in rules.iter().filter_map(|rule| rule.codec) {
            codec.validate().map_err(ConfigError::from)?;
            if RingCodec::of(codec).is_none() {
                return Err(ConfigError::NoRingCodec { codec }.into());
            }
        }
        // No shard restricts them, and no variable has rows.
        let compression = Compression::new(catalogue, rules, &BTreeMap::new(), 0)?;
        Ok(GradientCodecs { compression })
    }

    /// Returns a text of all codecs, for the facts on which ranks agree; empty if there are none.
    pub(super) fn facts(&self, catalogue: &Catalogue) -> String {
        let codec = |(id, found): (&VariableId, &VariableCodec)| {
            format!(", {} as {}", catalogue.variable(*id).name(), found.codec)
        };
        self.compression.variables.iter().map(codec).collect()
    }

    /// Whether the gradient of a variable travels encoded.
    pub(super) fn covers(&self, id: VariableId) -> bool {
        self.compression.covers(id)
    }

    /// Averages the gradient of a variable that has a codec.
    ///
    /// # Errors
    /// [`Error::NonFinite`] on every rank, if one contributes NaN or infinity in a codec that cannot
    /// express it: this gradient has not been encoded. [`Error::Ring`].
    pub(super) async fn reduce(
        &mut self,
        ring: &mut Ring,
        plan: &ShardingPlan,
        id: VariableId,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let variable = plan.catalogue().variable(id);
        let codec = self.compression.variables.get(&id).map(|found| found.codec);
        if codec.is_some_and(|codec| !codec.encoding().takes_non_finite()) {
            self.agree_on_finite(ring, plan, id, bytes).await?;
        }
        self.reduce_variable(ring, variable, id, bytes).await
    }

    /// Has every rank refuse what one rank cannot encode. Gathers 24 bytes of each.
    async fn agree_on_finite(
        &self,
        ring: &mut Ring,
        plan: &ShardingPlan,
        id: VariableId,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let own = match self.compression.check(plan, id, bytes, 1.0) {
            Err(Error::NonFinite { element, value, .. }) => {
                [1, element as i64, value.to_bits() as i64]
            }
            checked => checked.map(|_| [0; 3])?,
        };
        let mut all = vec![0; own.len() * ring.size() as usize];
        ring.all_gather(&own, &mut all).await?;
        let found = all.as_chunks::<3>().0.iter().find(|[is_found, ..]| *is_found != 0);
        let Some(&[_, element, value]) = found else { return Ok(()) };
        Err(Error::NonFinite {
            variable: plan.catalogue().variable(id).name().to_owned(),
            element: element as usize,
            value: f64::from_bits(value as u64),
        })
    }

    async fn reduce_variable(
        &mut self,
        ring: &mut Ring,
        variable: &VariableSpec,
        id: VariableId,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let Some(found) = self.compression.variables.get_mut(&id) else { return Ok(()) };
        let VariableCodec { codec, residual } = found;
        let codec = *codec;
        let name = variable.name();
        match residual {
            VariableResidual::F64(residual) => {
                average::<f64>(ring, name, codec, cast_elements(bytes), residual).await
            }
            VariableResidual::F32(residual) if variable.dtype() == DType::F32 => {
                average::<f32>(ring, name, codec, cast_elements(bytes), residual).await
            }
            VariableResidual::F32(residual) => {
                let bytes = &mut bytes[..variable.bytes() as usize];
                let mut wide = widened(variable.dtype(), bytes);
                average::<f32>(ring, name, codec, &mut wide, residual).await?;
                narrow(variable.dtype(), &wide, bytes)
            }
            VariableResidual::OnDevice(_)
            | VariableResidual::RowsF32(_)
            | VariableResidual::RowsF64(_) => {
                unreachable!("a ring's variables are dense, and no device has encoded them")
            }
        }
    }

    /// Returns all residuals as bytes.
    pub(super) fn save(&self, catalogue: &Catalogue) -> Result<Vec<u8>, Error> {
        self.compression.save(catalogue)
    }

    /// Restores residuals.
    pub(super) fn restore(&mut self, catalogue: &Catalogue, bytes: &[u8]) -> Result<(), Error> {
        self.compression.restore(catalogue, bytes)
    }
}

async fn average<T: RingElement + Real>(
    ring: &mut Ring,
    name: &str,
    codec: Codec,
    values: &mut [T],
    residual: &mut Residual<T>,
) -> Result<(), Error> {
    let tensor = EncodedTensor { name, codec, values, residual };
    Ok(ring.all_reduce_encoded(tensor, Reduction::Mean).await?)
}

/// Rounds a mean to the half type of its variable, as a mean of such elements is.
fn narrow(dtype: DType, wide: &[f32], bytes: &mut [u8]) -> Result<(), Error> {
    let Some(codec) = Encoding::of_type(dtype).and_then(Encoding::codec_of_values) else {
        return Ok(());
    };
    let mut narrow = Vec::new();
    // A codec of values takes any element.
    codec.encode(wide, &mut narrow).map_err(ConfigError::from)?;
    bytes.copy_from_slice(&narrow[..bytes.len()]);
    Ok(())
}
