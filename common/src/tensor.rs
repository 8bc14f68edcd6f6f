//! Element types and shapes whose element counts cannot overflow.

use std::fmt;

pub use half::{bf16, f16};
use thiserror::Error;

/// The type of a variable's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 double precision, 8 bytes.
    F64,
    /// Two's complement 64-bit integer; for counters (`assign_add`), not trainable.
    I64,
    /// IEEE 754 half precision, 2 bytes: [`half::f16`]. Servers store `f32`: [`DType::master`].
    F16,
    /// The upper half of an `f32`, 2 bytes: [`half::bf16`]. Servers store `f32`: [`DType::master`].
    Bf16,
}

impl DType {
    /// Every type, in the order of their codes.
    pub const ALL: [DType; 5] = [DType::F32, DType::F64, DType::I64, DType::F16, DType::Bf16];

    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Returns whether an optimizer can train this type; only such types have NaN.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I64)
    }

    /// Returns the type in which servers store elements of this type; it holds every element
    /// exactly.
    ///
    /// It is `f32` for types of 2 bytes, which are too coarse to accumulate many small updates, and
    /// the type itself for all others.
    pub const fn master(self) -> DType {
        match self {
            DType::F16 | DType::Bf16 => DType::F32,
            other => other,
        }
    }

    /// Returns the code on the wire and in files.
    pub const fn code(self) -> u8 {
        match self {
            DType::F32 => 1,
            DType::F64 => 2,
            DType::I64 => 3,
            DType::F16 => 4,
            DType::Bf16 => 5,
        }
    }

    /// Returns the type of a code; `None` for a code that this version does not know.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        })
    }
}

/// Copies the elements out of bytes of any alignment; an incomplete element at the end is ignored.
pub fn elements_of<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// A number type that can be an element: ties a Rust type to its [`DType`].
pub trait Element: bytemuck::Pod + PartialEq + fmt::Debug {
    /// The element type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

impl Element for i64 {
    const DTYPE: DType = DType::I64;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}

/// The extent of a tensor along each axis; a scalar has none.
///
/// A shape has at most [`Shape::RANK_MAX`] axes and at most [`Shape::ELEMENTS_MAX`] elements, so
/// its counts never overflow.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape(Vec<u64>);

/// The reason why a list of extents is not a [`Shape`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// There are more axes than [`Shape::RANK_MAX`].
    #[error("cannot use a shape of rank {rank}: the limit is {}", Shape::RANK_MAX)]
    Rank {
        /// The number of axes.
        rank: usize,
    },
    /// There are more elements than [`Shape::ELEMENTS_MAX`].
    #[error("cannot use the shape {extents:?}: it has more than {} elements", Shape::ELEMENTS_MAX)]
    TooLarge {
        /// The extents.
        extents: Vec<u64>,
    },
}

impl Shape {
    /// The largest number of axes.
    pub const RANK_MAX: usize = 8;
    /// The largest number of elements: 2^48, so that sums of byte counts cannot overflow.
    pub const ELEMENTS_MAX: u64 = 1 << 48;

    /// Creates a shape after checking the extents.
    pub fn new(extents: impl Into<Vec<u64>>) -> Result<Shape, ShapeError> {
        let extents = extents.into();
        if extents.len() > Shape::RANK_MAX {
            return Err(ShapeError::Rank { rank: extents.len() });
        }
        let elements = extents.iter().try_fold(1u64, |product, &extent| {
            product.checked_mul(extent).filter(|&elements| elements <= Shape::ELEMENTS_MAX)
        });
        // The width of a row must be bounded too. A zero extent would hide it in the product, so
        // the non-zero extents are also checked on their own.
        let widths = extents.iter().filter(|&&extent| extent > 0).try_fold(1u64, |product, &e| {
            product.checked_mul(e).filter(|&elements| elements <= Shape::ELEMENTS_MAX)
        });
        match (elements, widths) {
            (Some(_), Some(_)) => Ok(Shape(extents)),
            _ => Err(ShapeError::TooLarge { extents }),
        }
    }

    /// Returns the shape of a single number.
    pub fn scalar() -> Shape {
        Shape(Vec::new())
    }

    /// Returns the extents, outermost first.
    pub fn extents(&self) -> &[u64] {
        &self.0
    }

    /// Returns the number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of elements; 1 for a scalar.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// Returns the extent of the first axis, along which a variable is partitioned; 1 for a scalar.
    pub fn rows(&self) -> u64 {
        self.0.first().copied().unwrap_or(1)
    }

    /// Returns the number of elements in one row; 1 for a scalar or a vector.
    pub fn row_elements(&self) -> u64 {
        self.0.iter().skip(1).product()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_checked_at_their_limits() {
        let shape = Shape::new([10, 3, 2]).unwrap();
        assert_eq!((shape.elements(), shape.rows(), shape.row_elements()), (60, 10, 6));
        assert_eq!(Shape::scalar().elements(), 1);
        assert_eq!(Shape::new([0, 5]).unwrap().elements(), 0);
        assert_eq!(Shape::new([1; 9]), Err(ShapeError::Rank { rank: 9 }));
        for extents in [vec![1 << 49], vec![1 << 32, 1 << 32], vec![0, u64::MAX, u64::MAX]] {
            assert_eq!(Shape::new(extents.clone()), Err(ShapeError::TooLarge { extents }));
        }
    }

    #[test]
    fn codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(DType::from_code(0), None);
    }
}
