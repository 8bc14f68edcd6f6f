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
        self.add_terms(elements, &One(terms));
    }

    /// The same where the terms of several elements are had together.
    #[inline(always)]
    pub(super) fn add_terms<const N: usize>(&mut self, elements: usize, terms: &impl Terms<N>) {
        let first = (self.elements % PARTS as u64) as usize;
        let head = elements.min((PARTS - first) % PARTS);
        let end = elements - (elements - head) % PARTS;
        let (parts, _) = self.parts.split_first_chunk_mut::<N>().expect("so many sums at most");
        for at in 0..head {
            add_to(parts, first + at, terms.of::<1>(at));
        }
        for start in (head..end).step_by(PARTS) {
            add_to(parts, 0, terms.of::<PARTS>(start));
        }
        for at in end..elements {
            add_to(parts, at - end, terms.of::<1>(at));
        }
        self.elements += elements as u64;
    }

    /// What they come to.
    pub fn totals(&self) -> [f64; ApplyAt::SUMS_MAX] {
        self.parts.map(|parts| parts.iter().sum())
    }
}

/// Adds terms to parts of sums, from this part on.
#[inline(always)]
fn add_to<const N: usize, const LENGTH: usize>(
    parts: &mut [[f64; PARTS]; N],
    first: usize,
    terms: [[f64; LENGTH]; N],
) {
    for (parts, terms) in parts.iter_mut().zip(terms) {
        for (part, term) in parts[first..first + LENGTH].iter_mut().zip(terms) {
            *part += term;
        }
    }
}

/// What the elements of a run give to sums.
pub(super) trait Terms<const N: usize> {
    /// The terms of so many elements, from a place on. Implementations are `#[inline(always)]`: what
    /// is not inlined is not compiled for AVX2.
    fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; N];
}

/// Terms that are had for one element at a time.
struct One<T>(T);

impl<const N: usize, T: Fn(usize) -> [f64; N]> Terms<N> for One<T> {
    #[inline(always)]
    fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; N] {
        let mut lines = [[0.0; LENGTH]; N];
        for part in 0..LENGTH {
            for (line, term) in lines.iter_mut().zip((self.0)(at + part)) {
                line[part] = term;
            }
        }
        lines
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
