//! Residuals of rows, kept by row within a memory limit.

use std::collections::HashMap;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::{Codec, CodecError, Real, Residual};

use super::add_encoded_parts;
use crate::gradients::part_buffer::PartBuffer;

/// The residuals of one variable's rows.
///
/// Rows are kept in two generations: the rows that were pushed since the young generation began,
/// and others of the previous one. When the young generation is full, it becomes the old one, and
/// the previous old one is dropped. So the rows that are dropped were not pushed for the longest
/// time, and each loses at most one step's error. The result depends on the pushed rows only.
#[derive(Debug)]
pub(crate) struct RowResiduals<T> {
    /// The elements of a row.
    width: usize,
    /// The most rows of a generation; 0 keeps no residuals.
    rows_max: usize,
    young: RowGeneration<T>,
    old: RowGeneration<T>,
    /// The residuals of the rows that are being encoded, and memory for them.
    left: Residual<T>,
    gathered: Vec<T>,
}

/// Rows in the order of their insertion.
#[derive(Debug)]
struct RowGeneration<T> {
    ids: Vec<u64>,
    rows: Vec<T>,
    /// The index of each row. Rows that it does not name are dropped.
    places: HashMap<u64, usize>,
}

/// What a row takes beside its elements: its id, and an entry in a map that is rarely full.
const ROW_OVERHEAD_BYTES: u64 = 48;

impl<T: Real> RowResiduals<T> {
    /// No residuals, for rows of `width` elements. At most about `bytes` will be used.
    pub(crate) fn new(width: usize, bytes: u64) -> RowResiduals<T> {
        let row_bytes = (width * size_of::<T>()) as u64 + ROW_OVERHEAD_BYTES;
        let rows_max = (bytes / 2 / row_bytes) as usize;
        RowResiduals::with_capacity(width, rows_max)
    }

    /// No residuals, for rows of `width` elements and at most `rows_max` rows in each generation.
    fn with_capacity(width: usize, rows_max: usize) -> RowResiduals<T> {
        let [young, old] = [(); 2].map(|()| RowGeneration::new());
        let left = Residual::new(0);
        let gathered = Vec::default();
        RowResiduals { width, rows_max, young, old, left, gathered }
    }

    /// Returns the elements of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns residuals of the same shape and limit, without any row.
    pub(super) fn cleared(&self) -> RowResiduals<T> {
        RowResiduals::with_capacity(self.width, self.rows_max)
    }

    /// Returns the residual of each row. [`RowResiduals::keep`] rebuilds the same state from this
    /// order.
    pub(super) fn left(&self) -> impl Iterator<Item = (u64, &[T])> {
        let generations = [&self.old, &self.young].into_iter();
        generations.flat_map(|generation| generation.entries(self.width))
    }

    /// Encodes rows of a partition with their residuals, adds the parts of their values to `out`,
    /// and keeps the new residuals.
    pub(super) fn encode(
        &mut self,
        codec: &Codec,
        partition: &Partition,
        part_bytes: u64,
        ids: &[u64],
        values: &[T],
        out: &mut PartBuffer,
    ) -> Result<(), CodecError> {
        let mut gathered = std::mem::take(&mut self.gathered);
        self.gather(ids, &mut gathered);
        self.left.swap_left(&mut gathered);
        let all = 0..values.len();
        let result =
            add_encoded_parts(codec, &mut self.left, partition, part_bytes, all, values, out);
        self.left.swap_left(&mut gathered);
        if result.is_ok() {
            self.keep(ids.iter().copied().zip(gathered.chunks_exact(self.width)));
        }
        gathered.clear();
        self.gathered = gathered;
        result
    }

    /// Appends the residuals of these rows, back to back; zeros for rows without.
    fn gather(&self, ids: &[u64], left: &mut Vec<T>) {
        for id in ids {
            match self.young.row(*id, self.width).or_else(|| self.old.row(*id, self.width)) {
                Some(found) => left.extend_from_slice(found),
                None => left.extend(std::iter::repeat_n(T::zeroed(), self.width)),
            }
        }
    }

    /// Replaces the residuals of these rows.
    pub(super) fn keep<'a>(&mut self, rows: impl Iterator<Item = (u64, &'a [T])>) {
        for (id, row) in rows.filter(|_| self.rows_max > 0) {
            if let Some(place) = self.young.places.get(&id) {
                let start = place * self.width;
                self.young.rows[start..start + self.width].copy_from_slice(row);
                continue;
            }
            self.old.places.remove(&id);
            if is_zero(row) {
                continue;
            }
            if self.young.ids.len() == self.rows_max {
                std::mem::swap(&mut self.old, &mut self.young);
                self.young.clear();
            }
            self.young.push(id, row, self.rows_max);
        }
    }
}

impl<T: Real> RowGeneration<T> {
    fn new() -> RowGeneration<T> {
        RowGeneration { ids: Vec::new(), rows: Vec::new(), places: HashMap::new() }
    }

    /// Drops all rows.
    fn clear(&mut self) {
        self.ids.clear();
        self.rows.clear();
        self.places.clear();
    }

    /// Adds a row; the generation has fewer than `rows_max`.
    fn push(&mut self, id: u64, row: &[T], rows_max: usize) {
        if self.rows.len() == self.rows.capacity() {
            // Doubles the capacity, but not beyond the limit.
            let more = (rows_max - self.ids.len()).min(self.ids.len().max(8));
            self.rows.reserve_exact(more * row.len());
        }
        self.places.insert(id, self.ids.len());
        self.ids.push(id);
        self.rows.extend_from_slice(row);
    }

