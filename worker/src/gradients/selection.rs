//! Pulls of one variable: what a shard is asked for, and what its answer must be.

use std::ops::Range;

use pushpull_common::ids::{PartitionId, ShardId, VariableId};
use pushpull_common::protocol::limits::SELECTION_MAX;
use pushpull_common::protocol::message::Selection;
use pushpull_common::protocol::wire::List;

use super::sharding_plan::ShardingPlan;

/// Partitions of one variable on one shard, in one request.
#[derive(Clone, Debug)]
pub(crate) struct PartitionSelection {
    pub(crate) shard: ShardId,
    partitions: Vec<PartitionId>,
    /// Their ranges of the shard's layout, ascending and merged.
    ranges: Vec<Range<u64>>,
}

impl PartitionSelection {
    /// Selects all partitions of a dense variable, except empty ones.
    pub(crate) fn of(plan: &ShardingPlan, variable: VariableId) -> Vec<PartitionSelection> {
        let mut selected: Vec<PartitionSelection> = Vec::new();
        for partition in plan.catalogue().partitions_of(variable) {
            let shard = partition.shard;
            let range = partition.offset..partition.end();
            if range.is_empty() {
                continue;
            }
            let open = selected.iter_mut().rfind(|selected| selected.shard == shard);
            match open.filter(|open| open.partitions.len() < SELECTION_MAX) {
                Some(open) => open.add(partition.id, range),
                None => {
                    let partitions = vec![partition.id];
                    let ranges = vec![range];
                    selected.push(PartitionSelection { shard, partitions, ranges });
                }
            }
        }
        selected
    }

    fn add(&mut self, partition: PartitionId, range: Range<u64>) {
        self.partitions.push(partition);
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
    }

    /// Returns the selection as the message encodes it.
    pub(crate) fn selection(&self) -> Selection {
        let partitions = List::new(self.partitions.clone());
        let partitions = partitions.expect("a selection has at most SELECTION_MAX partitions");
        Selection::Partitions { partitions }
    }

    /// Returns the first selected offset from `from` on; `None` behind the last.
    pub(crate) fn next_value(&self, from: u64) -> Option<u64> {
        let next = self.ranges.iter().find(|range| range.end > from);
        next.map(|range| range.start.max(from))
    }

    /// Whether all of a range is selected.
    pub(crate) fn contains(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|asked| asked.start <= range.start && range.end <= asked.end)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    /// Two variables of 5 rows in 3 partitions, with an empty variable between them.
    fn plan(shards: u16) -> ShardingPlan {
        let split = || Partitioner::Fixed { shards: 3 };
        let variables = vec![
            VariableSpec::f32("first", [5, 3]).unwrap().partitioner(split()),
            VariableSpec::f32("empty", [0]).unwrap(),
            VariableSpec::f32("second", [5, 3]).unwrap().partitioner(split()),
        ];
        let map = ShardMap::new([0], shards).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn every_partition_is_selected_once_and_adjacent_ranges_are_merged() {
        for shards in [1, 2, 4] {
            let plan = plan(shards);
            for id in [0, 2].map(VariableId) {
                let selected = PartitionSelection::of(&plan, id);
                let mut bytes = 0;
                for one in &selected {
                    assert!(one.partitions.is_sorted() && one.ranges.is_sorted_by_key(|r| r.start));
                    assert!(one.ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
                    bytes += one.ranges.iter().map(|range| range.end - range.start).sum::<u64>();
                }
                let partitions = plan.catalogue().partitions_of(id);
                assert_eq!(bytes, partitions.iter().map(|p| p.end() - p.offset).sum::<u64>());
                let named: usize = selected.iter().map(|one| one.partitions.len()).sum();
                assert_eq!(named, partitions.len());
            }
            assert!(PartitionSelection::of(&plan, VariableId(1)).is_empty());
        }
    }

    #[test]
    fn only_selected_ranges_are_accepted() {
        let shard = ShardId { task: 0, shard: 0 };
        let partitions = vec![PartitionId(1)];
        let selected = PartitionSelection { shard, partitions, ranges: vec![8..24, 40..48] };
        let next = [0, 8, 16, 24, 40, 47, 48].map(|from| selected.next_value(from));
        assert_eq!(next, [Some(8), Some(8), Some(16), Some(40), Some(40), Some(47), None]);
        for (range, contained) in [(8..24, true), (8..16, true), (40..48, true), (16..40, false)] {
            assert_eq!(selected.contains(&range), contained, "{range:?}");
        }
        assert!(!selected.contains(&(0..16)) && !selected.contains(&(24..48)));
    }
}
