//! The variables of a training, with their places: what all tasks agree on at join.
//!
//! A catalogue gives every variable and every partition a dense id, and every shard a layout: the
//! partitions it holds one behind the other, each padded to 8 bytes. Pushes and pulls speak of
//! ranges of that layout, so that many variables travel in one message.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::ids::{PartitionId, ShardId, VariableId};
use crate::initializer::{FromValue, Initializer};
use crate::placement::Placement;
use crate::protocol::ProtocolError;
use crate::protocol::limits::{CATALOGUE_BYTES_MAX, NAME_BYTES_MAX};
use crate::protocol::wire::{Reader, Text, Wire};
use crate::tensor::{DType, Shape, ShapeError};
use crate::variable::{VariableError, VariableSpec};

/// Why a list of variables is not a catalogue.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// Two variables have one name.
    #[error("cannot declare the variable {name:?} twice")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// The partitions of a variable do not cover it exactly, in order.
    #[error(
        "cannot place {name:?}: its rows are 0..{rows}, and partition {part} starts at {start}"
    )]
    Partitions {
        /// The variable.
        name: String,
        /// How many rows it has.
        rows: u64,
        /// The partition that is out of place, or missing.
        part: u32,
        /// Where it starts.
        start: u64,
    },
    /// The encoded catalogue is too large for a message, or a shard's variables for a file.
    #[error("cannot declare so much: {what} is {found} bytes, the limit is {limit}")]
    TooLarge {
        /// What is too large.
        what: String,
        /// Its bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A variable that cannot exist.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// A shape that cannot exist.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Bytes that are not a catalogue.
    #[error(transparent)]
    Encoding(#[from] ProtocolError),
}

/// A row range of a variable, on the shard that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Partition {
    /// Its index in the catalogue.
    pub id: PartitionId,
    /// The variable it is a part of.
    pub variable: VariableId,
    /// Its rows within the variable.
    pub rows: Range<u64>,
    /// Its elements within the variable, in row-major order.
    pub elements: Range<u64>,
    /// The type of its elements.
    pub dtype: DType,
    /// Whether the optimizer updates it.
    pub trainable: bool,
    /// The shard that holds it.
    pub shard: ShardId,
    /// Where it starts in the shard's layout, in bytes; a multiple of 8.
    pub offset: u64,
    /// Its length in bytes, without padding.
    pub bytes: u64,
}

impl Partition {
    /// Where the next partition of the shard's layout starts.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.next_multiple_of(ALIGN)
    }
}

/// The partitions of one shard, one behind the other in order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardLayout {
    partitions: Vec<Partition>,
}

impl ShardLayout {
    /// The partitions.
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// The length of the layout in bytes, with padding.
    pub fn bytes(&self) -> u64 {
        self.partitions.last().map_or(0, Partition::end)
    }

    /// Whether a partition starts at this byte.
    pub fn starts_at(&self, offset: u64) -> bool {
        let index = self.partitions.partition_point(|partition| partition.offset < offset);
        self.partitions.get(index).is_some_and(|partition| partition.offset == offset)
    }

    /// The partition that lies on both sides of this byte.
    pub fn cut_at(&self, end: u64) -> Option<&Partition> {
        self.partitions.get(self.first_beyond(end)).filter(|partition| partition.offset < end)
    }

    /// The partition that holds this byte, or its padding does.
    ///
    /// # Panics
    /// If the byte lies beyond the layout.
    pub fn at(&self, offset: u64) -> &Partition {
        &self.partitions[self.first_beyond(offset)]
    }

    /// The partitions that a range touches, without those that have no elements.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        self.partitions[self.first_beyond(range.start)..]
            .iter()
            .take_while(move |partition| partition.offset < range.end)
            .filter(|partition| partition.bytes > 0)
    }

    fn first_beyond(&self, offset: u64) -> usize {
        self.partitions.partition_point(|partition| partition.end() <= offset)
    }
}

/// Variables, their partitions, and where each lives. One that exists is correct.
#[derive(Clone, Debug)]
pub struct Catalogue {
    variables: Vec<VariableSpec>,
    names: HashMap<String, VariableId>,
    partitions: Vec<Partition>,
    /// Where the partitions of each variable start in `partitions`.
    starts: Vec<usize>,
    layouts: BTreeMap<ShardId, ShardLayout>,
    encoded: Vec<u8>,
    digest: [u8; 32],
}

