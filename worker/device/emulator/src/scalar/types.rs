//! [`Type`]: the fundamental types of PTX.

/// A fundamental type of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F32,
    F64,
}

impl Type {
    /// Returns the type of a name such as `f32`, without its point.
    pub(crate) fn parse(name: &str) -> Option<Type> {
        Some(match name {
            "pred" => Type::Pred,
            "b8" => Type::B8,
            "b16" => Type::B16,
            "b32" => Type::B32,
            "b64" => Type::B64,
            "u8" => Type::U8,
            "u16" => Type::U16,
            "u32" => Type::U32,
            "u64" => Type::U64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "f32" => Type::F32,
            "f64" => Type::F64,
            _ => return None,
        })
    }

    /// The size in bytes. A predicate counts as one byte.
    pub(crate) fn size(self) -> usize {
        match self {
            Type::Pred | Type::B8 | Type::U8 | Type::S8 => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 => 2,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 => 4,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
        }
    }

    /// The size in bits.
    pub(crate) fn bits(self) -> u32 {
        if self == Type::Pred { 1 } else { self.size() as u32 * 8 }
    }

    /// Whether values of this type are floating-point numbers.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Type::F16 | Type::F32 | Type::F64)
    }

    /// Whether values of this type are integers with a sign.
    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// The integer of twice the width with the same sign, where there is one.
    pub(crate) fn doubled(self) -> Option<Type> {
        Some(match self {
            Type::U8 => Type::U16,
            Type::U16 => Type::U32,
            Type::U32 => Type::U64,
            Type::S8 => Type::S16,
            Type::S16 => Type::S32,
            Type::S32 => Type::S64,
            _ => return None,
        })
    }

    /// The bits of a value that belong to this type.
    pub(crate) fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// The value as an integer of unlimited width, with the sign of this type.
    pub(crate) fn wide(self, bits: u64) -> i128 {
        let unused = 64 - self.bits();
        if self.is_signed() {
            i128::from(((bits << unused) as i64) >> unused)
        } else {
            i128::from(bits & self.mask())
        }
    }

    /// The least and the greatest integer of this type.
    pub(crate) fn range(self) -> (i128, i128) {
        let bits = self.bits();
        if self.is_signed() {
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        } else {
            (0, (1 << bits) - 1)
        }
    }
}
