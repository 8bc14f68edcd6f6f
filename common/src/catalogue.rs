//! The variables of a training, with their places: what all tasks agree on at join.
//!
//! A catalogue gives every variable and every partition a dense id, and every shard a layout: the
//! partitions it holds one behind the other, each padded to 8 bytes. Pushes and pulls speak of
//! ranges of that layout, so that many variables travel in one message.

mod difference;
mod encoding;
mod layout;
mod pieces;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::ids::{ShardId, VariableId};
use crate::initializer::FromValue;
use crate::placement::Placement;
use crate::protocol::ProtocolError;
use crate::protocol::limits::CATALOGUE_BYTES_MAX;
use crate::tensor::ShapeError;
use crate::variable::{VariableError, VariableSpec};

pub use layout::{Partition, ShardLayout};
pub use pieces::{Piece, ValueEncoding};

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
        let encoded = encoding::encode(&variables, &places);
        too_large("the catalogue", encoded.len() as u64, CATALOGUE_BYTES_MAX)?;
        let mut names = HashMap::with_capacity(variables.len());
        for (index, variable) in variables.iter().enumerate() {
            let name = variable.name().to_owned();
            if names.insert(name.clone(), VariableId(index as u32)).is_some() {
                return Err(CatalogueError::DuplicateName { name });
            }
        }
        let starts = layout::check_coverage(&variables, &places)?;
        let (partitions, layouts) = layout::lay_out(&variables, places)?;
        let digest = Sha256::digest(&encoded).into();
        Ok(Catalogue { variables, names, partitions, starts, layouts, encoded, digest })
    }

    /// Reads an encoded catalogue. The bytes may be anybody's: they are checked as they are read.
    pub fn decode(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
        let (variables, places) = encoding::decode(bytes)?;
        let catalogue = Catalogue::build(variables, places)?;
        // One catalogue has one encoding, or two equal ones would have two digests.
        if catalogue.encoded == bytes { Ok(catalogue) } else { Err(encoding::not_canonical()) }
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

    /// What a shard holds, without a copy; `None` for one that holds nothing.
    pub fn layout_of(&self, shard: ShardId) -> Option<&ShardLayout> {
        self.layouts.get(&shard)
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
            if let Some(difference) = difference::of_variables(ours, theirs) {
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

fn too_large(what: &str, found: u64, limit: u64) -> Result<(), CatalogueError> {
    let what = what.to_owned();
    if found > limit { Err(CatalogueError::TooLarge { what, found, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Encoding;
    use crate::initializer::Initializer;
    use crate::partition::Partitioner;
    use crate::placement::{PlacementStrategy, ShardMap};
    use crate::tensor::{DType, Shape};

    fn variables() -> Vec<VariableSpec> {
        vec![
            VariableSpec::f32("w", [10, 3]).unwrap().partitioner(Partitioner::Fixed { shards: 4 }),
            VariableSpec::f32("b", [3]).unwrap().initializer(Initializer::Constant(0.5)).seed(9),
            VariableSpec::new("n", DType::I64, Shape::scalar()).unwrap(),
            VariableSpec::f32("none", [0, 4]).unwrap(),
            VariableSpec::bf16("h", [5, 3]).unwrap().partitioner(Partitioner::Fixed { shards: 2 }),
        ]
    }

    fn catalogue(variables: Vec<VariableSpec>) -> Catalogue {
        let map = ShardMap::new([0, 1], 2).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
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
        let halves = catalogue.partitions_of(VariableId(4));
        let kept: Vec<_> = halves.iter().map(|p| (p.dtype, p.own, p.bytes)).collect();
        let own = Some(Encoding::Bf16);
        assert_eq!(kept, [(DType::F32, own, 36), (DType::F32, own, 24)], "as f32");
    }

    #[test]
    fn encoding_round_trips_and_the_digest_tells_any_difference() {
        let ours = catalogue(variables());
        let decoded = Catalogue::decode(ours.encode()).unwrap();
        assert_eq!(decoded.digest(), ours.digest());
        assert_eq!(decoded.partitions(), ours.partitions());
        assert_eq!(ours.difference(&decoded), None);
        type Change = fn(&mut Vec<VariableSpec>);
        let changes: [(Change, &str); 5] = [
            (|v| v[1] = VariableSpec::f32("b", [4]).unwrap(), "[3], not [4]"),
            (|v| v[1].seed = 8, "seed 9"),
            (|v| v[4] = VariableSpec::f16("h", [5, 3]).unwrap(), "\"h\" is of bf16, not f16"),
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
