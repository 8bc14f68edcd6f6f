//! Reductions: the operations that combine the elements of all ranks.

use std::fmt;

use crate::ElementKind;

/// The operation that combines the elements of all ranks into one.
///
/// Every result is bit-equal on all ranks and between runs, because each element is folded in one
/// order, which depends on its position and the size of the ring alone. The order and the number of
/// the ranks change sums by rounding errors. Minima and maxima depend on neither.
///
/// - **NaN**: a result is NaN if any contribution is, and a sum also if it adds infinities of opposite
///   sign. With two ranks or more it is always the same NaN: quiet, positive, without payload.
/// - **Zeros**: -0 is less than +0, so a minimum of both is -0 and a maximum +0.
/// - **`f16` and `bf16`**: each addition rounds the sum of two elements to nearest, ties to even, and
///   overflows to infinity. A sum over many ranks therefore loses more than one of `f32`, which is
///   rounded once at the end.
/// - **Integers**: a partial sum that the type cannot represent ends the operation with an error.
///   It may do so although the whole sum fits, if contributions have opposite signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum of all contributions.
    Sum,
    /// The sum divided by the number of ranks; of floating-point numbers only.
    Mean,
    /// The least contribution.
    Min,
    /// The greatest contribution.
    Max,
}

impl Reduction {
    /// Every reduction.
    #[cfg(test)]
    pub(crate) const ALL: [Reduction; 4] =
        [Reduction::Sum, Reduction::Mean, Reduction::Min, Reduction::Max];

    /// Returns whether the reduction is defined for elements of this type.
    ///
    /// Only the mean of integers is not: it would have to round in a way that each caller expects
    /// otherwise.
    pub const fn allows(self, kind: ElementKind) -> bool {
        kind.is_float() || !matches!(self, Reduction::Mean)
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Min => "min",
            Reduction::Max => "max",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mean_of_integers_is_refused() {
        for reduction in Reduction::ALL {
            for kind in ElementKind::ALL {
                let is_refused = reduction == Reduction::Mean
                    && matches!(kind, ElementKind::I32 | ElementKind::I64);
                assert_eq!(reduction.allows(kind), !is_refused, "{reduction} of {kind}");
            }
        }
        assert_eq!(Reduction::ALL.map(|r| r.to_string()), ["sum", "mean", "min", "max"]);
    }
}
