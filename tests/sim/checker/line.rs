//! The elements of variables, as the checkers compute with them.

use pushpull_common::tensor::DType;

use crate::setting::RATE;

/// All values or one gradient, by variable; `None` where a gradient leaves a variable out.
pub(crate) type Tensors = Vec<Option<Elements>>;

/// The elements of one variable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Elements {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

impl Elements {
    pub(crate) fn zeros(dtype: DType, length: usize) -> Elements {
        match dtype {
            DType::F64 => Elements::Double(vec![0.0; length]),
            _ => Elements::Single(vec![0.0; length]),
        }
    }

    /// Returns `length` elements, each the integer `element(index)`. The type must hold it exactly.
    pub(crate) fn of(dtype: DType, length: usize, element: impl Fn(usize) -> i64) -> Elements {
        match dtype {
            DType::F64 => Elements::Double((0..length).map(|e| element(e) as f64).collect()),
            _ => Elements::Single((0..length).map(|e| element(e) as f32).collect()),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Elements::Single(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
            Elements::Double(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
        }
    }

    /// Returns the sum of the squares of the elements.
    pub(crate) fn squares(&self) -> f64 {
        match self {
            Elements::Single(line) => line.iter().map(|&e| f64::from(e) * f64::from(e)).sum(),
            Elements::Double(line) => line.iter().map(|e| e * e).sum(),
        }
    }

    /// Multiplies all elements by a factor.
    pub(crate) fn scale(&mut self, factor: f64) {
        match self {
            Elements::Single(line) => {
                line.iter_mut().for_each(|e| *e = (f64::from(*e) * factor) as f32);
            }
            Elements::Double(line) => line.iter_mut().for_each(|e| *e *= factor),
        }
    }

    /// Takes one step of gradient descent along the mean of the gradients, summed in their order.
    pub(crate) fn descend(&mut self, gradients: &[&Elements]) {
        match self {
            Elements::Single(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f32>, line| {
                        let Elements::Single(line) = line else { unreachable!("of one type") };
                        Some(sum.map_or(line[at], |sum| sum + line[at]))
                    });
                    if let Some(sum) = sum {
                        *value -= RATE as f32 * (sum / gradients.len() as f32);
                    }
                }
            }
            Elements::Double(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f64>, line| {
                        let Elements::Double(line) = line else { unreachable!("of one type") };
                        Some(sum.map_or(line[at], |sum| sum + line[at]))
                    });
                    if let Some(sum) = sum {
                        *value -= RATE * (sum / gradients.len() as f64);
                    }
                }
            }
        }
    }
}
