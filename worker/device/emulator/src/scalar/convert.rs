//! Conversions between types, as `cvt` does them.

use super::half_float::{f16_to_f32, f64_to_f16};
use super::types::Type;

/// A direction in which results are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To the nearest value; ties to even.
    Nearest,
    /// Towards zero.
    Zero,
    /// Towards negative infinity.
    Down,
    /// Towards positive infinity.
    Up,
}

impl Rounding {
    /// Returns the rounding of a modifier such as `rn` or `rzi`.
    pub(crate) fn parse(modifier: &str) -> Option<Rounding> {
        Some(match modifier {
            "rn" | "rni" => Rounding::Nearest,
            "rz" | "rzi" => Rounding::Zero,
            "rm" | "rmi" => Rounding::Down,
            "rp" | "rpi" => Rounding::Up,
            _ => return None,
        })
    }

    fn to_integral(self, value: f64) -> f64 {
        match self {
            Rounding::Nearest => value.round_ties_even(),
            Rounding::Zero => value.trunc(),
            Rounding::Down => value.floor(),
            Rounding::Up => value.ceil(),
        }
    }

    /// Rounds a magnitude whose sign is kept elsewhere.
    pub(super) fn to_integral_magnitude(self, magnitude: f64, negative: bool) -> f64 {
        match (self, negative) {
            (Rounding::Down, true) => magnitude.ceil(),
            (Rounding::Up, true) => magnitude.floor(),
            _ => self.to_integral(magnitude),
        }
    }
}

/// A conversion of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    /// The type of the operand.
    pub(crate) from: Type,
    /// The type of the result.
    pub(crate) to: Type,
    /// The rounding of the result, if it is not exact.
    pub(crate) rounding: Rounding,
    /// Whether a float becomes an integral float.
    pub(crate) integral: bool,
    /// Whether integers are clamped to their range, and floats to 0 to 1.
    pub(crate) saturates: bool,
}

/// Converts a value.
pub(crate) fn convert(how: Conversion, bits: u64) -> u64 {
    match (how.from.is_float(), how.to.is_float()) {
        (false, false) => {
            let value = how.from.wide(bits);
            let (least, greatest) = how.to.range();
            let value = if how.saturates { value.clamp(least, greatest) } else { value };
            value as u64 & how.to.mask()
        }
        (false, true) => from_integer(how, how.from.wide(bits)),
        (true, false) => to_integer(how, float_value(how.from, bits)),
        (true, true) => between_floats(how, bits),
    }
}

fn float_value(of: Type, bits: u64) -> f64 {
    match of {
        Type::F16 => f64::from(f16_to_f32(bits as u16)),
        Type::F32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}

fn from_integer(how: Conversion, value: i128) -> u64 {
    // The nearest float of an integer is found by the compiler; the others are beside it.
    let bits = match how.to {
        Type::F32 => {
            let nearest = value as f32;
            u64::from(
                beside_f32(nearest, compare_integer(value, f64::from(nearest)), how.rounding)
                    .to_bits(),
            )
        }
        Type::F64 => {
            let nearest = value as f64;
            beside_f64(nearest, compare_integer(value, nearest), how.rounding).to_bits()
        }
        _ => {
            // More than 65536 is infinite in half precision, so a float of 64 bits has room enough.
            let clamped = value.clamp(-(1 << 40), 1 << 40) as f64;
            u64::from(f64_to_f16(clamped, how.rounding))
        }
    };
    if how.saturates { saturate(how.to, bits) } else { bits }
}

/// The sign of an integer less a float that is integral.
fn compare_integer(exact: i128, rounded: f64) -> i32 {
    (exact - rounded as i128).signum() as i32
}

fn to_integer(how: Conversion, value: f64) -> u64 {
    let (least, greatest) = how.to.range();
    if value.is_nan() {
        let wide = how.from == Type::F64 || how.to.bits() == 64;
        return if wide { 1 << (how.to.bits() - 1) } else { 0 };
    }
    // Out of range, hardware clamps. The cast saturates at 128 bits, which is further out.
    let rounded = how.rounding.to_integral(value) as i128;
    rounded.clamp(least, greatest) as u64 & how.to.mask()
}

fn between_floats(how: Conversion, bits: u64) -> u64 {
    let value = float_value(how.from, bits);
    let value = if how.integral { how.rounding.to_integral(value) } else { value };
    let bits = match how.to {
        Type::F16 => u64::from(f64_to_f16(value, how.rounding)),
        Type::F32 => {
            let nearest = value as f32;
            let exact = value.partial_cmp(&f64::from(nearest)).map_or(0, |order| order as i32);
            u64::from(canonical_f32(beside_f32(nearest, exact, how.rounding)))
        }
        _ => value.to_bits(),
    };
    if how.saturates { saturate(how.to, bits) } else { bits }
}

/// Clamps a float to 0 to 1. NaN becomes 0.
pub(super) fn saturate(of: Type, bits: u64) -> u64 {
    let value = float_value(of, bits);
    let clamped = if value > 0.0 { value.min(1.0) } else { 0.0 };
    match of {
        Type::F16 => u64::from(f64_to_f16(clamped, Rounding::Nearest)),
        Type::F32 => u64::from((clamped as f32).to_bits()),
        _ => clamped.to_bits(),
    }
}

/// The bits of a float. Every NaN has the bits that the hardware gives it.
#[inline(always)]
pub(super) fn canonical_f32(value: f32) -> u32 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits() }
}

