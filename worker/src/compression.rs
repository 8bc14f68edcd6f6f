//! Gradients that are sent encoded: the codec of each variable, and its residual.

#[cfg(feature = "devices")]
mod on_device;
#[cfg(not(feature = "devices"))]
#[path = "compression/without_devices.rs"]
mod on_device;
mod rows;
mod saved;

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::{Codec, CodecError, Encoding, Encodings, Real, Residual, ScaleBlocks};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::names::NamePattern;
use pushpull_common::tensor::{DType, Element, bf16, f16};
use pushpull_common::variable::VariableSpec;

use crate::error::{ConfigError, Error};
use crate::gradients::part_buffer::PartBuffer;
use crate::gradients::rows::VariableRows;
use crate::gradients::sharding_plan::{ShardingPlan, part_elements};
use on_device::DeviceResidual;
use rows::RowResiduals;

/// A call of [`crate::WorkerConfig::codec`]: the variables that it matches, and their codec or
/// none.
#[derive(Clone, Debug)]
pub(crate) struct CodecRule {
    pub(crate) names: NamePattern,
    pub(crate) codec: Option<Codec>,
}

impl CodecRule {
    /// Checks that the rule matches a variable, and that its codec suits the trained ones among
    /// them. If it matches no trained variable, that is an error too. A rule for all variables
    /// skips those that its codec does not suit.
    fn check(&self, catalogue: &Catalogue) -> Result<(), ConfigError> {
        let variables = catalogue.variables().iter();
        let matched: Vec<&VariableSpec> =
            variables.filter(|variable| self.names.matches(variable.name())).collect();
        let Some(first) = matched.first() else {
            return Err(ConfigError::NothingToCompress { names: self.names.to_string() });
        };
        let Some(codec) = self.codec.filter(|_| !self.names.matches_all()) else { return Ok(()) };
        let mut trained = matched.iter().filter(|variable| variable.is_trainable()).peekable();
        let refused = match trained.peek() {
            None => Some(first),
            Some(_) => trained.find(|variable| !supports(variable, codec)),
        };
        match refused {
            Some(variable) => {
                Err(ConfigError::NotCompressible { variable: variable.name().to_owned(), codec })
            }
            None => Ok(()),
        }
    }

    /// Whether the rule decides the codec of a variable.
    fn decides_for(&self, variable: &VariableSpec) -> bool {
        let can = self.codec.is_none_or(|codec| supports(variable, codec));
        self.names.matches(variable.name()) && (can || !self.names.matches_all())
    }
}

/// Whether gradients of a variable can be encoded with a codec.
fn supports(variable: &VariableSpec, codec: Codec) -> bool {
    let rows = !variable.is_sparse() || codec.encoding().is_for_rows();
    variable.is_trainable() && rows
}

/// The codecs of a worker's variables, with their residuals.
///
/// A residual changes once for each gradient, when that is encoded. The session keeps the encoded
/// bytes and sends them as often as necessary. If a gradient is not applied in the end, its encoded
/// part is lost, with what it carried of earlier gradients; the residual keeps what it left out.
#[derive(Debug, Default)]
pub(crate) struct Compression {
    pub(crate) variables: BTreeMap<VariableId, VariableCodec>,
    /// Gradients of half types, widened to `f32`.
    widened: Vec<f32>,
}

/// The codec of one variable, with its residual.
#[derive(Debug)]
pub(crate) struct VariableCodec {
    pub(crate) codec: Codec,
    pub(crate) residual: VariableResidual,
}

/// The residual of one variable.
#[derive(Debug)]
pub(crate) enum VariableResidual {
    F32(Residual<f32>),
    /// Of a variable of `f32` whose last gradient was encoded on a device.
    #[cfg_attr(not(feature = "devices"), expect(dead_code, reason = "no value of it exists"))]
    OnDevice(DeviceResidual),
    F64(Residual<f64>),
    /// Of a sparse variable.
    RowsF32(RowResiduals<f32>),
    RowsF64(RowResiduals<f64>),
}

