//! Sums over all elements of a variable, for rules that need them before they change any element.

use super::ApplyAt;

/// The number of partial sums. Each takes every eighth element, so that vector units can add them.
const PARTS: usize = 8;

/// Sums over the elements of a variable, in `f64`, computed run by run in the order of the
/// elements.
///
/// The result has the same bits for any division into runs and on any machine: element `i` is added
/// to partial sum `i mod 8`, and the partial sums are added at the end.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    parts: [[f64; PARTS]; ApplyAt::SUMS_MAX],
    elements: u64,
}

impl Sums {
    /// Adds the terms of the next run of `elements` elements. `terms` returns the contribution of
    /// the element at an index of the run to each sum.
    ///
    /// # Panics
    /// If there are more than [`ApplyAt::SUMS_MAX`] terms.
    #[inline(always)]
    pub fn add<const N: usize>(&mut self, elements: usize, terms: impl Fn(usize) -> [f64; N]) {
        self.add_terms(elements, &SingleTerm(terms));
    }

    /// Adds the terms of the next run, which are computed for several elements together.
    #[inline(always)]
    pub(super) fn add_terms<const N: usize>(&mut self, elements: usize, terms: &impl Terms<N>) {
        let first = (self.elements % PARTS as u64) as usize;
        let head = elements.min((PARTS - first) % PARTS);
        let end = elements - (elements - head) % PARTS;
        let (parts, _) = self.parts.split_first_chunk_mut::<N>().expect("at most SUMS_MAX sums");
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

    /// Returns the sums.
    #[inline]
    pub fn totals(&self) -> [f64; ApplyAt::SUMS_MAX] {
        self.parts.map(|parts| parts.iter().sum())
    }
}

/// Adds terms to consecutive partial sums, from `first` on.
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

/// The contributions of the elements of a run to sums.
pub(super) trait Terms<const N: usize> {
    /// Returns the terms of `LENGTH` elements from index `at` on. Implementations are
    /// `#[inline(always)]`: a function that is not inlined is not compiled for AVX2.
    fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; N];
}

/// Terms that are computed for one element at a time.
struct SingleTerm<T>(T);

impl<const N: usize, T: Fn(usize) -> [f64; N]> Terms<N> for SingleTerm<T> {
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

/// A run of elements of one variable whose terms are added to sums, with its slots and its
/// gradient, all before the update. All slices have the same length.
#[derive(Debug)]
#[non_exhaustive]
pub struct SumRun<'a, T> {
    /// The values.
    pub values: &'a [T],
    /// The slots, in the order of [`super::Optimizer::slots`].
    pub slots: &'a [&'a [T]],
    /// The gradient.
    pub gradient: &'a [T],
}

impl<'a, T> SumRun<'a, T> {
    /// Creates a run of these slices.
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
        fn sums_do_not_depend_on_the_division_into_runs(
            elements in prop::collection::vec(-1e3_f64..1e3, 0..100),
            cuts in prop::collection::vec(0_usize..20, 0..20),
        ) {
            let terms = |start: usize| {
                let elements = &elements;
                move |at: usize| [elements[start + at], elements[start + at].powi(2)]
            };
            let mut whole = Sums::default();
            whole.add(elements.len(), terms(0));
            let mut cut = Sums::default();
            let mut start = 0;
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