/// Returns the float that a rounding takes, from the nearest and the sign of what is missing.
pub(super) fn beside_f32(nearest: f32, missing: i32, rounding: Rounding) -> f32 {
    match rounding {
        _ if missing == 0 || nearest.is_nan() => nearest,
        Rounding::Nearest => nearest,
        Rounding::Down if missing < 0 => nearest.next_down(),
        Rounding::Up if missing > 0 => nearest.next_up(),
        Rounding::Zero if nearest > 0.0 && missing < 0 => nearest.next_down(),
        Rounding::Zero if nearest < 0.0 && missing > 0 => nearest.next_up(),
        _ => nearest,
    }
}

/// [`beside_f32`] for floats of 64 bits.
pub(super) fn beside_f64(nearest: f64, missing: i32, rounding: Rounding) -> f64 {
    match rounding {
        _ if missing == 0 || nearest.is_nan() => nearest,
        Rounding::Nearest => nearest,
        Rounding::Down if missing < 0 => nearest.next_down(),
        Rounding::Up if missing > 0 => nearest.next_up(),
        Rounding::Zero if nearest > 0.0 && missing < 0 => nearest.next_down(),
        Rounding::Zero if nearest < 0.0 && missing > 0 => nearest.next_up(),
        _ => nearest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(from: Type, to: Type, rounding: &str, bits: u64) -> u64 {
        let rounding = Rounding::parse(rounding).unwrap();
        convert(Conversion { from, to, rounding, integral: false, saturates: false }, bits)
    }

    #[test]
    fn floats_become_integers_as_a_table_says() {
        let table = [
            ("rni", 2.5f32, 2i32),
            ("rni", 3.5, 4),
            ("rzi", -2.9, -2),
            ("rmi", -2.1, -3),
            ("rpi", 2.1, 3),
            ("rzi", 1e20, i32::MAX),
            ("rzi", -1e20, i32::MIN),
            ("rzi", f32::NAN, 0),
        ];
        for (rounding, value, expected) in table {
            let got = run(Type::F32, Type::S32, rounding, u64::from(value.to_bits()));
            assert_eq!(got, u64::from(expected as u32), "{rounding} {value}");
        }
        assert_eq!(run(Type::F32, Type::U32, "rzi", u64::from((-1f32).to_bits())), 0);
        assert_eq!(run(Type::F64, Type::S64, "rzi", f64::NAN.to_bits()), 1 << 63);
    }

    #[test]
    fn integers_become_floats_in_each_direction() {
        // 2^24 + 1 is halfway between two floats.
        let value = (1 << 24) + 1;
        for (rounding, expected) in [("rn", 1 << 24), ("rz", 1 << 24), ("rp", (1 << 24) + 2)] {
            let got = run(Type::U32, Type::F32, rounding, value);
            assert_eq!(f32::from_bits(got as u32), expected as f32, "{rounding}");
        }
        let got = run(Type::U64, Type::F32, "rn", u64::MAX);
        assert_eq!(f32::from_bits(got as u32), u64::MAX as f32);
    }

    #[test]
    fn integers_are_extended_and_cut() {
        assert_eq!(run(Type::S8, Type::S32, "rn", 0xff), 0xffff_ffff);
        assert_eq!(run(Type::U8, Type::S32, "rn", 0xff), 0xff);
        assert_eq!(run(Type::S64, Type::U16, "rn", u64::MAX), 0xffff);
        assert_eq!(run(Type::S32, Type::U64, "rn", 0xffff_ffff), u64::MAX);
    }

    #[test]
    fn narrowed_floats_are_rounded_in_each_direction() {
        let third = (1.0f64 / 3.0).to_bits();
        let down = f32::from_bits(run(Type::F64, Type::F32, "rm", third) as u32);
        let up = f32::from_bits(run(Type::F64, Type::F32, "rp", third) as u32);
        assert!(f64::from(down) < 1.0 / 3.0 && f64::from(up) > 1.0 / 3.0);
        assert_eq!(down.next_up(), up);
    }
}
