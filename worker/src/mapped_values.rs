//! Pulls from shared values: the copies that a pull consists of, and whether a shard's values suit
//! it.

use std::sync::Arc;

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::shared_values::{Geometry, ValueCounts};

use crate::gradients::sharding_plan::{LayoutSpan, ShardingPlan};

/// A range of one block, and its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCopy {
    /// The index of the block's logical block in [`CopyPlan::logical_blocks`].
    pub(crate) logical: usize,
    /// The start in the block, and in the buffer.
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: usize,
}

/// The copies that bring all dense values of a shard into a buffer of a plan.
#[derive(Debug)]
pub(crate) struct CopyPlan {
    plan: Arc<ShardingPlan>,
    logical_blocks: Vec<u32>,
    copies: Vec<BlockCopy>,
    bytes: u64,
}

impl CopyPlan {
    /// Plans the copies out of blocks of this geometry. Returns `None` if the blocks hold less than
    /// the shard has in `plan`, or if some of its values are of a half type.
    pub(crate) fn new(
        plan: &Arc<ShardingPlan>,
        shard: ShardId,
        geometry: &Geometry,
    ) -> Option<CopyPlan> {
        let mut copy_plan = CopyPlan {
            plan: plan.clone(),
            logical_blocks: Vec::new(),
            copies: Vec::new(),
            bytes: 0,
        };
        for (start, span, bytes) in plan.shard_spans(shard) {
            let mut to = match span {
                LayoutSpan::Buffer(to) => to,
                LayoutSpan::Halves(_) => return None,
                LayoutSpan::Padding => continue,
            };
            for (logical, within) in geometry.pieces(start..start + bytes) {
                if logical >= geometry.logical_blocks {
                    return None;
                }
                if copy_plan.logical_blocks.last() != Some(&logical) {
                    copy_plan.logical_blocks.push(logical);
                }
                let bytes = (within.end - within.start) as usize;
                let logical = copy_plan.logical_blocks.len() - 1;
                let from = within.start as usize;
                copy_plan.copies.push(BlockCopy { logical, from, to, bytes });
                to += bytes;
            }
            copy_plan.bytes += bytes;
        }
        Some(copy_plan)
    }

    pub(crate) fn is_of(&self, plan: &Arc<ShardingPlan>) -> bool {
        Arc::ptr_eq(&self.plan, plan)
    }

    /// Returns the logical blocks that it reads, ascending.
    pub(crate) fn logical_blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.logical_blocks.iter().copied()
    }

    pub(crate) fn copies(&self) -> &[BlockCopy] {
        &self.copies
    }

    /// Returns the number of bytes that it copies.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What a session knows of a shard that shares its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedShard {
    pub(crate) shard: ShardId,
    /// The restore epoch of the shard.
    pub(crate) epoch: RestoreEpoch,
    /// Whether the shard is the step owner.
    pub(crate) owns_step: bool,
    /// Whether steps are synchronous.
    pub(crate) synchronous: bool,
}

/// Whether to use the values of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PullVerdict {
    /// Use the values.
    Take,
    /// The token's step has passed.
    Stale,
    /// Request the values instead: these are too old, or of another epoch.
    Ask,
}

/// Checks that the values of several shards suit one pull.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PullConsistency {
    token: Option<GlobalStep>,
    /// In synchronous mode the step of all values; in asynchronous mode that of the step owner.
    step: Option<u64>,
    epoch: Option<u64>,
}

impl PullConsistency {
    /// For the step of a token, or for any step.
    pub(crate) fn new(token: Option<GlobalStep>) -> PullConsistency {
        PullConsistency { token, step: None, epoch: None }
    }

    /// Judges the values of a shard by the counts beside them.
    pub(crate) fn judge(
        &mut self,
        mapped_shard: &MappedShard,
        counts: &ValueCounts,
    ) -> PullVerdict {
        let epoch = u64::from(mapped_shard.epoch.0);
        if counts.epoch != epoch || *self.epoch.get_or_insert(epoch) != epoch {
            return PullVerdict::Ask;
        }
        let token = self.token.map(|step| step.0);
        if !mapped_shard.synchronous {
            if mapped_shard.owns_step {
                self.step = Some(counts.step);
            }
            return if counts.serves >= token.unwrap_or(0) {
                PullVerdict::Take
            } else {
                PullVerdict::Ask
            };
        }
        match token.or(self.step) {
            Some(step) if token.is_some() && counts.step > step => PullVerdict::Stale,
            Some(step) if counts.step != step => PullVerdict::Ask,
            _ => {
                self.step = Some(counts.step);
                PullVerdict::Take
            }
        }
    }

