//! Values in memory that a shard lends: which stretches of it go where, and whether what stands on
//! the boards is what a pull wants.

use std::sync::Arc;

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::shared_values::{Counts, Geometry};

use crate::sharding_plan::{ShardingPlan, Span};

/// Bytes of one block, and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The place that the block holds, by its number in [`Route::logical_blocks`].
    pub(crate) logical: usize,
    /// Where they start in the block, and in the buffer.
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: usize,
}

/// How all values of a shard that are not sparse come into a buffer of a plan.
#[derive(Debug)]
pub(crate) struct Route {
    plan: Arc<ShardingPlan>,
    logical_blocks: Vec<u32>,
    copies: Vec<Copy>,
    bytes: u64,
}

impl Route {
    /// The route from blocks that lie so; none if they hold less than the shard has in this plan, or if
    /// some of it is to be had as halves.
    pub(crate) fn new(
        plan: &Arc<ShardingPlan>,
        shard: ShardId,
        geometry: &Geometry,
    ) -> Option<Route> {
        let mut route =
            Route { plan: plan.clone(), logical_blocks: Vec::new(), copies: Vec::new(), bytes: 0 };
        for (start, span, bytes) in plan.stretches(shard) {
            let mut to = match span {
                Span::Buffer(to) => to,
                Span::Halves(_) => return None,
                Span::Padding => continue,
            };
            for (logical, within) in geometry.pieces(start..start + bytes) {
                if logical >= geometry.logical_blocks {
                    return None;
                }
                if route.logical_blocks.last() != Some(&logical) {
                    route.logical_blocks.push(logical);
                }
                let bytes = (within.end - within.start) as usize;
                let (logical, from) = (route.logical_blocks.len() - 1, within.start as usize);
                route.copies.push(Copy { logical, from, to, bytes });
                to += bytes;
            }
            route.bytes += bytes;
        }
        Some(route)
    }

    pub(crate) fn is_of(&self, plan: &Arc<ShardingPlan>) -> bool {
        Arc::ptr_eq(&self.plan, plan)
    }

    /// The places whose blocks it reads, rising.
    pub(crate) fn logical_blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.logical_blocks.iter().copied()
    }

    pub(crate) fn copies(&self) -> &[Copy] {
        &self.copies
    }

    /// How many bytes it copies.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What a session knows of a shard that lends its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedShard {
    pub(crate) shard: ShardId,
    /// The restore epoch that it lives in.
    pub(crate) epoch: RestoreEpoch,
    /// Whether it counts the global step.
    pub(crate) owns_step: bool,
    /// Whether steps are synchronous.
    pub(crate) synchronous: bool,
}

/// What to do with the values of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// They are what is wanted.
    Take,
    /// The token's step has passed.
    Stale,
    /// They have to be asked for, as there will be others.
    Ask,
}

/// Whether values of several shards are what one pull wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreement {
    token: Option<GlobalStep>,
    /// The step of all of them, in synchronous mode; of the step owner's in asynchronous mode.
    step: Option<u64>,
    epoch: Option<u64>,
}

impl Agreement {
    /// For the step of a token, or whatever step there is.
    pub(crate) fn new(token: Option<GlobalStep>) -> Agreement {
        Agreement { token, step: None, epoch: None }
    }

    /// What to do with values of which a shard says this.
    pub(crate) fn judge(&mut self, mapped_shard: &MappedShard, counts: &Counts) -> Verdict {
        let epoch = u64::from(mapped_shard.epoch.0);
        if counts.epoch != epoch || *self.epoch.get_or_insert(epoch) != epoch {
            return Verdict::Ask;
        }
        let token = self.token.map(|step| step.0);
        if !mapped_shard.synchronous {
            if mapped_shard.owns_step {
                self.step = Some(counts.step);
            }
            return if counts.serves >= token.unwrap_or(0) { Verdict::Take } else { Verdict::Ask };
        }
        match token.or(self.step) {
            Some(row_requests) if token.is_some() && counts.step > row_requests => Verdict::Stale,
            Some(row_requests) if counts.step != row_requests => Verdict::Ask,
            _ => {
                self.step = Some(counts.step);
                Verdict::Take
            }
        }
    }

    /// The step that all are of, or at least of; none if nobody has said so.
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

