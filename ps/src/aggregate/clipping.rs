//! Clipping by the global norm: the factor that scales a gradient down, the same on every shard.

/// An `f64` that is compared and hashed by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BitwiseF64(u64);

impl BitwiseF64 {
    pub(crate) const ONE: BitwiseF64 = BitwiseF64(1.0_f64.to_bits());

    pub(crate) fn get(self) -> f64 {
        f64::from_bits(self.0)
    }

    /// Returns the bits, for a durable word.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn from_bits(bits: u64) -> BitwiseF64 {
        BitwiseF64(bits)
    }
}

impl From<f64> for BitwiseF64 {
    fn from(number: f64) -> BitwiseF64 {
        BitwiseF64(number.to_bits())
    }
}

impl std::fmt::Debug for BitwiseF64 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.get())
    }
}

/// Returns the clipping factor of a gradient, from the sums of its squares on the shards. The
/// factor is 1 if the norm is at most `bound` or is not finite.
pub(crate) fn factor(bound: BitwiseF64, squares: impl Iterator<Item = BitwiseF64>) -> BitwiseF64 {
    // The order of the shards matters: each sum is rounded.
    let norm = squares.fold(0.0, |sum, squares| sum + squares.get()).sqrt();
    match norm > bound.get() && norm.is_finite() {
        // The durable record accepts only factors above 0.
        true => (bound.get() / norm).max(f64::MIN_POSITIVE).into(),
        false => BitwiseF64::ONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_norm_above_the_bound_is_scaled_down_to_it() {
        let factor = |squares: &[f64]| {
            factor(5.0.into(), squares.iter().map(|&squares| squares.into())).get()
        };
        assert_eq!(factor(&[36.0, 64.0]), 0.5);
        assert_eq!(factor(&[9.0, 16.0]), 1.0);
        assert_eq!(factor(&[]), 1.0);
        let tiny = super::factor(1e-300.into(), [BitwiseF64::from(1e60)].into_iter());
        assert_eq!(tiny.get(), f64::MIN_POSITIVE);
        for not_finite in [f64::INFINITY, f64::NAN] {
            assert_eq!(factor(&[100.0, not_finite]), 1.0, "{not_finite}");
        }
    }
}
