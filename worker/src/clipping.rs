//! Gradient clipping and scaling before a push.

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, Element, bf16, f16};

use crate::error::ConfigError;
use crate::gradients::params::Gradients;

/// Clipping, of all gradients in the push and of every type. Each call is one pass over them;
/// clipping by norm is one more. Norms are summed in `f64`, in an order that depends on the shapes
/// only.
///
/// Only this replica's own gradient is clipped. In synchronous mode that bounds the mean as well:
/// the norm of a mean is at most the largest norm of its terms. A codec with error feedback adds
/// what earlier pushes have left out, which is not bounded. The rows of a sparse variable count as
/// they are pushed: those with one id as their sum.
impl Gradients {
    /// Bounds every element: `g = min(max(g, -bound), bound)`. NaN is unchanged.
    ///
    /// # Errors
    /// If the bound is not positive and finite; nothing is changed then.
    pub fn clip_by_value(&mut self, bound: f64) -> Result<(), ConfigError> {
        check(bound)?;
        let narrow = bound as f32;
        for id in self.ids() {
            self.change(id, |g| g.clamp(-narrow, narrow), |g| g.clamp(-bound, bound));
        }
        Ok(())
    }

    /// Bounds the Euclidean norm of each variable's gradient: a longer one is scaled to `g * bound
    /// / |g|`. A partitioned variable has one norm.
    ///
    /// A gradient without a finite norm is unchanged. Either it has a NaN or an infinity, which the
    /// servers refuse; or it is of `f64` and its squares overflow, and [`Gradients::clip_by_value`]
    /// bounds it.
    ///
    /// # Errors
    /// If the bound is not positive and finite; nothing is changed then.
    pub fn clip_by_norm(&mut self, bound: f64) -> Result<(), ConfigError> {
        check(bound)?;
        for id in self.ids() {
            let norm = self.squares_of(id).sqrt();
            if norm > bound && norm.is_finite() {
                self.scale_one(id, bound / norm);
            }
        }
        Ok(())
    }

    /// Bounds the Euclidean norm of all gradients together, and returns the norm before clipping.
    /// If it is above the bound, all variables are scaled down by the same factor. If it is not
    /// finite, nothing is changed. (Pascanu, Mikolov and Bengio, 2013, "On the difficulty of
    /// training recurrent neural networks", algorithm 1.)
    ///
    /// # Errors
    /// If the bound is not positive and finite; nothing is changed then.
    pub fn clip_by_global_norm(&mut self, bound: f64) -> Result<f64, ConfigError> {
        check(bound)?;
        let norm = self.global_norm();
        if norm > bound && norm.is_finite() {
            self.scale(bound / norm);
        }
        Ok(norm)
    }

    /// Returns the Euclidean norm of all gradients together. It is not finite if an element is not,
    /// or if the square of an `f64` overflows.
    pub fn global_norm(&self) -> f64 {
        let squares = self.ids().into_iter().map(|id| self.squares_of(id));
        squares.fold(0.0, |sum, squares| sum + squares).sqrt()
    }

    /// Multiplies all gradients by a factor, rounded to each variable's type.
    ///
    /// For variables of `f16` and `bf16` the servers multiply, in `f32`, unless the gradient is
    /// viewed again before the push. So a scaled loss loses no small gradients.
    pub fn scale(&mut self, factor: f64) {
        for id in self.ids() {
            self.scale_one(id, factor);
        }
    }

    fn ids(&self) -> Vec<VariableId> {
        self.present().chain(self.memory.rows().variables()).collect()
    }

    fn squares_of(&self, id: VariableId) -> f64 {
        let bytes = match self.memory.rows().of_variable(id) {
            Some(rows) => rows.values,
            None => self.bytes_of(id),
        };
        let squares = match self.plan.catalogue().variable(id).dtype() {
            DType::F32 => squares::<f32>(bytes),
            DType::F64 => squares::<f64>(bytes),
            DType::F16 => squares::<f16>(bytes),
            DType::Bf16 => squares::<bf16>(bytes),
            _ => unreachable!("only floating-point variables have gradients"),
        };
        squares * self.factor(id) * self.factor(id)
    }

    fn scale_one(&mut self, id: VariableId, factor: f64) {
        let dtype = self.plan.catalogue().variable(id).dtype();
        let pending = self.factor(id) * factor;
        if dtype != dtype.master() && pending != 0.0 && pending.is_finite() {
            self.factors.insert(id, pending);
            return;
        }
        self.apply_factor(id);
        self.change(id, |g| (f64::from(g) * factor) as f32, |g| g * factor);
    }

