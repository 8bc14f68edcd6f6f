//! The elements of variables, as the checkers reckon with them.

use pushpull_common::tensor::DType;

use crate::setting::RATE;

/// All values, or a gradient: by variable; none where a gradient leaves a variable out.
pub(crate) type Numbers = Vec<Option<Line>>;

/// The elements of one variable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Line {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

impl Line {
    pub(crate) fn zeros(dtype: DType, length: usize) -> Line {
        match dtype {
            DType::F64 => Line::Double(vec![0.0; length]),
            _ => Line::Single(vec![0.0; length]),
        }
    }

    /// The elements, each an integer that this function gives, which the type can hold.
    pub(crate) fn of(dtype: DType, length: usize, element: impl Fn(usize) -> i64) -> Line {
        match dtype {
            DType::F64 => Line::Double((0..length).map(|e| element(e) as f64).collect()),
            _ => Line::Single((0..length).map(|e| element(e) as f32).collect()),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Line::Single(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
            Line::Double(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
        }
    }

    /// The sum of the squares of its elements.
    pub(crate) fn squares(&self) -> f64 {
        match self {
            Line::Single(line) => line.iter().map(|&e| f64::from(e) * f64::from(e)).sum(),
            Line::Double(line) => line.iter().map(|e| e * e).sum(),
        }
    }

    /// Multiplies all elements with a factor.
    pub(crate) fn scale(&mut self, factor: f64) {
        match self {
            Line::Single(line) => {
                line.iter_mut().for_each(|e| *e = (f64::from(*e) * factor) as f32);
            }
            Line::Double(line) => line.iter_mut().for_each(|e| *e *= factor),
        }
    }

    /// Takes one step along the mean of these gradients, added up in their order.
    pub(crate) fn descend(&mut self, gradients: &[&Line]) {
        match self {
            Line::Single(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f32>, line| {
                        let Line::Single(line) = line else { unreachable!("of one type") };
                        Some(sum.map_or(line[at], |sum| sum + line[at]))
                    });
                    if let Some(sum) = sum {
                        *value -= RATE as f32 * (sum / gradients.len() as f32);
                    }
                }
            }
            Line::Double(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f64>, line| {
                        let Line::Double(line) = line else { unreachable!("of one type") };
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