impl VariableResidual {
    /// A residual of zeros. For a sparse variable it takes at most `row_bytes_max` bytes later.
    fn zeros(variable: &VariableSpec, row_bytes_max: u64) -> VariableResidual {
        let elements = variable.shape().elements() as usize;
        let width = variable.shape().row_elements() as usize;
        match (variable.is_sparse(), variable.dtype()) {
            (false, DType::F64) => VariableResidual::F64(Residual::new(elements)),
            (false, _) => VariableResidual::F32(Residual::new(elements)),
            (true, DType::F64) => {
                VariableResidual::RowsF64(RowResiduals::new(width, row_bytes_max))
            }
            (true, _) => VariableResidual::RowsF32(RowResiduals::new(width, row_bytes_max)),
        }
    }
}

impl Compression {
    /// Gives each variable the codec of the last rule that decides for it. Fails if a shard does
    /// not support the encoding.
    pub(crate) fn new(
        catalogue: &Catalogue,
        rules: &[CodecRule],
        known: &BTreeMap<ShardId, Encodings>,
        row_residual_bytes: u64,
    ) -> Result<Compression, Error> {
        rules.iter().try_for_each(|rule| rule.check(catalogue))?;
        let mut variables = BTreeMap::new();
        for (index, variable) in catalogue.variables().iter().enumerate() {
            let id = VariableId(index as u32);
            let name = variable.name();
            let rule = rules.iter().rfind(|rule| rule.decides_for(variable));
            let codec = rule.and_then(|rule| rule.codec);
            let Some(codec) = codec.filter(|&codec| supports(variable, codec)) else { continue };
            if Encoding::of_type(variable.dtype()) == Some(codec.encoding()) {
                // A codec of the variable's own half type changes nothing.
                continue;
            }
            let encoding = codec.encoding();
            let lacks = |shard: &ShardId| {
                known.get(shard).is_some_and(|encodings| !encodings.contains(encoding))
            };
            let shards = catalogue.partitions_of(id).iter().map(|partition| partition.shard);
            if let Some(shard) = shards.into_iter().find(lacks) {
                return Err(Error::UnknownCodec { variable: name.to_owned(), codec, shard });
            }
            let residual = VariableResidual::zeros(variable, row_residual_bytes);
            variables.insert(id, VariableCodec { codec, residual });
        }
        Ok(Compression { variables, widened: Vec::default() })
    }

    /// Whether no variable has a codec.
    pub(crate) fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// Whether a variable has a codec.
    pub(crate) fn covers(&self, id: VariableId) -> bool {
        self.variables.contains_key(&id)
    }

    /// Checks that the gradient of a variable can be encoded, under any policy of the servers. All
    /// variables of a push are checked before the first is encoded.
    pub(crate) fn check(
        &self,
        plan: &ShardingPlan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
    ) -> Result<(), Error> {
        let Some(compressed) = self.variables.get(&id) else { return Ok(()) };
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        let result = match variable.dtype() {
            DType::F64 => compressed.codec.check::<f64>(bytemuck::cast_slice(bytes)),
            dtype => check_f32(&compressed.codec, dtype, bytes, factor),
        };
        result.map_err(|error| Compression::error(plan, id, error))
    }

    /// Checks that rows can be encoded, as [`Compression::check`] does.
    pub(crate) fn check_rows(
        &self,
        plan: &ShardingPlan,
        rows: VariableRows<'_>,
        factor: f64,
    ) -> Result<(), Error> {
        let id = rows.variable;
        let Some(VariableCodec { codec, .. }) = self.variables.get(&id) else { return Ok(()) };
        let result = match plan.catalogue().variable(id).dtype() {
            DType::F64 => codec.check(&rows.elements::<f64>()),
            dtype => check_f32(codec, dtype, rows.values, factor),
        };
        result.map_err(|error| match error {
            CodecError::NonFinite { element, value, .. } => rows.non_finite(plan, element, value),
            error => Compression::error(plan, id, error),
        })
    }

