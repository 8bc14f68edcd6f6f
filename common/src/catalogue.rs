//! The catalogue: the variables of a model and where each is placed. All tasks agree on it at join.
//!
//! A catalogue gives every variable and every partition a dense id. It gives every shard a layout:
//! the shard's partitions back to back, each padded to 8 bytes. Pushes and pulls name ranges of
//! that layout, so one message carries many variables.

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
use crate::placement::{Placement, TaskLoads};
use crate::protocol::ProtocolError;
use crate::protocol::limits::CATALOGUE_BYTES_MAX;
use crate::tensor::ShapeError;
use crate::variable::{VariableError, VariableSpec};

pub use layout::{Partition, ShardLayout};
pub use pieces::{LayoutPiece, ValueEncoding};

/// The reason why a list of variables and partitions is not a valid catalogue.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// Two variables have the same name.
    #[error("cannot declare the variable {name:?} twice")]
    DuplicateName {
        /// The name of both.
        name: String,
    },
    /// The partitions of a variable do not cover its rows exactly, in order.
    #[error(
        "cannot place {name:?}: its rows are 0..{rows}, and partition {part} starts at {start}"
    )]
    Partitions {
        /// The variable's name.
        name: String,
        /// The number of rows of the variable.
        rows: u64,
        /// The index of the partition that is out of order or absent.
        part: u32,
        /// The first row of that partition, or the first row that no partition covers.
        start: u64,
    },
    /// The encoded catalogue is too large for a message, or a shard's layout for a file.
    #[error("cannot declare the variables: {what} is {found} bytes: the limit is {limit}")]
    TooLarge {
        /// The thing that is too large.
        what: String,
        /// Its size in bytes.
        found: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A variable is invalid.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// A shape is invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The bytes do not encode a catalogue.
    #[error(transparent)]
    Encoding(#[from] ProtocolError),
}

/// The variables of a model, their partitions and the shard of each partition; always valid.
#[derive(Clone, Debug)]
pub struct Catalogue {
    variables: Vec<VariableSpec>,
    names: HashMap<String, VariableId>,
    partitions: Vec<Partition>,
    /// The index in `partitions` of each variable's first partition.
    starts: Vec<usize>,
    layouts: BTreeMap<ShardId, ShardLayout>,
    encoded: Vec<u8>,
    digest: [u8; 32],
}

/// The shard of one partition: the fields that its variable does not imply.
struct PartitionPlacement {
    variable: VariableId,
    rows: Range<u64>,
    shard: ShardId,
}

impl Catalogue {
    /// Builds the catalogue of `variables` with a `placement` that was planned for exactly these.
    pub fn new(
        variables: Vec<VariableSpec>,
        placement: &Placement,
    ) -> Result<Catalogue, CatalogueError> {
        for variable in &variables {
            variable.validate()?;
        }
        let places = placement.partitions().iter();
        let places = places
            .map(|placed| PartitionPlacement {
                variable: placed.variable,
                rows: placed.rows.clone(),
                shard: placed.shard,
            })
            .collect();
        Catalogue::build(variables, places)
    }

    fn build(
        variables: Vec<VariableSpec>,
        places: Vec<PartitionPlacement>,
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

    /// Decodes a catalogue; the bytes may be hostile and are validated while they are read.
    pub fn decode(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
        let (variables, places) = encoding::decode(bytes)?;
        let catalogue = Catalogue::build(variables, places)?;
        // Only the canonical encoding is accepted: equal catalogues must have equal digests.
        if catalogue.encoded == bytes { Ok(catalogue) } else { Err(encoding::not_canonical()) }
    }

    /// Returns the canonical encoding: the same variables and placement give the same bytes
    /// everywhere.
    pub fn encode(&self) -> &[u8] {
        &self.encoded
    }

    /// Returns the SHA-256 of [`Catalogue::encode`].
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Returns the variables in creation order.
    pub fn variables(&self) -> &[VariableSpec] {
        &self.variables
    }

    /// Returns one variable.
    ///
    /// # Panics
    /// If the id is not in this catalogue.
    pub fn variable(&self, id: VariableId) -> &VariableSpec {
        &self.variables[id.0 as usize]
    }

    /// Returns the id of the variable with this name.
    pub fn find(&self, name: &str) -> Option<VariableId> {
        self.names.get(name).copied()
    }

    /// Returns all partitions in order of their ids.
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// Returns the partitions of one variable, in order of rows.
    pub fn partitions_of(&self, id: VariableId) -> &[Partition] {
        let start = self.starts[id.0 as usize];
        let end = self.starts.get(id.0 as usize + 1).copied().unwrap_or(self.partitions.len());
        &self.partitions[start..end]
    }

    /// Returns the shards that hold at least one partition.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> {
        self.layouts.keys().copied()
    }

    /// Returns the layout of a shard by reference; `None` if the shard holds nothing.
    pub fn layout_of(&self, shard: ShardId) -> Option<&ShardLayout> {
        self.layouts.get(&shard)
    }

    /// Returns a copy of the layout of a shard; empty if the shard holds nothing.
    pub fn layout(&self, shard: ShardId) -> ShardLayout {
        self.layouts.get(&shard).cloned().unwrap_or_default()
    }

    /// Returns the bytes on each of these ps tasks, ascending. A table counts with its memory
    /// limit.
    pub fn task_loads(&self, tasks: &[u32]) -> TaskLoads {
        let partitions = self.partitions.iter();
        TaskLoads::new(tasks, partitions.map(|part| (part.shard.task, self.stored_bytes(part))))
    }

    /// Returns the bytes of a partition's elements as stored; for a table, its share of the memory
    /// limit.
    pub fn stored_bytes(&self, partition: &Partition) -> u64 {
        let rows = partition.rows.end - partition.rows.start;
        self.variable(partition.variable).bytes_of_rows(rows)
    }

    /// Fills `out` with the initial values of a variable, starting at `first_element`.
    pub fn fill<T: FromValue>(&self, id: VariableId, first_element: u64, out: &mut [T]) {
        let variable = self.variable(id);
        let seed = variable.seed;
        let name = variable.name();
        let shape = variable.shape();
        variable.initializer.fill(seed, name, shape, first_element, out);
    }

    /// Describes the first difference from `other` in words; values of this catalogue come first.
    pub fn difference(&self, other: &Catalogue) -> Option<String> {
        for (ours, theirs) in self.variables.iter().zip(&other.variables) {
            if let Some(difference) = difference::of_variables(ours, theirs) {
                return Some(difference);
            }
        }
        let ours = self.variables.len();
        let theirs = other.variables.len();
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
                "rows {:?} of {name:?} are on {}, not rows {:?} on {}",
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
            VariableSpec::f32("m", [3]).unwrap().mean_every_steps(2),
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
        // The placement knows the bytes from its variables, the catalogue from its partitions.
        let map = ShardMap::new([0, 1], 2).unwrap();
        let placement =
            Placement::plan(&variables(), &map, &PlacementStrategy::RoundRobin).unwrap();
        assert_eq!(catalogue.task_loads(map.tasks()), placement.task_loads());
        let rows: Vec<_> =
            catalogue.partitions_of(VariableId(0)).iter().map(|p| p.rows.clone()).collect();
        assert_eq!(rows, [0..3, 3..6, 6..8, 8..10]);
        let halves = catalogue.partitions_of(VariableId(4));
        let kept: Vec<_> = halves.iter().map(|p| (p.dtype, p.own_encoding, p.bytes)).collect();
        let own = Some(Encoding::Bf16);
        assert_eq!(kept, [(DType::F32, own, 36), (DType::F32, own, 24)], "as f32");
    }

    #[test]
    fn the_encoding_round_trips_and_any_difference_changes_the_digest() {
        let ours = catalogue(variables());
        let decoded = Catalogue::decode(ours.encode()).unwrap();
        assert_eq!(decoded.digest(), ours.digest());
        assert_eq!(decoded.partitions(), ours.partitions());
        assert_eq!(ours.difference(&decoded), None);
        type SpecChange = fn(&mut Vec<VariableSpec>);
        let changes: [(SpecChange, &str); 8] = [
            (|v| v[1] = VariableSpec::f32("b", [4]).unwrap(), "[3], not [4]"),
            (|v| v[1].seed = 8, "seed 9"),
            (|v| v[4] = VariableSpec::f16("h", [5, 3]).unwrap(), "\"h\" is of bf16, not f16"),
            (|v| v[5] = v[5].clone().local(), "\"m\" is mean every 2 steps, not local"),
            (
                |v| v[5] = v[5].clone().mean_every_steps(3),
                "\"m\" is mean every 2 steps, not mean every 3",
            ),
            (|v| v[2] = v[2].clone().local(), "\"n\" is shared, not local"),
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

    /// A newer program may declare what this one does not know.
    #[test]
    fn unknown_and_invalid_updates_are_named() {
        let encoded = |variable: VariableSpec| catalogue(vec![variable]).encode().to_vec();
        let scalar = || VariableSpec::f32("b", []).unwrap();
        // Format, count, name, type and rank precede it.
        let update = 2 + 4 + (2 + 1) + 1 + 1;
        let mut bytes = encoded(scalar().local());
        assert_eq!(std::mem::replace(&mut bytes[update], 4), 2);
        let error = Catalogue::decode(&bytes).unwrap_err().to_string();
        assert!(error.contains("update") && error.contains('4'), "{error}");
        let mut bytes = encoded(scalar().mean_every_steps(7));
        assert_eq!(bytes[update..update + 2], [3, 7]);
        bytes[update + 1] = 0;
        let error = Catalogue::decode(&bytes).unwrap_err().to_string();
        assert!(error.contains("a mean every 0 steps"), "{error}");
    }

    #[test]
    fn truncated_and_flipped_bytes_are_rejected() {
        let encoded = catalogue(variables()).encode().to_vec();
        for length in 0..encoded.len() {
            assert!(Catalogue::decode(&encoded[..length]).is_err(), "cut to {length}");
        }
        for byte in 0..encoded.len() {
            let mut flipped = encoded.clone();
            flipped[byte] ^= 0xff;
            // A different name or seed gives another valid catalogue, with its own digest.
            if let Ok(catalogue) = Catalogue::decode(&flipped) {
                assert_eq!(catalogue.encode(), flipped);
            }
        }
        let twice =
            vec![VariableSpec::f32("w", [1]).unwrap(), VariableSpec::f32("w", [1]).unwrap()];
        let places = |count| {
            (0..count)
                .map(|v| PartitionPlacement {
                    variable: VariableId(v),
                    rows: 0..1,
                    shard: ShardId::default(),
                })
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
