//! The sparse accumulator: the mean or the sum of enough fresh gradients that name their rows.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Shape;
use thiserror::Error;

use super::real::{Summand, add};
use super::takers::{Applied, TakeError, Taken, Takers, Ticket};

/// How the rows that are taken together are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SparseReduction {
    /// Each row's sum divided by the number of pushes. A dense accumulator gives the same for the
    /// same gradients with absent rows as zeros. The default.
    #[default]
    ReplicaMean,
    /// Each row's sum divided by the number of pushes that contained the row: the mean of
    /// TensorFlow's sparse accumulators. Rows that few replicas touch move further than under
    /// `ReplicaMean`.
    RowMean,
    /// Each row's sum.
    Sum,
}

/// A gradient of some rows of a variable.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SparseGradient<T> {
    /// The row indices, ascending and unique.
    pub indices: Vec<u64>,
    /// The rows, concatenated in the order of `indices`.
    pub values: Vec<T>,
}

/// Sums the fresh sparse gradients of one variable until a caller takes enough of them.
///
/// Steps, tickets and the order of service are those of [`Accumulator`](super::Accumulator). The
/// origin is TensorFlow's `tf.compat.v1.SparseConditionalAccumulator`, which differs in two ways:
///
/// - Its mean is [`SparseReduction::RowMean`] here.
/// - It assumes that the indices of a push are ascending and unique. With unsorted indices its
///   merge misses equal rows and returns them twice; duplicate rows within a push stay separate.
///   Here the indices of a push may be in any order. Rows with equal indices are summed, in their
///   order, before they are added.
///
/// A push without rows counts as a push.
///
/// Memory: the rows that were touched since the last take, and the results that were not fetched.
///
/// Invariants: those of the waiters; every row in the sum has its own position, and was in at least
/// one push and in at most as many as there are; without pushes there are no rows.
#[doc(alias = "SparseConditionalAccumulator")]
#[derive(Clone, Debug)]
pub struct SparseAccumulator<T> {
    rows: u64,
    row_elements: usize,
    reduction: SparseReduction,
    sum: RowSums<T>,
    takers: Takers<SparseGradient<T>>,
}

/// The reason why a sparse gradient cannot be applied. The caller is at fault; the accumulator is
/// unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SparseApplyError {
    /// The values are not one whole row for each index.
    #[error(
        "cannot apply {found} values as {indices} rows: a row of the accumulator has {row_elements} \
         elements"
    )]
    Values {
        /// The number of indices.
        indices: u64,
        /// The number of elements in a row.
        row_elements: u64,
        /// The number of values given.
        found: u64,
    },
    /// An index is beyond the last row.
    #[error("cannot apply row {index}, at position {at} of the indices: there are {rows} rows")]
    Index {
        /// The first such index.
        index: u64,
        /// Its position among the indices, from 0.
        at: u64,
        /// The number of rows in the accumulator.
        rows: u64,
    },
}

impl<T: Summand> SparseAccumulator<T> {
    /// Creates an empty accumulator at step 0 for a variable of this shape. Rows run along the
    /// first axis; a scalar is one row. Allocates nothing.
    pub fn new(shape: &Shape, reduction: SparseReduction) -> Self {
        SparseAccumulator {
            rows: shape.rows(),
            // If a row does not fit into memory, no caller can have the values of one.
            row_elements: usize::try_from(shape.row_elements()).unwrap_or(usize::MAX),
            reduction,
            sum: RowSums::new(),
            takers: Takers::new(),
        }
    }

    /// Returns the earliest step whose gradients are accepted.
    pub fn step(&self) -> GlobalStep {
        self.takers.step()
    }

    /// Sets the step, forwards or backwards. Rows in the sum stay there.
    pub fn set_step(&mut self, step: GlobalStep) {
        self.takers.set_step(step);
    }

    /// Returns the number of pushes in the sum, including those without rows.
    pub fn count(&self) -> u64 {
        self.takers.count()
    }

