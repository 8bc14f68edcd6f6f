//! Half-precision floats: conversions from and to wider ones.

use super::convert::Rounding;

/// Returns the value of a half-precision float, exactly.
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let mantissa = u32::from(bits) & 0x3ff;
    match exponent {
        0 => {
            // Zero or subnormal: a multiple of 2^-24.
            let magnitude = mantissa as f32 / 16_777_216.0;
            f32::from_bits(magnitude.to_bits() | sign)
        }
        0x1f => f32::from_bits(sign | 0x7f80_0000 | mantissa << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

/// Returns a value, rounded to half precision.
pub(super) fn f64_to_f16(value: f64, rounding: Rounding) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    if value.is_nan() {
        return 0x7fff;
    }
    let magnitude = value.abs();
    // The distance of neighbours: 2^(exponent - 10), but never below 2^-24.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).clamp(-14, 16);
    let scaled = magnitude * 2f64.powi(10 - exponent);
    let rounded = rounding.to_integral_magnitude(scaled, value.is_sign_negative());
    let result = rounded * 2f64.powi(exponent - 10);
    if result >= 65536.0 {
        let away = match rounding {
            Rounding::Nearest => true,
            Rounding::Zero => false,
            Rounding::Down => sign != 0,
            Rounding::Up => sign == 0,
        };
        return sign | if away || magnitude.is_infinite() { 0x7c00 } else { 0x7bff };
    }
    let bits = (result as f32).to_bits();
    if result < 2f64.powi(-14) {
        return sign | (result * 16_777_216.0) as u16;
    }
    sign | (((bits >> 23) - 112) << 10) as u16 | (bits >> 13 & 0x3ff) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_to_f32_and_back() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            if value.is_nan() {
                continue;
            }
            assert_eq!(f64_to_f16(f64::from(value), Rounding::Nearest), bits, "{bits:#06x}");
        }
    }

    #[test]
    fn ties_go_to_even() {
        assert_eq!(f64_to_f16(1.0 + 1.0 / 2048.0, Rounding::Nearest), 0x3c00);
        assert_eq!(f64_to_f16(1.0 + 3.0 / 2048.0, Rounding::Nearest), 0x3c02);
        assert_eq!(f64_to_f16(65519.0, Rounding::Nearest), 0x7bff);
        assert_eq!(f64_to_f16(65520.0, Rounding::Nearest), 0x7c00);
    }
}
