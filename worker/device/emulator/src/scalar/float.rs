//! Arithmetic on floating-point numbers.

use super::arithmetic::{Binary, Ternary, Unary};
use super::convert::{Rounding, canonical_f32, saturate};
use super::directed::{Rounded, f32_operation, f64_operation};
use super::half_float::{f16_to_f32, f64_to_f16};
use super::types::Type;

#[inline(always)]
fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

#[inline(always)]
fn bits_of(value: f32) -> u64 {
    u64::from(canonical_f32(value))
}

#[inline(always)]
fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

fn f16_of(bits: u64) -> f64 {
    f64::from(f16_to_f32(bits as u16))
}

fn half_bits(value: f64) -> u64 {
    u64::from(f64_to_f16(value, Rounding::Nearest))
}

/// The functions that hardware approximates are computed to full precision here.
pub(super) fn unary(operation: &str, of: Type) -> Option<Unary> {
    Some(match (operation, of) {
        ("neg", Type::F16) => |a| a ^ 0x8000,
        ("neg", Type::F32) => |a| a ^ 0x8000_0000,
        ("neg", Type::F64) => |a| a ^ 1 << 63,
        ("abs", Type::F16) => |a| a & 0x7fff,
        ("abs", Type::F32) => |a| a & 0x7fff_ffff,
        ("abs", Type::F64) => |a| a & !(1 << 63),
        ("sqrt.rn" | "sqrt.approx", Type::F32) => |a| bits_of(f32_of(a).sqrt()),
        ("rcp.rn" | "rcp.approx", Type::F32) => |a| bits_of(1.0 / f32_of(a)),
        ("rsqrt.approx", Type::F32) => |a| bits_of((1.0 / f64::from(f32_of(a)).sqrt()) as f32),
        ("sin.approx", Type::F32) => |a| bits_of(f64::from(f32_of(a)).sin() as f32),
        ("cos.approx", Type::F32) => |a| bits_of(f64::from(f32_of(a)).cos() as f32),
        ("lg2.approx", Type::F32) => |a| bits_of(f64::from(f32_of(a)).log2() as f32),
        ("ex2.approx", Type::F32) => |a| bits_of(f64::from(f32_of(a)).exp2() as f32),
        ("tanh.approx", Type::F32) => |a| bits_of(f64::from(f32_of(a)).tanh() as f32),
        ("sqrt.rz", Type::F32) => |a| root(a, Rounding::Zero),
        ("sqrt.rm", Type::F32) => |a| root(a, Rounding::Down),
        ("sqrt.rp", Type::F32) => |a| root(a, Rounding::Up),
        ("rcp.rz", Type::F32) => |a| inverse(a, Rounding::Zero),
        ("rcp.rm", Type::F32) => |a| inverse(a, Rounding::Down),
        ("rcp.rp", Type::F32) => |a| inverse(a, Rounding::Up),
        ("sqrt.rn", Type::F64) => |a| f64_of(a).sqrt().to_bits(),
        ("rcp.rn", Type::F64) => |a| (1.0 / f64_of(a)).to_bits(),
        ("rsqrt.approx", Type::F64) => |a| (1.0 / f64_of(a).sqrt()).to_bits(),
        // Only the upper half of the result is computed; the lower is zero.
        ("rcp.approx.ftz", Type::F64) => |a| (1.0 / f64_of(a)).to_bits() & !0xffff_ffff,
        ("rsqrt.approx.ftz", Type::F64) => |a| (1.0 / f64_of(a).sqrt()).to_bits() & !0xffff_ffff,
        ("saturate", Type::F16) => |a| saturate(Type::F16, a),
        ("saturate", Type::F32) => |a| saturate(Type::F32, a),
        ("saturate", Type::F64) => |a| saturate(Type::F64, a),
        // Subnormal numbers become zero and keep their sign.
        ("flush", Type::F32) => |a| if a & 0x7f80_0000 == 0 { a & 0x8000_0000 } else { a },
        ("testp.finite", Type::F32) => |a| u64::from(f32_of(a).is_finite()),
        ("testp.infinite", Type::F32) => |a| u64::from(f32_of(a).is_infinite()),
        ("testp.notanumber", Type::F32) => |a| u64::from(f32_of(a).is_nan()),
        ("testp.number", Type::F32) => |a| u64::from(!f32_of(a).is_nan()),
        ("testp.normal", Type::F32) => |a| u64::from(f32_of(a).is_normal()),
        ("testp.subnormal", Type::F32) => |a| u64::from(f32_of(a).is_subnormal()),
        ("testp.finite", Type::F64) => |a| u64::from(f64_of(a).is_finite()),
        ("testp.infinite", Type::F64) => |a| u64::from(f64_of(a).is_infinite()),
        ("testp.notanumber", Type::F64) => |a| u64::from(f64_of(a).is_nan()),
        ("testp.number", Type::F64) => |a| u64::from(!f64_of(a).is_nan()),
        ("testp.normal", Type::F64) => |a| u64::from(f64_of(a).is_normal()),
        ("testp.subnormal", Type::F64) => |a| u64::from(f64_of(a).is_subnormal()),
        _ => return None,
    })
}

fn root(a: u64, rounding: Rounding) -> u64 {
    bits_of(f32_operation(Rounded::SquareRoot, f32_of(a), 0.0, 0.0, rounding))
}

