//! Gradients that are made smaller before they are pushed.

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, Element, bf16, f16};

use crate::error::ClipError;
use crate::params::Gradients;

/// Of the gradients that are in the push, whatever their type: each call is a pass over them, and
/// those by norm another. Norms are summed up in `f64`, in an order that depends on the shapes alone.
///
/// What is clipped is this replica's own gradient. In synchronous mode that bounds the mean as well:
/// it is in no norm larger than the largest of what it is made of. A codec with error feedback adds what
/// earlier pushes have left out, which nothing bounds. Rows of a sparse variable count as
/// they are pushed: those of one number as their sum.
impl Gradients {
    /// Bounds every element: `g = min(max(g, -bound), bound)`, with NaN left as it is.
    ///
    /// # Errors
    /// If the bound is not above 0 and finite; nothing is changed then.
    pub fn clip_by_value(&mut self, bound: f64) -> Result<(), ClipError> {
        check(bound)?;
        let narrow = bound as f32;
        for id in self.ids() {
            self.change(id, |g| g.clamp(-narrow, narrow), |g| g.clamp(-bound, bound));
        }
        Ok(())
    }

    /// Bounds the Euclidean norm of each variable's gradient: one that is longer is scaled down to
    /// it, `g *= bound / |g|`. A partitioned variable has one norm. A gradient whose norm is not
    /// finite is left as it is: one that is not finite itself is for the servers to refuse, and one of
    /// `f64` may have elements whose squares are not ([`Gradients::clip_by_value`] bounds those).
    ///
    /// # Errors
    /// If the bound is not above 0 and finite; nothing is changed then.
    pub fn clip_by_norm(&mut self, bound: f64) -> Result<(), ClipError> {
        check(bound)?;
        for id in self.ids() {
            let norm = self.squares_of(id).sqrt();
            if norm > bound && norm.is_finite() {
                self.scale_one(id, bound / norm);
            }
        }
        Ok(())
    }

    /// Bounds the Euclidean norm of all gradients together (Pascanu, Mikolov and Bengio, 2013, "On the
    /// difficulty of training recurrent neural networks", algorithm 1), and returns what it was: a
    /// push that is longer is scaled down to the bound, all variables by the same. It is left as
    /// it is if the norm is not finite.
    ///
    /// # Errors
    /// If the bound is not above 0 and finite; nothing is changed then.
    pub fn clip_by_global_norm(&mut self, bound: f64) -> Result<f64, ClipError> {
        check(bound)?;
        let norm = self.global_norm();
        if norm > bound && norm.is_finite() {
            self.scale(bound / norm);
        }
        Ok(norm)
    }

    /// The Euclidean norm of all gradients together; not finite if an element is not, or one of `f64`
    /// has no finite square.
    pub fn global_norm(&self) -> f64 {
        let squares = self.ids().into_iter().map(|id| self.squares_of(id));
        squares.fold(0.0, |sum, squares| sum + squares).sqrt()
    }