    /// Every variable lies in the buffer as the catalogue says that it lies on its shards.
    #[test]
    fn a_route_brings_every_value_where_it_belongs() {
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
        let (mut buffer, mut expected) = (vec![0_u8; plan.bytes()], vec![0; plan.bytes()]);
        let mut passed_over = 0;
        for (salt, &shard) in plan.shards().iter().enumerate() {
            let layout = plan.catalogue().layout(shard);
            let value = |at: u64| (at as usize * 7 + at as usize / 256 + 31 * salt) as u8;
            let logical_blocks = layout.bytes().div_ceil(64) as u32;
            let geometry =
                Geometry { offset: 0, block_bytes: 64, stride: 72, blocks: 99, logical_blocks };
            let route = Route::new(&plan, shard, &geometry).unwrap();
            let rising: Vec<u32> = route.logical_blocks().collect();
            assert!(rising.is_sorted_by(|a, b| a < b));
            passed_over += logical_blocks as usize - rising.len();
            for copy in route.copies() {
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
            assert!(Route::new(&plan, shard, &fewer).is_none(), "it holds less");
        }
        for index in 0..plan.catalogue().variables().len() {
            let range = plan.range(VariableId(index as u32));
            assert_eq!(buffer[range.clone()], expected[range], "variable {index}");
        }
        assert!(passed_over > 5, "rows are not read");
    }

    #[test]
    fn halves_have_no_route() {
        let variables = vec![VariableSpec::bf16("h", [4]).unwrap()];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let plan =
            Arc::new(ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap())));
        let geometry =
            Geometry { offset: 0, block_bytes: 64, stride: 72, blocks: 4, logical_blocks: 2 };
        assert!(Route::new(&plan, plan.shards()[0], &geometry).is_none());
    }

    const MAPPED_SHARD: MappedShard = MappedShard {
        shard: ShardId { task: 0, shard: 0 },
        epoch: RestoreEpoch(1),
        owns_step: true,
        synchronous: false,
    };

    fn at(step: u64) -> Counts {
        Counts { version: 9, gradients: 8, step, serves: step, epoch: 1 }
    }

    #[test]
    fn asynchronous_values_are_at_least_as_new_as_the_token() {
        let judge = |token: Option<u64>, mapped_shard: MappedShard, counts: Counts| {
            let mut agreement = Agreement::new(token.map(GlobalStep));
            let verdict = agreement.judge(&mapped_shard, &counts);
            (verdict, agreement.step().map(|step| step.0))
        };
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(7)), (Verdict::Take, Some(7)));
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(4)), (Verdict::Take, Some(4)));
        assert_eq!(judge(Some(4), MAPPED_SHARD, at(3)).0, Verdict::Ask);
        assert_eq!(judge(None, MAPPED_SHARD, at(0)), (Verdict::Take, Some(0)));
        let other = MappedShard { owns_step: false, ..MAPPED_SHARD };
        let always = Counts { serves: u64::MAX, ..at(0) };
        assert_eq!(judge(Some(4), other, always), (Verdict::Take, Some(4)));
        assert_eq!(judge(None, other, always), (Verdict::Take, None), "nobody knows the step");
        assert_eq!(judge(None, MAPPED_SHARD, Counts { epoch: 2, ..at(0) }).0, Verdict::Ask);
    }

    #[test]
    fn synchronous_values_are_all_of_the_tokens_step() {
        let mapped_shard = MappedShard { synchronous: true, ..MAPPED_SHARD };
        let judge = |token: Option<u64>, steps: &[u64]| {
            let mut agreement = Agreement::new(token.map(GlobalStep));
            steps.iter().map(|&step| agreement.judge(&mapped_shard, &at(step))).collect::<Vec<_>>()
        };
        assert_eq!(judge(Some(4), &[4, 4]), [Verdict::Take; 2]);
        assert_eq!(judge(Some(4), &[4, 5]), [Verdict::Take, Verdict::Stale]);
        assert_eq!(judge(Some(4), &[3]), [Verdict::Ask]);
        assert_eq!(judge(None, &[6, 6, 7]), [Verdict::Take, Verdict::Take, Verdict::Ask]);
        let mut agreement = Agreement::new(None);
        assert_eq!(agreement.judge(&mapped_shard, &at(6)), Verdict::Take);
        let behind = MappedShard { epoch: RestoreEpoch(2), ..mapped_shard };
        let counts = Counts { epoch: 2, ..at(6) };
        assert_eq!(agreement.judge(&behind, &counts), Verdict::Ask, "of another epoch");
    }
}