    fn row(&self, id: u64, width: usize) -> Option<&[T]> {
        let start = self.places.get(&id)? * width;
        Some(&self.rows[start..start + width])
    }

    fn entries(&self, width: usize) -> impl Iterator<Item = (u64, &[T])> {
        let rows = self.ids.iter().copied().zip(self.rows.chunks_exact(width));
        rows.enumerate()
            .filter(|(place, (id, row))| self.places.get(id) == Some(place) && !is_zero(row))
            .map(|(_, row)| row)
    }
}

fn is_zero<T: Real>(row: &[T]) -> bool {
    row.iter().all(|&value| value == T::zeroed())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;
    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::placement::{Placement, PlacementStrategy as Placing, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::sharding_plan::ShardingPlan;
    use crate::gradients::staged_parts::StagedParts;

    proptest! {
        /// For each row, the arrived values and the residual sum up to the given values, and the
        /// residual is at most one step's error.
        #[test]
        fn rows_keep_their_running_sums(
            steps in prop::collection::vec(
                prop::collection::btree_map(0..9_u64, prop::collection::vec(-1f32..1.0, 5), 0..9),
                1..20,
            ),
            codec in prop_oneof![Just(Codec::F16), Just(Codec::Bf16), Just(Codec::Int8)],
            part_bytes in prop_oneof![Just(8_u64), Just(24), Just(64), Just(1 << 20)],
        ) {
            let variable = VariableSpec::f32("rows", [9, 5]).unwrap().sparse();
            let map = ShardMap::new([0], 1).unwrap();
            let variables = vec![variable];
            let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
            let plan = ShardingPlan::new(Catalogue::new(variables, &placement).unwrap().into());
            let partition = &plan.catalogue().partitions()[0];
            let mut residuals = RowResiduals::<f32>::new(5, 1 << 20);
            // The given and the arrived sum of each row.
            let mut sums: BTreeMap<u64, [[f64; 5]; 2]> = BTreeMap::new();
            for step in steps {
                let ids: Vec<u64> = step.keys().copied().collect();
                let values = step.into_values().flatten().collect::<Vec<f32>>();
                let mut staged = StagedParts::default();
                let out = &mut staged.copies;
                residuals.encode(&codec, partition, part_bytes, &ids, &values, out).unwrap();
                let mut decoded = vec![0f32; values.len()];
                for (_, part) in Arc::new(staged).parts() {
                    let stretch = part.encoded.unwrap();
                    let start = (part.offset - partition.offset) as usize / 4;
                    let target = &mut decoded[start..start + stretch.elements as usize];
                    let blocks = partition.blocks_from(part.offset);
                    let bytes = part.body.concat();
                    stretch.encoding.decode_rows(blocks, &bytes, target).unwrap();
                }
                for ((id, given), arrived) in ids.iter().zip(values.chunks(5)).zip(decoded.chunks(5)) {
                    let sums = sums.entry(*id).or_default();
                    let add = |sum: &mut [f64; 5], row: &[f32]| {
                        sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
                    };
                    add(&mut sums[0], given);
                    add(&mut sums[1], arrived);
                }
                for (&id, [given, arrived]) in &sums {
                    let left = gathered(&residuals, &[id]);
                    for ((given, arrived), &left) in given.iter().zip(arrived).zip(&left) {
                        let off = (given - arrived - f64::from(left)).abs();
                        prop_assert!(off < 1e-5, "{codec}: row {id} is off by {off:e}");
                        // For sums below 1.01: half a unit in the last place of a bf16, or 1/127.
                        prop_assert!(left.abs() <= 1.01 / 250.0, "{codec}: {left} is left");
                    }
                }
            }
        }
    }

    fn left(residuals: &RowResiduals<f32>) -> Vec<(u64, f32)> {
        residuals.left().map(|(id, row)| (id, row[0])).collect()
    }

    fn gathered(residuals: &RowResiduals<f32>, ids: &[u64]) -> Vec<f32> {
        let mut left = Vec::new();
        residuals.gather(ids, &mut left);
        left
    }

    fn keep(residuals: &mut RowResiduals<f32>, id: u64, value: f32) {
        residuals.keep([(id, &[value][..])].into_iter());
    }

    #[test]
    fn the_residuals_of_rows_not_pushed_for_longest_are_dropped() {
        // Two generations of three rows.
        let mut residuals = RowResiduals::<f32>::new(1, 2 * 3 * (4 + ROW_OVERHEAD_BYTES));
        (1..=3).for_each(|id| keep(&mut residuals, id, id as f32));
        assert_eq!(gathered(&residuals, &[2, 9, 3]), [2.0, 0.0, 3.0]);
        keep(&mut residuals, 4, 4.0);
        keep(&mut residuals, 2, 2.5);
        // Row 1 is removed, as its residual is zero.
        keep(&mut residuals, 1, 0.0);
        assert_eq!(left(&residuals), [(3, 3.0), (4, 4.0), (2, 2.5)]);
        keep(&mut residuals, 5, 5.0);
        keep(&mut residuals, 6, 6.0);
        assert_eq!(left(&residuals), [(4, 4.0), (2, 2.5), (5, 5.0), (6, 6.0)], "3 is dropped");
        keep(&mut residuals, 6, 0.0);
        assert_eq!(gathered(&residuals, &[6, 5]), [0.0, 5.0]);

        let mut again = residuals.cleared();
        again.keep(residuals.left());
        assert_eq!(left(&again), left(&residuals));
        let mut none = RowResiduals::<f32>::new(1, 2 * (4 + ROW_OVERHEAD_BYTES) - 1);
        keep(&mut none, 1, 1.0);
        assert_eq!((left(&none), gathered(&none, &[1])), (vec![], vec![0.0]));
    }
}
