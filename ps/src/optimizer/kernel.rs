//! The vector loops, compiled once for the baseline and once for AVX2, chosen at run time. The
//! baseline of x86-64 has SSE2, that of AArch64 has NEON.
//!
//! A rule says what one element and its slots become. Two drivers take it over runs, a line of
//! elements at a time: one changes them in place, the other writes what they become to another
//! place, past the cache. A line is read whole before any of it is written, and its loop has a
//! fixed length, so that the compiler makes vectors of it. It never contracts a multiplication and
//! an addition into one rounding by itself, so that every tier and both drivers compute the same
//! bits; `mul_add` would not.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::ops::{Add, Div, Mul, Sub};

use super::gradient::{GradientRun, Here, Looking, Mean, SharedGradient, SharedRun, Source};
use super::sums::{Sums, Terms};
use super::{Run, Runs, StreamRun, StreamRuns};
use crate::volatile::LINE_BYTES;

/// The arithmetic of a rule with so many slots, its hyperparameters rounded to the type of the
/// elements.
pub(super) trait Rule<F, const SLOTS: usize>: Copy {
    /// What an element and its slots become by a gradient. Implementations are `#[inline(always)]`:
    /// what is not inlined is not compiled for AVX2.
    fn step(self, value: F, slots: [F; SLOTS], gradient: F) -> (F, [F; SLOTS]);
}

/// A run of elements, to be changed in place or from one place to another.
pub(super) trait Elements<F> {
    /// Takes a rule over it.
    ///
    /// # Panics
    /// If the run has another number of slots.
    fn update<R: Rule<F, S>, const S: usize>(self, rule: R);
}

/// A floating-point type. Every operation rounds as IEEE 754 has it, and so gives the same bits on
/// every machine, but for `pow`: the last digit is the platform's.
pub(super) trait Float:
    bytemuck::Pod
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// The bits of a number without its sign, which rise with it.
    type Magnitude: Copy + Default + Ord;
    /// Those of an infinity; more are those of NaN.
    const INFINITE: Self::Magnitude;

    /// A number rounded to this type.
    fn of(number: f64) -> Self;
    /// The root.
    fn sqrt(self) -> Self;
    /// The power, of a number that is not negative.
    fn pow(self, exponent: Self) -> Self;
    /// The number without its sign.
    fn abs(self) -> Self;
    /// Its bits without the sign.
    fn magnitude(self) -> Self::Magnitude;

    /// The number and `factor` times another; the same bits as before if the factor is 0, however
    /// large the other is.
    #[inline(always)]
    fn plus(self, factor: Self, other: Self) -> Self {
        if factor == Self::default() { self } else { self + factor * other }
    }
}

macro_rules! float {
    ($float:ident, $bits:ident) => {
        impl Float for $float {
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

/// Has runs of a kind changed by a loop with the widest vectors there are.
macro_rules! tiers {
    ($run:ident, $plain:ident, $avx2:ident, $($float:ty),*) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2<F: Float, R: Rule<F, S>, const S: usize, const N: usize>(
            rule: R,
            run: $run<'_, F>,
        ) {
            $plain::<F, R, S, true, N>(rule, run);
        }

        $(impl Elements<$float> for $run<'_, $float> {
            fn update<R: Rule<$float, S>, const S: usize>(self, rule: R) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that this is compiled for.
                    return unsafe { $avx2::<$float, R, S, N>(rule, self) };
                }
                $plain::<$float, R, S, false, N>(rule, self);
            }
        })*
    };
}
tiers!(Run, in_place, in_place_avx2, f32, f64);
tiers!(StreamRun, streamed, streamed_avx2, f32, f64);

/// The same for runs that come one by one: the loop is chosen once.
macro_rules! tiers_of_runs {
    ($runs:ident, $plain:ident, $avx2:ident, $($float:ty),*) => {
        $(impl Elements<$float> for &mut $runs<'_, $float> {
            fn update<R: Rule<$float, S>, const S: usize>(self, rule: R) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that this is compiled for.
                    return self(&mut |run| unsafe { $avx2::<$float, R, S, N>(rule, run) });
                }
                self(&mut |run| $plain::<$float, R, S, false, N>(rule, run));
            }
        })*
    };
}
tiers_of_runs!(Runs, in_place, in_place_avx2, f32, f64);
tiers_of_runs!(StreamRuns, streamed, streamed_avx2, f32, f64);