    /// Encodes the gradient of a variable, if it has a codec, adds the resulting parts to `out`,
    /// and keeps the residual. `bytes` are all its elements, aligned. Elements of a half type are
    /// multiplied by `factor`.
    pub(crate) fn encode(
        &mut self,
        plan: &ShardingPlan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
        out: &mut PartBuffer,
    ) -> Result<(), Error> {
        let Compression { variables, widened } = self;
        let Some(VariableCodec { codec, residual }) = variables.get_mut(&id) else { return Ok(()) };
        if let VariableResidual::OnDevice(left) = residual {
            *residual = VariableResidual::F32(left.read()?);
        }
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        let partitions = plan.catalogue().partitions_of(id);
        let encoded = match residual {
            VariableResidual::F32(residual) => {
                let gradient = as_f32(variable.dtype(), bytes, factor, widened);
                encode(codec, residual, partitions, plan, gradient, out)
            }
            VariableResidual::F64(residual) => {
                encode(codec, residual, partitions, plan, bytemuck::cast_slice(bytes), out)
            }
            VariableResidual::OnDevice(_) => unreachable!("it was read from the device"),
            VariableResidual::RowsF32(_) | VariableResidual::RowsF64(_) => {
                unreachable!("rows have parts of their own")
            }
        };
        encoded.map_err(|error| Compression::error(plan, id, error))
    }

    /// Encodes the rows of a partition, adds the parts of their values to `out`, and keeps the
    /// residual. Elements of a half type are multiplied by `factor`.
    pub(crate) fn encode_rows(
        &mut self,
        plan: &ShardingPlan,
        partition: &Partition,
        rows: VariableRows<'_>,
        factor: f64,
        out: &mut PartBuffer,
    ) -> Result<(), Error> {
        let id = rows.variable;
        let most = plan.part_bytes();
        let Compression { variables, widened } = self;
        let Some(VariableCodec { codec, residual }) = variables.get_mut(&id) else { return Ok(()) };
        let dtype = plan.catalogue().variable(id).dtype();
        let encoded = match residual {
            VariableResidual::RowsF32(residual) => {
                let values = as_f32(dtype, rows.values, factor, widened);
                residual.encode(codec, partition, most, rows.ids, values, out)
            }
            VariableResidual::RowsF64(residual) => {
                residual.encode(codec, partition, most, rows.ids, &rows.elements::<f64>(), out)
            }
            VariableResidual::F32(_) | VariableResidual::F64(_) | VariableResidual::OnDevice(_) => {
                unreachable!("only what is sparse has rows")
            }
        };
        encoded.map_err(|error| Compression::error(plan, id, error))
    }

    fn error(plan: &ShardingPlan, id: VariableId, error: CodecError) -> Error {
        let variable = plan.catalogue().variable(id).name().to_owned();
        match error {
            CodecError::NonFinite { element, value, .. } => {
                Error::NonFinite { variable, element, value }
            }
            error => Error::Encode { variable, error },
        }
    }
}

fn encode<T: Real>(
    codec: &Codec,
    residual: &mut Residual<T>,
    partitions: &[Partition],
    plan: &ShardingPlan,
    gradient: &[T],
    out: &mut PartBuffer,
) -> Result<(), CodecError> {
    partitions.iter().try_for_each(|partition| {
        let elements = partition.elements.start as usize..partition.elements.end as usize;
        add_encoded_parts(codec, residual, partition, plan.part_bytes(), elements, gradient, out)
    })
}

/// Encodes elements of a partition into parts, and adds these to `out`. The first element is the
/// first that is pushed of the partition. `residual` holds the residuals at the same indices.
fn add_encoded_parts<T: Real>(
    codec: &Codec,
    residual: &mut Residual<T>,
    partition: &Partition,
    part_bytes: u64,
    elements: Range<usize>,
    gradient: &[T],
    out: &mut PartBuffer,
) -> Result<(), CodecError> {
    stretches(codec, T::DTYPE, partition, part_bytes, elements).try_for_each(|stretch| {
        let Stretch { before, blocks, elements } = stretch;
        let values = &gradient[elements.clone()];
        out.add_encoded(partition, before, values.len(), codec.encoding(), |out| {
            residual.encode(codec, blocks, elements.start, values, out)
        })
    })
}

