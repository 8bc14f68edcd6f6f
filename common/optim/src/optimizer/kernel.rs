//! The vector loops of the rules, and the choice among them at run time: those for the baseline
//! and, for `f32`, those for AVX2. The baseline of x86-64 has SSE2; that of AArch64 has NEON.
//!
//! A rule computes the new value of one element and its slots. Two loops apply it to runs, one
//! line of elements at a time: one in place, and one to other memory, with non-temporal stores if
//! asked and the processor has AVX. A line is read completely before any of it is written, and the
//! loop over it has a fixed length, so the compiler vectorizes it. The compiler never fuses a
//! multiplication and an addition by itself, so every tier and both loops compute the same bits.
//! `mul_add` would not.
//!
//! Each rule compiles these loops about twenty times. Hence no `map` of an array in what depends on
//! the rule: the compiler takes ten times as long for it as for a loop.
//!
//! This is one of the few files that may hold `unsafe` code.

#[cfg(test)]
mod tests;

use super::float::OptimizerFloat;
use super::gradient::{
    ExponentScan, GradientRun, GradientSource, LocalGradient, MeanGradient, SharedGradient,
    SharedRun,
};
use super::sums::{Sums, Terms};
use super::{Run, Runs, StreamRun, StreamRuns};
use crate::volatile::LINE_BYTES;

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

/// Applies a rule to a run in place. `WIDE` changes nothing.
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
    let slots = slots_of::<_, S>(run.slots);
    let values = &mut run.values[..length];
    let gradient = &run.gradient[..length];
    let whole = length - length % N;
    for at in (0..whole).step_by(N) {
        step_in_place::<F, R, S, N>(rule, values, slots, gradient, at);
    }
    for at in whole..length {
        step_in_place::<F, R, S, 1>(rule, values, slots, gradient, at);
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
    let mut before = [[F::default(); N]; S];
    for (before, slot) in before.iter_mut().zip(slots.iter()) {
        *before = *line(slot, at);
    }
    let (w, s) = step::<F, R, S, N>(rule, *line(values, at), before, line(gradient, at));
    *line_mut(values, at) = w;
    for (out, line) in slots.iter_mut().zip(s) {
        *line_mut(out, at) = line;
    }
}

/// Applies a rule to a run and writes the result to other memory. `WIDE` means that the processor
/// has AVX.
#[inline(always)]
fn streamed<
    F: OptimizerFloat,
    R: UpdateRule<F, S>,
    const S: usize,
    const WIDE: bool,
    const N: usize,
>(
    rule: R,
    mut run: StreamRun<'_, F>,
) {
    match std::mem::replace(&mut run.gradient, GradientRun::Local(&[])) {
        GradientRun::Local(gradient) => {
            streamed_from::<F, R, S, WIDE, N>(rule, run, &mut LocalGradient::new(gradient));
        }
        GradientRun::Shared { run: SharedRun { gradients, at, divisor, exponents }, full } => {
            let scan = ExponentScan::new(exponents);
            let scan = if let (&[gradient], 1) = (gradients, divisor) {
                let mut gradient = SharedGradient::new(gradient.skip(at), scan);
                streamed_from::<F, R, S, WIDE, N>(rule, run, &mut gradient);
                gradient.scan
            } else {
                let mut gradient = MeanGradient::new(gradients, at, divisor, scan);
                streamed_from::<F, R, S, WIDE, N>(rule, run, &mut gradient);
                gradient.scan
            };
            *full |= scan.were_full();
        }
    }
}

/// The maximum magnitude written at each position of a line. It is an integer maximum, so it takes
/// no time from the floating-point units and is not slow for denormals.
struct WrittenMagnitudes<F: OptimizerFloat, const N: usize>([F::Magnitude; N]);

impl<F: OptimizerFloat, const N: usize> WrittenMagnitudes<F, N> {
    #[inline(always)]
    fn empty() -> Self {
        WrittenMagnitudes([F::Magnitude::default(); N])
    }

    #[inline(always)]
    fn line(&mut self, line: &[F; N]) {
        for (most, value) in self.0.iter_mut().zip(line) {
            *most = (*most).max(value.magnitude());
        }
    }

    #[inline(always)]
    fn element(&mut self, value: F) {
        self.0[0] = self.0[0].max(value.magnitude());
    }

    #[inline(always)]
    fn is_finite(&self) -> bool {
        self.0.iter().all(|&most| most < F::INFINITE)
    }
}

/// Updates a run into other memory, with this gradient.
#[inline(always)]
fn streamed_from<
    F: OptimizerFloat,
    R: UpdateRule<F, S>,
    const S: usize,
    const WIDE: bool,
    const N: usize,
>(
    rule: R,
    run: StreamRun<'_, F>,
    gradient: &mut impl GradientSource<F, N>,
) {
    let length = run.values.len();
    let slots: &[&[F]; S] = run.slots.try_into().expect("the slots of the rule");
    let slots_out = slots_of::<_, S>(run.slots_out);
    let head = unaligned(run.values_out);
    // Unless all streams have the same offset within a line, they are written through the cache.
    let past_cache = run.past_cache && all_unaligned(slots_out, head);
    let count = (length - head) / N;
    let mut written = WrittenMagnitudes::<F, N>::empty();
    for at in (0..head).chain(head + count * N..length) {
        let before = of_slots(slots, at, F::default());
        let (value, after) = rule.step(run.values[at], before, gradient.element(at));
        run.values_out[at] = value;
        written.element(value);
        for (out, slot) in slots_out.iter_mut().zip(after) {
            out[at] = slot;
        }
    }
    gradient.seek(head, count);
    let lines = StreamLines::new(run.values, run.values_out, slots, slots_out, head, count);
    // Without AVX, both would be the same loop.
    let lines_written = match WIDE && past_cache {
        true => stream_lines::<F, R, S, WIDE, true, N>(rule, lines, gradient),
        false => stream_lines::<F, R, S, WIDE, false, N>(rule, lines, gradient),
    };
    *run.overflowed |= !(written.is_finite() && lines_written.is_finite());
}