/// Adds the terms of so many elements to sums, with the widest vectors there are.
pub(super) fn add_up<const N: usize>(sums: &mut Sums, elements: usize, terms: &impl Terms<N>) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the processor has the features that this is compiled for.
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
fn in_place<F: Float, R: Rule<F, S>, const S: usize, const WIDE: bool, const N: usize>(
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
fn step_in_place<F: Float, R: Rule<F, S>, const S: usize, const N: usize>(
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

/// The slots of a rule with so many.
#[inline(always)]
fn slots_of<T, const S: usize>(slots: &mut [T]) -> &mut [T; S] {
    slots.try_into().expect("the slots of the rule")
}

#[inline(always)]
fn streamed<F: Float, R: Rule<F, S>, const S: usize, const WIDE: bool, const N: usize>(
    rule: R,
    mut run: StreamRun<'_, F>,
) {
    match std::mem::replace(&mut run.gradient, GradientRun::Here(&[])) {
        GradientRun::Here(gradient) => {
            streamed_from::<F, R, S, WIDE, N>(rule, run, &mut Here::new(gradient));
        }
        GradientRun::Shared(SharedRun { gradients, at, over, exponents, full }) => {
            let looking = Looking::new(exponents);
            let looking = if let (&[gradient], 1) = (gradients, over) {
                let mut gradient = SharedGradient::new(gradient.behind(at), looking);
                streamed_from::<F, R, S, WIDE, N>(rule, run, &mut gradient);
                gradient.looking
            } else {
                let mut gradient = Mean::new(gradients, at, over, looking);
                streamed_from::<F, R, S, WIDE, N>(rule, run, &mut gradient);
                gradient.looking
            };
            *full |= looking.were_full();
        }
    }
}

/// Looks at what is written: the most of each place of a line. Integers are compared, which takes nothing from
/// what computes, and no longer where numbers are tiny.
struct Written<F: Float, const N: usize>([F::Magnitude; N]);

impl<F: Float, const N: usize> Written<F, N> {
    #[inline(always)]
    fn nothing() -> Self {
        Written([F::Magnitude::default(); N])
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

/// The same with the gradient that is found there.
#[inline(always)]
fn streamed_from<F: Float, R: Rule<F, S>, const S: usize, const WIDE: bool, const N: usize>(
    rule: R,
    run: StreamRun<'_, F>,
    gradient: &mut impl Source<F, N>,
) {
    let length = run.values.len();
    let slots: &[&[F]; S] = run.slots.try_into().expect("the slots of the rule");
    let slots_out = slots_of::<_, S>(run.slots_out);
    // All streams lie alike within their lines, or are written through the cache.
    let aligned = |slice: &[F]| slice.as_ptr().align_offset(LINE_BYTES).min(length);
    let head = aligned(run.values_out);
    let past_cache = run.past_cache && slots_out.iter().all(|slot| aligned(slot) == head);
    let count = (length - head) / N;
    let mut written = Written::<F, N>::nothing();
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

/// The whole lines of a run whose result is written elsewhere. All are as many.
struct StreamLines<'a, F, const S: usize, const N: usize> {
    values: &'a [[F; N]],
    values_out: &'a mut [[F; N]],
    slots: [&'a [[F; N]]; S],
    slots_out: [&'a mut [[F; N]]; S],
}

/// What can be is checked and chosen before, not for each line: where the streams stay in the second cache,
/// that takes as long as all the rest. What is written is looked at while it is at hand.
#[inline(always)]
fn stream_lines<
    F: Float,
    R: Rule<F, S>,
    const S: usize,
    const WIDE: bool,
    const PAST_CACHE: bool,
    const N: usize,
>(
    rule: R,
    lines: StreamLines<'_, F, S, N>,
    gradient: &mut impl Source<F, N>,
) -> Written<F, N> {
    let StreamLines { values, values_out, slots, mut slots_out } = lines;
    let mut written = Written::nothing();
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

/// What a line and its slots become.
#[inline(always)]
fn step<F: Float, R: Rule<F, S>, const S: usize, const N: usize>(
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
fn put_line<F: Float, const WIDE: bool, const PAST_CACHE: bool, const N: usize>(
    out: &mut [F; N],
    line: [F; N],
) {
    match PAST_CACHE {
        true => stream_line::<F, WIDE, N>(out, &line),
        false => *out = line,
    }
}

/// Writes a line past the cache; `WIDE` says that the processor has AVX.
#[inline(always)]
fn stream_line<F: Float, const WIDE: bool, const N: usize>(out: &mut [F; N], line: &[F; N]) {
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
                // SAFETY: both lines are N elements long, which these words cover; `out` starts a
                // cache line, as the caller has made sure; so has it that there is AVX.
                unsafe { _mm256_stream_si256(to.add(word), _mm256_loadu_si256(from.add(word))) };
            }
        } else {
            let (from, to) = (from.cast::<__m128i>(), to.cast::<__m128i>());
            for word in 0..size_of::<[F; N]>() / 16 {
                // SAFETY: as above; SSE2 is part of every x86-64 processor.
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
        Adadelta, Adagrad, Adam, AdamW, ApplyAt, Dense, Ftrl, Lamb, MEAN_GRADIENTS_MAX, Momentum,
        Optimizer, RmsProp, Sgd,
    };
    use crate::volatile::Volatile;

    /// A run that is changed by the loop of the baseline, in lines of so many elements.
    struct Baseline<const N: usize, R>(R);

    impl<F: Float, const N: usize> Elements<F> for Baseline<N, Run<'_, F>> {
        fn update<R: Rule<F, S>, const S: usize>(self, rule: R) {
            in_place::<F, R, S, false, N>(rule, self.0);
        }
    }

    impl<F: Float, const N: usize> Elements<F> for Baseline<N, StreamRun<'_, F>> {
        fn update<R: Rule<F, S>, const S: usize>(self, rule: R) {
            streamed::<F, R, S, false, N>(rule, self.0);
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        seed: u64,
        length: usize,
        /// Where each stream starts in its first line, in elements.
        starts: [usize; 4],
        past_cache: bool,
    }

    fn cases() -> impl Strategy<Value = Case> {
        let starts = prop_oneof![
            proptest::array::uniform4(0..16_usize),
            (0..16_usize).prop_map(|start| [start; 4])
        ];
        (any::<u64>(), 0..150_usize, starts, any::<bool>()).prop_map(
            |(seed, length, starts, past_cache)| Case { seed, length, starts, past_cache },
        )
    }

    /// Numbers of the size of gradients, zeros, and numbers whose squares overflow or vanish.
    fn numbers<F: Float>(seed: &mut u64, length: usize) -> Vec<F> {
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

    /// A stream that lies where its case has it.
    struct Placed<F>(Vec<F>, usize);

    impl<F: Float> Placed<F> {
        fn new(case: &Case, stream: usize, numbers: &[F]) -> Self {
            let mut buffer = vec![F::default(); numbers.len() + 32];
            let start = buffer.as_ptr().align_offset(LINE_BYTES) + case.starts[stream];
            buffer[start..start + numbers.len()].copy_from_slice(numbers);
            Placed(buffer, start)
        }

        fn all(case: &Case, streams: &[Vec<F>]) -> Vec<Self> {
            streams.iter().enumerate().map(|(i, numbers)| Placed::new(case, i, numbers)).collect()
        }

        fn slice(&mut self, length: usize) -> &mut [F] {
            &mut self.0[self.1..self.1 + length]
        }
    }

    /// The bits of streams, all NaN alike: which of two an operation gives is left open.
    fn bits<F: Float + Into<f64>>(streams: &[Vec<F>]) -> Vec<Vec<u64>> {
        let bits = |&number: &F| {
            let number: f64 = number.into();
            if number.is_nan() { f64::NAN.to_bits() } else { number.to_bits() }
        };
        streams.iter().map(|stream| stream.iter().map(bits).collect()).collect()
    }

    fn taken<F: Float>(mut streams: Vec<Placed<F>>, length: usize) -> Vec<Vec<F>> {
        streams.iter_mut().map(|stream| stream.slice(length).to_vec()).collect()
    }

    /// What values and slots become in place.
    fn changed<F: Float>(
        case: &Case,
        streams: &[Vec<F>],
        gradient: &[F],
        change: impl FnOnce(Run<'_, F>),
    ) -> Vec<Vec<F>> {
        let mut placed = Placed::all(case, streams);
        let mut slices = placed.iter_mut().map(|stream| stream.slice(case.length));
        let values = slices.next().unwrap();
        let mut slots: Vec<&mut [F]> = slices.collect();
        change(Run { values, slots: &mut slots, gradient });
        taken(placed, case.length)
    }

    /// What values and slots become elsewhere.
    fn carried<F: Float>(
        case: &Case,
        streams: &[Vec<F>],
        gradient: GradientRun<'_, F>,
        change: impl FnOnce(StreamRun<'_, F>),
    ) -> Vec<Vec<F>> {
        let mut overflowed = false;
        let mut placed = Placed::all(case, &vec![vec![F::default(); case.length]; streams.len()]);
        let mut slices = placed.iter_mut().map(|stream| stream.slice(case.length));
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
        let taken = taken(placed, case.length);
        // What is no number stays none, times whatever.
        let finite = taken[0].iter().all(|&value| value * F::default() == F::default());
        assert_eq!(overflowed, !finite, "{case:?}");
        taken
    }

    /// The same by the mean of gradients that lie in memory that is lent, behind 64 bytes of something else;
    /// whether an exponent was full.
    fn carried_from_shared<F: Float>(
        case: &Case,
        streams: &[Vec<F>],
        gradients: &[Vec<F>],
        change: impl FnOnce(StreamRun<'_, F>),
    ) -> (Vec<Vec<F>>, bool) {
        let before = LINE_BYTES / size_of::<F>();
        let lie = |gradient: &Vec<F>| {
            let all = [&vec![F::of(f64::NAN); before][..], gradient].concat();
            Placed::new(case, 0, &all)
        };
        let (mut placed, mut full) = (gradients.iter().map(lie).collect::<Vec<_>>(), false);
        let volatile = |placed: &mut Placed<F>| {
            let bytes: &[u8] = bytemuck::cast_slice(placed.slice(before + case.length));
            // SAFETY: they live until the end of this, and nobody writes them.
            unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
        };
        let dtype = if size_of::<F>() == 4 { DType::F32 } else { DType::F64 };
        let shared = SharedRun {
            gradients: &placed.iter_mut().map(volatile).collect::<Vec<_>>(),
            at: LINE_BYTES,
            over: gradients.len() as u32,
            exponents: Exponents::of(dtype),
            full: &mut full,
        };
        let found = carried(case, streams, GradientRun::Shared(shared), change);
        (found, full)
    }

    fn check_as<F, D, const N: usize>(rule: &D, case: &Case)
    where
        F: Float + Into<f64>,
        D: Dense + Optimizer,
        for<'a> Run<'a, F>: Elements<F>,
        for<'a> StreamRun<'a, F>: Elements<F>,
        for<'a, 'b> &'a mut Runs<'b, F>: Elements<F>,
    {
        let (at, mut seed) = (ApplyAt::new(3, 2), case.seed);
        let mut streams: Vec<Vec<F>> =
            (0..=rule.slots().len()).map(|_| numbers(&mut seed, case.length)).collect();
        if rule.kind() != "momentum" && rule.kind() != "nesterov" {
            // A sum of squares, and the root of a negative one is NaN and nothing else.
            for sum in streams.iter_mut().skip(1).flatten() {
                *sum = sum.abs();
            }
        }
        let gradient: Vec<F> = numbers(&mut seed, case.length);
        // One element at a time, where no vector unit is used.
        let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
        let reference = bits(&changed(case, &streams, &gradient, singly));
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
            ("in place, baseline", changed(case, &streams, &gradient, baseline)),
            ("in place", changed(case, &streams, &gradient, dispatched)),
            ("in runs", changed(case, &streams, &gradient, in_runs)),
            ("elsewhere, baseline", carried(case, &streams, GradientRun::Here(&gradient), across)),
            ("elsewhere", carried(case, &streams, GradientRun::Here(&gradient), across_dispatched)),
        ] {
            assert_eq!(bits(&found), reference, "{rule:?} {way}, {case:?}");
        }
        // The same, and the mean of some.
        let mut gradients = vec![gradient];
        for count in 1..=MEAN_GRADIENTS_MAX as u32 {
            let length = 0..case.length;
            let sum = |at: usize| {
                let each = gradients.iter().map(|gradient| gradient[at]);
                each.reduce(|sum, more| sum + more).unwrap() / F::of(count.into())
            };
            let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
            let mean: Vec<F> = length.map(sum).collect();
            let mean = bits(&changed(case, &streams, &mean, singly));
            let (found, full) = carried_from_shared(case, &streams, &gradients, across);
            assert_eq!((bits(&found), full), (mean.clone(), false), "{rule:?} baseline, {case:?}");
            let (found, full) = carried_from_shared(case, &streams, &gradients, across_dispatched);
            assert_eq!((bits(&found), full), (mean, false), "{rule:?} of {count}, {case:?}");
            // Wherever one is that is no number.
            if let Some(at) = (seed as usize).checked_rem(case.length) {
                let mut wrong = gradients.clone();
                let number = if seed & 64 == 0 { f64::NAN } else { f64::NEG_INFINITY };
                wrong[(seed >> 8) as usize % gradients.len()][at] = F::of(number);
                let (_, full) = carried_from_shared(case, &streams, &wrong, across);
                assert!(full, "baseline, {at} of {case:?}");
                let (_, full) = carried_from_shared(case, &streams, &wrong, across_dispatched);
                assert!(full, "{at} of {case:?}");
            }
            gradients.push(numbers(&mut seed, case.length));
        }
    }

    fn check(rule: &(impl Dense + Optimizer), case: &Case) {
        check_as::<f32, _, { LINE_BYTES / 4 }>(rule, case);
        check_as::<f64, _, { LINE_BYTES / 8 }>(rule, case);
    }

    /// Terms with operations that a wider tier might round otherwise.
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
        /// In whatever runs a variable comes.
        #[test]
        fn every_way_adds_up_to_the_same_bits(
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
        fn every_way_computes_the_same_bits(case in cases()) {
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