/// Where one partition lies: all that is not implied by its variable.
struct Place {
    variable: VariableId,
    rows: Range<u64>,
    shard: ShardId,
}

const ALIGN: u64 = 8;
const FORMAT: u16 = 0;
/// The bytes of one shard's layout: far below where a sum of a few such could overflow.
const LAYOUT_BYTES_MAX: u64 = 1 << 48;

impl Catalogue {
    /// The catalogue of these variables in this placement, which must have been planned for them.
    pub fn new(
        variables: Vec<VariableSpec>,
        placement: &Placement,
    ) -> Result<Catalogue, CatalogueError> {
        for variable in &variables {
            variable.validate()?;
        }
        let places = placement.partitions().iter();
        let places = places
            .map(|placed| Place {
                variable: placed.variable,
                rows: placed.rows.clone(),
                shard: placed.shard,
            })
            .collect();
        Catalogue::build(variables, places)
    }

    fn build(
        variables: Vec<VariableSpec>,
        places: Vec<Place>,
    ) -> Result<Catalogue, CatalogueError> {
        let encoded = encode(&variables, &places);
        too_large("the catalogue", encoded.len() as u64, CATALOGUE_BYTES_MAX)?;
        let mut names = HashMap::with_capacity(variables.len());
        for (index, variable) in variables.iter().enumerate() {
            let name = variable.name().to_owned();
            if names.insert(name.clone(), VariableId(index as u32)).is_some() {
                return Err(CatalogueError::DuplicateName { name });
            }
        }
        let starts = check_coverage(&variables, &places)?;
        let (partitions, layouts) = lay_out(&variables, places)?;
        let digest = Sha256::digest(&encoded).into();
        Ok(Catalogue { variables, names, partitions, starts, layouts, encoded, digest })
    }

    /// Reads an encoded catalogue. The bytes may be anybody's: they are checked as they are read.
    pub fn decode(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
        let mut reader = Reader::new("Catalogue", bytes);
        let format = u16::take(&mut reader)?;
        if format != FORMAT {
            return Err(reader.invalid("format", format.into()).into());
        }
        let count = u32::take(&mut reader)?;
        let mut variables = Vec::new();
        for _ in 0..count {
            variables.push(take_variable(&mut reader)?);
        }
        let count = u32::take(&mut reader)?;
        let mut places = Vec::new();
        for _ in 0..count {
            let variable = VariableId::take(&mut reader)?;
            let rows = u64::take(&mut reader)?..u64::take(&mut reader)?;
            places.push(Place { variable, rows, shard: ShardId::take(&mut reader)? });
        }
        let spare = reader.invalid("unused bytes of an initializer", 0);
        reader.finish()?;
        let catalogue = Catalogue::build(variables, places)?;
        // One catalogue has one encoding, or two equal ones would have two digests.
        if catalogue.encoded == bytes { Ok(catalogue) } else { Err(spare.into()) }
    }

    /// The catalogue as bytes: the same for the same variables and placement on every machine.
    pub fn encode(&self) -> &[u8] {
        &self.encoded
    }

    /// SHA-256 of [`Catalogue::encode`].
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The variables in creation order.
    pub fn variables(&self) -> &[VariableSpec] {
        &self.variables
    }

    /// One variable.
    ///
    /// # Panics
    /// If the id is not of this catalogue.
    pub fn variable(&self, id: VariableId) -> &VariableSpec {
        &self.variables[id.0 as usize]
    }

    /// The variable of this name.
    pub fn find(&self, name: &str) -> Option<VariableId> {
        self.names.get(name).copied()
    }

    /// All partitions in order of their ids.
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// The partitions of one variable, in order of rows.
    pub fn partitions_of(&self, id: VariableId) -> &[Partition] {
        let start = self.starts[id.0 as usize];
        let end = self.starts.get(id.0 as usize + 1).copied().unwrap_or(self.partitions.len());
        &self.partitions[start..end]
    }

