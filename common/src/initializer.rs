//! Initializers: the initial values of a variable, equal on every machine and in every layout.
//!
//! A value depends only on the seed, the variable's name and the element's index in the whole
//! variable. A partition, a shard or a block can therefore be filled on its own, in any order. A
//! restart or another number of tasks gives the same model. The code uses only IEEE operations with
//! one correct result and the software functions of `libm`, never the math library of the machine.

mod counter;
mod quantile;
mod text;

pub use counter::InitialKey;

use thiserror::Error;

use crate::tensor::{Element, Shape};
use quantile::normal_quantile;

/// The distribution of a variable's initial values; the default is [`Initializer::Zeros`].
///
/// The last four use [`Fans::of`] the whole variable, however it is partitioned.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Initializer {
    /// All 0.
    #[default]
    Zeros,
    /// All 1.
    Ones,
    /// All the same value.
    Constant(f64),
    /// Uniform between two bounds, which rounding to the element type may reach.
    Uniform {
        /// The lower bound.
        low: f64,
        /// The upper bound, not below `low`.
        high: f64,
    },
    /// The normal distribution.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation, not negative.
        stddev: f64,
    },
    /// The normal distribution truncated at two standard deviations from the mean.
    TruncatedNormal {
        /// The mean.
        mean: f64,
        /// The standard deviation before truncation, not negative; truncation reduces it to 0.88 of
        /// that.
        stddev: f64,
    },
    /// Uniform within `sqrt(6 / (fan_in + fan_out))` of 0. Glorot and Bengio, "Understanding the
    /// difficulty of training deep feedforward neural networks", 2010, equation 16.
    GlorotUniform,
    /// Truncated normal with the variance of [`Initializer::GlorotUniform`], 2 / (fan_in +
    /// fan_out), after truncation.
    GlorotNormal,
    /// Uniform within `sqrt(6 / fan_in)` of 0. He, Zhang, Ren and Sun, "Delving deep into
    /// rectifiers", 2015, equation 10.
    HeUniform,
    /// Truncated normal with the variance of [`Initializer::HeUniform`], 2 / fan_in, after
    /// truncation.
    HeNormal,
}

/// The reason why an initializer is invalid.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum InitializerError {
    /// An argument is NaN or infinite, or so large that a value could be infinite.
    #[error("cannot initialize with {initializer}: its values would not all be finite")]
    NotFinite {
        /// The initializer.
        initializer: Initializer,
    },
    /// The lower bound is above the upper bound.
    #[error("cannot initialize with {initializer}: the lower bound is above the upper bound")]
    LowAboveHigh {
        /// The initializer.
        initializer: Initializer,
    },
    /// The standard deviation is negative.
    #[error("cannot initialize with {initializer}: the standard deviation is negative")]
    NegativeStddev {
        /// The initializer.
        initializer: Initializer,
    },
    /// The text is not an initializer.
    #[error("cannot read the initializer {text:?}: expected a form such as zeros or normal(0,0.1)")]
    Text {
        /// The text, clipped.
        text: String,
    },
}

/// The numbers of inputs and outputs of a layer's unit, derived from the shape of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fans {
    /// Inputs per output.
    pub fan_in: u64,
    /// Outputs per input.
    pub fan_out: u64,
}

impl Fans {
    /// Derives the fans from a shape, as TensorFlow does.
    ///
    /// A scalar has 1 and 1, a vector of length `n` has `n` and `n`, a dense layer is `[in, out]`.
    /// In a convolution `[.., in, out]` both are multiplied by the number of kernel positions.
    pub fn of(shape: &Shape) -> Fans {
        let extents = shape.extents();
        let (fan_in, fan_out) = match *extents {
            [] => (1, 1),
            [length] => (length, length),
            [ref kernel @ .., inputs, outputs] => {
                let positions: u64 = kernel.iter().product();
                (positions * inputs, positions * outputs)
            }
        };
        Fans { fan_in, fan_out }
    }

    fn mean(self) -> f64 {
        ((self.fan_in as f64 + self.fan_out as f64) / 2.0).max(1.0)
    }
}

/// An element type that can take an initial value.
pub trait FromValue: Element {
    /// Rounds to the nearest float, or towards zero to an integer within its bounds.
    fn from_value(value: f64) -> Self;
}

impl FromValue for f32 {
    fn from_value(value: f64) -> f32 {
        value as f32
    }
}

impl FromValue for f64 {
    fn from_value(value: f64) -> f64 {
        value
    }
}

impl FromValue for i64 {
    fn from_value(value: f64) -> i64 {
        value as i64
    }
}

impl Initializer {
    /// Checks that the arguments are sensible and that all values are finite.
    pub fn validate(&self) -> Result<(), InitializerError> {
        let initializer = *self;
        let finite = match initializer {
            Initializer::Constant(value) => value.is_finite(),
            Initializer::Uniform { low, high } => (high - low).is_finite(),
            Initializer::Normal { mean, stddev }
            | Initializer::TruncatedNormal { mean, stddev } => {
                (mean.abs() + QUANTILE_BOUND * stddev.abs()).is_finite()
            }
            _ => true,
        };
        match initializer {
            _ if !finite => Err(InitializerError::NotFinite { initializer }),
            Initializer::Uniform { low, high } if low > high => {
                Err(InitializerError::LowAboveHigh { initializer })
            }
            Initializer::Normal { stddev, .. } | Initializer::TruncatedNormal { stddev, .. }
                if stddev < 0.0 =>
            {
                Err(InitializerError::NegativeStddev { initializer })
            }
            _ => Ok(()),
        }
    }

