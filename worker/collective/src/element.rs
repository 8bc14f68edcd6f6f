//! Element types of collective operations.

use std::fmt;

use bytemuck::Pod;
use pushpull_common::tensor::{DType, bf16, f16};

/// The type of the elements of a collective operation.
///
/// It is a variable's type ([`DType`]) or `i32`, which no variable has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementKind {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 double precision, 8 bytes.
    F64,
    /// IEEE 754 half precision, 2 bytes: [`struct@f16`].
    F16,
    /// The upper half of an `f32`, 2 bytes: [`struct@bf16`].
    Bf16,
    /// Two's complement 32-bit integer.
    I32,
    /// Two's complement 64-bit integer.
    I64,
}

/// The code of `i32` on the wire. Those below belong to the types of variables.
const I32_CODE: u8 = 16;

impl ElementKind {
    /// Every type.
    pub const ALL: [ElementKind; 6] = [
        ElementKind::F32,
        ElementKind::F64,
        ElementKind::F16,
        ElementKind::Bf16,
        ElementKind::I32,
        ElementKind::I64,
    ];

    /// Returns the type of variables with the same elements; `None` for `i32`.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            ElementKind::F32 => Some(DType::F32),
            ElementKind::F64 => Some(DType::F64),
            ElementKind::F16 => Some(DType::F16),
            ElementKind::Bf16 => Some(DType::Bf16),
            ElementKind::I32 => None,
            ElementKind::I64 => Some(DType::I64),
        }
    }

    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self.dtype() {
            Some(dtype) => dtype.size(),
            None => size_of::<i32>(),
        }
    }

    /// Returns whether the elements are floating-point numbers; only such types have NaN.
    pub const fn is_float(self) -> bool {
        match self.dtype() {
            Some(dtype) => dtype.is_float(),
            None => false,
        }
    }

    /// Returns the code on the wire: that of [`DType::code`], or 16 for `i32`.
    pub const fn code(self) -> u8 {
        match self.dtype() {
            Some(dtype) => dtype.code(),
            None => I32_CODE,
        }
    }

    /// Returns the type of a code; `None` for a code that this version does not know.
    pub fn from_code(code: u8) -> Option<ElementKind> {
        ElementKind::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for ElementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype() {
            Some(dtype) => dtype.fmt(f),
            None => f.write_str("i32"),
        }
    }
}

/// A number type whose tensors a ring can reduce: `f32`, `f64`, `f16`, `bf16`, `i32` and `i64`.
///
/// No other crate can implement it.
pub trait RingElement: sealed::Sealed + Pod + Send + Sync + 'static {
    /// The element type.
    const KIND: ElementKind;
}

mod sealed {
    /// Restricts [`super::RingElement`] to this crate.
    pub trait Sealed {}
}

macro_rules! ring_element {
    ($($type:ty => $kind:ident,)*) => {$(
        impl sealed::Sealed for $type {}

        impl RingElement for $type {
            const KIND: ElementKind = ElementKind::$kind;
        }
    )*};
}
ring_element! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => Bf16,
    i32 => I32,
    i64 => I64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_tensors_and_round_trip() {
        let codes = ElementKind::ALL.map(ElementKind::code);
        assert_eq!(codes, [1, 2, 4, 5, 16, 3]);
        for code in 0..=u8::MAX {
            match ElementKind::from_code(code) {
                Some(kind) => assert_eq!(kind.code(), code),
                None => assert!(!codes.contains(&code), "{code}"),
            }
        }
        for dtype in DType::ALL {
            let kind = ElementKind::from_code(dtype.code()).unwrap();
            assert_eq!(kind.dtype(), Some(dtype));
        }
    }

    #[test]
    fn kinds_describe_their_types() {
        fn described<T: RingElement>() -> (usize, String) {
            assert_eq!(T::KIND.size(), size_of::<T>());
            (T::KIND.size(), T::KIND.to_string())
        }
        assert_eq!(described::<f32>(), (4, "f32".to_owned()));
        assert_eq!(described::<f64>(), (8, "f64".to_owned()));
        assert_eq!(described::<f16>(), (2, "f16".to_owned()));
        assert_eq!(described::<bf16>(), (2, "bf16".to_owned()));
        assert_eq!(described::<i32>(), (4, "i32".to_owned()));
        assert_eq!(described::<i64>(), (8, "i64".to_owned()));
        let floats = ElementKind::ALL.map(ElementKind::is_float);
        assert_eq!(floats, [true, true, true, true, false, false]);
    }
}
