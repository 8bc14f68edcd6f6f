//! Gradients that travel encoded: by which codec, and what each push has left out so far.

mod rows;
mod saved;

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::{Codec, EncodeError, Encoding, Encodings, Real, Residual};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::names::Names;
use pushpull_common::tensor::{DType, Element, bf16, f16};
use pushpull_common::variable::VariableSpec;

use crate::error::{Error, JoinError};
use crate::rows::RowsOf;
use crate::sharding_plan::{ShardingPlan, stretch_elements};
use crate::staging::Copies;
use rows::RowResiduals;
pub use saved::ResidualsError;

/// Which variables a codec is for: all whose names match, or none of them.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) names: Names,
    pub(crate) codec: Option<Codec>,
}

impl Rule {
    /// Whether there is a variable that it is for, and none that cannot have its codec. A rule for all
    /// passes over those; others pass over variables that take no gradients, if one does.
    fn check(&self, catalogue: &Catalogue) -> Result<(), JoinError> {
        let variables = catalogue.variables().iter();
        let matched: Vec<&VariableSpec> =
            variables.filter(|variable| self.names.contain(variable.name())).collect();
        let Some(first) = matched.first() else {
            return Err(JoinError::NothingToCompress { names: self.names.to_string() });
        };
        let Some(codec) = self.codec.filter(|_| !self.names.are_all()) else { return Ok(()) };
        let mut trained = matched.iter().filter(|variable| variable.is_trainable()).peekable();
        let refused = match trained.peek() {
            None => Some(first),
            Some(_) => trained.find(|variable| !can_have(variable, codec)),
        };
        match refused {
            Some(variable) => {
                Err(JoinError::NotCompressible { variable: variable.name().to_owned(), codec })
            }
            None => Ok(()),
        }
    }

    /// Whether it says what a variable's codec is.
    fn decides(&self, variable: &VariableSpec) -> bool {
        let can = self.codec.is_none_or(|codec| can_have(variable, codec));
        self.names.contain(variable.name()) && (can || !self.names.are_all())
    }
}

/// Whether gradients of a variable may travel so.
fn can_have(variable: &VariableSpec, codec: Codec) -> bool {
    let rows = !variable.is_sparse() || codec.encoding().is_for_rows();
    variable.is_trainable() && rows
}

/// The codecs of a worker's variables, and their residuals.
///
/// A residual changes when a gradient is encoded, and not again: what is encoded is kept by the
/// session, and sent as often as it takes. A gradient that is not taken after all is lost as it was
/// encoded, with what it carried of earlier ones; what it left out is still there.
#[derive(Debug, Default)]
pub(crate) struct Compression {
    pub(crate) variables: BTreeMap<VariableId, Compressed>,
    /// Gradients of half types in `f32`.
    wide: Vec<f32>,
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
    /// Of rows.
    RowsF32(RowResiduals<f32>),
    RowsF64(RowResiduals<f64>),
}

impl Left {
    /// Nothing is left of this variable; of rows, what will be takes at most so many bytes.
    fn nothing(variable: &VariableSpec, row_bytes_max: u64) -> Left {
        let elements = variable.shape().elements() as usize;
        let width = variable.shape().row_elements() as usize;
        match (variable.is_sparse(), variable.dtype()) {
            (false, DType::F64) => Left::F64(Residual::new(elements)),
            (false, _) => Left::F32(Residual::new(elements)),
            (true, DType::F64) => Left::RowsF64(RowResiduals::new(width, row_bytes_max)),
            (true, _) => Left::RowsF32(RowResiduals::new(width, row_bytes_max)),
        }
    }
}

