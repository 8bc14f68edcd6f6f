//! Sums, products and quotients rounded in a direction other than to the nearest.
//!
//! The result is beside the nearest one, on the side of the remainder. The sign of the remainder
//! is found exactly.

use super::convert::{Rounding, beside_f32, beside_f64};

/// An operation that has a form for each rounding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounded {
    Add,
    Subtract,
    Multiply,
    Divide,
    SquareRoot,
    Fma,
}

fn sign(value: f64) -> i32 {
    value.partial_cmp(&0.0).map_or(0, |order| order as i32)
}

/// The rounding error of a sum, exactly.
fn sum_error(a: f64, b: f64, sum: f64) -> f64 {
    let b_part = sum - a;
    (a - (sum - b_part)) + (b - b_part)
}

pub(super) fn f32_operation(what: Rounded, a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let wide_a = f64::from(a);
    let wide_b = f64::from(b);
    let wide_c = f64::from(c);
    // Products of two floats are exact in 64 bits.
    let sum = |x: f64, y: f64, nearest: f32| {
        let sum = x + y;
        let missing = sum - f64::from(nearest);
        let missing = if missing != 0.0 { missing } else { sum_error(x, y, sum) };
        beside_f32(nearest, sign(missing), rounding)
    };
    match what {
        Rounded::Add => sum(wide_a, wide_b, a + b),
        Rounded::Subtract => sum(wide_a, -wide_b, a - b),
        Rounded::Multiply => {
            let nearest = a * b;
            beside_f32(nearest, sign(wide_a * wide_b - f64::from(nearest)), rounding)
        }
        Rounded::Divide => {
            let nearest = a / b;
            let remainder = (-f64::from(nearest)).mul_add(wide_b, wide_a);
            beside_f32(nearest, sign(remainder) * sign(wide_b), rounding)
        }
        Rounded::SquareRoot => {
            let nearest = a.sqrt();
            let wide = f64::from(nearest);
            beside_f32(nearest, sign((-wide).mul_add(wide, wide_a)), rounding)
        }
        Rounded::Fma => sum(wide_a * wide_b, wide_c, a.mul_add(b, c)),
    }
}

/// [`f32_operation`] for 64 bits, without the fused product, whose remainder needs more bits.
pub(super) fn f64_operation(what: Rounded, a: f64, b: f64, rounding: Rounding) -> f64 {
    let (nearest, missing) = match what {
        Rounded::Add => (a + b, sum_error(a, b, a + b)),
        Rounded::Subtract => (a - b, sum_error(a, -b, a - b)),
        Rounded::Multiply | Rounded::Fma => (a * b, a.mul_add(b, -(a * b))),
        Rounded::Divide => {
            let quotient = a / b;
            (quotient, (-quotient).mul_add(b, a) * b.signum())
        }
        Rounded::SquareRoot => {
            let root = a.sqrt();
            (root, (-root).mul_add(root, a))
        }
    };
    beside_f64(nearest, sign(missing), rounding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_results_enclose_the_exact_one() {
        let cases = [
            (Rounded::Add, 1.0, 1e-9, 0.0),
            (Rounded::Subtract, 1.0, 1e-9, 0.0),
            (Rounded::Multiply, 1.1, 1.3, 0.0),
            (Rounded::Divide, 1.0, -3.0, 0.0),
            (Rounded::SquareRoot, 2.0, 0.0, 0.0),
            (Rounded::Fma, 1.1, 1.3, -1e-9),
        ];
        for (what, a, b, c) in cases {
            let down = f32_operation(what, a, b, c, Rounding::Down);
            let up = f32_operation(what, a, b, c, Rounding::Up);
            let nearest = f32_operation(what, a, b, c, Rounding::Nearest);
            let zero = f32_operation(what, a, b, c, Rounding::Zero);
            assert_eq!(down.next_up(), up);
            assert!(nearest == down || nearest == up);
            assert_eq!(zero, if nearest > 0.0 { down } else { up });
        }
        let down = f64_operation(Rounded::Divide, 1.0, 3.0, Rounding::Down);
        assert_eq!(f64_operation(Rounded::Divide, 1.0, 3.0, Rounding::Up), down.next_up());
    }
}
