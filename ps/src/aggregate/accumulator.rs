//! The mean or the sum of enough fresh gradients of one variable.

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Shape;
use thiserror::Error;

use super::real::{Real, add};
use super::takers::{Applied, TakeError, Taken, Takers, Ticket};

/// What becomes of the gradients that are taken together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// Their sum divided by their number: however many there are, not however many were asked for.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// Adds the fresh gradients of one variable until somebody takes enough of them.
///
/// The semantics are those of TensorFlow's conditional accumulators
/// (`tf.compat.v1.ConditionalAccumulator`), with one difference: a gradient that is dropped is
/// answered with [`Applied::Stale`], where TensorFlow says nothing.
///
/// An accumulator has a step, at first 0. A gradient says which step its values were of; one of an
/// earlier step than the accumulator's is dropped, one of a later step is as good as one of this.
/// Whoever calls [`take`](Self::take) gets a ticket, and when there are as many gradients as it
/// asked for, [`poll_taken`](Self::poll_taken) gives their mean or sum. That empties the
/// accumulator and raises its step by one, so a gradient that was computed before the taker has
/// changed the variable is stale already.
///
/// Sums are made in `T` and in the order of arrival. NaN and infinity are numbers like others.
///
/// Memory: one gradient while there is any, and one for each that was taken and is not fetched.
///
/// Invariants: those of the waiters; the sum has the variable's length if there is a gradient in
/// it, and is empty if not.
#[derive(Clone, Debug)]
pub struct Accumulator<T> {
    shape: Shape,
    reduction: Reduction,
    sum: Vec<T>,
    takers: Takers<Vec<T>>,
}

/// Why a gradient cannot be applied. The caller's doing; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The gradient has another shape than the variable.
    #[error("cannot apply a gradient of shape {found}: the accumulator's is {expected}")]
    Shape {
        /// The accumulator's shape.
        expected: Shape,
        /// The gradient's.
        found: Shape,
    },
    /// The values are fewer or more than the shape has elements.
    #[error("cannot apply a gradient of {found} values: its shape has {expected} elements")]
    Values {
        /// The elements of the shape.
        expected: u64,
        /// The values given.
        found: u64,
    },
}

impl<T: Real> Accumulator<T> {
    /// An empty accumulator at step 0 for a variable of this shape. Allocates nothing.
    pub fn new(shape: Shape, reduction: Reduction) -> Self {
        Accumulator { shape, reduction, sum: Vec::new(), takers: Takers::new() }
    }

    /// The shape of the gradients.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The step that gradients must be of at least.
    pub fn step(&self) -> GlobalStep {
        self.takers.step()
    }

    /// Sets the step, forwards or backwards. The gradients that are in the sum stay in it, even
    /// those that would be stale now; so do the waiters.
    pub fn set_step(&mut self, step: GlobalStep) {
        self.takers.set_step(step);
    }

    /// The gradients in the sum.
    pub fn count(&self) -> u64 {
        self.takers.count()
    }

    /// Adds a gradient that was computed from the values of step `local_step`. Never waits.
    ///
    /// A stale gradient is dropped before anything else is looked at: it is [`Applied::Stale`]
    /// whatever its shape.
    ///
    /// Cost: one pass over the values; the first gradient after a take is copied into new memory.
    ///
    /// # Errors
    ///
    /// [`ApplyError::Shape`] if the shape is not the accumulator's, [`ApplyError::Values`] if there
    /// are not as many values as the shape has elements.
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

    /// Waits for at least this many gradients. Callers are served strictly in the order of their
    /// calls: one that wants few waits behind one that wants many.
    ///
    /// If there are enough, [`poll_taken`](Self::poll_taken) has them when this returns. Cost of a
    /// mean: one pass over the sum.
    ///
    /// # Errors
    ///
    /// [`TakeError::Zero`] for no gradients; [`TakeError::TooManyWaiters`] if
    /// [`WAITERS_MAX`](super::WAITERS_MAX) callers wait or have not fetched what they got.
    pub fn take(&mut self, gradients: u64) -> Result<Ticket, TakeError> {
        self.takers.take(gradients, reduce(&mut self.sum, self.reduction))
    }

    /// The next caller that was served, with the values in row-major order; in the order of the
    /// calls.
    pub fn poll_taken(&mut self) -> Option<Taken<Vec<T>>> {
        self.takers.poll_taken()
    }

    /// Ends a wait, so that the next in line may be served. False if the ticket does not wait: it
    /// was cancelled, or it was served and its gradients are to be polled all the same.
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

/// What empties a sum of so many gradients into a value.
fn reduce<T: Real>(sum: &mut Vec<T>, reduction: Reduction) -> impl FnOnce(u64) -> Vec<T> {
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
    use crate::aggregate::WAITERS_MAX;
    use crate::aggregate::tests::{number, numbers, vectors};

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

    /// The number that a note of the script gives after the word "count".
    fn count_in(note: &str) -> Option<u64> {
        let (_, after) = note.split_once("count ")?;
        after.split(' ').find_map(|word| word.parse().ok())
    }

    #[test]
    fn the_script_gives_what_tensorflow_gives() {
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
                other => panic!("no event {other}"),
            }
            if let Some(count) = count_in(note) {
                assert_eq!(accumulator.count(), count, "{event}");
            }
            accumulator.check_invariants();
        }
        assert_eq!(accumulator.poll_taken(), None);
    }

    #[test]
    fn errors_are_those_of_the_vectors_and_change_nothing() {
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
        let turned = Shape::new([1, 2]).unwrap();
        assert!(accumulator.apply(&turned, &[1.0; 2], step(0)).is_err(), "as many elements");
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
    fn a_cancelled_wait_lets_the_next_be_served() {
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
    fn the_waiters_are_bounded_and_so_are_those_who_do_not_fetch() {
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
    fn a_sum_is_not_divided_and_a_mean_is_by_what_there_is() {
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
    fn nan_and_infinity_are_numbers_like_others() {
        let (mut accumulator, shape) = pairs(Reduction::Mean);
        for gradient in [[f64::NAN, 1.0], [2.0, f64::INFINITY]] {
            let applied = accumulator.apply(&shape, &gradient, step(0)).unwrap();
            assert!(matches!(applied, Applied::Added { .. }));
        }
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert!(taken.value[0].is_nan() && taken.value[1] == f64::INFINITY);
        // Nothing of it stays.
        accumulator.apply(&shape, &[1.0, 1.0], step(1)).unwrap();
        accumulator.take(1).unwrap();
        assert_eq!(accumulator.poll_taken().unwrap().value, [1.0, 1.0]);
    }

    #[test]
    fn a_variable_without_elements_counts_gradients_all_the_same() {
        let shape = Shape::new([0, 3]).unwrap();
        let mut accumulator = Accumulator::<f32>::new(shape.clone(), Reduction::Mean);
        accumulator.apply(&shape, &[], step(0)).unwrap();
        accumulator.take(1).unwrap();
        let taken = accumulator.poll_taken().unwrap();
        assert_eq!((taken.count, taken.value.len(), accumulator.step()), (1, 0, step(1)));
    }

    #[test]
    fn the_last_step_there_is_overflows_nothing() {
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
        fn in_any_order_the_mean_is_the_sum_divided_by_the_count(
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