impl Compression {
    /// Chooses for each variable the codec of the last rule that matches it; one for all variables passes
    /// over those that cannot have its codec. The shards must know the encodings.
    pub(crate) fn new(
        catalogue: &Catalogue,
        rules: &[Rule],
        known: &BTreeMap<ShardId, Encodings>,
        row_residual_bytes: u64,
    ) -> Result<Compression, JoinError> {
        rules.iter().try_for_each(|rule| rule.check(catalogue))?;
        let mut variables = BTreeMap::new();
        for (index, variable) in catalogue.variables().iter().enumerate() {
            let (id, name) = (VariableId(index as u32), variable.name());
            let rule = rules.iter().rfind(|rule| rule.decides(variable));
            let codec = rule.and_then(|rule| rule.codec);
            let Some(codec) = codec.filter(|&codec| can_have(variable, codec)) else { continue };
            if Encoding::of_type(variable.dtype()) == Some(codec.encoding()) {
                // Halves travel as what they are, which loses nothing.
                continue;
            }
            let encoding = codec.encoding();
            let lacks = |shard: &ShardId| {
                known.get(shard).is_some_and(|encodings| !encodings.contain(encoding))
            };
            let shards = catalogue.partitions_of(id).iter().map(|partition| partition.shard);
            if let Some(shard) = shards.into_iter().find(lacks) {
                return Err(JoinError::UnknownCodec { variable: name.to_owned(), codec, shard });
            }
            let left = Left::nothing(variable, row_residual_bytes);
            variables.insert(id, Compressed { codec, left });
        }
        Ok(Compression { variables, wide: Vec::default() })
    }

    /// Whether no variable's gradients travel encoded.
    pub(crate) fn is_of_none(&self) -> bool {
        self.variables.is_empty()
    }

    /// Whether a variable's gradients travel encoded.
    pub(crate) fn covers(&self, id: VariableId) -> bool {
        self.variables.contains_key(&id)
    }

    /// Whether the gradient of a variable can be encoded, whatever the servers' policy is: looked at
    /// for all variables of a push before the first of them is encoded.
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
            dtype => check_singles(&compressed.codec, dtype, bytes, factor),
        };
        result.map_err(|error| Compression::error(plan, id, error))
    }

    /// The same for rows.
    pub(crate) fn check_rows(
        &self,
        plan: &ShardingPlan,
        rows: RowsOf<'_>,
        factor: f64,
    ) -> Result<(), Error> {
        let id = rows.variable;
        let Some(Compressed { codec, .. }) = self.variables.get(&id) else { return Ok(()) };
        let result = match plan.catalogue().variable(id).dtype() {
            DType::F64 => codec.check(&rows.elements::<f64>()),
            dtype => check_singles(codec, dtype, rows.values, factor),
        };
        result.map_err(|error| match error {
            EncodeError::NonFinite { element, value, .. } => rows.non_finite(plan, element, value),
            error => Compression::error(plan, id, error),
        })
    }

    /// Encodes the gradient of a variable, if it travels so, and keeps what that leaves out; the parts in which it
    /// travels are added to `out`. `bytes` are all its elements, aligned; those of a half type are
    /// multiplied with `factor`.
    pub(crate) fn encode(
        &mut self,
        plan: &ShardingPlan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
        out: &mut Copies,
    ) -> Result<(), Error> {
        let Compression { variables, wide } = self;
        let Some(Compressed { codec, left }) = variables.get_mut(&id) else { return Ok(()) };
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        let partitions = plan.catalogue().partitions_of(id);
        let encoded = match left {
            Left::F32(left) => {
                let gradient = singles(variable.dtype(), bytes, factor, wide);
                encode(codec, left, partitions, plan, gradient, out)
            }
            Left::F64(left) => {
                encode(codec, left, partitions, plan, bytemuck::cast_slice(bytes), out)
            }
            Left::RowsF32(_) | Left::RowsF64(_) => unreachable!("rows have parts of their own"),
        };
        encoded.map_err(|error| Compression::error(plan, id, error))
    }

    /// Encodes the rows of a partition, and keeps what that leaves out; the parts in which their values
    /// travel are added to `out`. Those of a half type are multiplied with `factor`.
    pub(crate) fn encode_rows(
        &mut self,
        plan: &ShardingPlan,
        partition: &Partition,
        rows: RowsOf<'_>,
        factor: f64,
        out: &mut Copies,
    ) -> Result<(), Error> {
        let (id, most) = (rows.variable, plan.part_bytes());
        let Compression { variables, wide } = self;
        let Some(Compressed { codec, left }) = variables.get_mut(&id) else { return Ok(()) };
        let dtype = plan.catalogue().variable(id).dtype();
        let encoded = match left {
            Left::RowsF32(left) => {
                let values = singles(dtype, rows.values, factor, wide);
                left.encode(codec, partition, most, rows.ids, values, out)
            }
            Left::RowsF64(left) => {
                left.encode(codec, partition, most, rows.ids, &rows.elements::<f64>(), out)
            }
            Left::F32(_) | Left::F64(_) => unreachable!("only what is sparse has rows"),
        };
        encoded.map_err(|error| Compression::error(plan, id, error))
    }

    fn error(plan: &ShardingPlan, id: VariableId, error: EncodeError) -> Error {
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
    plan: &ShardingPlan,
    gradient: &[T],
    out: &mut Copies,
) -> Result<(), EncodeError> {
    partitions.iter().try_for_each(|partition| {
        let elements = partition.elements.start as usize..partition.elements.end as usize;
        stretches(codec, left, partition, plan.part_bytes(), elements, gradient, out)
    })
}

