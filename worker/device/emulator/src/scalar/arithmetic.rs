//! The functions of arithmetic instructions by name and type.

use super::types::Type;
use super::{bits, float, integer};

/// A function of one register.
pub(crate) type Unary = fn(u64) -> u64;
/// A function of two registers.
pub(crate) type Binary = fn(u64, u64) -> u64;
/// A function of three registers.
pub(crate) type Ternary = fn(u64, u64, u64) -> u64;

macro_rules! of_integer {
    ($of:expr, $table:ident, $operation:expr) => {
        match $of {
            Type::U8 => integer::$table::<integer::U8>($operation),
            Type::U16 => integer::$table::<integer::U16>($operation),
            Type::U32 => integer::$table::<integer::U32>($operation),
            Type::U64 => integer::$table::<integer::U64>($operation),
            Type::S8 => integer::$table::<integer::S8>($operation),
            Type::S16 => integer::$table::<integer::S16>($operation),
            Type::S32 => integer::$table::<integer::S32>($operation),
            Type::S64 => integer::$table::<integer::S64>($operation),
            // A logical shift has an untyped name.
            Type::B16 => integer::$table::<integer::U16>($operation),
            Type::B32 => integer::$table::<integer::U32>($operation),
            Type::B64 => integer::$table::<integer::U64>($operation),
            _ => None,
        }
    };
}

/// Returns the function of an instruction such as `neg` for values of a type.
pub(crate) fn unary(operation: &str, of: Type) -> Option<Unary> {
    if of.is_float() {
        return float::unary(operation, of).or_else(|| bits::unary(operation, of));
    }
    bits::unary(operation, of).or_else(|| of_integer!(of, unary, operation))
}

/// Returns the function of an instruction such as `mul.hi` for values of a type.
pub(crate) fn binary(operation: &str, of: Type) -> Option<Binary> {
    if of.is_float() {
        return float::binary(operation, of).or_else(|| bits::binary(operation, of));
    }
    bits::binary(operation, of).or_else(|| of_integer!(of, binary, operation))
}

/// Returns the function of an instruction such as `mad.lo` for values of a type.
pub(crate) fn ternary(operation: &str, of: Type) -> Option<Ternary> {
    if of.is_float() {
        return float::ternary(operation, of).or_else(|| bits::ternary(operation, of));
    }
    bits::ternary(operation, of).or_else(|| of_integer!(of, ternary, operation))
}