    /// The shards that hold something.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> {
        self.layouts.keys().copied()
    }

    /// What a shard holds; empty for one that holds nothing.
    pub fn layout(&self, shard: ShardId) -> ShardLayout {
        self.layouts.get(&shard).cloned().unwrap_or_default()
    }

    /// Fills `out` with the initial values of a variable, from its `first_element` on.
    pub fn fill<T: FromValue>(&self, id: VariableId, first_element: u64, out: &mut [T]) {
        let variable = self.variable(id);
        let (seed, name, shape) = (variable.seed, variable.name(), variable.shape());
        variable.initializer.fill(seed, name, shape, first_element, out);
    }

    /// The first difference to another catalogue in words, this one's side first.
    pub fn difference(&self, other: &Catalogue) -> Option<String> {
        for (ours, theirs) in self.variables.iter().zip(&other.variables) {
            if let Some(difference) = differ(ours, theirs) {
                return Some(difference);
            }
        }
        let (ours, theirs) = (self.variables.len(), other.variables.len());
        if ours != theirs {
            let (longer, side) = if ours > theirs {
                (&self.variables, "only here")
            } else {
                (&other.variables, "only there")
            };
            let name = longer[ours.min(theirs)].name();
            return Some(format!("{ours} variables, not {theirs}: {name:?} is {side}"));
        }
        self.partitions.iter().zip(&other.partitions).find(|(a, b)| a != b).map(|(a, b)| {
            let name = self.variable(a.variable).name();
            format!(
                "rows {:?} of {name:?} lie on {}, not rows {:?} on {}",
                a.rows, a.shard, b.rows, b.shard
            )
        })
    }
}

fn differ(ours: &VariableSpec, theirs: &VariableSpec) -> Option<String> {
    let (name, other) = (ours.name(), theirs.name());
    if name != other {
        return Some(format!("a variable is named {name:?}, not {other:?}"));
    }
    if ours.dtype() != theirs.dtype() {
        return Some(format!("{name:?} is of {}, not {}", ours.dtype(), theirs.dtype()));
    }
    if ours.shape() != theirs.shape() {
        return Some(format!("{name:?} has the shape {}, not {}", ours.shape(), theirs.shape()));
    }
    if ours.is_trainable() != theirs.is_trainable() {
        let word = |trainable| if trainable { "trainable" } else { "plain" };
        let (a, b) = (word(ours.is_trainable()), word(theirs.is_trainable()));
        return Some(format!("{name:?} is {a}, not {b}"));
    }
    if (ours.initializer, ours.seed) != (theirs.initializer, theirs.seed) {
        return Some(format!(
            "{name:?} starts as {} with seed {}, not {} with seed {}",
            ours.initializer, ours.seed, theirs.initializer, theirs.seed
        ));
    }
    None
}

/// Checks that the partitions of each variable follow each other and cover it; returns where
/// those of each variable start.
fn check_coverage(
    variables: &[VariableSpec],
    places: &[Place],
) -> Result<Vec<usize>, CatalogueError> {
    let mut starts = Vec::with_capacity(variables.len());
    let mut next = 0;
    for (index, variable) in variables.iter().enumerate() {
        starts.push(next);
        let rows = variable.shape().rows();
        let (mut part, mut row) = (0, 0);
        let fault = |part, start| CatalogueError::Partitions {
            name: variable.name().to_owned(),
            rows,
            part,
            start,
        };
        while let Some(place) = places.get(next).filter(|p| p.variable.0 as usize == index) {
            let in_place = place.rows.start == row && place.rows.end <= rows;
            let moves_on = place.rows.end > row || (rows == 0 && part == 0);
            if !in_place || !moves_on {
                return Err(fault(part, place.rows.start));
            }
            row = place.rows.end;
            (part, next) = (part + 1, next + 1);
        }
        if row != rows || part == 0 {
            return Err(fault(part, row));
        }
    }
    match places.get(next) {
        None => Ok(starts),
        Some(place) => Err(CatalogueError::Partitions {
            name: format!("variable {}", place.variable),
            rows: 0,
            part: 0,
            start: place.rows.start,
        }),
    }
}

fn lay_out(
    variables: &[VariableSpec],
    places: Vec<Place>,
) -> Result<(Vec<Partition>, BTreeMap<ShardId, ShardLayout>), CatalogueError> {
    let mut partitions = Vec::with_capacity(places.len());
    let mut layouts: BTreeMap<ShardId, ShardLayout> = BTreeMap::new();
    for (id, place) in places.into_iter().enumerate() {
        let variable = &variables[place.variable.0 as usize];
        let width = variable.shape().row_elements();
        // A shape bounds its elements to 2^48, so the byte counts of its rows cannot overflow.
        let elements = place.rows.start * width..place.rows.end * width;
        let layout = layouts.entry(place.shard).or_default();
        let partition = Partition {
            id: PartitionId(id as u32),
            variable: place.variable,
            rows: place.rows,
            dtype: variable.dtype(),
            trainable: variable.is_trainable(),
            shard: place.shard,
            offset: layout.bytes(),
            bytes: (elements.end - elements.start) * variable.dtype().size() as u64,
            elements,
        };
        let what = || format!("{}", partition.shard);
        too_large(&what(), partition.end(), LAYOUT_BYTES_MAX)?;
        layout.partitions.push(partition.clone());
        partitions.push(partition);
    }
    Ok((partitions, layouts))
}

