//! [`Placement`]: every partition of every variable on its shard.

use std::cmp::Reverse;
use std::ops::Range;

use super::cut_rule::{CutRule, VariableKind};
use super::picker::{Picker, name_hashes};
use super::{CustomStrategy, PlacementError, PlacementStrategy, ShardMap};
use crate::cluster::index_list;
use crate::ids::{ShardId, VariableId};
use crate::partition::split_rows;
use crate::variable::VariableSpec;

/// A row range of a variable and the shard that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedPartition {
    /// The variable's index in the planned list.
    pub variable: VariableId,
    /// The index of the part, from 0.
    pub part: u32,
    /// The number of parts of the variable.
    pub parts: u32,
    /// The rows of the part; a scalar has the one row 0.
    pub rows: Range<u64>,
    /// The shard that holds the part.
    pub shard: ShardId,
    /// The bytes of the part's elements as stored; for a table, its share of the limit.
    pub bytes: u64,
}

/// The shard of every partition, in order of creation.
///
/// The row ranges of a variable's partitions are in order and cover each of its rows once.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub(super) partitions: Vec<PlacedPartition>,
    pub(super) map: ShardMap,
    pub(super) strategy: &'static str,
}

impl Placement {
    /// The largest number of partitions of all variables together.
    pub const PARTITIONS_MAX: usize = 1 << 20;

    /// Places the variables on the shards of `map`.
    ///
    /// [`PlacementStrategy::Balanced`] places pinned parts first, then the others by falling size.
    /// The other strategies place in the order of the variables. Each part draws once from them,
    /// even if its variable's device pins it to a ps task. For pinned parts,
    /// [`PlacementStrategy::GreedyBytes`] counts their bytes where they are, and a custom strategy
    /// is not called.
    ///
    /// Within a task a part goes to the shard with the fewest bytes so far, the lowest index on
    /// ties. [`PlacementStrategy::HashName`] hashes there too, so that the order of creation does
    /// not matter.
    ///
    /// Fails if a variable is invalid, if a pin or a custom strategy names a ps task outside the
    /// map, and beyond [`Placement::PARTITIONS_MAX`].
    pub fn plan(
        variables: &[VariableSpec],
        map: &ShardMap,
        strategy: &PlacementStrategy,
    ) -> Result<Placement, PlacementError> {
        let mut planner = Planner::new(variables, map, strategy);
        planner.cut()?;
        let partitions = planner.place()?;
        Ok(Placement { partitions, map: map.clone(), strategy: strategy.name() })
    }

    /// Returns all partitions: by variable, then by part.
    pub fn partitions(&self) -> &[PlacedPartition] {
        &self.partitions
    }

    /// Returns the partitions of one variable, by part; empty if there is no such variable.
    pub fn of_variable(&self, variable: VariableId) -> &[PlacedPartition] {
        let start = self.partitions.partition_point(|placed| placed.variable < variable);
        let end = self.partitions.partition_point(|placed| placed.variable <= variable);
        &self.partitions[start..end]
    }

    /// Returns the partitions that a shard holds, in order of creation.
    pub fn of_shard(&self, shard: ShardId) -> impl Iterator<Item = &PlacedPartition> {
        self.partitions.iter().filter(move |placed| placed.shard == shard)
    }

    /// Returns the shards of the plan.
    pub fn map(&self) -> &ShardMap {
        &self.map
    }

    /// Returns the name of the strategy; see [`PlacementStrategy::name`].
    pub fn strategy(&self) -> &'static str {
        self.strategy
    }
}

/// A placement under construction.
struct Planner<'a> {
    variables: &'a [VariableSpec],
    map: &'a ShardMap,
    strategy: &'a PlacementStrategy,
    tasks: Picker,
    /// One picker for each task, by its position in the map.
    shards: Vec<Picker>,
    pieces: Vec<Piece>,
}

/// A part of a variable before it has a shard.
struct Piece {
    variable: u32,
    part: u32,
    parts: u32,
    rows: Range<u64>,
    bytes: u64,
    /// The position of the task that the variable is pinned to.
    pinned: Option<usize>,
}

