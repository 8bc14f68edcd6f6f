//! Arithmetic with the carry bit of a thread.

use super::types::Type;

/// The sum or difference of an instruction with a carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CarryOperation {
    /// `a + b`.
    Add,
    /// `a - b`.
    Subtract,
    /// The lower half of `a * b`, plus `c`.
    MultiplyLow,
    /// The upper half of `a * b`, plus `c`.
    MultiplyHigh,
}

/// An instruction of the `.cc` family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carry {
    /// The sum.
    pub(crate) operation: CarryOperation,
    /// The type of all operands, an integer of 32 or 64 bits.
    pub(crate) of: Type,
    /// Whether the carry bit is added, or the borrow subtracted.
    pub(crate) takes: bool,
    /// Whether the carry bit is written.
    pub(crate) sets: bool,
}

impl Carry {
    /// Returns the sum and the carry out, or the borrow of a subtraction.
    pub(crate) fn apply(self, a: u64, b: u64, c: u64, carry: bool) -> (u64, bool) {
        let bits = self.of.bits();
        let mask = self.of.mask();
        let carry = u128::from(self.takes && carry);
        let product = self.of.wide(a).wrapping_mul(self.of.wide(b)) as u128;
        let a = u128::from(a & mask);
        let b = u128::from(b & mask);
        let c = u128::from(c & mask);
        let sum = match self.operation {
            CarryOperation::Add => a + b + carry,
            CarryOperation::Subtract => a.wrapping_sub(b).wrapping_sub(carry),
            CarryOperation::MultiplyLow => (product & u128::from(mask)) + c + carry,
            CarryOperation::MultiplyHigh => (product >> bits & u128::from(mask)) + c + carry,
        };
        (sum as u64 & mask, (sum >> bits) & 1 == 1)
    }
}
