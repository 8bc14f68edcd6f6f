//! Shared helpers of the kernels' tests: random values and numeric derivatives.

/// Returns values in -1..1 from a seed, equal in every run.
pub(crate) fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Asserts that two values differ by at most `tolerance`, relative to the greater of the expected
/// value and 1.
#[track_caller]
pub(crate) fn assert_close(found: f64, expected: f64, tolerance: f64) {
    let limit = tolerance * expected.abs().max(1.0);
    assert!((found - expected).abs() <= limit, "{found} instead of {expected}");
}

/// Asserts that `gradients` are the derivatives of `loss` at `values`, by central differences.
#[track_caller]
pub(crate) fn assert_gradients(gradients: &[f32], values: &[f32], loss: impl Fn(&[f64]) -> f64) {
    assert_eq!(gradients.len(), values.len());
    let mut values: Vec<f64> = values.iter().map(|&value| value.into()).collect();
    for index in 0..values.len() {
        const STEP: f64 = 1e-5;
        let value = values[index];
        let mut at = |value| {
            values[index] = value;
            loss(&values)
        };
        let slope = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
        values[index] = value;
        assert_close(gradients[index].into(), slope, 1e-5);
    }
}
