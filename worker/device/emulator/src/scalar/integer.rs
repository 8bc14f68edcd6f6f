//! Integer arithmetic of all widths.

use super::arithmetic::{Binary, Ternary, Unary};
use super::types::Type;

/// An integer type as a Rust type, so that each operation has one function for each width.
pub(super) trait Integer {
    const TYPE: Type;
}

pub(super) struct U8;
pub(super) struct U16;
pub(super) struct U32;
pub(super) struct U64;
pub(super) struct S8;
pub(super) struct S16;
pub(super) struct S32;
pub(super) struct S64;

macro_rules! integers {
    ($($name:ident)*) => { $(impl Integer for $name { const TYPE: Type = Type::$name; })* };
}
integers!(U8 U16 U32 U64 S8 S16 S32 S64);

#[inline(always)]
fn wide<T: Integer>(bits: u64) -> i128 {
    T::TYPE.wide(bits)
}

#[inline(always)]
fn narrow<T: Integer>(value: i128) -> u64 {
    value as u64 & T::TYPE.mask()
}

#[inline(always)]
fn clamped<T: Integer>(value: i128) -> u64 {
    let (least, greatest) = T::TYPE.range();
    narrow::<T>(value.clamp(least, greatest))
}

/// The upper half of a product. The product of two 64-bit integers fits into 128 bits.
#[inline(always)]
fn high<T: Integer>(a: u64, b: u64) -> i128 {
    let product = wide::<T>(a).wrapping_mul(wide::<T>(b));
    (product as u128 >> T::TYPE.bits()) as i128
}

/// Bits of a product of two integers of at most 32 bits, which fits into 64.
#[inline(always)]
fn product<T: Integer>(a: u64, b: u64) -> u64 {
    let product = wide::<T>(a).wrapping_mul(wide::<T>(b)) as u64;
    product & (u64::MAX >> (64 - 2 * T::TYPE.bits().min(32)))
}

/// The lower 24 bits of a value, with its sign.
#[inline(always)]
fn low_24<T: Integer>(bits: u64) -> i128 {
    let wide = wide::<T>(bits << 8) & !0xff;
    wide >> 8
}

pub(super) fn unary<T: Integer>(operation: &str) -> Option<Unary> {
    Some(match operation {
        "neg" => |a| narrow::<T>(-wide::<T>(a)),
        "abs" => |a| narrow::<T>(wide::<T>(a).abs()),
        "bfind" => |a| u64::from(leading::<T>(a)),
        "bfind.shiftamt" => |a| match leading::<T>(a) {
            u32::MAX => u64::from(u32::MAX),
            at => u64::from(T::TYPE.bits() - 1 - at),
        },
        _ => return None,
    })
}

/// The place of the most significant bit that is not a sign bit, or all ones.
fn leading<T: Integer>(bits: u64) -> u32 {
    let value = wide::<T>(bits);
    let value = if value < 0 { !value } else { value };
    127u32.wrapping_sub(value.leading_zeros())
}

pub(super) fn binary<T: Integer>(operation: &str) -> Option<Binary> {
    Some(match operation {
        "add" => |a, b| narrow::<T>(wide::<T>(a).wrapping_add(wide::<T>(b))),
        "sub" => |a, b| narrow::<T>(wide::<T>(a).wrapping_sub(wide::<T>(b))),
        "add.sat" => |a, b| clamped::<T>(wide::<T>(a) + wide::<T>(b)),
        "sub.sat" => |a, b| clamped::<T>(wide::<T>(a) - wide::<T>(b)),
        "mul.lo" => |a, b| narrow::<T>(wide::<T>(a).wrapping_mul(wide::<T>(b))),
        "mul.hi" => |a, b| narrow::<T>(high::<T>(a, b)),
        "mul.wide" => product::<T>,
        "mul24.lo" => |a, b| narrow::<T>(low_24::<T>(a) * low_24::<T>(b)),
        "mul24.hi" => |a, b| narrow::<T>((low_24::<T>(a) * low_24::<T>(b)) >> 16),
        // The caller has checked that the divisor is not zero.
        "div" => |a, b| narrow::<T>(wide::<T>(a).checked_div(wide::<T>(b)).unwrap_or(-1)),
        "rem" => |a, b| narrow::<T>(wide::<T>(a).checked_rem(wide::<T>(b)).unwrap_or(-1)),
        "min" => |a, b| narrow::<T>(wide::<T>(a).min(wide::<T>(b))),
        "max" => |a, b| narrow::<T>(wide::<T>(a).max(wide::<T>(b))),
        // A shift by the width or more leaves only sign bits or zeros.
        "shr" => |a, b| narrow::<T>(wide::<T>(a) >> (b as u32).min(T::TYPE.bits())),
        "inc" => |a, b| if (a & T::TYPE.mask()) >= b { 0 } else { a + 1 },
        "dec" => |a, b| if a == 0 || a > b { b } else { a - 1 },
        _ => return None,
    })
}

pub(super) fn ternary<T: Integer>(operation: &str) -> Option<Ternary> {
    Some(match operation {
        "mad.lo" => |a, b, c| {
            narrow::<T>(wide::<T>(a).wrapping_mul(wide::<T>(b)).wrapping_add(wide::<T>(c)))
        },
        "mad.hi" => |a, b, c| narrow::<T>(high::<T>(a, b).wrapping_add(wide::<T>(c))),
        "mad.hi.sat" => |a, b, c| {
            let high = T::TYPE.wide(high::<T>(a, b) as u64);
            clamped::<T>(high + wide::<T>(c))
        },
        "mad.wide" => |a, b, c| {
            let width = 2 * T::TYPE.bits().min(32);
            product::<T>(a, b).wrapping_add(c) & (u64::MAX >> (64 - width))
        },
        "mad24.lo" => |a, b, c| narrow::<T>(low_24::<T>(a) * low_24::<T>(b) + wide::<T>(c)),
        "sad" => |a, b, c| narrow::<T>((wide::<T>(a) - wide::<T>(b)).abs() + wide::<T>(c)),
        "bfe" => extract::<T>,
        _ => return None,
    })
}

/// Extracts a bit field, and extends it by its sign if the type has one.
fn extract<T: Integer>(a: u64, position: u64, length: u64) -> u64 {
    let position = position as u32 & 0xff;
    let length = length as u32 & 0xff;
    if length == 0 {
        return 0;
    }
    let value = wide::<T>(a) >> position.min(T::TYPE.bits());
    if length >= T::TYPE.bits() {
        return narrow::<T>(value);
    }
    let unused = 128 - length;
    let field = (value << unused) >> unused;
    let mask = (1i128 << length) - 1;
    narrow::<T>(if T::TYPE.is_signed() { field } else { field & mask })
}
