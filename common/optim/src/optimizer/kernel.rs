//! The choice of a rule's vector loop at run time, among those for the baseline and, for `f32`, for
//! AVX2. The baseline of x86-64 has SSE2; that of AArch64 has NEON.
//!
//! A rule computes the new value of one element and its slots. Two loops apply it to runs, one
//! line of elements at a time: the one in this file in place, the one in `streaming` to other memory. A
//! line is read completely before any of it is written, and the loop over it has a fixed length, so
//! the compiler vectorizes it. The compiler never fuses a multiplication and an addition by itself,
//! so every tier and both drivers compute the same bits. `mul_add` would not.
//!
//! This is one of the few files that may hold `unsafe` code.

mod streaming;
#[cfg(test)]
mod tests;

use super::float::OptimizerFloat;
use super::sums::{Sums, Terms};
use super::{Run, Runs, StreamRun, StreamRuns};
use crate::volatile::LINE_BYTES;
use streaming::streamed;

/// The arithmetic of a rule with `SLOTS` slots, with hyperparameters rounded to the type of the
/// elements.
pub(super) trait UpdateRule<F, const SLOTS: usize>: Copy {
    /// Returns the new value of an element and of its slots. Implementations are
    /// `#[inline(always)]`: a function that is not inlined is not compiled for AVX2.
    fn step(self, value: F, slots: [F; SLOTS], gradient: F) -> (F, [F; SLOTS]);
}

/// One or more runs of elements, to be updated in place or into other memory.
pub(super) trait RuleRun<F> {
    /// Applies a rule to the run.
    ///
    /// # Panics
    /// If the run has another number of slots.
    fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R);
}

/// Implements [`RuleRun`] for a kind of run. Runs of `f32` use the widest vectors of the processor;
/// those of `f64`, which few models have, use the baseline's, so that each rule is compiled once
/// less.
macro_rules! tiers {
    ($run:ident, $runs:ident, $plain:ident, $avx2:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2<R: UpdateRule<f32, S>, const S: usize>(rule: R, run: $run<'_, f32>) {
            $plain::<f32, R, S, true, { line_of::<f32>() }>(rule, run);
        }

        impl RuleRun<f32> for $run<'_, f32> {
            fn update<R: UpdateRule<f32, S>, const S: usize>(self, rule: R) {
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that the function is compiled for.
                    return unsafe { $avx2(rule, self) };
                }
                $plain::<f32, R, S, false, { line_of::<f32>() }>(rule, self);
            }
        }

        impl RuleRun<f64> for $run<'_, f64> {
            fn update<R: UpdateRule<f64, S>, const S: usize>(self, rule: R) {
                $plain::<f64, R, S, false, { line_of::<f64>() }>(rule, self);
            }
        }

        // The rule's hyperparameters are rounded once for all runs.
        impl<F> RuleRun<F> for &mut $runs<'_, F>
        where
            for<'a> $run<'a, F>: RuleRun<F>,
        {
            fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R) {
                self(&mut |run| run.update(rule));
            }
        }
    };
}
tiers!(Run, Runs, in_place, in_place_avx2);
tiers!(StreamRun, StreamRuns, streamed, streamed_avx2);

/// Returns the number of elements in a cache line.
const fn line_of<F>() -> usize {
    LINE_BYTES / size_of::<F>()
}

/// Adds the terms of `elements` elements to sums, with the widest vectors of the processor.
pub(super) fn add_up<const N: usize>(sums: &mut Sums, elements: usize, terms: &impl Terms<N>) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the processor has the features that the function is compiled for.
        return unsafe { add_up_avx2(sums, elements, terms) };
    }
    sums.add_terms(elements, terms);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_up_avx2<const N: usize>(sums: &mut Sums, elements: usize, terms: &impl Terms<N>) {
    sums.add_terms(elements, terms);
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

#[inline(always)]
fn in_place<
    F: OptimizerFloat,
    R: UpdateRule<F, S>,
    const S: usize,
    const WIDE: bool,
    const N: usize,
>(
    rule: R,
    run: Run<'_, F>,
) {
    let length = run.values.len();
    let mut slots = slots_of::<_, S>(run.slots).each_mut().map(|slot| &mut slot[..length]);
    let (values, gradient) = (&mut run.values[..length], &run.gradient[..length]);
    let whole = length - length % N;
    for at in (0..whole).step_by(N) {
        step_in_place::<F, R, S, N>(rule, values, &mut slots, gradient, at);
    }
    for at in whole..length {
        step_in_place::<F, R, S, 1>(rule, values, &mut slots, gradient, at);
    }
}

#[inline(always)]
fn step_in_place<F: OptimizerFloat, R: UpdateRule<F, S>, const S: usize, const N: usize>(
    rule: R,
    values: &mut [F],
    slots: &mut [&mut [F]; S],
    gradient: &[F],
    at: usize,
) {
    let before = slots.each_ref().map(|slot| *line(slot, at));
    let (w, s) = step::<F, R, S, N>(rule, *line(values, at), before, line(gradient, at));
    *line_mut(values, at) = w;
    for (out, line) in slots.iter_mut().zip(s) {
        *line_mut(out, at) = line;
    }
}

/// Converts the slots to an array of the rule's length.
#[inline(always)]
fn slots_of<T, const S: usize>(slots: &mut [T]) -> &mut [T; S] {
    slots.try_into().expect("the slots of the rule")
}

/// Computes the new values of a line and its slots.
#[inline(always)]
fn step<F: OptimizerFloat, R: UpdateRule<F, S>, const S: usize, const N: usize>(
    rule: R,
    mut w: [F; N],
    mut s: [[F; N]; S],
    g: &[F; N],
) -> ([F; N], [[F; N]; S]) {
    for i in 0..N {
        let (value, slots) = rule.step(w[i], s.each_ref().map(|slot| slot[i]), g[i]);
        w[i] = value;
        for (line, slot) in s.iter_mut().zip(slots) {
            line[i] = slot;
        }
    }
    (w, s)
}

#[inline(always)]
pub(super) fn line<F, const N: usize>(run: &[F], at: usize) -> &[F; N] {
    run[at..at + N].try_into().expect("a line of the run")
}

#[inline(always)]
fn line_mut<F, const N: usize>(run: &mut [F], at: usize) -> &mut [F; N] {
    (&mut run[at..at + N]).try_into().expect("a line of the run")
}