    /// Adds rows that were computed from the values of step `local_step`. Never blocks.
    ///
    /// `values` holds a row for each index, concatenated. A stale gradient is dropped before
    /// anything else is checked.
    ///
    /// Cost: one pass over the values, and `k log k + k log m` comparisons to find the positions of
    /// `k` rows pushed among `m` rows in the sum.
    ///
    /// # Errors
    ///
    /// [`SparseApplyError::Values`] if the values are not a row for each index,
    /// [`SparseApplyError::Index`] for the first index beyond the last row.
    pub fn apply(
        &mut self,
        indices: &[u64],
        values: &[T],
        local_step: GlobalStep,
    ) -> Result<Applied, SparseApplyError> {
        if let Some(stale) = self.takers.stale(local_step) {
            return Ok(stale);
        }
        self.check(indices, values)?;
        self.sum.add_push(self.row_elements, indices, values);
        let (width, reduction) = (self.row_elements, self.reduction);
        Ok(self.takers.added(|count| self.sum.reduce(width, reduction, count)))
    }

    /// Requests at least this many pushes. Callers are served strictly in the order of their calls.
    ///
    /// If there are enough, [`poll_taken`](Self::poll_taken) has the result when this returns.
    /// Cost: one pass over the rows in the sum.
    ///
    /// # Errors
    ///
    /// [`TakeError::Zero`] for no pushes; [`TakeError::TooManyWaiters`] if
    /// [`WAITERS_MAX`](super::WAITERS_MAX) callers wait or have not fetched their result.
    pub fn take(&mut self, pushes: u64) -> Result<Ticket, TakeError> {
        let (width, reduction) = (self.row_elements, self.reduction);
        self.takers.take(pushes, |count| self.sum.reduce(width, reduction, count))
    }

    /// Returns the next result, in the order of the calls.
    pub fn poll_taken(&mut self) -> Option<Taken<SparseGradient<T>>> {
        self.takers.poll_taken()
    }

    /// Ends a wait, so that the next in line may be served. Returns false if the ticket does not
    /// wait: it was cancelled, or it was served and its result must still be polled.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let (width, reduction) = (self.row_elements, self.reduction);
        self.takers.cancel(ticket, |count| self.sum.reduce(width, reduction, count))
    }

    fn check(&self, indices: &[u64], values: &[T]) -> Result<(), SparseApplyError> {
        if indices.len().checked_mul(self.row_elements) != Some(values.len()) {
            return Err(SparseApplyError::Values {
                indices: indices.len() as u64,
                row_elements: self.row_elements as u64,
                found: values.len() as u64,
            });
        }
        match indices.iter().position(|&index| index >= self.rows) {
            None => Ok(()),
            Some(at) => {
                Err(SparseApplyError::Index { index: indices[at], at: at as u64, rows: self.rows })
            }
        }
    }

    /// Asserts the invariants; for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        self.takers.check_invariants();
        let RowSums { positions, values, pushes } = &self.sum;
        let taken: std::collections::BTreeSet<usize> = positions.values().copied().collect();
        assert!(taken.into_iter().eq(0..pushes.len()), "one position for each row");
        assert_eq!(
            (positions.len(), values.len()),
            (pushes.len(), pushes.len() * self.row_elements)
        );
        assert!(pushes.iter().all(|pushes| (1..=self.count()).contains(pushes)));
        assert!(positions.keys().all(|&index| index < self.rows));
    }
}

/// The sums of rows, in the order in which the rows were first touched.
#[derive(Clone, Debug)]
struct RowSums<T> {
    /// The position of each row, by its index.
    positions: BTreeMap<u64, usize>,
    /// The sums, by position.
    values: Vec<T>,
    /// The number of pushes that contained each row, by position.
    pushes: Vec<u64>,
}

impl<T: Summand> RowSums<T> {
    fn new() -> Self {
        RowSums { positions: BTreeMap::new(), values: Vec::new(), pushes: Vec::new() }
    }

