//! Fused ranges: adjacent partitions that are updated alike are treated as one. A hundred thousand
//! small variables then cost as much as one variable of the same total length.

use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::VariableRules;

/// The fused ranges of a shard. Each is as long as possible.
///
/// Invariants: the ranges ascend, and cover the partitions that have elements. Padding is covered
/// only within a range.
#[derive(Debug, Default)]
pub(in crate::shard) struct FusedRanges(Vec<FusedRange>);

/// Adjacent partitions of one type with the same rule and rate, or one partition that is sparse or
/// whose rule needs sums over all of it. The padding between the partitions is updated with them,
/// and its values are never used.
#[derive(Debug)]
pub(in crate::shard) struct FusedRange {
    /// The range of the values in a push.
    pub(in crate::shard) range: Range<u64>,
    pub(in crate::shard) dtype: DType,
    /// The index of the first partition in the layout.
    first: usize,
    /// Whether the range is updated only once a push is complete, not as its parts arrive.
    pub(in crate::shard) is_deferred: bool,
    /// Whether the partition has rows, or is of a table.
    pub(in crate::shard) sparse: bool,
    /// Whether gradients change it.
    pub(in crate::shard) trainable: bool,
}

impl FusedRanges {
    pub(in crate::shard) fn new(layout: &ShardLayout, rules: &VariableRules) -> FusedRanges {
        let is_deferred = |p: &Partition| p.is_sparse() || rules.sums(p);
        let rule = |p: &Partition| {
            (p.trainable, rules.rule_index(p.variable), rules.rate(p.variable).to_bits())
        };
        let mut fused_ranges: Vec<FusedRange> = Vec::new();
        let with_elements = layout.all().iter().enumerate().filter(|(_, p)| p.bytes > 0);
        for (index, partition) in with_elements {
            let end = partition.offset + partition.bytes;
            match fused_ranges.last_mut() {
                Some(last)
                    if !last.is_deferred
                        && !is_deferred(partition)
                        && last.range.end.next_multiple_of(8) == partition.offset
                        && last.dtype == partition.dtype
                        && rule(&layout.all()[last.first]) == rule(partition) =>
                {
                    last.range.end = end;
                }
                _ => fused_ranges.push(FusedRange {
                    range: partition.offset..end,
                    dtype: partition.dtype,
                    first: index,
                    is_deferred: is_deferred(partition),
                    sparse: partition.is_sparse(),
                    trainable: partition.trainable,
                }),
            }
        }
        FusedRanges(fused_ranges)
    }

    /// Returns the first partition touched by a range of a push for which `is_it(sparse,
    /// trainable)` holds. Partitions are checked one by one only if a fused range or an index
    /// satisfies it.
    pub(in crate::shard) fn first_touched<'a>(
        &self,
        layout: &'a ShardLayout,
        range: &Range<u64>,
        is_it: impl Fn(bool, bool) -> bool,
    ) -> Option<&'a Partition> {
        let of = |partition: &&Partition| is_it(partition.is_sparse(), partition.trainable);
        let values = self.within(range.start..range.end.min(layout.values_end()));
        let mut values =
            values.filter(|fused_range| is_it(fused_range.sparse, fused_range.trainable));
        let some =
            values.next().is_some() || layout.touched_by_index(range.clone()).any(|p| of(&p));
        some.then(|| layout.touched(range.clone()).find(of)).flatten()
    }

    /// Returns the fused ranges that a range touches. An empty range touches none.
    pub(in crate::shard) fn within(&self, range: Range<u64>) -> impl Iterator<Item = &FusedRange> {
        let first = self.0.partition_point(|fused_range| fused_range.range.end <= range.start);
        let end = if range.is_empty() { 0 } else { range.end };
        self.0[first..].iter().take_while(move |fused_range| fused_range.range.start < end)
    }
}