impl<'a> Planner<'a> {
    fn new(
        variables: &'a [VariableSpec],
        map: &'a ShardMap,
        strategy: &'a PlacementStrategy,
    ) -> Planner<'a> {
        let within = match strategy {
            PlacementStrategy::HashName => PlacementStrategy::HashName,
            _ => PlacementStrategy::GreedyBytes,
        };
        let shards = Picker::new(within, usize::from(map.shards_per_task()));
        Planner {
            variables,
            map,
            strategy,
            tasks: Picker::new(strategy.clone(), map.tasks().len()),
            shards: vec![shards; map.tasks().len()],
            pieces: Vec::new(),
        }
    }

    /// Cuts every variable into pieces.
    fn cut(&mut self) -> Result<(), PlacementError> {
        let variables = self.variables;
        let rule = CutRule::new(variables, self.map);
        let mut total = 0_u64;
        for (index, variable) in (0u32..).zip(variables) {
            variable.validate().map_err(|source| PlacementError::Variable { source })?;
            let parts = match self.strategy {
                PlacementStrategy::Balanced => rule.parts(variable)?,
                _ => variable.parts().map_err(|source| PlacementError::Variable { source })?,
            };
            let name = || variable.name().to_owned();
            total = total
                .checked_add(variable.master_bytes())
                .ok_or_else(|| PlacementError::TooManyBytes { variable: name() })?;
            if self.pieces.len() + parts as usize > Placement::PARTITIONS_MAX {
                return Err(PlacementError::TooManyPartitions { variable: name() });
            }
            let pinned = self.pinned(variable)?;
            for (part, rows) in (0u32..).zip(split_rows(variable.shape().rows(), parts)) {
                let bytes = variable.bytes_of_rows(rows.end - rows.start);
                self.pieces.push(Piece { variable: index, part, parts, rows, bytes, pinned });
            }
        }
        Ok(())
    }

    /// Chooses a shard for every piece, and returns the partitions in order of creation.
    fn place(mut self) -> Result<Vec<PlacedPartition>, PlacementError> {
        let pieces = std::mem::take(&mut self.pieces);
        let variables = self.variables;
        let kind = |piece: &Piece| VariableKind::of(&variables[piece.variable as usize]);
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        if let PlacementStrategy::Balanced = self.strategy {
            // The sort is stable: pieces of one size stay in order of creation.
            order.sort_by_cached_key(|&index| {
                let piece = &pieces[index];
                (kind(piece), piece.pinned.is_none(), Reverse(piece.bytes))
            });
        }
        let mut shards = vec![ShardId::default(); pieces.len()];
        let mut last_kind = None;
        for index in order {
            let kind = kind(&pieces[index]);
            if let PlacementStrategy::Balanced = self.strategy
                && last_kind.replace(kind).is_some_and(|last| last != kind)
            {
                self.tasks = self.tasks.next_kind();
                self.shards = self.shards.iter().map(Picker::next_kind).collect();
            }
            shards[index] = self.choose(&pieces[index])?;
        }
        let placed = pieces.into_iter().zip(shards).map(|(piece, shard)| {
            let Piece { variable, part, parts, rows, bytes, .. } = piece;
            PlacedPartition { variable: VariableId(variable), part, parts, rows, shard, bytes }
        });
        Ok(placed.collect())
    }

    /// Returns the position of the task that the variable's device names. An open job means the job
    /// of the map, because only its tasks hold variables.
    fn pinned(&self, variable: &VariableSpec) -> Result<Option<usize>, PlacementError> {
        let device = &variable.device;
        let map_job = self.map.job();
        if device.job().is_some_and(|job| job != map_job) {
            return Err(PlacementError::PinnedJob {
                variable: variable.name().to_owned(),
                device: device.to_string(),
                job: map_job.to_owned(),
                tasks: index_list(self.map.tasks().iter().copied()),
            });
        }
        let Some(task) = device.task() else {
            return Ok(None);
        };
        match self.map.position(task) {
            Some(position) => Ok(Some(position)),
            None => Err(PlacementError::PinnedTask {
                variable: variable.name().to_owned(),
                job: map_job.to_owned(),
                task,
                tasks: index_list(self.map.tasks().iter().copied()),
            }),
        }
    }

    fn choose(&mut self, piece: &Piece) -> Result<ShardId, PlacementError> {
        let variable = &self.variables[piece.variable as usize];
        let (task_hash, shard_hash) = match self.strategy {
            PlacementStrategy::HashName => name_hashes(variable.name(), piece.part),
            _ => (0, 0),
        };
        let drawn = self.tasks.draw(task_hash);
        let position = match (piece.pinned, self.strategy) {
            (Some(position), _) => position,
            (None, PlacementStrategy::Custom(choice)) => {
                self.custom(choice, variable, piece.part)?
            }
            (None, _) => drawn,
        };
        self.tasks.add(position, piece.bytes);
        let shards = &mut self.shards[position];
        let shard = shards.draw(shard_hash);
        shards.add(shard, piece.bytes);
        // Fits: a picker's result is below its number of bins, here a u16.
        Ok(ShardId { task: self.map.tasks()[position], shard: shard as u16 })
    }

    fn custom(
        &self,
        choice: &CustomStrategy,
        variable: &VariableSpec,
        part: u32,
    ) -> Result<usize, PlacementError> {
        let task = choice.choose(variable, part, self.map.tasks());
        self.map.position(task).ok_or_else(|| PlacementError::CustomTask {
            variable: variable.name().to_owned(),
            part,
            job: self.map.job().to_owned(),
            task,
            tasks: index_list(self.map.tasks().iter().copied()),
        })
    }
}

#[cfg(test)]
mod balance_tests;
#[cfg(test)]
mod tests;
