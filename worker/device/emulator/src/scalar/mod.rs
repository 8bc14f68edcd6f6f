//! Arithmetic of PTX on single values: pure functions that decoded instructions point to.
//!
//! A value is the contents of a register: its bits, zero-extended to 64.

mod arithmetic;
mod bits;
mod carry;
mod compare;
mod convert;
mod directed;
mod float;
mod half_float;
mod integer;
mod types;

pub(crate) use arithmetic::{Binary, Ternary, Unary, binary, ternary, unary};
pub(crate) use carry::{Carry, CarryOperation};
pub(crate) use compare::{Comparison, comparison};
pub(crate) use convert::{Conversion, Rounding, convert};
pub(crate) use types::Type;