/// Adds the parts in which these elements of a gradient travel, the first of which are the first of what
/// is pushed of a partition; what is left of them has the same places in `left`.
fn stretches<T: Real>(
    codec: &Codec,
    left: &mut Residual<T>,
    partition: &Partition,
    part_bytes: u64,
    elements: Range<usize>,
    gradient: &[T],
    out: &mut Copies,
) -> Result<(), EncodeError> {
    let encoding = codec.encoding();
    let mut start = elements.start;
    while start < elements.end {
        let before = ((start - elements.start) * size_of::<T>()) as u64;
        let blocks = partition.blocks_from(partition.offset + before);
        let most = stretch_elements(encoding, blocks, T::DTYPE, part_bytes);
        let stretch = start..elements.end.min(start + most);
        out.add_encoded(partition, before, stretch.len(), encoding, |out| {
            left.encode(codec, blocks, start, &gradient[stretch.clone()], out)
        })?;
        start = stretch.end;
    }
    Ok(())
}

/// Elements of `f32`, or of a half type in `f32` and multiplied, as the servers would have them. They are
/// in `wide` where they cannot be had as they lie.
fn singles<'a>(dtype: DType, bytes: &'a [u8], factor: f64, wide: &'a mut Vec<f32>) -> &'a [f32] {
    if let Some(elements) = as_singles(dtype, bytes) {
        return elements;
    }
    wide.resize(bytes.len() / dtype.size(), 0.0);
    widen(dtype, bytes, factor, wide);
    wide
}

/// What is found first in elements that are had so, looked at a few at a time; and how many elements come
/// before those it was found in.
pub(crate) fn find_in_singles<R>(
    dtype: DType,
    bytes: &[u8],
    factor: f64,
    find: impl Fn(&[f32]) -> Option<R>,
) -> Option<(usize, R)> {
    const FEW: usize = 256;
    if let Some(elements) = as_singles(dtype, bytes) {
        return find(elements).map(|found| (0, found));
    }
    let mut few = [0.0; FEW];
    bytes.chunks(FEW * dtype.size()).enumerate().find_map(|(nth, bytes)| {
        let few = &mut few[..bytes.len() / dtype.size()];
        widen(dtype, bytes, factor, few);
        find(few).map(|found| (nth * FEW, found))
    })
}

fn check_singles(
    codec: &Codec,
    dtype: DType,
    bytes: &[u8],
    factor: f64,
) -> Result<(), EncodeError> {
    match find_in_singles(dtype, bytes, factor, |elements| codec.check(elements).err()) {
        None => Ok(()),
        Some((first, EncodeError::NonFinite { codec, element, value })) => {
            Err(EncodeError::NonFinite { codec, element: first + element, value })
        }
        Some((_, error)) => Err(error),
    }
}

