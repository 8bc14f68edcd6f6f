//! Gradients that travel encoded: by which codec, and what each push has left out so far.

mod saved;

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::{Codec, EncodeError, Encoding, Encodings, Real, Residual};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::names::Names;
use pushpull_common::tensor::{DType, bf16, f16};

use crate::error::{Error, JoinError};
use crate::fanout::{Part, Plan};
pub use saved::ResidualsError;

/// Which variables a codec is for: all whose names match, or none of them.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) names: Names,
    pub(crate) codec: Option<Codec>,
}

/// The codecs of a worker's variables, and their residuals.
///
/// A residual changes when a gradient is encoded, and not again: what is encoded is kept by the
/// session, and sent as often as it takes. A gradient that is not taken after all is lost as it was
/// encoded, with what it carried of earlier ones; what it left out is still there.
#[derive(Debug, Default)]
pub(crate) struct Compression {
    pub(crate) variables: BTreeMap<VariableId, Compressed>,
}

/// One variable's codec.
#[derive(Debug)]
pub(crate) struct Compressed {
    codec: Codec,
    pub(crate) left: Left,
}

/// What is left of one variable.
#[derive(Debug)]
pub(crate) enum Left {
    F32(Residual<f32>),
    F64(Residual<f64>),
}

impl Compression {
    /// Chooses for each variable the codec of the last rule that matches it. A variable that a rule
    /// names must take gradients, every rule must match one, and the shards must know the encodings.
    pub(crate) fn new(
        catalogue: &Catalogue,
        rules: &[Rule],
        known: &BTreeMap<ShardId, Encodings>,
    ) -> Result<Compression, JoinError> {
        let mut variables = BTreeMap::new();
        let mut matched = vec![false; rules.len()];
        for (index, variable) in catalogue.variables().iter().enumerate() {
            let (id, name) = (VariableId(index as u32), variable.name());
            // Rows travel as they are.
            let takes = variable.is_trainable() && !variable.is_sparse();
            let mut chosen = None;
            for (rule, matched) in rules.iter().zip(&mut matched) {
                if rule.names.contain(name) {
                    *matched = true;
                    // Halves travel as what they are, which loses nothing.
                    let own = Encoding::of_type(variable.dtype());
                    let shorter = |codec: &Codec| takes && Some(codec.encoding()) != own;
                    chosen = rule.codec.filter(shorter);
                }
                if let Some(codec) = rule.codec.filter(|_| rule.names.as_str() == name && !takes) {
                    return Err(JoinError::NotCompressible { variable: name.to_owned(), codec });
                }
            }
            let Some(codec) = chosen else { continue };
            let encoding = codec.encoding();
            let lacks = |shard: &ShardId| {
                known.get(shard).is_some_and(|encodings| !encodings.contain(encoding))
            };
            let shards = catalogue.partitions_of(id).iter().map(|partition| partition.shard);
            if let Some(shard) = shards.into_iter().find(lacks) {
                return Err(JoinError::UnknownCodec { variable: name.to_owned(), codec, shard });
            }
            let elements = variable.shape().elements() as usize;
            let left = match variable.dtype() {
                DType::F64 => Left::F64(Residual::new(elements)),
                _ => Left::F32(Residual::new(elements)),
            };
            variables.insert(id, Compressed { codec, left });
        }
        match rules.iter().zip(matched).find(|(_, matched)| !matched) {
            Some((rule, _)) => Err(JoinError::NothingToCompress { names: rule.names.to_string() }),
            None => Ok(Compression { variables }),
        }
    }

    /// Whether a variable's gradients travel encoded.
    pub(crate) fn covers(&self, id: VariableId) -> bool {
        self.variables.contains_key(&id)
    }

    /// Whether the gradient of a variable can be encoded, whatever the servers' policy is: looked at
    /// for all variables of a push before the first of them is encoded.
    pub(crate) fn check(
        &self,
        plan: &Plan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
    ) -> Result<(), Error> {
        let Some(compressed) = self.variables.get(&id) else { return Ok(()) };
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        let result = match compressed.left {
            Left::F32(_) => compressed.codec.check(&singles(variable.dtype(), bytes, factor)),
            Left::F64(_) => compressed.codec.check::<f64>(bytemuck::cast_slice(bytes)),
        };
        result.map_err(|error| Compression::error(plan, id, error))
    }

    /// Encodes the gradient of a variable and keeps what that leaves out; the parts in which it
    /// travels. `bytes` are all its elements, aligned; those of a half type are multiplied with `factor`.
    pub(crate) fn parts(
        &mut self,
        plan: &Plan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
    ) -> Result<Vec<(ShardId, Vec<Part>)>, Error> {
        let Some(Compressed { codec, left }) = self.variables.get_mut(&id) else {
            return Ok(Vec::new());
        };
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        let partitions = plan.catalogue().partitions_of(id);
        let parts = match left {
            Left::F32(left) => {
                let gradient = singles(variable.dtype(), bytes, factor);
                encode(codec, left, partitions, plan, &gradient)
            }
            Left::F64(left) => encode(codec, left, partitions, plan, bytemuck::cast_slice(bytes)),
        };
        parts.map_err(|error| Compression::error(plan, id, error))
    }

    fn error(plan: &Plan, id: VariableId, error: EncodeError) -> Error {
        let variable = plan.catalogue().variable(id).name().to_owned();
        match error {
            EncodeError::NonFinite { element, value, .. } => {
                Error::NonFinite { variable, element, value }
            }
            error => Error::Encode { variable, error },
        }
    }
}

fn encode<T: Real>(
    codec: &Codec,
    left: &mut Residual<T>,
    partitions: &[Partition],
    plan: &Plan,
    gradient: &[T],
) -> Result<Vec<(ShardId, Vec<Part>)>, EncodeError> {
    let encoding = codec.encoding();
    let mut by_shard = Vec::with_capacity(partitions.len());
    let mut out = Vec::new();
    for partition in partitions {
        let mut parts = Vec::new();
        for stretch in plan.stretches(partition, encoding) {
            out.clear();
            left.encode(codec, stretch.start, &gradient[stretch.clone()], &mut out)?;
            // As long as it is: what is kept until it is settled should not be longer.
            let bodies = vec![Bytes::copy_from_slice(&out)];
            parts.push(Part::stretch(partition, stretch, encoding, bodies));
        }
        if !parts.is_empty() {
            by_shard.push((partition.shard, parts));
        }
    }
    Ok(by_shard)
}

/// Elements of `f32`, or of a half type in `f32` and multiplied, as the servers would have them.
pub(crate) fn singles(dtype: DType, bytes: &[u8], factor: f64) -> Cow<'_, [f32]> {
    let single = |g: f64| (g * factor) as f32;
    match dtype {
        DType::F16 => {
            let halves = bytemuck::cast_slice::<u8, f16>(bytes).iter();
            halves.map(|&g| single(g.into())).collect()
        }
        DType::Bf16 => {
            let halves = bytemuck::cast_slice::<u8, bf16>(bytes).iter();
            halves.map(|&g| single(g.into())).collect()
        }
        _ => bytemuck::cast_slice(bytes).into(),
    }
}
