//! The dense accumulator: the mean or the sum of enough fresh gradients of one variable.

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Shape;
use thiserror::Error;

use super::real::{Summand, add};
use super::takers::{Applied, TakeError, Taken, Takers, Ticket};

/// How the gradients that are taken together are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// Their sum divided by their actual number, which may exceed the number requested.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// Sums the fresh gradients of one variable until a caller takes enough of them.
///
/// The semantics are those of TensorFlow's conditional accumulators
/// (`tf.compat.v1.ConditionalAccumulator`), with one difference: a dropped gradient is reported as
/// [`Applied::Stale`], where TensorFlow drops it silently.
///
/// An accumulator has a step, initially 0. Each gradient names the step of the values it was
/// computed from. A gradient of an earlier step than the accumulator's is dropped; one of a later
/// step is accepted. A caller of [`take`](Self::take) gets a ticket. Once there are as many
/// gradients as it requested, [`poll_taken`](Self::poll_taken) returns their mean or sum. Serving a
/// ticket empties the accumulator and increments its step. A gradient that was computed before the
/// taker has changed the variable is then stale already.
///
/// Sums are computed in `T` and in the order of arrival. NaN and infinity get no special treatment.
///
/// Memory: one gradient if the sum is not empty, and one for each result that was not fetched.
///
/// Invariants: those of the waiters; the sum has the variable's length if it contains a gradient,
/// and is empty otherwise.
#[doc(alias = "ConditionalAccumulator")]
#[derive(Clone, Debug)]
pub struct Accumulator<T> {
    shape: Shape,
    reduction: Reduction,
    sum: Vec<T>,
    takers: Takers<Vec<T>>,
}

/// The reason why a gradient cannot be applied. The caller is at fault; the accumulator is
/// unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The gradient's shape differs from the variable's.
    #[error("cannot apply a gradient of shape {found}: the accumulator's is {expected}")]
    Shape {
        /// The accumulator's shape.
        expected: Shape,
        /// The gradient's shape.
        found: Shape,
    },
    /// The number of values differs from the number of elements in the shape.
    #[error("cannot apply a gradient of {found} values: its shape has {expected} elements")]
    Values {
        /// The number of elements in the shape.
        expected: u64,
        /// The number of values given.
        found: u64,
    },
}

impl<T: Summand> Accumulator<T> {
    /// Creates an empty accumulator at step 0 for a variable of this shape. Allocates nothing.
    pub fn new(shape: Shape, reduction: Reduction) -> Self {
        Accumulator { shape, reduction, sum: Vec::new(), takers: Takers::new() }
    }

    /// Returns the shape of the gradients.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the earliest step whose gradients are accepted.
    pub fn step(&self) -> GlobalStep {
        self.takers.step()
    }

    /// Sets the step, forwards or backwards. Gradients in the sum stay there, even those that would
    /// now be stale. Waiters stay too.
    pub fn set_step(&mut self, step: GlobalStep) {
        self.takers.set_step(step);
    }

    /// Returns the number of gradients in the sum.
    pub fn count(&self) -> u64 {
        self.takers.count()
    }

    /// Adds a gradient that was computed from the values of step `local_step`. Never blocks.
    ///
    /// The step is checked before anything else: a stale gradient is [`Applied::Stale`] even if its
    /// shape is wrong.
    ///
    /// Cost: one pass over the values. The first gradient after a take is copied into new memory.
    ///
    /// # Errors
    ///
    /// [`ApplyError::Shape`] if the shape is not the accumulator's, [`ApplyError::Values`] if the
    /// number of values is not the number of elements in the shape.
    pub fn apply(
        &mut self,
        shape: &Shape,
        values: &[T],
        local_step: GlobalStep,
    ) -> Result<Applied, ApplyError> {
        if let Some(stale) = self.takers.stale(local_step) {
            return Ok(stale);
        }
        if *shape != self.shape {
            let (expected, found) = (self.shape.clone(), shape.clone());
            return Err(ApplyError::Shape { expected, found });
        }
        let (expected, found) = (shape.elements(), values.len() as u64);
        if expected != found {
            return Err(ApplyError::Values { expected, found });
        }
        if self.takers.count() == 0 {
            self.sum.extend_from_slice(values);
        } else {
            add(&mut self.sum, values);
        }
        Ok(self.takers.added(reduce(&mut self.sum, self.reduction)))
    }