/// Elements of a partition that are encoded together, as one part.
struct Stretch {
    /// The bytes of the partition before them.
    before: u64,
    blocks: ScaleBlocks,
    /// Their indices in the gradient.
    elements: Range<usize>,
}

/// Cuts elements of a partition into stretches. The first element is the first that is pushed of
/// the partition.
fn stretches(
    codec: &Codec,
    dtype: DType,
    partition: &Partition,
    part_bytes: u64,
    elements: Range<usize>,
) -> impl Iterator<Item = Stretch> {
    let encoding = codec.encoding();
    let mut start = elements.start;
    std::iter::from_fn(move || {
        if start >= elements.end {
            return None;
        }
        let before = ((start - elements.start) * dtype.size()) as u64;
        let blocks = partition.blocks_from(partition.offset + before);
        let most = part_elements(encoding, blocks, dtype, part_bytes);
        let stretch = start..elements.end.min(start + most);
        start = stretch.end;
        Some(Stretch { before, blocks, elements: stretch })
    })
}

/// Returns elements of `f32`, or elements of a half type as `f32` multiplied by `factor`, as the
/// servers compute them. Uses `widened` unless the bytes are an aligned slice of `f32`.
fn as_f32<'a>(dtype: DType, bytes: &'a [u8], factor: f64, widened: &'a mut Vec<f32>) -> &'a [f32] {
    if let Some(elements) = borrow_f32(dtype, bytes) {
        return elements;
    }
    widened.resize(bytes.len() / dtype.size(), 0.0);
    widen(dtype, bytes, factor, widened);
    widened
}

/// Calls `find` for chunks of the elements as `f32`, multiplied by `factor`. Returns the first
/// result, and the index of the first element of its chunk.
pub(crate) fn find_in_f32<R>(
    dtype: DType,
    bytes: &[u8],
    factor: f64,
    find: impl Fn(&[f32]) -> Option<R>,
) -> Option<(usize, R)> {
    const CHUNK: usize = 256;
    if let Some(elements) = borrow_f32(dtype, bytes) {
        return find(elements).map(|found| (0, found));
    }
    let mut chunk = [0.0; CHUNK];
    bytes.chunks(CHUNK * dtype.size()).enumerate().find_map(|(nth, bytes)| {
        let chunk = &mut chunk[..bytes.len() / dtype.size()];
        widen(dtype, bytes, factor, chunk);
        find(chunk).map(|found| (nth * CHUNK, found))
    })
}

fn check_f32(codec: &Codec, dtype: DType, bytes: &[u8], factor: f64) -> Result<(), CodecError> {
    match find_in_f32(dtype, bytes, factor, |elements| codec.check(elements).err()) {
        None => Ok(()),
        Some((first, CodecError::NonFinite { codec, element, value })) => {
            Err(CodecError::NonFinite { codec, element: first + element, value })
        }
        Some((_, error)) => Err(error),
    }
}

fn borrow_f32(dtype: DType, bytes: &[u8]) -> Option<&[f32]> {
    (dtype == DType::F32).then(|| bytemuck::try_cast_slice(bytes).ok()).flatten()
}