fn too_large(what: &str, found: u64, limit: u64) -> Result<(), CatalogueError> {
    let what = what.to_owned();
    if found > limit { Err(CatalogueError::TooLarge { what, found, limit }) } else { Ok(()) }
}

fn encode(variables: &[VariableSpec], places: &[Place]) -> Vec<u8> {
    let mut out = Vec::new();
    FORMAT.put(&mut out);
    (variables.len() as u32).put(&mut out);
    for variable in variables {
        // A variable's name is never too long to travel: both limits are the same.
        Text::<NAME_BYTES_MAX>::clipped(variable.name()).put(&mut out);
        variable.dtype().code().put(&mut out);
        out.push(variable.shape().rank() as u8);
        for extent in variable.shape().extents() {
            extent.put(&mut out);
        }
        variable.is_trainable().put(&mut out);
        put_initializer(variable.initializer, &mut out);
        variable.seed.put(&mut out);
    }
    (places.len() as u32).put(&mut out);
    for place in places {
        place.variable.put(&mut out);
        place.rows.start.put(&mut out);
        place.rows.end.put(&mut out);
        place.shard.put(&mut out);
    }
    out
}

fn take_variable(reader: &mut Reader<'_>) -> Result<VariableSpec, CatalogueError> {
    let name = Text::<NAME_BYTES_MAX>::take(reader)?;
    let code = u8::take(reader)?;
    let dtype = DType::from_code(code).ok_or_else(|| reader.invalid("dtype", code.into()))?;
    let rank = usize::from(u8::take(reader)?);
    if rank > Shape::RANK_MAX {
        return Err(ShapeError::Rank { rank }.into());
    }
    let extents: Vec<u64> =
        (0..rank).map(|_| u64::take(reader)).collect::<Result<_, ProtocolError>>()?;
    let trainable = bool::take(reader)?;
    if trainable && !dtype.is_float() {
        return Err(reader.invalid("trainable", 1).into());
    }
    let initializer = take_initializer(reader)?;
    let seed = u64::take(reader)?;
    let mut variable = VariableSpec::new(name.as_str(), dtype, Shape::new(extents)?)?
        .initializer(initializer)
        .seed(seed);
    if !trainable {
        variable = variable.plain();
    }
    variable.validate()?;
    Ok(variable)
}

fn put_initializer(initializer: Initializer, out: &mut Vec<u8>) {
    let (tag, a, b): (u8, f64, f64) = match initializer {
        Initializer::Zeros => (1, 0.0, 0.0),
        Initializer::Ones => (2, 0.0, 0.0),
        Initializer::Constant(value) => (3, value, 0.0),
        Initializer::Uniform { low, high } => (4, low, high),
        Initializer::Normal { mean, stddev } => (5, mean, stddev),
        Initializer::TruncatedNormal { mean, stddev } => (6, mean, stddev),
        Initializer::GlorotUniform => (7, 0.0, 0.0),
        Initializer::GlorotNormal => (8, 0.0, 0.0),
        Initializer::HeUniform => (9, 0.0, 0.0),
        Initializer::HeNormal => (10, 0.0, 0.0),
    };
    tag.put(out);
    a.put(out);
    b.put(out);
}