    /// Returns the step that all values are of, or at least of; `None` while it is unknown.
    pub(crate) fn step(&self) -> Option<GlobalStep> {
        self.step.map(GlobalStep).max(self.token)
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::ids::VariableId;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    /// Compares the copies with the layout in the catalogue.
    #[test]
    fn a_copy_plan_copies_every_value_to_its_place() {
        let f32 = |name: &str, extents: &[u64]| VariableSpec::f32(name, extents).unwrap();
        let variables = vec![
            f32("odd", &[3]),
            f32("split", &[50, 3]).partitioner(Partitioner::Fixed { shards: 2 }),
            f32("rows", &[40, 4]).sparse(),
            f32("long", &[100]),
            f32("last", &[5]),
        ];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let plan =
            Arc::new(ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap())));
        let mut buffer = vec![0_u8; plan.bytes()];
        let mut expected = vec![0; plan.bytes()];
        let mut passed_over = 0;
        for (salt, &shard) in plan.shards().iter().enumerate() {
            let layout = plan.catalogue().layout(shard);
            let value = |at: u64| (at as usize * 7 + at as usize / 256 + 31 * salt) as u8;
            let logical_blocks = layout.bytes().div_ceil(64) as u32;
            let geometry =
                Geometry { offset: 0, block_bytes: 64, stride: 72, blocks: 99, logical_blocks };
            let copy_plan = CopyPlan::new(&plan, shard, &geometry).unwrap();
            let rising: Vec<u32> = copy_plan.logical_blocks().collect();
            assert!(rising.is_sorted_by(|a, b| a < b));
            passed_over += logical_blocks as usize - rising.len();
            for copy in copy_plan.copies() {
                let start = u64::from(rising[copy.logical]) * 64 + copy.from as u64;
                for (at, to) in (start..).zip(&mut buffer[copy.to..copy.to + copy.bytes]) {
                    *to = value(at);
                }
            }
            for partition in layout.partitions().iter().filter(|p| !p.is_sparse()) {
                let before = partition.elements.start * partition.dtype.size() as u64;
                let to = plan.range(partition.variable).start + before as usize;
                for at in 0..partition.bytes {
                    expected[to + at as usize] = value(partition.offset + at);
                }
            }
            let fewer = Geometry { logical_blocks: logical_blocks - 1, ..geometry };
            assert!(CopyPlan::new(&plan, shard, &fewer).is_none(), "the last block is missing");
        }
        for index in 0..plan.catalogue().variables().len() {
            let range = plan.range(VariableId(index as u32));
            assert_eq!(buffer[range.clone()], expected[range], "variable {index}");
        }
        assert!(passed_over > 5, "blocks of rows are not read");
    }

    #[test]
    fn halves_have_no_copy_plan() {
        let variables = vec![VariableSpec::bf16("h", [4]).unwrap()];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let plan =
            Arc::new(ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap())));
        let geometry =
            Geometry { offset: 0, block_bytes: 64, stride: 72, blocks: 4, logical_blocks: 2 };
        assert!(CopyPlan::new(&plan, plan.shards()[0], &geometry).is_none());
    }

    const MAPPED_SHARD: MappedShard = MappedShard {
        shard: ShardId { task: 0, shard: 0 },
        epoch: RestoreEpoch(1),
        owns_step: true,
        synchronous: false,
    };

    fn at(step: u64) -> ValueCounts {
        ValueCounts { version: 9, gradients: 8, step, serves: step, epoch: 1 }
    }

    #[test]
    fn asynchronous_values_are_at_least_as_new_as_the_token() {
        let judge = |token: Option<u64>, mapped_shard: MappedShard, counts: ValueCounts| {
            let mut consistency = PullConsistency::new(token.map(GlobalStep));
            let verdict = consistency.judge(&mapped_shard, &counts);
            (verdict, consistency.step().map(|step| step.0))
        };
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(7)), (PullVerdict::Take, Some(7)));
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(4)), (PullVerdict::Take, Some(4)));
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(3)).0, PullVerdict::Ask);
        assert_eq!(judge(None, MAPPED_SHARD, at(0)), (PullVerdict::Take, Some(0)));
        let other = MappedShard { owns_step: false, ..MAPPED_SHARD };
        let always = ValueCounts { serves: u64::MAX, ..at(0) };
        assert_eq!(judge(Some(4), other, always), (PullVerdict::Take, Some(4)));
        assert_eq!(judge(None, other, always), (PullVerdict::Take, None), "the step is unknown");
        assert_eq!(
            judge(None, MAPPED_SHARD, ValueCounts { epoch: 2, ..at(0) }).0,
            PullVerdict::Ask
        );
    }

    #[test]
    fn synchronous_values_are_all_of_the_tokens_step() {
        let mapped_shard = MappedShard { synchronous: true, ..MAPPED_SHARD };
        let judge = |token: Option<u64>, steps: &[u64]| {
            let mut consistency = PullConsistency::new(token.map(GlobalStep));
            steps
                .iter()
                .map(|&step| consistency.judge(&mapped_shard, &at(step)))
                .collect::<Vec<_>>()
        };
        assert_eq!(judge(Some(4), &[4, 4]), [PullVerdict::Take; 2]);
        assert_eq!(judge(Some(4), &[4, 5]), [PullVerdict::Take, PullVerdict::Stale]);
        assert_eq!(judge(Some(4), &[3]), [PullVerdict::Ask]);
        assert_eq!(
            judge(None, &[6, 6, 7]),
            [PullVerdict::Take, PullVerdict::Take, PullVerdict::Ask]
        );
        let mut consistency = PullConsistency::new(None);
        assert_eq!(consistency.judge(&mapped_shard, &at(6)), PullVerdict::Take);
        let behind = MappedShard { epoch: RestoreEpoch(2), ..mapped_shard };
        let counts = ValueCounts { epoch: 2, ..at(6) };
        assert_eq!(consistency.judge(&behind, &counts), PullVerdict::Ask, "of another epoch");
    }
}
