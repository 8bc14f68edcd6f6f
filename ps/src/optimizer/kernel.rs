//! The vector loops, compiled once for the baseline and once for AVX2, chosen at run time.
//!
//! The bodies are plain loops. The compiler never contracts a multiplication and an addition into
//! one rounding by itself, so that every tier computes the same bits; `mul_add` would not.
//!
//! This is one of the few files that may hold `unsafe` code.

/// Declares a kernel: a plain loop, its AVX2 twin, and the choice between them.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $body:block) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) {
            #[inline(always)]
            fn body($($arg: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) {
                    body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has the features that `avx2` is compiled for.
                    unsafe { avx2($($arg),*) };
                    return;
                }
            }
            body($($arg),*)
        }
    };
}

/// The scalars of one Adam update.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdamScalars {
    pub(super) alpha: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) epsilon: f64,
}

macro_rules! rules {
    ($float:ty, $sgd:ident, $adam:ident) => {
        kernel! {
            /// `w -= lr * g`.
            $sgd(values: &mut [$float], gradient: &[$float], rate: $float) {
                for (w, g) in values.iter_mut().zip(gradient) {
                    *w -= rate * g;
                }
            }
        }

        kernel! {
            /// One Adam update; see [`super::Adam`].
            $adam(
                values: &mut [$float],
                first: &mut [$float],
                second: &mut [$float],
                gradient: &[$float],
                scalars: AdamScalars
            ) {
                let (b1, b2) = (scalars.beta1 as $float, scalars.beta2 as $float);
                // 1 - beta is rounded from f64: in f32, 1 - 0.999 would lose three digits.
                let (c1, c2) = ((1.0 - scalars.beta1) as $float, (1.0 - scalars.beta2) as $float);
                let (alpha, epsilon) = (scalars.alpha as $float, scalars.epsilon as $float);
                for (((w, m), v), g) in values.iter_mut().zip(first).zip(second).zip(gradient) {
                    *m = b1 * *m + c1 * g;
                    *v = b2 * *v + c2 * (g * g);
                    *w -= alpha * *m / (v.sqrt() + epsilon);
                }
            }
        }
    };
}
rules!(f32, sgd_f32, adam_f32);
rules!(f64, sgd_f64, adam_f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tiers_compute_the_same_bits() {
        // The scalar reference is computed one element at a time, where no vector unit is used.
        let n = 1003;
        let g: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.5).collect();
        let s = AdamScalars { alpha: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let (mut w, mut m, mut v) = (vec![1.0; n], vec![0.1; n], vec![0.2; n]);
        let (mut w1, mut m1, mut v1) = (w.clone(), m.clone(), v.clone());
        adam_f32(&mut w, &mut m, &mut v, &g, s);
        for i in 0..n {
            let one = i..i + 1;
            adam_f32(&mut w1[one.clone()], &mut m1[one.clone()], &mut v1[one.clone()], &g[one], s);
        }
        assert_eq!((w, m, v), (w1, m1, v1));
    }
}