    /// Requests at least this many gradients. Callers are served strictly in the order of their
    /// calls: one that wants few waits behind one that wants many.
    ///
    /// If there are enough, [`poll_taken`](Self::poll_taken) has the result when this returns. Cost
    /// of a mean: one pass over the sum.
    ///
    /// # Errors
    ///
    /// [`TakeError::Zero`] for no gradients; [`TakeError::TooManyWaiters`] if
    /// [`WAITERS_MAX`](super::WAITERS_MAX) callers wait or have not fetched their result.
    pub fn take(&mut self, gradients: u64) -> Result<Ticket, TakeError> {
        self.takers.take(gradients, reduce(&mut self.sum, self.reduction))
    }

    /// Returns the next result, with the values in row-major order. Results come in the order of
    /// the calls.
    pub fn poll_taken(&mut self) -> Option<Taken<Vec<T>>> {
        self.takers.poll_taken()
    }

    /// Ends a wait, so that the next in line may be served. Returns false if the ticket does not
    /// wait: it was cancelled, or it was served and its result must still be polled.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        self.takers.cancel(ticket, reduce(&mut self.sum, self.reduction))
    }

    /// Asserts the invariants; for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        self.takers.check_invariants();
        let elements = if self.count() == 0 { 0 } else { self.shape.elements() };
        assert_eq!(self.sum.len() as u64, elements);
    }
}