/// The whole lines of a run whose result is written to other memory. All slices have the same
/// length.
struct StreamLines<'a, F, const S: usize, const N: usize> {
    values: &'a [[F; N]],
    values_out: &'a mut [[F; N]],
    slots: [&'a [[F; N]]; S],
    slots_out: [&'a mut [[F; N]]; S],
}

impl<'a, F: OptimizerFloat, const S: usize, const N: usize> StreamLines<'a, F, S, N> {
    /// Takes `count` lines from the element `head` on.
    #[inline(always)]
    fn new(
        values: &'a [F],
        values_out: &'a mut [F],
        slots: &[&'a [F]; S],
        slots_out: &'a mut [&mut [F]; S],
        head: usize,
        count: usize,
    ) -> StreamLines<'a, F, S, N> {
        StreamLines {
            values: &values[head..].as_chunks().0[..count],
            values_out: &mut values_out[head..].as_chunks_mut().0[..count],
            slots: slots.map(|slot| &slot[head..].as_chunks().0[..count]),
            slots_out: slots_out.each_mut().map(|out| &mut out[head..].as_chunks_mut().0[..count]),
        }
    }
}

/// Returns the number of elements before the first that starts a cache line.
fn unaligned<F>(run: &[F]) -> usize {
    run.as_ptr().align_offset(LINE_BYTES).min(run.len())
}

fn all_unaligned<F>(runs: &[&mut [F]], elements: usize) -> bool {
    runs.iter().all(|run| unaligned(run) == elements)
}

/// Returns what each slot has at this index.
#[inline(always)]
fn of_slots<T: Copy, const S: usize>(slots: &[&[T]; S], at: usize, zero: T) -> [T; S] {
    let mut all = [zero; S];
    for (one, slot) in all.iter_mut().zip(slots) {
        *one = slot[at];
    }
    all
}

/// Updates whole lines. All checks and choices are made before the loop: for streams in the
/// second-level cache, checks for each line would double the time. The new values are scanned while
/// they are in registers.
#[inline(always)]
fn stream_lines<
    F: OptimizerFloat,
    R: UpdateRule<F, S>,
    const S: usize,
    const WIDE: bool,
    const PAST_CACHE: bool,
    const N: usize,
>(
    rule: R,
    lines: StreamLines<'_, F, S, N>,
    gradient: &mut impl GradientSource<F, N>,
) -> WrittenMagnitudes<F, N> {
    let StreamLines { values, values_out, slots, mut slots_out } = lines;
    let mut written = WrittenMagnitudes::empty();
    for (line, w) in values.iter().enumerate() {
        keep_loop_over_lines();
        let before = of_slots(&slots, line, [F::default(); N]);
        let (w, s) = step(rule, *w, before, &gradient.line::<WIDE>(line));
        written.line(&w);
        put_line::<F, PAST_CACHE, N>(&mut values_out[line], w);
        for (out, s) in slots_out.iter_mut().zip(s) {
            put_line::<F, PAST_CACHE, N>(&mut out[line], s);
        }
    }
    written
}

/// Keeps the compiler from vectorizing the loop around it, and compiles to no instruction.
///
/// A vector of that loop would hold one element of each of eight lines, gathered one by one.
/// Gradient descent over 64 KiB took five times as long. The elements of a line, which are adjacent,
/// are still vectorized.
#[inline(always)]
fn keep_loop_over_lines() {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: there is no instruction.
    unsafe {
        std::arch::asm!("", options(nomem, nostack, preserves_flags));
    }
}

#[inline(always)]
fn put_line<F: OptimizerFloat, const PAST_CACHE: bool, const N: usize>(
    out: &mut [F; N],
    line: [F; N],
) {
    match PAST_CACHE {
        true => stream_line(out, &line),
        false => *out = line,
    }
}

/// Writes a line with non-temporal stores. The processor has AVX.
#[inline(always)]
fn stream_line<F: OptimizerFloat, const N: usize>(out: &mut [F; N], line: &[F; N]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
        let from = line.as_ptr().cast::<__m256i>();
        let to = out.as_mut_ptr().cast::<__m256i>();
        let is_line = size_of::<[F; N]>() == LINE_BYTES;
        debug_assert!(is_line && out.as_ptr().align_offset(LINE_BYTES) == 0);
        for word in 0..size_of::<[F; N]>() / 32 {
            // SAFETY: both lines have N elements, which these words cover. The caller has checked
            // that `out` starts a cache line, and that the processor has AVX.
            unsafe { _mm256_stream_si256(to.add(word), _mm256_loadu_si256(from.add(word))) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        *out = *line;
    }
}

/// Orders the non-temporal stores of this thread before its later accesses.
#[cfg(test)]
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` exists on every x86-64 processor and accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
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
        let mut slots = [F::default(); S];
        for (slot, line) in slots.iter_mut().zip(&s) {
            *slot = line[i];
        }
        let (value, slots) = rule.step(w[i], slots, g[i]);
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
