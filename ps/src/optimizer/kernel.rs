//! The vector loops, compiled once for the baseline and once for AVX2, chosen at run time.
//!
//! A rule is written for one line of elements, as plain loops over arrays of a fixed length. Two
//! drivers take it over runs: one changes them in place, the other writes what they become to another
//! place, past the cache. The compiler never contracts a multiplication and an addition into one
//! rounding by itself, so that every tier and both drivers compute the same bits; `mul_add` would
//! not.
//!
//! This is one of the few files that may hold `unsafe` code.

use super::{Run, StreamRun};

/// A rule with so many slots, for elements of this type.
pub(super) trait Rule<F, const SLOTS: usize>: Copy {
    /// Changes a few elements and their slots by their gradient.
    fn step<const N: usize>(self, values: &mut [F; N], slots: [&mut [F; N]; SLOTS], g: &[F; N]);
}

/// A cache line of elements.
const LINE_BYTES: usize = 64;

/// A floating-point type, with the drivers for lines of it.
pub(super) trait Float: Copy + Default + bytemuck::Pod {
    /// Takes a rule over a run, in place.
    fn in_place<R: Rule<Self, S>, const S: usize>(rule: R, run: Run<'_, Self>);
    /// Takes a rule over a run, whose result goes elsewhere.
    fn streamed<R: Rule<Self, S>, const S: usize>(rule: R, run: StreamRun<'_, Self>);
}

/// Runs a loop with the widest vectors there are.
macro_rules! tiers {
    ($plain:ident, $avx2:ident, $argument:ty) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2<F: Float, R: Rule<F, S>, const S: usize, const N: usize>(rule: R, run: $argument) {
            $plain::<F, R, S, true, N>(rule, run);
        }
    };
}
tiers!(in_place, in_place_avx2, Run<'_, F>);
tiers!(streamed, streamed_avx2, StreamRun<'_, F>);

macro_rules! float {
    ($float:ty) => {
        impl Float for $float {
            fn in_place<R: Rule<Self, S>, const S: usize>(rule: R, run: Run<'_, Self>) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that this is compiled for.
                    return unsafe { in_place_avx2::<Self, R, S, N>(rule, run) };
                }
                in_place::<Self, R, S, false, N>(rule, run);
            }

            fn streamed<R: Rule<Self, S>, const S: usize>(rule: R, run: StreamRun<'_, Self>) {
                const N: usize = LINE_BYTES / size_of::<$float>();
                #[cfg(target_arch = "x86_64")]
                if has_avx2() {
                    // SAFETY: the processor has the features that this is compiled for.
                    return unsafe { streamed_avx2::<Self, R, S, N>(rule, run) };
                }
                streamed::<Self, R, S, false, N>(rule, run);
            }
        }
    };
}
float!(f32);
float!(f64);

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
    let slots: &mut [&mut [F]; S] = run.slots.try_into().expect("the slots of the rule");
    let mut slots = slots.each_mut().map(|slot| &mut slot[..length]);
    let (values, gradient) = (&mut run.values[..length], &run.gradient[..length]);
    let whole = length - length % N;
    let mut at = 0;
    while at < whole {
        step_in_place::<F, R, S, N>(rule, values, &mut slots, gradient, at);
        at += N;
    }
    while at < length {
        step_in_place::<F, R, S, 1>(rule, values, &mut slots, gradient, at);
        at += 1;
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
    let slots = slots.each_mut().map(|slot| line_mut::<F, N>(slot, at));
    rule.step(line_mut(values, at), slots, line(gradient, at));
}

#[inline(always)]
fn streamed<F: Float, R: Rule<F, S>, const S: usize, const WIDE: bool, const N: usize>(
    rule: R,
    run: StreamRun<'_, F>,
) {
    let length = run.values.len();
    let slots: &[&[F]; S] = run.slots.try_into().expect("the slots of the rule");
    let slots = slots.map(|slot| &slot[..length]);
    let out: &mut [&mut [F]; S] = run.slots_out.try_into().expect("the slots of the rule");
    let mut slots_out = out.each_mut().map(|slot| &mut slot[..length]);
    let (values, gradient) = (&run.values[..length], &run.gradient[..length]);
    let values_out = &mut run.values_out[..length];
    // All streams lie alike within their lines, or are written through the cache.
    let aligned = |slice: &[F]| slice.as_ptr().align_offset(LINE_BYTES);
    let head = aligned(values_out).min(length);
    let past_cache =
        run.past_cache && slots_out.iter().all(|slot| aligned(slot).min(length) == head);
    let end = length - (length - head) % N;
    for at in (0..head).chain(end..length) {
        let (w, s) = step_across::<F, R, S, 1>(rule, values, &slots, gradient, at);
        store(values_out, &mut slots_out, at, w, s);
    }
    if past_cache {
        for at in (head..end).step_by(N) {
            let (w, s) = step_across::<F, R, S, N>(rule, values, &slots, gradient, at);
            stream_line::<F, WIDE, N>(line_mut(values_out, at), &w);
            for (out, line) in slots_out.iter_mut().zip(&s) {
                stream_line::<F, WIDE, N>(line_mut(out, at), line);
            }
        }
    } else {
        for at in (head..end).step_by(N) {
            let (w, s) = step_across::<F, R, S, N>(rule, values, &slots, gradient, at);
            store(values_out, &mut slots_out, at, w, s);
        }
    }
}

/// What a line and its slots become.
#[inline(always)]
fn step_across<F: Float, R: Rule<F, S>, const S: usize, const N: usize>(
    rule: R,
    values: &[F],
    slots: &[&[F]; S],
    gradient: &[F],
    at: usize,
) -> ([F; N], [[F; N]; S]) {
    let (mut w, mut s) = (*line(values, at), slots.map(|slot| *line(slot, at)));
    rule.step(&mut w, s.each_mut(), line(gradient, at));
    (w, s)
}

#[inline(always)]
fn store<F: Float, const S: usize, const N: usize>(
    values: &mut [F],
    slots: &mut [&mut [F]; S],
    at: usize,
    w: [F; N],
    s: [[F; N]; S],
) {
    *line_mut(values, at) = w;
    for (out, line) in slots.iter_mut().zip(s) {
        *line_mut(out, at) = line;
    }
}

#[inline(always)]
fn line<F, const N: usize>(run: &[F], at: usize) -> &[F; N] {
    run[at..at + N].try_into().expect("a line of the run")
}

#[inline(always)]
fn line_mut<F, const N: usize>(run: &mut [F], at: usize) -> &mut [F; N] {
    (&mut run[at..at + N]).try_into().expect("a line of the run")
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

/// `w -= lr * g`; see [`super::Sgd`].
#[derive(Clone, Copy, Debug)]
pub(super) struct SgdRule<F> {
    pub(super) rate: F,
}

/// One Adam update; see [`super::Adam`].
#[derive(Clone, Copy, Debug)]
pub(super) struct AdamRule<F> {
    pub(super) alpha: F,
    pub(super) beta1: F,
    pub(super) beta2: F,
    /// `1 - beta`, rounded from f64: in f32, 1 - 0.999 would lose three digits.
    pub(super) rest1: F,
    pub(super) rest2: F,
    pub(super) epsilon: F,
}

macro_rules! rules {
    ($float:ty) => {
        impl Rule<$float, 0> for SgdRule<$float> {
            #[inline(always)]
            fn step<const N: usize>(
                self,
                w: &mut [$float; N],
                []: [&mut [$float; N]; 0],
                g: &[$float; N],
            ) {
                for i in 0..N {
                    w[i] -= self.rate * g[i];
                }
            }
        }

        impl Rule<$float, 2> for AdamRule<$float> {
            #[inline(always)]
            fn step<const N: usize>(
                self,
                w: &mut [$float; N],
                [m, v]: [&mut [$float; N]; 2],
                g: &[$float; N],
            ) {
                for i in 0..N {
                    m[i] = self.beta1 * m[i] + self.rest1 * g[i];
                    v[i] = self.beta2 * v[i] + self.rest2 * (g[i] * g[i]);
                    w[i] -= self.alpha * m[i] / (v[i].sqrt() + self.epsilon);
                }
            }
        }
    };
}
rules!(f32);
rules!(f64);

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: AdamRule<f32> =
        AdamRule { alpha: 1e-3, beta1: 0.9, beta2: 0.999, rest1: 0.1, rest2: 0.001, epsilon: 1e-8 };

    #[test]
    fn every_way_computes_the_same_bits() {
        let n = 1003;
        let g: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.5).collect();
        let (w, m, v) = (vec![1.0; n], vec![0.1; n], vec![0.2; n]);
        // The reference is computed one element at a time, where no vector unit is used.
        let (mut w1, mut m1, mut v1) = (w.clone(), m.clone(), v.clone());
        for i in 0..n {
            let slots = [line_mut::<f32, 1>(&mut m1, i), line_mut(&mut v1, i)];
            RULE.step(line_mut(&mut w1, i), slots, line(&g, i));
        }
        let (mut w2, mut m2, mut v2) = (w.clone(), m.clone(), v.clone());
        let slots: &mut [&mut [f32]] = &mut [&mut m2, &mut v2];
        f32::in_place(RULE, Run { values: &mut w2, slots, gradient: &g });
        assert!((&w1, &m1, &v1) == (&w2, &m2, &v2));
        // Wherever the streams start: alike in their lines or not.
        let places = [(0, 0), (3, 3), (16, 0), (5, 6)];
        for ((a, b), past_cache) in places.into_iter().flat_map(|p| [(p, true), (p, false)]) {
            let (mut w2, mut m2, mut v2) =
                (vec![0.0; n + 40], vec![0.0; n + 40], vec![0.0; n + 40]);
            let offset = |buffer: &[f32], more: usize| buffer.as_ptr().align_offset(64) + more;
            let (w_at, m_at, v_at) = (offset(&w2, a), offset(&m2, b), offset(&v2, a));
            let out: &mut [&mut [f32]] = &mut [&mut m2[m_at..m_at + n], &mut v2[v_at..v_at + n]];
            let run = StreamRun {
                values: &w,
                values_out: &mut w2[w_at..w_at + n],
                slots: &[&m, &v],
                slots_out: out,
                gradient: &g,
                past_cache,
            };
            f32::streamed(RULE, run);
            crate::arena::fence();
            assert!(w2[w_at..w_at + n] == w1 && m2[m_at..m_at + n] == m1);
            assert!(v2[v_at..v_at + n] == v1);
        }
    }
}