/// Returns a function that empties the sum of N gradients into their sum or mean.
fn reduce<T: Summand>(sum: &mut Vec<T>, reduction: Reduction) -> impl FnOnce(u64) -> Vec<T> {
    move |count| {
        let mut value = std::mem::take(sum);
        if reduction == Reduction::Mean {
            value.iter_mut().for_each(|element| *element = element.over(count));
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::WAITERS_MAX;
    use crate::tests::{number, numbers, vectors};

    fn step(step: u64) -> GlobalStep {
        GlobalStep(step)
    }

    fn pairs(reduction: Reduction) -> (Accumulator<f64>, Shape) {
        let shape = Shape::new([2]).unwrap();
        (Accumulator::new(shape.clone(), reduction), shape)
    }

    fn scalars() -> (Accumulator<f64>, Shape) {
        (Accumulator::new(Shape::scalar(), Reduction::Mean), Shape::scalar())
    }

    /// Returns the number that a note of the script gives after the word "count".
    fn count_in(note: &str) -> Option<u64> {
        let (_, after) = note.split_once("count ")?;
        after.split(' ').find_map(|word| word.parse().ok())
    }

    #[test]
    fn the_script_matches_tensorflow() {
        let vectors = vectors();
        let vector = &vectors["accumulator_dense"];
        let (mut accumulator, shape) = pairs(Reduction::Mean);
        assert_eq!(accumulator.count(), number(&vector["start"]["count"]));
        assert_eq!(accumulator.step().0, number(&vector["start"]["accumulator_step"]));
        let script = vector["script"].as_array().unwrap();
        assert_eq!(script.len(), 18);
        for event in script {
            let before = accumulator.count();
            let note = event.as_array().unwrap().last().and_then(Value::as_str).unwrap_or_default();
            match event[0].as_str().unwrap() {
                "apply" => {
                    let local_step = step(number(&event[2]));
                    let applied = accumulator.apply(&shape, &numbers(&event[1]), local_step);
                    let expected = if note.starts_with("dropped") {
                        Applied::Stale { current: accumulator.step() }
                    } else {
                        Applied::Added { count: before + 1 }
                    };
                    assert_eq!(applied, Ok(expected), "{event}");
                }
                "take" => {
                    let from = accumulator.step().0;
                    let ticket = accumulator.take(number(&event[1])).unwrap();
                    let value = numbers(&event[2]);
                    let expected = Taken { ticket, count: before, value };
                    assert_eq!(accumulator.poll_taken(), Some(expected), "{event}");
                    assert_eq!((accumulator.step().0, accumulator.count()), (from + 1, 0));
                }
                "set_global_step" => accumulator.set_step(step(number(&event[1]))),
                other => panic!("unknown event {other}"),
            }
            if let Some(count) = count_in(note) {
                assert_eq!(accumulator.count(), count, "{event}");
            }
            accumulator.check_invariants();
        }
        assert_eq!(accumulator.poll_taken(), None);
    }

    #[test]
    fn errors_match_the_vectors_and_change_nothing() {
        let vectors = vectors();
        let errors = &vectors["accumulator_dense"]["errors"];
        let (mut accumulator, shape) = pairs(Reduction::Mean);
        let other = Shape::new([3]).unwrap();

        assert_eq!(errors["take 0"], "InvalidArgument");
        assert_eq!(accumulator.take(0), Err(TakeError::Zero));

        assert_eq!(errors["fresh gradient of wrong shape"], "InvalidArgument");
        let refused = accumulator.apply(&other, &[1.0; 3], step(0)).unwrap_err();
        let expected = ApplyError::Shape { expected: shape.clone(), found: other.clone() };
        assert_eq!(refused, expected);
        assert_eq!(
            refused.to_string(),
            "cannot apply a gradient of shape [3]: the accumulator's is [2]"
        );
        let reshaped = Shape::new([1, 2]).unwrap();
        assert!(accumulator.apply(&reshaped, &[1.0; 2], step(0)).is_err(), "as many elements");
        let refused = accumulator.apply(&shape, &[1.0; 3], step(0));
        assert_eq!(refused, Err(ApplyError::Values { expected: 2, found: 3 }));
        assert_eq!((accumulator.count(), accumulator.step()), (0, step(0)));
        accumulator.check_invariants();

        assert_eq!(errors["stale gradient of wrong shape"], "no error, dropped");
        accumulator.set_step(step(1));
        let stale = Applied::Stale { current: step(1) };
        assert_eq!(accumulator.apply(&other, &[1.0; 7], step(0)), Ok(stale));
    }

    #[test]
    fn a_caller_that_wants_few_waits_behind_one_that_wants_many() {
        let vectors = vectors();
        let note = vectors["accumulator_dense"]["fifo"].as_str().unwrap();
        assert_eq!(note, "take(2) queued before take(1): first gradient unblocks neither");
        let (mut accumulator, shape) = scalars();
        let two = accumulator.take(2).unwrap();
        let one = accumulator.take(1).unwrap();
        accumulator.apply(&shape, &[1.0], step(0)).unwrap();
        assert_eq!((accumulator.poll_taken(), accumulator.count()), (None, 1));
        accumulator.apply(&shape, &[3.0], step(0)).unwrap();
        let first = Taken { ticket: two, count: 2, value: vec![2.0] };
        assert_eq!(accumulator.poll_taken(), Some(first));
        assert_eq!(accumulator.poll_taken(), None, "nothing is left for the second");
        accumulator.apply(&shape, &[5.0], step(1)).unwrap();
        let second = Taken { ticket: one, count: 1, value: vec![5.0] };
        assert_eq!(accumulator.poll_taken(), Some(second));
        accumulator.check_invariants();
    }

    #[test]
    fn a_cancelled_wait_lets_the_next_caller_be_served() {
        let (mut accumulator, shape) = scalars();
        let two = accumulator.take(2).unwrap();
        let one = accumulator.take(1).unwrap();
        accumulator.apply(&shape, &[1.0], step(0)).unwrap();
        assert!(accumulator.cancel(two));
        accumulator.check_invariants();
        assert!(!accumulator.cancel(two), "once");
        assert!(!accumulator.cancel(one), "it was served");
        assert_eq!(accumulator.poll_taken().unwrap().ticket, one);
        assert_eq!((accumulator.poll_taken(), accumulator.step()), (None, step(1)));
    }

    #[test]
    fn waiters_and_unfetched_results_are_bounded() {
        let (mut accumulator, shape) = scalars();
        let first = accumulator.take(1).unwrap();
        for _ in 1..WAITERS_MAX {
            accumulator.take(1).unwrap();
        }
        let full = Err(TakeError::TooManyWaiters { waiters_max: WAITERS_MAX });
        assert_eq!(accumulator.take(1), full);
        accumulator.apply(&shape, &[1.0], step(0)).unwrap();
        assert_eq!(accumulator.take(1), full, "the first has not fetched its gradient");
        assert_eq!(accumulator.poll_taken().unwrap().ticket, first);
        accumulator.take(1).unwrap();
        accumulator.check_invariants();
    }

    #[test]
    fn a_mean_is_divided_by_the_actual_count_and_a_sum_is_not() {
        for (reduction, expected) in [(Reduction::Sum, [12.0, 6.0]), (Reduction::Mean, [4.0, 2.0])]
        {
            let (mut accumulator, shape) = pairs(reduction);
            for gradient in [[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]] {
                accumulator.apply(&shape, &gradient, step(0)).unwrap();
            }
            accumulator.take(2).unwrap();
            let taken = accumulator.poll_taken().unwrap();
            assert_eq!((taken.count, &taken.value[..]), (3, &expected[..]));
        }
    }

    #[test]
    fn nan_and_infinity_are_summed_like_other_numbers() {
        let (mut accumulator, shape) = pairs(Reduction::Mean);
        for gradient in [[f64::NAN, 1.0], [2.0, f64::INFINITY]] {
            let applied = accumulator.apply(&shape, &gradient, step(0)).unwrap();
            assert!(matches!(applied, Applied::Added { .. }));
        }
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert!(taken.value[0].is_nan() && taken.value[1] == f64::INFINITY);
        // The next sum starts without them.
        accumulator.apply(&shape, &[1.0, 1.0], step(1)).unwrap();
        accumulator.take(1).unwrap();
        assert_eq!(accumulator.poll_taken().unwrap().value, [1.0, 1.0]);
    }

    #[test]
    fn a_variable_without_elements_still_counts_gradients() {
        let shape = Shape::new([0, 3]).unwrap();
        let mut accumulator = Accumulator::<f32>::new(shape.clone(), Reduction::Mean);
        accumulator.apply(&shape, &[], step(0)).unwrap();
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert_eq!((taken.count, taken.value.len(), accumulator.step()), (1, 0, step(1)));
    }

    #[test]
    fn the_largest_step_does_not_overflow() {
        let (mut accumulator, shape) = scalars();
        accumulator.set_step(step(u64::MAX));
        accumulator.apply(&shape, &[1.0], step(u64::MAX)).unwrap();
        accumulator.take(1).unwrap();
        assert_eq!(accumulator.step(), step(u64::MAX));
    }

    fn gradients() -> impl Strategy<Value = Vec<[f32; 2]>> {
        prop::collection::vec([-1e6_f32..1e6, -1.0_f32..1.0], 1..40)
    }

    proptest! {
        #[test]
        fn the_mean_is_accurate_in_any_order(
            (gradients, shuffled) in gradients()
                .prop_flat_map(|g| (Just(g.clone()), Just(g).prop_shuffle())),
            reduction in prop::sample::select(vec![Reduction::Mean, Reduction::Sum]),
        ) {
            let shape = Shape::new([2]).unwrap();
            let taken = |gradients: &[[f32; 2]]| {
                let mut accumulator = Accumulator::<f32>::new(shape.clone(), reduction);
                for gradient in gradients {
                    accumulator.apply(&shape, gradient, step(0)).unwrap();
                    accumulator.check_invariants();
                }
                accumulator.take(1).unwrap();
                accumulator.check_invariants();
                accumulator.poll_taken().unwrap().value
            };
            let (one, other) = (taken(&gradients), taken(&shuffled));
            let divisor = match reduction {
                Reduction::Mean => gradients.len() as f64,
                Reduction::Sum => 1.0,
            };
            for element in 0..2 {
                let column = gradients.iter().map(|gradient| f64::from(gradient[element]));
                let exact = column.clone().sum::<f64>() / divisor;
                // Each addition and the division round once, relative to a sum of this size.
                let size = column.map(f64::abs).sum::<f64>() / divisor;
                let bound = size * f64::from(f32::EPSILON) * (gradients.len() + 1) as f64;
                prop_assert!((f64::from(one[element]) - exact).abs() <= bound);
                prop_assert!((f64::from(other[element]) - exact).abs() <= bound);
            }
        }
    }
}