fn take_initializer(reader: &mut Reader<'_>) -> Result<Initializer, ProtocolError> {
    let (tag, a, b) = (u8::take(reader)?, f64::take(reader)?, f64::take(reader)?);
    Ok(match tag {
        1 => Initializer::Zeros,
        2 => Initializer::Ones,
        3 => Initializer::Constant(a),
        4 => Initializer::Uniform { low: a, high: b },
        5 => Initializer::Normal { mean: a, stddev: b },
        6 => Initializer::TruncatedNormal { mean: a, stddev: b },
        7 => Initializer::GlorotUniform,
        8 => Initializer::GlorotNormal,
        9 => Initializer::HeUniform,
        10 => Initializer::HeNormal,
        other => return Err(reader.invalid("initializer", other.into())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Partitioner;
    use crate::placement::{ShardMap, Strategy};

    fn variables() -> Vec<VariableSpec> {
        vec![
            VariableSpec::f32("w", [10, 3]).unwrap().partitioner(Partitioner::Fixed { shards: 4 }),
            VariableSpec::f32("b", [3]).unwrap().initializer(Initializer::Constant(0.5)).seed(9),
            VariableSpec::new("n", DType::I64, Shape::scalar()).unwrap(),
            VariableSpec::f32("none", [0, 4]).unwrap(),
        ]
    }

    fn catalogue(variables: Vec<VariableSpec>) -> Catalogue {
        let map = ShardMap::new([0, 1], 2).unwrap();
        let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin).unwrap();
        Catalogue::new(variables, &placement).unwrap()
    }

    #[test]
    fn layouts_are_dense_padded_and_findable() {
        let catalogue = catalogue(variables());
        let mut seen = 0;
        for shard in catalogue.shards() {
            let layout = catalogue.layout(shard);
            let mut end = 0;
            for partition in layout.partitions() {
                assert_eq!((partition.offset, partition.offset % 8), (end, 0));
                end = partition.end();
                seen += 1;
                assert!(layout.starts_at(partition.offset));
                if partition.bytes > 8 {
                    assert_eq!(layout.at(partition.offset + 4).id, partition.id);
                    assert_eq!(
                        layout.cut_at(partition.offset + 8).map(|p| p.id),
                        Some(partition.id)
                    );
                    assert!(!layout.starts_at(partition.offset + 8));
                }
                assert!(layout.cut_at(partition.end()).is_none());
            }
            assert_eq!(layout.bytes(), end);
        }
        assert_eq!(seen, catalogue.partitions().len());
        let rows: Vec<_> =
            catalogue.partitions_of(VariableId(0)).iter().map(|p| p.rows.clone()).collect();
        assert_eq!(rows, [0..3, 3..6, 6..8, 8..10]);
    }

    #[test]
    fn encoding_round_trips_and_the_digest_tells_any_difference() {
        let ours = catalogue(variables());
        let decoded = Catalogue::decode(ours.encode()).unwrap();
        assert_eq!(decoded.digest(), ours.digest());
        assert_eq!(decoded.partitions(), ours.partitions());
        assert_eq!(ours.difference(&decoded), None);
        type Change = fn(&mut Vec<VariableSpec>);
        let changes: [(Change, &str); 4] = [
            (|v| v[1] = VariableSpec::f32("b", [4]).unwrap(), "[3], not [4]"),
            (|v| v[1].seed = 8, "seed 9"),
            (|v| v.truncate(3), "\"none\" is only here"),
            (|v| v[0].partitioner = Partitioner::Fixed { shards: 2 }, "rows 0..3 of \"w\""),
        ];
        for (change, expected) in changes {
            let mut other = variables();
            change(&mut other);
            let other = catalogue(other);
            assert_ne!(ours.digest(), other.digest());
            let difference = ours.difference(&other).unwrap();
            assert!(difference.contains(expected), "{difference}");
        }
    }

    #[test]
    fn hostile_bytes_are_refused_at_every_length_and_flip() {
        let encoded = catalogue(variables()).encode().to_vec();
        for length in 0..encoded.len() {
            assert!(Catalogue::decode(&encoded[..length]).is_err(), "cut to {length}");
        }
        for byte in 0..encoded.len() {
            let mut flipped = encoded.clone();
            flipped[byte] ^= 0xff;
            // Another name or seed is another catalogue, with another digest.
            if let Ok(catalogue) = Catalogue::decode(&flipped) {
                assert_eq!(catalogue.encode(), flipped);
            }
        }
        let twice =
            vec![VariableSpec::f32("w", [1]).unwrap(), VariableSpec::f32("w", [1]).unwrap()];
        let places = |count| {
            (0..count)
                .map(|v| Place { variable: VariableId(v), rows: 0..1, shard: ShardId::default() })
                .collect()
        };
        let error = Catalogue::build(twice.clone(), places(2)).unwrap_err();
        assert_eq!(error, CatalogueError::DuplicateName { name: "w".into() });
        for wrong in [0, 3] {
            let variables = vec![twice[0].clone()];
            let error = Catalogue::build(variables, places(wrong)).unwrap_err();
            assert!(matches!(error, CatalogueError::Partitions { .. }), "{error}");
        }
    }
}
