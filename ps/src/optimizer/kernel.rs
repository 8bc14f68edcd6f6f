//! The vector loops of the rules, compiled for the baseline and for AVX2, and chosen at run time.
//! The baseline of x86-64 has SSE2; that of AArch64 has NEON.
//!
//! A rule computes the new value of one element and its slots. Two drivers apply it to runs, one
//! line of elements at a time: one in place, the other with non-temporal stores to other memory. A
//! line is read completely before any of it is written, and the loop over it has a fixed length, so
//! the compiler vectorizes it. The compiler never fuses a multiplication and an addition by itself,
//! so every tier and both drivers compute the same bits. `mul_add` would not.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::ops::{Add, Div, Mul, Sub};

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

/// A floating-point type. Every operation rounds as IEEE 754 requires and so gives the same bits on
/// every machine, except `pow`, whose last digit depends on the platform.
pub(super) trait OptimizerFloat:
    bytemuck::Pod
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// The bits of a number without its sign. They are ordered as the numbers are.
    type Magnitude: Copy + Default + Ord;
    /// The magnitude of infinity. Those of NaN are larger.
    const INFINITE: Self::Magnitude;

    /// Rounds a number to this type.
    fn of(number: f64) -> Self;
    /// Returns the square root.
    fn sqrt(self) -> Self;
    /// Raises a non-negative number to a power.
    fn pow(self, exponent: Self) -> Self;
    /// Returns the absolute value.
    fn abs(self) -> Self;
    /// Returns the bits without the sign.
    fn magnitude(self) -> Self::Magnitude;

    /// Returns `self + factor * other`. If the factor is 0, returns `self` bit for bit, even if
    /// `other` is infinite or NaN.
    #[inline(always)]
    fn plus(self, factor: Self, other: Self) -> Self {
        if factor == Self::default() { self } else { self + factor * other }
    }
}

macro_rules! float {
    ($float:ident, $bits:ident) => {
        impl OptimizerFloat for $float {
            type Magnitude = $bits;
            const INFINITE: $bits = $float::INFINITY.to_bits().cast_signed();

            #[inline(always)]
            fn of(number: f64) -> Self {
                number as $float
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline(always)]
            fn pow(self, exponent: Self) -> Self {
                $float::powf(self, exponent)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $float::abs(self)
            }

            #[inline(always)]
            fn magnitude(self) -> $bits {
                $float::abs(self).to_bits().cast_signed()
            }
        }
    };
}
float!(f32, i32);
float!(f64, i64);

/// Implements [`RuleRun`] for a kind of run, with the widest vectors of the processor.
macro_rules! tiers {
    ($run:ident, $plain:ident, $avx2:ident, $($float:ty),*) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2<F: OptimizerFloat, R: UpdateRule<F, S>, const S: usize, const N: usize>(
            rule: R,
            run: $run<'_, F>,
        ) {
            $plain::<F, R, S, true, N>(rule, run);
        }

        $(impl RuleRun<$float> for $run<'_, $float> {
            fn update<R: UpdateRule<$float, S>, const S: usize>(self, rule: R) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that the function is compiled for.
                    return unsafe { $avx2::<$float, R, S, N>(rule, self) };
                }
                $plain::<$float, R, S, false, N>(rule, self);
            }
        })*
    };
}
tiers!(Run, in_place, in_place_avx2, f32, f64);
tiers!(StreamRun, streamed, streamed_avx2, f32, f64);