    /// Multiplies all gradients with a factor, rounded to each variable's type. Those of `f16` and `bf16`
    /// are multiplied in `f32` by the servers, unless they are viewed again before they are pushed: so a
    /// scaled loss loses nothing.
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
        let later = self.factor(id) * factor;
        if dtype != dtype.master() && later != 0.0 && later.is_finite() {
            self.factors.insert(id, later);
            return;
        }
        self.round(id);
        self.change(id, |g| (f64::from(g) * factor) as f32, |g| g * factor);
    }

    /// What the servers multiply a gradient with.
    pub(crate) fn factor(&self, id: VariableId) -> f64 {
        self.factors.get(&id).copied().unwrap_or(1.0)
    }

    /// Multiplies a gradient here that the servers were to multiply.
    pub(crate) fn round(&mut self, id: VariableId) {
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

/// The sum of squares, in as many sums as vectors have room for. Rows need not lie aligned.
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

fn check(bound: f64) -> Result<(), ClipError> {
    match bound.is_finite() && bound > 0.0 {
        true => Ok(()),
        false => Err(ClipError { bound }),
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::params::tests::{gradients_for, gradients_of};

    /// A gradient of norm 5, one of norm 12, and one that is not in the push.
    fn gradients() -> Gradients {
        let mut gradients = gradients_of(&[("w", DType::F32, 2), ("v", DType::F64, 9)], "left");
        gradients.view_mut("w").unwrap().copy_from_slice(&[-3.0_f32, 4.0]);
        gradients.view_mut("v").unwrap().copy_from_slice(&[4.0_f64; 9]);
        gradients
    }

    fn seen(gradients: &mut Gradients) -> (Vec<f32>, Vec<f64>) {
        (gradients.view_mut("w").unwrap().to_vec(), gradients.view_mut("v").unwrap().to_vec())
    }

    #[test]
    fn every_element_is_bounded() {
        let mut gradients = gradients();
        gradients.view_mut("v").unwrap()[1..4].copy_from_slice(&[f64::NAN, f64::INFINITY, -0.5]);
        gradients.clip_by_value(3.5).unwrap();
        let (w, v) = seen(&mut gradients);
        assert_eq!(w, [-3.0, 3.5]);
        assert!(v[1].is_nan());
        assert_eq!((v[0], v[2], v[3], v[8]), (3.5, 3.5, -0.5, 3.5));
    }

    #[test]
    fn each_variable_has_its_norm() {
        let mut gradients = gradients();
        gradients.clip_by_norm(6.0).unwrap();
        assert_eq!(seen(&mut gradients), (vec![-3.0, 4.0], vec![2.0; 9]));
    }

    #[test]
    fn all_variables_have_one_norm() {
        let mut gradients = gradients();
        assert_eq!(gradients.clip_by_global_norm(13.0).unwrap(), 13.0);
        assert_eq!(seen(&mut gradients), (vec![-3.0, 4.0], vec![4.0; 9]));
        assert_eq!(gradients.clip_by_global_norm(6.5).unwrap(), 13.0);
        assert_eq!(seen(&mut gradients), (vec![-1.5, 2.0], vec![2.0; 9]));
        assert_eq!(gradients.global_norm(), 6.5);
    }

    #[test]
    fn what_is_not_in_the_push_counts_for_nothing() {
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
        let seen = |gradients: &Gradients| -> Vec<f32> {
            gradients.memory.rows().of_variable(VariableId(0)).unwrap().elements().into()
        };
        assert_eq!(seen(&gradients), [2.5, -0.75, 1.0, 1.5]);
        gradients.clip_by_value(1.25).unwrap();
        assert_eq!(seen(&gradients), [1.25, -0.75, 1.0, 1.25]);
    }

    /// Gradients of a half type are multiplied once they are in f32, or where they are viewed.
    #[test]
    fn halves_are_multiplied_later() {
        let vectors = [("h", DType::F16, 2), ("b", DType::Bf16, 1), ("w", DType::F32, 1)];
        let mut gradients = gradients_of(&vectors, "left");
        let halves = [3.0, -4.0].map(f16::from_f32);
        gradients.view_mut("h").unwrap().copy_from_slice(&halves);
        gradients.view_mut("b").unwrap().copy_from_slice(&[bf16::from_f32(12.0)]);
        gradients.view_mut::<f32>("w").unwrap()[0] = 0.0;
        assert_eq!(gradients.clip_by_global_norm(6.5).unwrap(), 13.0);
        gradients.scale(1e-9);
        assert!((gradients.global_norm() / 6.5e-9 - 1.0).abs() < 1e-9);
        let (h, b) = (VariableId(0), VariableId(1));
        assert_eq!((gradients.factor(h), gradients.factor(b)), (0.5e-9, 0.5e-9));
        assert_eq!(gradients.bytes_of(h)[..4], *bytemuck::cast_slice::<f16, u8>(&halves));
        gradients.scale(1e9);
        gradients.clip_by_value(1.75).unwrap();
        // Bounded as the servers will have it.
        assert_eq!(gradients.view_mut::<f16>("h").unwrap(), [1.5, -1.75].map(f16::from_f32));
        assert_eq!(gradients.factor(h), 1.0, "what is viewed is what is pushed");
        gradients.omit("b").unwrap();
        assert_eq!(gradients.factor(b), 1.0);
        gradients.scale(f64::INFINITY);
        assert_eq!(gradients.view_mut::<f16>("h").unwrap()[0], f16::INFINITY);
    }

    #[test]
    fn gradients_without_a_norm_stay_as_they_are() {
        let mut gradients = gradients();
        gradients.view_mut::<f32>("w").unwrap()[0] = f32::INFINITY;
        gradients.clip_by_norm(1.0).unwrap();
        assert_eq!(gradients.clip_by_global_norm(1.0).unwrap(), f64::INFINITY);
        assert_eq!(seen(&mut gradients).0, [f32::INFINITY, 4.0]);
    }

    #[test]
    fn a_bound_that_cannot_be_is_refused() {
        for bound in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut gradients = gradients();
            let errors = [
                gradients.clip_by_value(bound).unwrap_err(),
                gradients.clip_by_norm(bound).unwrap_err(),
                gradients.clip_by_global_norm(bound).unwrap_err(),
            ];
            assert!(errors.iter().all(|error| error.bound.to_bits() == bound.to_bits()));
            assert_eq!(seen(&mut gradients), (vec![-3.0, 4.0], vec![4.0; 9]));
        }
    }
}
