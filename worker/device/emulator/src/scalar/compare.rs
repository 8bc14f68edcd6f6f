//! Comparisons of `setp` and `set`.

use super::half_float::f16_to_f32;
use super::types::Type;

/// A comparison of two values.
pub(crate) type Comparison = fn(u64, u64) -> bool;

macro_rules! ordered {
    ($operation:expr, $read:expr) => {
        match $operation {
            "eq" => Some(|a, b| $read(a) == $read(b)),
            "ne" => Some(|a, b| $read(a) != $read(b)),
            "lt" | "lo" => Some(|a, b| $read(a) < $read(b)),
            "le" | "ls" => Some(|a, b| $read(a) <= $read(b)),
            "gt" | "hi" => Some(|a, b| $read(a) > $read(b)),
            "ge" | "hs" => Some(|a, b| $read(a) >= $read(b)),
            _ => None,
        }
    };
}

macro_rules! floats {
    ($operation:expr, $read:expr) => {
        match $operation {
            // Ordered: false if either value is NaN, also for inequality.
            "eq" => Some(|a, b| $read(a) == $read(b)),
            "ne" => Some(|a, b| $read(a) < $read(b) || $read(a) > $read(b)),
            "lt" => Some(|a, b| $read(a) < $read(b)),
            "le" => Some(|a, b| $read(a) <= $read(b)),
            "gt" => Some(|a, b| $read(a) > $read(b)),
            "ge" => Some(|a, b| $read(a) >= $read(b)),
            // Unordered: true if either value is NaN.
            "equ" => Some(|a, b| !($read(a) < $read(b) || $read(a) > $read(b))),
            "neu" => Some(|a, b| $read(a) != $read(b)),
            "ltu" => Some(|a, b| !($read(a) >= $read(b))),
            "leu" => Some(|a, b| !($read(a) > $read(b))),
            "gtu" => Some(|a, b| !($read(a) <= $read(b))),
            "geu" => Some(|a, b| !($read(a) < $read(b))),
            "num" => Some(|a, b| !$read(a).is_nan() && !$read(b).is_nan()),
            "nan" => Some(|a, b| $read(a).is_nan() || $read(b).is_nan()),
            _ => None,
        }
    };
}

/// Returns the comparison of a name such as `ltu`, for values of a type.
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "a NaN makes the negation true")]
pub(crate) fn comparison(operation: &str, of: Type) -> Option<Comparison> {
    match of {
        Type::U16 | Type::B16 => ordered!(operation, |a| a as u16),
        Type::U32 | Type::B32 => ordered!(operation, |a| a as u32),
        Type::U64 | Type::B64 => ordered!(operation, |a: u64| a),
        Type::S16 => ordered!(operation, |a| a as i16),
        Type::S32 => ordered!(operation, |a| a as i32),
        Type::S64 => ordered!(operation, |a| a as i64),
        Type::F16 => floats!(operation, |a| f16_to_f32(a as u16)),
        Type::F32 => floats!(operation, |a| f32::from_bits(a as u32)),
        Type::F64 => floats!(operation, f64::from_bits),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unordered_comparisons_hold_for_nan() {
        let one = u64::from(1f32.to_bits());
        let nan = u64::from(f32::NAN.to_bits());
        for name in ["eq", "ne", "lt", "le", "gt", "ge", "num"] {
            assert!(!comparison(name, Type::F32).unwrap()(one, nan), "{name}");
        }
        for name in ["equ", "neu", "ltu", "leu", "gtu", "geu", "nan"] {
            assert!(comparison(name, Type::F32).unwrap()(one, nan), "{name}");
        }
    }

    #[test]
    fn integers_compare_by_their_sign() {
        let minus = u64::from(u32::MAX);
        let one = 1;
        assert!(comparison("lt", Type::S32).unwrap()(minus, one));
        assert!(!comparison("lt", Type::U32).unwrap()(minus, one));
        assert!(comparison("hi", Type::U32).unwrap()(minus, one));
    }
}
