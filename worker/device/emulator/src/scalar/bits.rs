//! Operations on untyped bits.

use super::arithmetic::{Binary, Ternary, Unary};
use super::types::Type;

pub(super) fn unary(operation: &str, of: Type) -> Option<Unary> {
    Some(match (operation, of.bits()) {
        ("not", 1) => |a| a ^ 1,
        ("not", 16) => |a| !a & 0xffff,
        ("not", 32) => |a| !a & 0xffff_ffff,
        ("not", 64) => |a| !a,
        ("cnot", 16) => |a| u64::from(a & 0xffff == 0),
        ("cnot", 32) => |a| u64::from(a & 0xffff_ffff == 0),
        ("cnot", 64) => |a| u64::from(a == 0),
        ("popc", 32) => |a| u64::from((a as u32).count_ones()),
        ("popc", 64) => |a| u64::from(a.count_ones()),
        ("clz", 32) => |a| u64::from((a as u32).leading_zeros()),
        ("clz", 64) => |a| u64::from(a.leading_zeros()),
        ("brev", 32) => |a| u64::from((a as u32).reverse_bits()),
        ("brev", 64) => u64::reverse_bits,
        ("mov", _) => |a| a,
        _ => return None,
    })
}

pub(super) fn binary(operation: &str, of: Type) -> Option<Binary> {
    Some(match (operation, of.bits()) {
        ("and", _) => |a, b| a & b,
        ("or", _) => |a, b| a | b,
        ("xor", _) => |a, b| a ^ b,
        ("exch", _) => |_, b| b,
        // A shift by the width or more leaves zero.
        ("shl", 16) => |a, b| if b as u32 > 15 { 0 } else { (a << b as u32) & 0xffff },
        ("shl", 32) => |a, b| if b as u32 > 31 { 0 } else { (a << b as u32) & 0xffff_ffff },
        ("shl", 64) => |a, b| a.checked_shl(b as u32).unwrap_or(0),
        ("pack", 32) => |a, b| (a & 0xffff) | (b & 0xffff) << 16,
        ("pack", 64) => |a, b| (a & 0xffff_ffff) | b << 32,
        _ => return None,
    })
}

pub(super) fn ternary(operation: &str, of: Type) -> Option<Ternary> {
    Some(match (operation, of.bits()) {
        ("selp", _) => |a, b, c| if c & 1 == 1 { a } else { b },
        ("shf.l.wrap", 32) => |a, b, c| ((b << 32 | a) << (c & 31)) >> 32,
        ("shf.l.clamp", 32) => |a, b, c| shift_left(a, b, (c as u32).min(32)),
        ("shf.r.wrap", 32) => |a, b, c| ((b << 32 | a) >> (c & 31)) & 0xffff_ffff,
        ("shf.r.clamp", 32) => |a, b, c| ((b << 32 | a) >> (c as u32).min(32)) & 0xffff_ffff,
        ("prmt", 32) => permute,
        ("insert", 32) => |a, field, c| merge(a, field, c, 32),
        ("insert", 64) => |a, field, c| merge(a, field, c, 64),
        _ => return None,
    })
}

fn shift_left(low: u64, high: u64, by: u32) -> u64 {
    (((u128::from(high) << 32 | u128::from(low)) << by) >> 32) as u64 & 0xffff_ffff
}

/// Picks four of the eight bytes of `a` and `b`, or their signs.
fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (b << 32 | a).to_le_bytes();
    (0..4).fold(0, |picked, at| {
        let select = selector >> (4 * at);
        let byte = bytes[select as usize & 7];
        let byte = if select & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        picked | u64::from(byte) << (8 * at)
    })
}

/// Inserts a bit field into `base`. The last operand has the position in its low byte, and the
/// length in the next.
fn merge(field: u64, base: u64, place: u64, width: u32) -> u64 {
    let position = place as u32 & 0xff;
    let length = (place >> 8) as u32 & 0xff;
    let all = u64::MAX >> (64 - width);
    if length == 0 || position >= width {
        return base & all;
    }
    let mask = (u64::MAX >> (64 - length.min(64))) << position;
    (base & !mask | (field << position) & mask) & all
}