/// Implements [`RuleRun`] for an iterator over runs. The loop is chosen once for all of them.
macro_rules! tiers_of_runs {
    ($runs:ident, $plain:ident, $avx2:ident, $($float:ty),*) => {
        $(impl RuleRun<$float> for &mut $runs<'_, $float> {
            fn update<R: UpdateRule<$float, S>, const S: usize>(self, rule: R) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that the function is compiled for.
                    return self(&mut |run| unsafe { $avx2::<$float, R, S, N>(rule, run) });
                }
                self(&mut |run| $plain::<$float, R, S, false, N>(rule, run));
            }
        })*
    };
}
tiers_of_runs!(Runs, in_place, in_place_avx2, f32, f64);
tiers_of_runs!(StreamRuns, streamed, streamed_avx2, f32, f64);

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::finite::Exponents;
    use pushpull_common::tensor::DType;

    use super::*;
    use crate::optimizer::{
        Adadelta, Adagrad, Adam, AdamW, ApplyAt, BuiltInRule, Ftrl, Lamb, MEAN_GRADIENTS_MAX,
        Momentum, Optimizer, RmsProp, Sgd,
    };
    use crate::volatile::Volatile;

    /// A run that is updated by the baseline loop, in lines of `N` elements.
    struct Baseline<const N: usize, R>(R);

    impl<F: OptimizerFloat, const N: usize> RuleRun<F> for Baseline<N, Run<'_, F>> {
        fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R) {
            in_place::<F, R, S, false, N>(rule, self.0);
        }
    }

    impl<F: OptimizerFloat, const N: usize> RuleRun<F> for Baseline<N, StreamRun<'_, F>> {
        fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R) {
            streamed::<F, R, S, false, N>(rule, self.0);
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct KernelCase {
        seed: u64,
        length: usize,
        /// The offset of each stream in its first line, in elements.
        starts: [usize; 4],
        past_cache: bool,
    }

    fn cases() -> impl Strategy<Value = KernelCase> {
        let starts = prop_oneof![
            proptest::array::uniform4(0..16_usize),
            (0..16_usize).prop_map(|start| [start; 4])
        ];
        (any::<u64>(), 0..150_usize, starts, any::<bool>()).prop_map(
            |(seed, length, starts, past_cache)| KernelCase { seed, length, starts, past_cache },
        )
    }

    /// Generates numbers of the size of gradients, zeros, and numbers whose squares overflow or
    /// underflow.
    fn numbers<F: OptimizerFloat>(seed: &mut u64, length: usize) -> Vec<F> {
        let mut next = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x5851_f42d);
            let mantissa = (*seed >> 32) as f64 / 2.0_f64.powi(31) - 1.0;
            match *seed >> 8 & 15 {
                0 => mantissa * 0.0,
                1 => mantissa * 1e30,
                2 => mantissa * 1e-42,
                _ => mantissa,
            }
        };
        (0..length).map(|_| F::of(next())).collect()
    }

    /// A stream at the offset of its case.
    struct PlacedStream<F>(Vec<F>, usize);

    impl<F: OptimizerFloat> PlacedStream<F> {
        fn new(case: &KernelCase, stream: usize, numbers: &[F]) -> Self {
            let mut buffer = vec![F::default(); numbers.len() + 32];
            let start = buffer.as_ptr().align_offset(LINE_BYTES) + case.starts[stream];
            buffer[start..start + numbers.len()].copy_from_slice(numbers);
            PlacedStream(buffer, start)
        }

        fn all(case: &KernelCase, streams: &[Vec<F>]) -> Vec<Self> {
            streams
                .iter()
                .enumerate()
                .map(|(i, numbers)| PlacedStream::new(case, i, numbers))
                .collect()
        }

        fn slice(&mut self, length: usize) -> &mut [F] {
            &mut self.0[self.1..self.1 + length]
        }
    }

    /// Returns the bits of streams, with one bit pattern for all NaN: IEEE 754 does not say which
    /// operand's NaN an operation returns.
    fn bits<F: OptimizerFloat + Into<f64>>(streams: &[Vec<F>]) -> Vec<Vec<u64>> {
        let bits = |&number: &F| {
            let number: f64 = number.into();
            if number.is_nan() { f64::NAN.to_bits() } else { number.to_bits() }
        };
        streams.iter().map(|stream| stream.iter().map(bits).collect()).collect()
    }

    fn contents_of<F: OptimizerFloat>(
        mut streams: Vec<PlacedStream<F>>,
        length: usize,
    ) -> Vec<Vec<F>> {
        streams.iter_mut().map(|stream| stream.slice(length).to_vec()).collect()
    }

    /// Returns the values and slots after an update in place.
    fn result_in_place<F: OptimizerFloat>(
        case: &KernelCase,
        streams: &[Vec<F>],
        gradient: &[F],
        change: impl FnOnce(Run<'_, F>),
    ) -> Vec<Vec<F>> {
        let mut memory = PlacedStream::all(case, streams);
        let mut slices = memory.iter_mut().map(|stream| stream.slice(case.length));
        let values = slices.next().unwrap();
        let mut slots: Vec<&mut [F]> = slices.collect();
        change(Run { values, slots: &mut slots, gradient });
        contents_of(memory, case.length)
    }

    /// Returns the values and slots after an update into other memory.
    fn streamed_result<F: OptimizerFloat>(
        case: &KernelCase,
        streams: &[Vec<F>],
        gradient: GradientRun<'_, F>,
        change: impl FnOnce(StreamRun<'_, F>),
    ) -> Vec<Vec<F>> {
        let mut overflowed = false;
        let mut memory =
            PlacedStream::all(case, &vec![vec![F::default(); case.length]; streams.len()]);
        let mut slices = memory.iter_mut().map(|stream| stream.slice(case.length));
        let values_out = slices.next().unwrap();
        let mut slots_out: Vec<&mut [F]> = slices.collect();
        let slots: Vec<&[F]> = streams[1..].iter().map(Vec::as_slice).collect();
        change(StreamRun {
            values: &streams[0],
            values_out,
            slots: &slots,
            slots_out: &mut slots_out,
            gradient,
            past_cache: case.past_cache,
            overflowed: &mut overflowed,
        });
        crate::arena::fence();
        let contents = contents_of(memory, case.length);
        // A product with zero is zero only for a finite number.
        let finite = contents[0].iter().all(|&value| value * F::default() == F::default());
        assert_eq!(overflowed, !finite, "{case:?}");
        contents
    }

    /// Returns the result of an update into other memory by the mean of shared gradients, which
    /// follow 64 bytes of NaN. Also returns whether an exponent was full.
    fn streamed_result_of_shared<F: OptimizerFloat>(
        case: &KernelCase,
        streams: &[Vec<F>],
        gradients: &[Vec<F>],
        change: impl FnOnce(StreamRun<'_, F>),
    ) -> (Vec<Vec<F>>, bool) {
        let before = LINE_BYTES / size_of::<F>();
        let place_stream = |gradient: &Vec<F>| {
            let all = [&vec![F::of(f64::NAN); before][..], gradient].concat();
            PlacedStream::new(case, 0, &all)
        };
        let (mut memory, mut full) =
            (gradients.iter().map(place_stream).collect::<Vec<_>>(), false);
        let volatile = |memory: &mut PlacedStream<F>| {
            let bytes: &[u8] = bytemuck::cast_slice(memory.slice(before + case.length));
            // SAFETY: the bytes live until the end of this function, and nothing writes them.
            unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
        };
        let dtype = if size_of::<F>() == 4 { DType::F32 } else { DType::F64 };
        let shared = SharedRun {
            gradients: &memory.iter_mut().map(volatile).collect::<Vec<_>>(),
            at: LINE_BYTES,
            divisor: gradients.len() as u32,
            exponents: Exponents::of(dtype),
            full: &mut full,
        };
        let found = streamed_result(case, streams, GradientRun::Shared(shared), change);
        (found, full)
    }

    fn check_as<F, D, const N: usize>(rule: &D, case: &KernelCase)
    where
        F: OptimizerFloat + Into<f64>,
        D: BuiltInRule + Optimizer,
        for<'a> Run<'a, F>: RuleRun<F>,
        for<'a> StreamRun<'a, F>: RuleRun<F>,
        for<'a, 'b> &'a mut Runs<'b, F>: RuleRun<F>,
    {
        let (at, mut seed) = (ApplyAt::new(3, 2), case.seed);
        let mut streams: Vec<Vec<F>> =
            (0..=rule.slots().len()).map(|_| numbers(&mut seed, case.length)).collect();
        if rule.kind() != "momentum" && rule.kind() != "nesterov" {
            // These slots are sums of squares. The root of a negative one would be NaN.
            for sum in streams.iter_mut().skip(1).flatten() {
                *sum = sum.abs();
            }
        }
        let gradient: Vec<F> = numbers(&mut seed, case.length);
        // One element at a time, without vector instructions.
        let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
        let reference = bits(&result_in_place(case, &streams, &gradient, singly));
        let baseline = |run: Run<'_, F>| rule.drive(at, Baseline::<N, _>(run));
        let dispatched = |run: Run<'_, F>| rule.drive(at, run);
        let in_runs = |Run { values, slots, gradient }: Run<'_, F>| {
            let mut runs = |change: &mut dyn FnMut(Run<'_, F>)| {
                for start in (0..values.len()).step_by(21) {
                    let within = start..values.len().min(start + 21);
                    let slots = slots.iter_mut().map(|slot| &mut slot[within.clone()]);
                    let mut slots: Vec<&mut [F]> = slots.collect();
                    let (values, gradient) = (&mut values[within.clone()], &gradient[within]);
                    change(Run { values, slots: &mut slots, gradient });
                }
            };
            rule.drive(at, &mut runs as &mut Runs<'_, F>);
        };
        let across = |run: StreamRun<'_, F>| rule.drive(at, Baseline::<N, _>(run));
        let across_dispatched = |run: StreamRun<'_, F>| rule.drive(at, run);
        for (way, found) in [
            ("in place, baseline", result_in_place(case, &streams, &gradient, baseline)),
            ("in place", result_in_place(case, &streams, &gradient, dispatched)),
            ("in runs", result_in_place(case, &streams, &gradient, in_runs)),
            (
                "streamed, baseline",
                streamed_result(case, &streams, GradientRun::Local(&gradient), across),
            ),
            (
                "streamed",
                streamed_result(case, &streams, GradientRun::Local(&gradient), across_dispatched),
            ),
        ] {
            assert_eq!(bits(&found), reference, "{rule:?} {way}, {case:?}");
        }
        // The same gradient in shared memory, and the mean of several.
        let mut gradients = vec![gradient];
        for count in 1..=MEAN_GRADIENTS_MAX as u32 {
            let length = 0..case.length;
            let sum = |at: usize| {
                let each = gradients.iter().map(|gradient| gradient[at]);
                each.reduce(|sum, more| sum + more).unwrap() / F::of(count.into())
            };
            let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
            let mean: Vec<F> = length.map(sum).collect();
            let mean = bits(&result_in_place(case, &streams, &mean, singly));
            let (found, full) = streamed_result_of_shared(case, &streams, &gradients, across);
            assert_eq!((bits(&found), full), (mean.clone(), false), "{rule:?} baseline, {case:?}");
            let (found, full) =
                streamed_result_of_shared(case, &streams, &gradients, across_dispatched);
            assert_eq!((bits(&found), full), (mean, false), "{rule:?} of {count}, {case:?}");
            // A non-finite element is found at any position.
            if let Some(at) = (seed as usize).checked_rem(case.length) {
                let mut wrong = gradients.clone();
                let number = if seed & 64 == 0 { f64::NAN } else { f64::NEG_INFINITY };
                wrong[(seed >> 8) as usize % gradients.len()][at] = F::of(number);
                let (_, full) = streamed_result_of_shared(case, &streams, &wrong, across);
                assert!(full, "baseline, {at} of {case:?}");
                let (_, full) =
                    streamed_result_of_shared(case, &streams, &wrong, across_dispatched);
                assert!(full, "{at} of {case:?}");
            }
            gradients.push(numbers(&mut seed, case.length));
        }
    }

    fn check(rule: &(impl BuiltInRule + Optimizer), case: &KernelCase) {
        check_as::<f32, _, { LINE_BYTES / 4 }>(rule, case);
        check_as::<f64, _, { LINE_BYTES / 8 }>(rule, case);
    }

    /// Terms with operations that a wider tier might round differently.
    struct Quotients<'a>(&'a [f32]);

    impl Terms<2> for Quotients<'_> {
        #[inline(always)]
        fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; 2] {
            let line: &[f32; LENGTH] = line(self.0, at);
            let quotients = line.map(|x| f64::from(x * 0.7 / (x.abs().sqrt() + 0.3)));
            [line.map(|x| f64::from(x) * f64::from(x) + 0.1), quotients]
        }
    }

    proptest! {
        /// For any division of a variable into runs.
        #[test]
        fn every_tier_computes_the_same_sums(
            elements in prop::collection::vec(-1e3_f32..1e3, 0..200),
            cuts in prop::collection::vec(0_usize..40, 0..10),
        ) {
            let (mut widest, mut baseline) = (Sums::default(), Sums::default());
            let mut rest = &elements[..];
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (run, after) = rest.split_at(cut.min(rest.len()));
                add_up(&mut widest, run.len(), &Quotients(run));
                baseline.add(run.len(), |at| Quotients(run).of::<1>(at).map(|[term]| term));
                rest = after;
            }
            prop_assert_eq!(widest.totals().map(f64::to_bits), baseline.totals().map(f64::to_bits));
        }

        #[test]
        fn every_loop_computes_the_same_bits(case in cases()) {
            check(&Sgd::new(0.1).weight_decay(0.2), &case);
            check(&Momentum::new(0.1, 0.9), &case);
            check(&Momentum::new(0.1, 0.9).l2(0.1), &case);
            check(&Momentum::nesterov(0.1, 0.9), &case);
            check(&Momentum::nesterov(0.1, 0.9).l2(0.1).weight_decay(0.2), &case);
            check(&Adagrad::new(0.1), &case);
            check(&Adadelta::new(1.0), &case);
            check(&RmsProp::new(0.1).momentum(0.9), &case);
            check(&RmsProp::new(0.1).momentum(0.9).centered(), &case);
            check(&Adam::new(0.1), &case);
            check(&AdamW::new(0.1), &case);
            check(&Lamb::new(0.1).weight_decay(0.2), &case);
            check(&Ftrl::new(0.1).l1(0.1).l2(0.2).l2_shrinkage(0.05).beta(1.0), &case);
            check(&Ftrl::new(0.1).learning_rate_power(-0.7).l1(0.1), &case);
        }
    }
}
