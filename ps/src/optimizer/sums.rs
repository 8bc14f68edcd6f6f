//! Sums over all elements of a variable, for rules that must know them before they change any.

use super::ApplyAt;

/// The parts of a sum: each takes every so manieth element, so that vector units can add them.
const PARTS: usize = 8;

/// Sums over the elements of a variable, in `f64`, added up run by run in the order of the elements.
///
/// However the variable is cut into runs, and on whatever machine, they come to the same bits: element
/// `i` is added to part `i mod 8` of a sum, and the parts are added up at the end.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    parts: [[f64; PARTS]; ApplyAt::SUMS_MAX],
    elements: u64,
}

impl Sums {
    /// Adds the terms of the next run of so many elements; `terms` says what the element at a place
    /// of the run gives to each sum.
    ///
    /// # Panics
    /// If there are more than [`ApplyAt::SUMS_MAX`] terms.
    #[inline(always)]
    pub fn add<const N: usize>(&mut self, elements: usize, terms: impl Fn(usize) -> [f64; N]) {
        let first = (self.elements % PARTS as u64) as usize;
        let head = elements.min((PARTS - first) % PARTS);
        let end = elements - (elements - head) % PARTS;
        let (parts, _) = self.parts.split_at_mut(N);
        for at in 0..head {
            let terms = terms(at);
            parts.iter_mut().zip(terms).for_each(|(parts, term)| parts[first + at] += term);
        }
        for start in (head..end).step_by(PARTS) {
            for part in 0..PARTS {
                let terms = terms(start + part);
                parts.iter_mut().zip(terms).for_each(|(parts, term)| parts[part] += term);
            }
        }
        for at in end..elements {
            let terms = terms(at);
            parts.iter_mut().zip(terms).for_each(|(parts, term)| parts[at - end] += term);
        }
        self.elements += elements as u64;
    }

    /// What they come to.
    pub fn totals(&self) -> [f64; ApplyAt::SUMS_MAX] {
        self.parts.map(|parts| parts.iter().sum())
    }
}

/// A run of elements of one variable whose terms are added to sums, with the same run of its slots and
/// its gradient, all as they are before the update. All slices are of one length.
#[derive(Debug)]
#[non_exhaustive]
pub struct SumRun<'a, T> {
    /// The values.
    pub values: &'a [T],
    /// The slots in the order of [`super::Optimizer::slots`].
    pub slots: &'a [&'a [T]],
    /// The gradient.
    pub gradient: &'a [T],
}

impl<'a, T> SumRun<'a, T> {
    /// A run of these slices.
    pub fn new(values: &'a [T], slots: &'a [&'a [T]], gradient: &'a [T]) -> Self {
        SumRun { values, slots, gradient }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cuts_leave_the_bits_of_a_sum_as_they_are(
            elements in prop::collection::vec(-1e3_f64..1e3, 0..100),
            cuts in prop::collection::vec(0_usize..20, 0..20),
        ) {
            let terms = |start: usize| {
                let elements = &elements;
                move |at: usize| [elements[start + at], elements[start + at].powi(2)]
            };
            let mut whole = Sums::default();
            whole.add(elements.len(), terms(0));
            let (mut cut, mut start) = (Sums::default(), 0);
            for length in cuts.into_iter().chain([elements.len()]) {
                let length = length.min(elements.len() - start);
                cut.add(length, terms(start));
                start += length;
            }
            prop_assert_eq!(whole.totals().map(f64::to_bits), cut.totals().map(f64::to_bits));
            let [sum, squares, rest @ ..] = whole.totals();
            let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-9 * (1.0 + squares);
            prop_assert!(near(sum, elements.iter().sum()));
            prop_assert!(near(squares, elements.iter().map(|x| x * x).sum()));
            prop_assert_eq!(rest, [0.0; ApplyAt::SUMS_MAX - 2]);
        }
    }
}
