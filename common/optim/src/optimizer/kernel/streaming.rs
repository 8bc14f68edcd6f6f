//! The loop that applies a rule to a run and writes the result to other memory, with non-temporal
//! stores if asked.
//!
//! This is one of the few files that may hold `unsafe` code.

use super::{UpdateRule, slots_of, step};
use crate::optimizer::StreamRun;
use crate::optimizer::float::OptimizerFloat;
use crate::optimizer::gradient::{
    ExponentScan, GradientRun, GradientSource, LocalGradient, MeanGradient, SharedGradient,
    SharedRun,
};
use crate::volatile::LINE_BYTES;

/// Applies a rule to a run and writes the result to other memory. `WIDE` means that the processor has
/// AVX.
#[inline(always)]
pub(super) fn streamed<
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
        GradientRun::Shared(SharedRun { gradients, at, divisor, exponents, full }) => {
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
    // Unless all streams have the same offset within a line, they are written through the cache.
    let aligned = |slice: &[F]| slice.as_ptr().align_offset(LINE_BYTES).min(length);
    let head = aligned(run.values_out);
    let past_cache = run.past_cache && slots_out.iter().all(|slot| aligned(slot) == head);
    let count = (length - head) / N;
    let mut written = WrittenMagnitudes::<F, N>::empty();
    for at in (0..head).chain(head + count * N..length) {
        let s = slots.map(|slot| slot[at]);
        let (value, after) = rule.step(run.values[at], s, gradient.element(at));
        run.values_out[at] = value;
        written.element(value);
        for (out, slot) in slots_out.iter_mut().zip(after) {
            out[at] = slot;
        }
    }
    gradient.seek(head, count);
    let lines = StreamLines {
        values: &run.values[head..].as_chunks().0[..count],
        values_out: &mut run.values_out[head..].as_chunks_mut().0[..count],
        slots: slots.map(|slot| &slot[head..].as_chunks().0[..count]),
        slots_out: slots_out.each_mut().map(|out| &mut out[head..].as_chunks_mut().0[..count]),
    };
    let lines_written = match past_cache {
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
        let s = slots.map(|slot| slot[line]);
        let (w, s) = step(rule, *w, s, &gradient.line::<WIDE>(line));
        written.line(&w);
        put_line::<F, WIDE, PAST_CACHE, N>(&mut values_out[line], w);
        for (out, s) in slots_out.iter_mut().zip(s) {
            put_line::<F, WIDE, PAST_CACHE, N>(&mut out[line], s);
        }
    }
    written
}

#[inline(always)]
fn put_line<F: OptimizerFloat, const WIDE: bool, const PAST_CACHE: bool, const N: usize>(
    out: &mut [F; N],
    line: [F; N],
) {
    match PAST_CACHE {
        true => stream_line::<F, WIDE, N>(out, &line),
        false => *out = line,
    }
}

/// Writes a line with non-temporal stores. `WIDE` means that the processor has AVX.
#[inline(always)]
fn stream_line<F: OptimizerFloat, const WIDE: bool, const N: usize>(
    out: &mut [F; N],
    line: &[F; N],
) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, __m256i, _mm_loadu_si128, _mm_stream_si128, _mm256_loadu_si256,
            _mm256_stream_si256,
        };
        let (from, to) = (line.as_ptr(), out.as_mut_ptr());
        debug_assert!(to.align_offset(LINE_BYTES) == 0 && size_of::<[F; N]>() == LINE_BYTES);
        if WIDE {
            let (from, to) = (from.cast::<__m256i>(), to.cast::<__m256i>());
            for word in 0..size_of::<[F; N]>() / 32 {
                // SAFETY: both lines have N elements, which these words cover. The caller has
                // checked that `out` starts a cache line, and that the processor has AVX.
                unsafe { _mm256_stream_si256(to.add(word), _mm256_loadu_si256(from.add(word))) };
            }
        } else {
            let (from, to) = (from.cast::<__m128i>(), to.cast::<__m128i>());
            for word in 0..size_of::<[F; N]>() / 16 {
                // SAFETY: as above, without AVX. SSE2 is part of every x86-64 processor.
                unsafe { _mm_stream_si128(to.add(word), _mm_loadu_si128(from.add(word))) };
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        *out = *line;
    }
}

/// Orders the non-temporal stores of this thread before its later accesses.
#[cfg(test)]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` exists on every x86-64 processor and accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