    /// Returns the factor by which the servers multiply a gradient.
    pub(crate) fn factor(&self, id: VariableId) -> f64 {
        self.factors.get(&id).copied().unwrap_or(1.0)
    }

    /// Multiplies a gradient by its pending factor on this side instead of on the servers.
    pub(crate) fn apply_factor(&mut self, id: VariableId) {
        if let Some(factor) = self.factors.remove(&id) {
            self.change(id, |g| g, |g| g * factor);
        }
    }

    /// Changes every element of a variable's gradient, by its type.
    fn change(&mut self, id: VariableId, narrow: impl Fn(f32) -> f32, wide: impl Fn(f64) -> f64) {
        let factor = self.factor(id);
        let half = |g: f64| wide(g * factor) / factor;
        match self.plan.catalogue().variable(id).dtype() {
            DType::F32 => self.change_as(id, narrow),
            DType::F64 => self.change_as(id, wide),
            DType::F16 => self.change_as(id, |g: f16| f16::from_f64(half(g.into()))),
            DType::Bf16 => self.change_as(id, |g: bf16| bf16::from_f64(half(g.into()))),
            _ => unreachable!("only floating-point variables have gradients"),
        }
    }

    fn change_as<T: Element>(&mut self, id: VariableId, change: impl Fn(T) -> T) {
        if self.memory.rows_mut().change(id, &change) {
            return;
        }
        let elements: &mut [T] = bytemuck::cast_slice_mut(self.bytes_of_mut(id));
        elements.iter_mut().for_each(|g| *g = change(*g));
    }
}

/// Returns the sum of squares, in 8 partial sums for vectorization. Rows need not be aligned.
fn squares<T: Element + Into<f64>>(bytes: &[u8]) -> f64 {
    let square = |element: T| element.into() * element.into();
    let mut sums = [0.0; 8];
    let lines = bytes.chunks_exact(8 * size_of::<T>());
    let rest = lines.remainder().chunks_exact(size_of::<T>());
    let rest: f64 = rest.map(|element| square(bytemuck::pod_read_unaligned(element))).sum();
    for line in lines {
        let line: [T; 8] = bytemuck::pod_read_unaligned(line);
        sums.iter_mut().zip(line).for_each(|(sum, element)| *sum += square(element));
    }
    sums.iter().sum::<f64>() + rest
}

