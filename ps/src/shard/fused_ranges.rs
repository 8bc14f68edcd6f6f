//! Partitions that lie one behind the other and are changed alike, taken as one: a hundred thousand
//! small variables cost what one costs that is as long.

use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::tensor::DType;

use crate::optimizer::VariableRules;

/// Partitions of a shard, each group as long as it can be.
///
/// Invariants: the groups rise, and cover what the partitions with elements cover; what pads them only
/// within a group.
#[derive(Debug, Default)]
pub(super) struct FusedRanges(Vec<FusedRange>);

/// Some partitions of one type, with one rule at one rate, and the padding between them, which is changed
/// with them: nobody looks at what it becomes. Or one that is sparse, or whose rule needs sums over all of it.
#[derive(Debug)]
pub(super) struct FusedRange {
    /// Where its values lie in what is pushed.
    pub(super) range: Range<u64>,
    pub(super) dtype: DType,
    /// The index of its first partition among all of the layout.
    first: usize,
    /// Whether it is changed once a push is whole, and not as it comes.
    pub(super) waits: bool,
    /// Whether it is of rows, or of a table.
    pub(super) sparse: bool,
    /// Whether gradients change it.
    pub(super) trainable: bool,
}

impl FusedRanges {
    pub(super) fn new(layout: &ShardLayout, rules: &VariableRules) -> FusedRanges {
        let waits = |p: &Partition| p.is_sparse() || rules.sums(p);
        let rule = |p: &Partition| {
            (p.trainable, rules.place(p.variable), rules.rate(p.variable).to_bits())
        };
        let mut fused_ranges: Vec<FusedRange> = Vec::new();
        let with_elements = layout.all().iter().enumerate().filter(|(_, p)| p.bytes > 0);
        for (index, partition) in with_elements {
            let end = partition.offset + partition.bytes;
            match fused_ranges.last_mut() {
                Some(last)
                    if !last.waits
                        && !waits(partition)
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
                    waits: waits(partition),
                    sparse: partition.is_sparse(),
                    trainable: partition.trainable,
                }),
            }
        }
        FusedRanges(fused_ranges)
    }

    /// The first partition that a range of what is pushed touches of which this holds: whether it is
    /// sparse, and whether gradients change it. Only if there is one are they looked at one by one.
    pub(super) fn first_touched<'a>(
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

    /// The groups that a range touches; an empty one touches none.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = &FusedRange> {
        let first = self.0.partition_point(|fused_range| fused_range.range.end <= range.start);
        let end = if range.is_empty() { 0 } else { range.end };
        self.0[first..].iter().take_while(move |fused_range| fused_range.range.start < end)
    }
}

impl FusedRange {
    /// A partition that is changed as all of it is.
    pub(super) fn partition<'a>(&self, layout: &'a ShardLayout) -> &'a Partition {
        &layout.all()[self.first]
    }

    /// What it has of a range.
    pub(super) fn part_of(&self, range: &Range<u64>) -> Range<u64> {
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

    use super::*;
    use crate::optimizer::{Lamb, Momentum, Rules, Sgd};

    fn ends(variables: Vec<VariableSpec>, rules: &Rules) -> Vec<(u64, u64, bool)> {
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
            .map(|fused_range| (fused_range.range.start, fused_range.range.end, fused_range.waits))
            .collect()
    }

    #[test]
    fn a_run_ends_where_something_is_changed_otherwise() {
        let f32 = |name: &str, elements: u64| VariableSpec::f32(name, [elements]).unwrap();
        let f64 = VariableSpec::new("wide", DType::F64, Shape::new([2]).unwrap()).unwrap();
        let rows = VariableSpec::f32("rows", [2, 2]).unwrap().sparse();
        let table = VariableSpec::table("table", DType::F32, [2], TableSpec::new(1 << 20)).unwrap();
        let mut rules = Rules::new(Arc::new(Sgd::new(0.1)));
        rules.optimizer_for("other*".into(), Arc::new(Momentum::new(0.1, 0.9)));
        rules.optimizer_for("sums*".into(), Arc::new(Lamb::default()));
        rules.rate_for("slow*".into(), 0.5);
        let variables = vec![
            f32("a", 4),
            f32("empty", 0),
            f32("b", 2),
            // What pads an odd number of elements is changed with them.
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
        let (with, without) = (true, false);
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
    fn what_a_range_touches_is_found() {
        let fused_ranges = |ranges: &[Range<u64>]| {
            let fused_range = |range: &Range<u64>| FusedRange {
                range: range.clone(),
                dtype: DType::F32,
                first: 0,
                waits: false,
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