/// Converts elements to `f32`, and multiplies them by `factor`.
fn widen(dtype: DType, bytes: &[u8], factor: f64, out: &mut [f32]) {
    fn each<T: Element + Into<f64>>(bytes: &[u8], factor: f64, out: &mut [f32]) {
        for (bytes, out) in bytes.chunks_exact(size_of::<T>()).zip(out) {
            *out = (bytemuck::pod_read_unaligned::<T>(bytes).into() * factor) as f32;
        }
    }
    match dtype {
        DType::F16 => each::<f16>(bytes, factor, out),
        DType::Bf16 => each::<bf16>(bytes, factor, out),
        _ => each::<f32>(bytes, factor, out),
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};

    use super::*;

    #[test]
    fn a_rule_for_all_skips_variables_that_it_does_not_suit() {
        let variables = vec![
            VariableSpec::f32("dense", [4]).unwrap(),
            VariableSpec::f32("rows", [4, 2]).unwrap().sparse(),
            VariableSpec::f32("ledger", [4]).unwrap().plain(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let chosen = |rules: &[(&str, Option<Codec>)]| {
            let rule = |&(names, codec): &(&str, _)| CodecRule { names: names.into(), codec };
            let rules: Vec<CodecRule> = rules.iter().map(rule).collect();
            let compression = Compression::new(&catalogue, &rules, &BTreeMap::new(), 0).unwrap();
            let codec = |id| compression.variables.get(&VariableId(id)).map(|found| found.codec);
            [codec(0), codec(1), codec(2)]
        };
        let topk = Some(Codec::TopK { fraction: 0.1 });
        let int8 = Some(Codec::Int8);
        assert_eq!(chosen(&[("rows", int8), ("*", topk)]), [topk, int8, None]);
        assert_eq!(chosen(&[("*", topk), ("rows", int8)]), [topk, int8, None]);
        assert_eq!(chosen(&[("*", int8), ("rows", None)]), [int8, None, None]);
        assert_eq!(chosen(&[("rows", int8), ("*", None)]), [None; 3]);
    }

    /// The encodings in the welcome of each shard that holds the variable decide.
    #[test]
    fn a_codec_that_a_server_does_not_support_is_refused_by_name() {
        let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [4]).unwrap()).to_vec();
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let old = Encodings(1 << Encoding::F16.code());
        let shards = [0, 1].map(|task| ShardId { task, shard: 0 });
        let known = BTreeMap::from([(shards[0], Encodings::all()), (shards[1], old)]);
        let join = |names: &str, codec| {
            let rules = [CodecRule { names: names.into(), codec: Some(codec) }];
            Compression::new(&catalogue, &rules, &known, 0).map(|_| ())
        };
        let refused = join("*", Codec::OneBit).unwrap_err();
        assert!(
            matches!(&refused, Error::UnknownCodec { variable, codec: Codec::OneBit, shard }
                if variable == "b" && *shard == shards[1]),
            "{refused}"
        );
        assert!(join("a", Codec::OneBit).is_ok() && join("*", Codec::F16).is_ok());
    }

    /// An element in a later chunk is found at its own index.
    #[test]
    fn widened_elements_keep_their_indices() {
        let mut halves = vec![f16::from_f32(2.0); 1_000];
        halves[700] = f16::from_f32(3.0);
        let bytes = bytemuck::cast_slice(&halves);
        let large = |elements: &[f32]| elements.iter().position(|&element| element > 20.0);
        assert_eq!(find_in_f32(DType::F16, bytes, 8.0, large), Some((512, 188)));
        assert_eq!(find_in_f32(DType::F16, bytes, 1.0, large), None);
        halves[999] = f16::INFINITY;
        let bytes = bytemuck::cast_slice(&halves);
        let found = check_f32(&Codec::Int8, DType::F16, bytes, 1.0);
        assert!(matches!(found, Err(CodecError::NonFinite { element: 999, .. })), "{found:?}");
        let mut widened = Vec::default();
        assert_eq!(as_f32(DType::F16, bytes, 0.5, &mut widened)[699..702], [1.0, 1.5, 1.0]);
        let own = [1.0_f32, 2.0];
        let taken = as_f32(DType::F32, bytemuck::cast_slice(&own), 1.0, &mut widened);
        assert!(
            std::ptr::eq(taken.as_ptr(), own.as_ptr()),
            "aligned elements of f32 are not copied"
        );
    }
}