fn check(bound: f64) -> Result<(), ConfigError> {
    match bound.is_finite() && bound > 0.0 {
        true => Ok(()),
        false => Err(ConfigError::ClipBound { bound }),
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::testing::plans::{gradients_for, gradients_of};

    /// A gradient of norm 5, one of norm 12, and one that is not in the push.
    fn gradients() -> Gradients {
        let mut gradients = gradients_of(&[("w", DType::F32, 2), ("v", DType::F64, 9)], "left");
        gradients.view_mut("w").unwrap().copy_from_slice(&[-3.0_f32, 4.0]);
        gradients.view_mut("v").unwrap().copy_from_slice(&[4.0_f64; 9]);
        gradients
    }

    fn values(gradients: &mut Gradients) -> (Vec<f32>, Vec<f64>) {
        (gradients.view_mut("w").unwrap().to_vec(), gradients.view_mut("v").unwrap().to_vec())
    }

    #[test]
    fn every_element_is_bounded() {
        let mut gradients = gradients();
        gradients.view_mut("v").unwrap()[1..4].copy_from_slice(&[f64::NAN, f64::INFINITY, -0.5]);
        gradients.clip_by_value(3.5).unwrap();
        let (w, v) = values(&mut gradients);
        assert_eq!(w, [-3.0, 3.5]);
        assert!(v[1].is_nan());
        assert_eq!((v[0], v[2], v[3], v[8]), (3.5, 3.5, -0.5, 3.5));
    }

    #[test]
    fn clipping_by_norm_uses_one_norm_per_variable() {
        let mut gradients = gradients();
        gradients.clip_by_norm(6.0).unwrap();
        assert_eq!(values(&mut gradients), (vec![-3.0, 4.0], vec![2.0; 9]));
    }

    #[test]
    fn clipping_by_global_norm_uses_one_norm() {
        let mut gradients = gradients();
        assert_eq!(gradients.clip_by_global_norm(13.0).unwrap(), 13.0);
        assert_eq!(values(&mut gradients), (vec![-3.0, 4.0], vec![4.0; 9]));
        assert_eq!(gradients.clip_by_global_norm(6.5).unwrap(), 13.0);
        assert_eq!(values(&mut gradients), (vec![-1.5, 2.0], vec![2.0; 9]));
        assert_eq!(gradients.global_norm(), 6.5);
    }

    #[test]
    fn omitted_gradients_do_not_count() {
        let mut gradients = gradients();
        gradients.view_mut::<f32>("left").unwrap().fill(f32::NAN);
        gradients.omit("left").unwrap();
        assert_eq!(gradients.clip_by_global_norm(6.5).unwrap(), 13.0);
    }

    #[test]
    fn rows_count_as_their_sums() {
        let variables = [VariableSpec::f32("t", [4, 2]).unwrap().sparse()];
        let mut gradients = gradients_for(variables.to_vec());
        let rows = [1.0_f32, 2.0, 0.0, -2.0, 1.0, 1.0, 5.0, 0.5];
        gradients.set_rows("t", &[3, 0, 3, 0], &rows).unwrap();
        // Row 0 is (5, -1.5), row 3 is (2, 3).
        let norm = (25.0 + 2.25 + 4.0 + 9.0_f64).sqrt();
        assert_eq!(gradients.clip_by_global_norm(norm / 2.0).unwrap(), norm);
        let values = |gradients: &Gradients| -> Vec<f32> {
            gradients.memory.rows().of_variable(VariableId(0)).unwrap().elements().into()
        };
        assert_eq!(values(&gradients), [2.5, -0.75, 1.0, 1.5]);
        gradients.clip_by_value(1.25).unwrap();
        assert_eq!(values(&gradients), [1.25, -0.75, 1.0, 1.25]);
    }

    /// Gradients of a half type are multiplied in f32 on the servers, or when they are viewed.
    #[test]
    fn scaling_of_halves_is_deferred() {
        let vectors = [("h", DType::F16, 2), ("b", DType::Bf16, 1), ("w", DType::F32, 1)];
        let mut gradients = gradients_of(&vectors, "left");
        let halves = [3.0, -4.0].map(f16::from_f32);
        gradients.view_mut("h").unwrap().copy_from_slice(&halves);
        gradients.view_mut("b").unwrap().copy_from_slice(&[bf16::from_f32(12.0)]);
        gradients.view_mut::<f32>("w").unwrap()[0] = 0.0;
        assert_eq!(gradients.clip_by_global_norm(6.5).unwrap(), 13.0);
        gradients.scale(1e-9);
        assert!((gradients.global_norm() / 6.5e-9 - 1.0).abs() < 1e-9);
        let h = VariableId(0);
        let b = VariableId(1);
        assert_eq!((gradients.factor(h), gradients.factor(b)), (0.5e-9, 0.5e-9));
        assert_eq!(gradients.bytes_of(h)[..4], *bytemuck::cast_slice::<f16, u8>(&halves));
        gradients.scale(1e9);
        gradients.clip_by_value(1.75).unwrap();
        // Bounded with the pending factor.
        assert_eq!(gradients.view_mut::<f16>("h").unwrap(), [1.5, -1.75].map(f16::from_f32));
        assert_eq!(gradients.factor(h), 1.0, "a viewed gradient has no pending factor");
        gradients.omit("b").unwrap();
        assert_eq!(gradients.factor(b), 1.0);
        gradients.scale(f64::INFINITY);
        assert_eq!(gradients.view_mut::<f16>("h").unwrap()[0], f16::INFINITY);
    }

    #[test]
    fn gradients_without_a_finite_norm_are_unchanged() {
        let mut gradients = gradients();
        gradients.view_mut::<f32>("w").unwrap()[0] = f32::INFINITY;
        gradients.clip_by_norm(1.0).unwrap();
        assert_eq!(gradients.clip_by_global_norm(1.0).unwrap(), f64::INFINITY);
        assert_eq!(values(&mut gradients).0, [f32::INFINITY, 4.0]);
    }

    #[test]
    fn invalid_bounds_are_refused() {
        for bound in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut gradients = gradients();
            let errors = [
                gradients.clip_by_value(bound).unwrap_err(),
                gradients.clip_by_norm(bound).unwrap_err(),
                gradients.clip_by_global_norm(bound).unwrap_err(),
            ];
            assert!(errors.iter().all(|error| {
                matches!(error, ConfigError::ClipBound { bound: found } if found.to_bits() == bound.to_bits())
            }));
            assert_eq!(values(&mut gradients), (vec![-3.0, 4.0], vec![4.0; 9]));
        }
    }
}