    fn add_push(&mut self, width: usize, indices: &[u64], values: &[T]) {
        let mut order: Vec<usize> = (0..indices.len()).collect();
        // The sort is stable, so that rows with equal indices are summed in the order given.
        order.sort_by_key(|&at| indices[at]);
        let mut summed = Vec::new();
        for same in order.chunk_by(|&one, &other| indices[one] == indices[other]) {
            let (index, first) = (indices[same[0]], row(values, width, same[0]));
            if let [_, more @ ..] = same
                && !more.is_empty()
            {
                summed.clear();
                summed.extend_from_slice(first);
                more.iter().for_each(|&at| add(&mut summed, row(values, width, at)));
                self.add_row(width, index, &summed);
            } else {
                self.add_row(width, index, first);
            }
        }
    }

    fn add_row(&mut self, width: usize, index: u64, values: &[T]) {
        match self.positions.entry(index) {
            Entry::Vacant(entry) => {
                entry.insert(self.pushes.len());
                self.pushes.push(1);
                self.values.extend_from_slice(values);
            }
            Entry::Occupied(entry) => {
                let position = *entry.get();
                self.pushes[position] += 1;
                add(&mut self.values[position * width..][..width], values);
            }
        }
    }

    /// Empties the sums of `count` pushes into a gradient.
    fn reduce(
        &mut self,
        width: usize,
        reduction: SparseReduction,
        count: u64,
    ) -> SparseGradient<T> {
        let RowSums { positions, values, pushes } = std::mem::replace(self, RowSums::new());
        let mut reduced = Vec::with_capacity(values.len());
        for &position in positions.values() {
            let sums = row(&values, width, position).iter();
            match reduction {
                SparseReduction::ReplicaMean => reduced.extend(sums.map(|sum| sum.over(count))),
                SparseReduction::RowMean => {
                    reduced.extend(sums.map(|sum| sum.over(pushes[position])));
                }
                SparseReduction::Sum => reduced.extend(sums),
            }
        }
        SparseGradient { indices: positions.into_keys().collect(), values: reduced }
    }
}