fn inverse(a: u64, rounding: Rounding) -> u64 {
    bits_of(f32_operation(Rounded::Divide, 1.0, f32_of(a), 0.0, rounding))
}

macro_rules! directed {
    ($what:ident, $of:expr, $rounding:ident) => {
        match $of {
            Type::F32 => |a, b| {
                let a = f32_of(a);
                let b = f32_of(b);
                bits_of(f32_operation(Rounded::$what, a, b, 0.0, Rounding::$rounding))
            },
            Type::F64 => |a, b| {
                f64_operation(Rounded::$what, f64_of(a), f64_of(b), Rounding::$rounding).to_bits()
            },
            _ => return None,
        }
    };
}

pub(super) fn binary(operation: &str, of: Type) -> Option<Binary> {
    Some(match (operation, of) {
        ("add" | "add.rn", Type::F32) => |a, b| bits_of(f32_of(a) + f32_of(b)),
        ("sub" | "sub.rn", Type::F32) => |a, b| bits_of(f32_of(a) - f32_of(b)),
        ("mul" | "mul.rn", Type::F32) => |a, b| bits_of(f32_of(a) * f32_of(b)),
        ("div.rn" | "div.approx" | "div.full", Type::F32) => |a, b| bits_of(f32_of(a) / f32_of(b)),
        // If one operand is NaN, the result is the other.
        ("min", Type::F32) => |a, b| bits_of(least(f32_of(a), f32_of(b))),
        ("max", Type::F32) => |a, b| bits_of(greatest(f32_of(a), f32_of(b))),
        ("copysign", Type::F32) => |a, b| (b & 0x7fff_ffff) | (a & 0x8000_0000),
        ("add" | "add.rn", Type::F64) => |a, b| (f64_of(a) + f64_of(b)).to_bits(),
        ("sub" | "sub.rn", Type::F64) => |a, b| (f64_of(a) - f64_of(b)).to_bits(),
        ("mul" | "mul.rn", Type::F64) => |a, b| (f64_of(a) * f64_of(b)).to_bits(),
        ("div.rn", Type::F64) => |a, b| (f64_of(a) / f64_of(b)).to_bits(),
        ("min", Type::F64) => |a, b| {
            let x = f64_of(a);
            let y = f64_of(b);
            if x == y { a | b } else { x.min(y).to_bits() }
        },
        ("max", Type::F64) => |a, b| {
            let x = f64_of(a);
            let y = f64_of(b);
            if x == y { a & b } else { x.max(y).to_bits() }
        },
        ("copysign", Type::F64) => |a, b| (b & !(1 << 63)) | (a & 1 << 63),
        // Twice as many bits and two more are enough to round a second time without a difference.
        ("add" | "add.rn", Type::F16) => |a, b| half_bits(f16_of(a) + f16_of(b)),
        ("sub" | "sub.rn", Type::F16) => |a, b| half_bits(f16_of(a) - f16_of(b)),
        ("mul" | "mul.rn", Type::F16) => |a, b| half_bits(f16_of(a) * f16_of(b)),
        ("add.rz", _) => directed!(Add, of, Zero),
        ("add.rm", _) => directed!(Add, of, Down),
        ("add.rp", _) => directed!(Add, of, Up),
        ("sub.rz", _) => directed!(Subtract, of, Zero),
        ("sub.rm", _) => directed!(Subtract, of, Down),
        ("sub.rp", _) => directed!(Subtract, of, Up),
        ("mul.rz", _) => directed!(Multiply, of, Zero),
        ("mul.rm", _) => directed!(Multiply, of, Down),
        ("mul.rp", _) => directed!(Multiply, of, Up),
        ("div.rz", _) => directed!(Divide, of, Zero),
        ("div.rm", _) => directed!(Divide, of, Down),
        ("div.rp", _) => directed!(Divide, of, Up),
        _ => return None,
    })
}

/// The lesser value. Equal values differ at most in the sign of zero, and minus zero is less.
fn least(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
}

/// The greater value; see [`least`].
fn greatest(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

pub(super) fn ternary(operation: &str, of: Type) -> Option<Ternary> {
    Some(match (operation, of) {
        ("fma.rn" | "mad.rn" | "mad", Type::F32) => {
            |a, b, c| bits_of(f32_of(a).mul_add(f32_of(b), f32_of(c)))
        }
        ("fma.rz", Type::F32) => |a, b, c| fused(a, b, c, Rounding::Zero),
        ("fma.rm", Type::F32) => |a, b, c| fused(a, b, c, Rounding::Down),
        ("fma.rp", Type::F32) => |a, b, c| fused(a, b, c, Rounding::Up),
        ("fma.rn" | "mad.rn", Type::F64) => {
            |a, b, c| f64_of(a).mul_add(f64_of(b), f64_of(c)).to_bits()
        }
        ("fma.rn", Type::F16) => |a, b, c| half_bits(f16_of(a).mul_add(f16_of(b), f16_of(c))),
        _ => return None,
    })
}

fn fused(a: u64, b: u64, c: u64, rounding: Rounding) -> u64 {
    bits_of(f32_operation(Rounded::Fma, f32_of(a), f32_of(b), f32_of(c), rounding))
}