fn as_singles(dtype: DType, bytes: &[u8]) -> Option<&[f32]> {
    (dtype == DType::F32).then(|| bytemuck::try_cast_slice(bytes).ok()).flatten()
}

/// Elements of a type that `f32` has room for, multiplied.
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
    fn a_rule_for_all_leaves_alone_what_cannot_have_it() {
        let variables = vec![
            VariableSpec::f32("dense", [4]).unwrap(),
            VariableSpec::f32("rows", [4, 2]).unwrap().sparse(),
            VariableSpec::f32("ledger", [4]).unwrap().plain(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let chosen = |rules: &[(&str, Option<Codec>)]| {
            let rule = |&(names, codec): &(&str, _)| Rule { names: names.into(), codec };
            let rules: Vec<Rule> = rules.iter().map(rule).collect();
            let compression = Compression::new(&catalogue, &rules, &BTreeMap::new(), 0).unwrap();
            let codec = |id| compression.variables.get(&VariableId(id)).map(|found| found.codec);
            [codec(0), codec(1), codec(2)]
        };
        let (topk, int8) = (Some(Codec::TopK { fraction: 0.1 }), Some(Codec::Int8));
        assert_eq!(chosen(&[("rows", int8), ("*", topk)]), [topk, int8, None]);
        assert_eq!(chosen(&[("*", topk), ("rows", int8)]), [topk, int8, None]);
        assert_eq!(chosen(&[("*", int8), ("rows", None)]), [int8, None, None]);
        assert_eq!(chosen(&[("rows", int8), ("*", None)]), [None; 3]);
    }

    /// What a server says it knows when it is met decides, for each variable that it holds.
    #[test]
    fn a_codec_that_a_server_does_not_know_is_refused_by_name() {
        let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [4]).unwrap()).to_vec();
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let old = Encodings(1 << Encoding::F16.code());
        let shards = [0, 1].map(|task| ShardId { task, shard: 0 });
        let known = BTreeMap::from([(shards[0], Encodings::all()), (shards[1], old)]);
        let join = |names: &str, codec| {
            let rules = [Rule { names: names.into(), codec: Some(codec) }];
            Compression::new(&catalogue, &rules, &known, 0).map(|_| ())
        };
        let refused = join("*", Codec::OneBit).unwrap_err();
        assert!(
            matches!(&refused, JoinError::UnknownCodec { variable, codec: Codec::OneBit, shard }
                if variable == "b" && *shard == shards[1]),
            "{refused}"
        );
        assert!(join("a", Codec::OneBit).is_ok() && join("*", Codec::F16).is_ok());
    }

    /// What is found among halves is found at its place, however many are looked at at a time.
    #[test]
    fn elements_that_are_widened_keep_their_places() {
        let mut halves = vec![f16::from_f32(2.0); 1_000];
        halves[700] = f16::from_f32(3.0);
        let bytes = bytemuck::cast_slice(&halves);
        let large = |elements: &[f32]| elements.iter().position(|&element| element > 20.0);
        assert_eq!(find_in_singles(DType::F16, bytes, 8.0, large), Some((512, 188)));
        assert_eq!(find_in_singles(DType::F16, bytes, 1.0, large), None);
        halves[999] = f16::INFINITY;
        let bytes = bytemuck::cast_slice(&halves);
        let found = check_singles(&Codec::Int8, DType::F16, bytes, 1.0);
        assert!(matches!(found, Err(EncodeError::NonFinite { element: 999, .. })), "{found:?}");
        let mut wide = Vec::default();
        assert_eq!(singles(DType::F16, bytes, 0.5, &mut wide)[699..702], [1.0, 1.5, 1.0]);
        let own = [1.0_f32, 2.0];
        let taken = singles(DType::F32, bytemuck::cast_slice(&own), 1.0, &mut wide);
        assert!(std::ptr::eq(taken.as_ptr(), own.as_ptr()), "they are not copied");
    }
}