fn row<T>(values: &[T], width: usize, at: usize) -> &[T] {
    &values[at * width..][..width]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::SparseReduction::{ReplicaMean, RowMean, Sum};
    use super::*;
    use crate::tests::{number, numbers, vectors};
    use crate::{Accumulator, Reduction};

    const NOW: GlobalStep = GlobalStep(0);

    fn accumulator(extents: &[u64], reduction: SparseReduction) -> SparseAccumulator<f64> {
        SparseAccumulator::new(&Shape::new(extents).unwrap(), reduction)
    }

    fn integers(value: &Value) -> Vec<u64> {
        value.as_array().unwrap().iter().map(number).collect()
    }

    fn rows(value: &Value) -> SparseGradient<f64> {
        SparseGradient { indices: integers(&value[0]), values: numbers(&value[1]) }
    }

    fn taken(case: &Value, reduction: SparseReduction) -> SparseGradient<f64> {
        let mut accumulator = accumulator(&[10], reduction);
        for push in case["push"].as_array().unwrap() {
            let SparseGradient { indices, values } = rows(push);
            accumulator.apply(&indices, &values, NOW).unwrap();
            accumulator.check_invariants();
        }
        accumulator.take(number(&case["take"])).unwrap();
        accumulator.check_invariants();
        accumulator.poll_taken().unwrap().value
    }

    /// Sums duplicate rows, as an optimizer does that subtracts both.
    fn with_summed_duplicates(gradient: &SparseGradient<f64>) -> BTreeMap<u64, f64> {
        let mut summed = BTreeMap::new();
        for (&index, value) in gradient.indices.iter().zip(&gradient.values) {
            *summed.entry(index).or_default() += value;
        }
        summed
    }

    #[test]
    fn the_cases_match_tensorflow_with_its_faults_corrected() {
        let vectors = vectors();
        let cases = vectors["accumulator_sparse"]["cases"].as_array().unwrap();
        let [sorted, unsorted, duplicates, empty] = &cases[..] else { panic!("four cases") };
        let given = |indices: &[u64], values: &[f64]| SparseGradient {
            indices: indices.to_vec(),
            values: values.to_vec(),
        };

        // With ascending indices, TensorFlow's mean is the mean over the pushes that contained a
        // row.
        assert_eq!(taken(sorted, RowMean), rows(&sorted["out"]));
        assert_eq!(taken(sorted, ReplicaMean), given(&[0, 2, 3], &[1.0, 5.0, 4.0]));
        assert_eq!(taken(sorted, Sum), given(&[0, 2, 3], &[2.0, 10.0, 8.0]));

        // The same rows in another order. TensorFlow's merge misses row 2 and returns its two
        // halves undivided; an optimizer adds them up to twice the mean.
        let classic = rows(&unsorted["out"]);
        assert_eq!(classic, given(&[2, 0, 3, 2], &[4.0, 2.0, 8.0, 6.0]));
        assert_eq!(with_summed_duplicates(&classic)[&2], 10.0);
        for reduction in [RowMean, ReplicaMean, Sum] {
            assert_eq!(taken(unsorted, reduction), taken(sorted, reduction));
        }

        // One push contains row 1 twice. TensorFlow keeps both, and an optimizer adds them up to 6;
        // the mean over two pushes is ((1 + 3) + 5) / 2.
        let classic = rows(&duplicates["out"]);
        assert_eq!(classic, given(&[1, 1], &[3.0, 3.0]));
        assert_eq!(with_summed_duplicates(&classic)[&1], 6.0);
        assert_eq!(taken(duplicates, RowMean), given(&[1], &[4.5]));
        assert_eq!(taken(duplicates, ReplicaMean), given(&[1], &[4.5]));
        assert_eq!(taken(duplicates, Sum), given(&[1], &[9.0]));

        // An empty push counts as a push, but contained no row.
        assert_eq!(taken(empty, RowMean), rows(&empty["out"]));
        assert_eq!(taken(empty, ReplicaMean), given(&[7], &[0.5]));
    }

    #[test]
    fn an_invalid_push_is_reported_and_changes_nothing() {
        let mut accumulator = accumulator(&[4, 2], ReplicaMean);
        accumulator.apply(&[3, 0], &[1.0, 2.0, 3.0, 4.0], NOW).unwrap();
        let refused = accumulator.apply(&[0, 1], &[9.0; 3], NOW).unwrap_err();
        let expected = SparseApplyError::Values { indices: 2, row_elements: 2, found: 3 };
        assert_eq!(refused, expected);
        assert_eq!(
            refused.to_string(),
            "cannot apply 3 values as 2 rows: a row of the accumulator has 2 elements"
        );
        let refused = accumulator.apply(&[0, 3, 4, u64::MAX], &[9.0; 8], NOW).unwrap_err();
        assert_eq!(refused, SparseApplyError::Index { index: 4, at: 2, rows: 4 });
        assert_eq!(
            refused.to_string(),
            "cannot apply row 4, at position 2 of the indices: there are 4 rows"
        );
        accumulator.check_invariants();
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert_eq!(taken.count, 1);
        assert_eq!(taken.value.indices, [0, 3]);
        assert_eq!(taken.value.values, [3.0, 4.0, 1.0, 2.0]);
        // Staleness is checked before every other error.
        let stale = accumulator.apply(&[9], &[], NOW);
        assert_eq!(stale, Ok(Applied::Stale { current: GlobalStep(1) }));
    }

    #[test]
    fn steps_and_waiters_are_those_of_the_dense_accumulator() {
        let mut accumulator = accumulator(&[4], ReplicaMean);
        assert_eq!(accumulator.take(0), Err(TakeError::Zero));
        let two = accumulator.take(2).unwrap();
        let one = accumulator.take(1).unwrap();
        accumulator.apply(&[1], &[1.0], GlobalStep(7)).unwrap();
        assert_eq!((accumulator.poll_taken(), accumulator.count()), (None, 1));
        assert!(accumulator.cancel(two) && !accumulator.cancel(one));
        assert_eq!(accumulator.poll_taken().unwrap().ticket, one);
        accumulator.set_step(GlobalStep(9));
        accumulator.apply(&[1], &[1.0], GlobalStep(9)).unwrap();
        accumulator.set_step(GlobalStep(3));
        assert_eq!((accumulator.step(), accumulator.count()), (GlobalStep(3), 1));
        accumulator.check_invariants();
    }

    #[test]
    fn rows_without_elements_and_pushes_without_rows_are_counted() {
        let mut accumulator = accumulator(&[3, 0], RowMean);
        accumulator.apply(&[2, 0, 2], &[], NOW).unwrap();
        accumulator.check_invariants();
        accumulator.take(1).unwrap();
        assert_eq!(accumulator.poll_taken().unwrap().value.indices, [0, 2]);
        accumulator.apply(&[], &[], GlobalStep(1)).unwrap();
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert_eq!((taken.count, taken.value), (1, SparseGradient::default()));
    }

    const ROWS: u64 = 6;
    const WIDTH: usize = 2;

    /// A push of rows in any order, some of them twice. Whole numbers, so that sums are exact.
    fn push() -> impl Strategy<Value = Vec<(u64, [f64; WIDTH])>> {
        let value = || (-1000_i32..1000).prop_map(f64::from);
        prop::collection::vec((0..ROWS, [value(), value()]), 0..9)
    }

    proptest! {
        #[test]
        fn the_mean_equals_that_of_the_dense_gradients(pushes in prop::collection::vec(push(), 1..8)) {
            let shape = Shape::new([ROWS, WIDTH as u64]).unwrap();
            let mut sparse = accumulator(shape.extents(), ReplicaMean);
            let mut by_row = accumulator(shape.extents(), RowMean);
            let mut dense = Accumulator::<f64>::new(shape.clone(), Reduction::Mean);
            let mut held_by = [0_u32; ROWS as usize];
            for push in &pushes {
                let indices: Vec<u64> = push.iter().map(|row| row.0).collect();
                let values: Vec<f64> = push.iter().flat_map(|row| row.1).collect();
                sparse.apply(&indices, &values, NOW).unwrap();
                by_row.apply(&indices, &values, NOW).unwrap();
                sparse.check_invariants();
                let mut scattered = vec![0.0; ROWS as usize * WIDTH];
                for &(index, values) in push {
                    add(&mut scattered[index as usize * WIDTH..][..WIDTH], &values);
                }
                dense.apply(&shape, &scattered, NOW).unwrap();
                for (index, held_by) in held_by.iter_mut().enumerate() {
                    *held_by += u32::from(indices.contains(&(index as u64)));
                }
            }
            sparse.take(1).unwrap();
            by_row.take(1).unwrap();
            dense.take(1).unwrap();
            let dense = dense.poll_taken().unwrap().value;
            let sparse = sparse.poll_taken().unwrap().value;
            let by_row = by_row.poll_taken().unwrap().value;
            let held = (0..ROWS).filter(|&index| held_by[index as usize] > 0);
            prop_assert!(sparse.indices.iter().copied().eq(held), "ascending and unique");
            prop_assert_eq!(&by_row.indices, &sparse.indices);
            let mut scattered = vec![0.0; dense.len()];
            for (at, &index) in sparse.indices.iter().enumerate() {
                for element in 0..WIDTH {
                    let (at, to) = (at * WIDTH + element, index as usize * WIDTH + element);
                    scattered[to] = sparse.values[at];
                    let undivided = by_row.values[at] * f64::from(held_by[index as usize]);
                    let sum = dense[to] * pushes.len() as f64;
                    prop_assert!((undivided - sum).abs() <= 1e-9, "row {}", index);
                }
            }
            prop_assert_eq!(scattered, dense);
        }
    }
}