impl FusedRange {
    /// Returns the first partition, which represents all of them.
    pub(in crate::shard) fn partition<'a>(&self, layout: &'a ShardLayout) -> &'a Partition {
        &layout.all()[self.first]
    }

    /// Returns the intersection with a range.
    pub(in crate::shard) fn part_of(&self, range: &Range<u64>) -> Range<u64> {
        let start = self.range.start.max(range.start);
        start..self.range.end.min(range.end).max(start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::ids::ShardId;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::table::TableSpec;
    use pushpull_common::tensor::Shape;
    use pushpull_common::variable::VariableSpec;
    use pushpull_optim::optimizer::{Lamb, Momentum, OptimizerRules, Sgd};

    use super::*;

    fn ends(variables: Vec<VariableSpec>, rules: &OptimizerRules) -> Vec<(u64, u64, bool)> {
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let layout = catalogue.layout(ShardId::default());
        let fused_ranges = FusedRanges::new(&layout, &rules.of_variables(&catalogue));
        for partition in layout.all().iter().filter(|partition| partition.bytes > 0) {
            let range = partition.offset..partition.offset + partition.bytes;
            let touched: Vec<_> = fused_ranges.within(range.clone()).collect();
            assert!(
                matches!(touched[..], [fused_range] if fused_range.part_of(&range) == range),
                "{range:?}"
            );
        }
        for fused_range in &fused_ranges.0 {
            assert_eq!(fused_range.partition(&layout).offset, fused_range.range.start);
        }
        fused_ranges
            .0
            .iter()
            .map(|fused_range| {
                (fused_range.range.start, fused_range.range.end, fused_range.is_deferred)
            })
            .collect()
    }

    #[test]
    fn a_range_ends_where_the_rule_the_rate_or_the_type_changes() {
        let f32 = |name: &str, elements: u64| VariableSpec::f32(name, [elements]).unwrap();
        let f64 = VariableSpec::new("wide", DType::F64, Shape::new([2]).unwrap()).unwrap();
        let rows = VariableSpec::f32("rows", [2, 2]).unwrap().sparse();
        let table = VariableSpec::table("table", DType::F32, [2], TableSpec::new(1 << 20)).unwrap();
        let mut rules = OptimizerRules::new(Arc::new(Sgd::new(0.1)));
        rules.optimizer_for("other*".into(), Arc::new(Momentum::new(0.1, 0.9)));
        rules.optimizer_for("sums*".into(), Arc::new(Lamb::default()));
        rules.rate_for("slow*".into(), 0.5);
        let variables = vec![
            f32("a", 4),
            f32("empty", 0),
            f32("b", 2),
            // The padding of an odd number of elements is updated with them.
            f32("odd", 3),
            f32("c", 2),
            f32("slow/a", 2),
            f32("slow/b", 2),
            f32("other/a", 2),
            f32("sums/a", 2),
            f32("sums/b", 2),
            rows,
            f64,
            f32("d", 2),
            f32("plain", 2).plain(),
            table,
        ];
        let with = true;
        let without = false;
        let expected = [
            (0, 48, without),
            (48, 64, without),
            (64, 72, without),
            (72, 80, with),
            (80, 88, with),
            (88, 104, with),
            (104, 120, without),
            (120, 128, without),
            (128, 136, without),
        ];
        let found = ends(variables, &rules);
        assert_eq!(found[..9], expected);
        assert!(found.len() == 10 && found[9].0 == 136 && found[9].2, "the table: {found:?}");
    }

    #[test]
    fn a_range_finds_the_fused_ranges_it_touches() {
        let fused_ranges = |ranges: &[Range<u64>]| {
            let fused_range = |range: &Range<u64>| FusedRange {
                range: range.clone(),
                dtype: DType::F32,
                first: 0,
                is_deferred: false,
                sparse: false,
                trainable: true,
            };
            FusedRanges(ranges.iter().map(fused_range).collect())
        };
        let fused_ranges = fused_ranges(&[0..12, 16..24, 24..100]);
        let touched = |range: Range<u64>| {
            fused_ranges
                .within(range.clone())
                .map(|fused_range| fused_range.part_of(&range))
                .collect::<Vec<_>>()
        };
        assert_eq!(touched(0..100), [0..12, 16..24, 24..100]);
        assert_eq!(touched(8..20), [8..12, 16..20]);
        assert_eq!(touched(12..16), Vec::<Range<u64>>::new());
        assert_eq!(touched(23..25), [23..24, 24..25]);
        assert_eq!(touched(100..200), Vec::<Range<u64>>::new());
    }
}