    /// Returns the value of the element at `index` of the whole variable, in row-major order.
    pub fn value(&self, key: InitialKey, index: u64, fans: Fans) -> f64 {
        let mut out = [0.0];
        self.rule(fans).fill(key, index, &mut out);
        out[0]
    }

    /// Fills `out` with the values of the elements from `first_element` on.
    ///
    /// `shape` is the shape of the whole variable and `first_element` an index in it, in row-major
    /// order; a partition that starts at row `r` starts at `r * shape.row_elements()`. Costs a few
    /// nanoseconds an element, more for the normal distributions.
    pub fn fill<T: FromValue>(
        &self,
        seed: u64,
        name: &str,
        shape: &Shape,
        first_element: u64,
        out: &mut [T],
    ) {
        self.rule(Fans::of(shape)).fill(InitialKey::new(seed, name), first_element, out);
    }

    /// Fills `out` with the initial values of a row of a table. They depend only on the key and the
    /// id.
    ///
    /// The values are those of the elements from `id` times the row's length on, modulo 2^64.
    /// Initializers that need fans take them as 1; tables reject such initializers.
    pub fn fill_row<T: FromValue>(&self, key: InitialKey, id: u64, out: &mut [T]) {
        let first = id.wrapping_mul(out.len() as u64);
        self.rule(Fans { fan_in: 1, fan_out: 1 }).fill(key, first, out);
    }

    fn rule(&self, fans: Fans) -> FillRule {
        let within = |limit: f64| FillRule::Uniform { low: -limit, width: 2.0 * limit };
        let cut = |variance: f64| FillRule::TruncatedNormal {
            mean: 0.0,
            stddev: libm::sqrt(variance) / TRUNCATED_STDDEV,
        };
        let fan_in = (fans.fan_in as f64).max(1.0);
        match *self {
            Initializer::Zeros => FillRule::Constant(0.0),
            Initializer::Ones => FillRule::Constant(1.0),
            Initializer::Constant(value) => FillRule::Constant(value),
            Initializer::Uniform { low, high } => FillRule::Uniform { low, width: high - low },
            Initializer::Normal { mean, stddev } => FillRule::Normal { mean, stddev },
            Initializer::TruncatedNormal { mean, stddev } => {
                FillRule::TruncatedNormal { mean, stddev }
            }
            Initializer::GlorotUniform => within(libm::sqrt(3.0 / fans.mean())),
            Initializer::GlorotNormal => cut(1.0 / fans.mean()),
            Initializer::HeUniform => within(libm::sqrt(6.0 / fan_in)),
            Initializer::HeNormal => cut(2.0 / fan_in),
        }
    }
}

/// An initializer whose fans are already applied.
#[derive(Clone, Copy, Debug)]
enum FillRule {
    Constant(f64),
    Uniform { low: f64, width: f64 },
    Normal { mean: f64, stddev: f64 },
    TruncatedNormal { mean: f64, stddev: f64 },
}

impl FillRule {
    fn fill<T: FromValue>(self, key: InitialKey, first: u64, out: &mut [T]) {
        match self {
            FillRule::Constant(value) => out.fill(T::from_value(value)),
            FillRule::Uniform { low, width } => each(key, first, out, |unit| low + unit * width),
            FillRule::Normal { mean, stddev } => {
                each(key, first, out, |unit| mean + stddev * normal_quantile(unit));
            }
            FillRule::TruncatedNormal { mean, stddev } => each(key, first, out, |unit| {
                // The quantile of a uniform number between the tails needs exactly one draw.
                // Redrawing until a number fits would need a varying number of draws per element.
                let deviation = normal_quantile(TAIL + unit * (1.0 - 2.0 * TAIL));
                mean + stddev * deviation.clamp(-2.0, 2.0)
            }),
        }
    }
}

fn each<T: FromValue>(key: InitialKey, first: u64, out: &mut [T], value: impl Fn(f64) -> f64) {
    let mut index = first;
    for element in out {
        *element = T::from_value(value(key.unit(index)));
        index = index.wrapping_add(1);
    }
}

/// The probability that a normal deviate is below -2.
const TAIL: f64 = 0.022_750_131_948_179_21;
/// The standard deviation of a normal deviate truncated at 2, with the digits that TensorFlow uses:
/// `sqrt(1 - 4 phi(2) / (1 - 2 TAIL))`.
const TRUNCATED_STDDEV: f64 = 0.879_625_661_034_239_8;
/// An upper bound of the largest quantile that 52 random bits can produce, which is 8.2.
const QUANTILE_BOUND: f64 = 9.0;

#[cfg(test)]
mod tests;
