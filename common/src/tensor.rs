//! Element types and shapes whose counts cannot overflow.

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
    /// IEEE 754 half precision, 2 bytes: [`half::f16`]. Servers keep `f32`: [`DType::master`].
    F16,
    /// The upper half of an `f32`, 2 bytes: [`half::bf16`]. Servers keep `f32`: [`DType::master`].
    Bf16,
}

impl DType {
    /// Every type, in the order of their codes.
    pub const ALL: [DType; 5] = [DType::F32, DType::F64, DType::I64, DType::F16, DType::Bf16];

    /// The width of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether an optimizer can train it and NaN can occur in it.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I64)
    }

    /// The type that servers keep such elements in: `f32` for those of 2 bytes, which are too coarse for
    /// many small updates to add up in; all others as they are. Holds every element exactly.
    pub const fn master(self) -> DType {
        match self {
            DType::F16 | DType::Bf16 => DType::F32,
            other => other,
        }
    }

    /// The code on the wire and in files.
    pub const fn code(self) -> u8 {
        match self {
            DType::F32 => 1,
            DType::F64 => 2,
            DType::I64 => 3,
            DType::F16 => 4,
            DType::Bf16 => 5,
        }
    }

    /// The type a code stands for; `None` for a code this version does not know.
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

/// The elements that bytes are of, wherever those lie; what is no whole element at the end is passed
/// over.
pub fn elements_of<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// A plain number that may be an element: ties a Rust type to its [`DType`].
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
/// A `Shape` that exists has at most [`Shape::RANK_MAX`] axes and at most
/// [`Shape::ELEMENTS_MAX`] elements, so its counts never overflow.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape(Vec<u64>);

/// Why a list of extents is not a [`Shape`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More axes than [`Shape::RANK_MAX`].
    #[error("cannot use a shape of rank {rank}: the largest is {}", Shape::RANK_MAX)]
    Rank {
        /// The number of axes asked for.
        rank: usize,
    },
    /// More elements than [`Shape::ELEMENTS_MAX`].
    #[error("cannot use the shape {extents:?}: it has more than {} elements", Shape::ELEMENTS_MAX)]
    TooLarge {
        /// The extents asked for.
        extents: Vec<u64>,
    },
}

impl Shape {
    /// The largest number of axes.
    pub const RANK_MAX: usize = 8;
    /// The largest number of elements: 2^48, so that a byte count fits every later sum.
    pub const ELEMENTS_MAX: u64 = 1 << 48;

    /// Checks the extents and makes them a shape.
    pub fn new(extents: impl Into<Vec<u64>>) -> Result<Shape, ShapeError> {
        let extents = extents.into();
        if extents.len() > Shape::RANK_MAX {
            return Err(ShapeError::Rank { rank: extents.len() });
        }
        let elements = extents.iter().try_fold(1u64, |product, &extent| {
            product.checked_mul(extent).filter(|&elements| elements <= Shape::ELEMENTS_MAX)
        });
        // A zero extent hides a later overflow in the product, never an element; but the row
        // width must be bounded too, so the non-zero extents are checked on their own.
        let widths = extents.iter().filter(|&&extent| extent > 0).try_fold(1u64, |product, &e| {
            product.checked_mul(e).filter(|&elements| elements <= Shape::ELEMENTS_MAX)
        });
        match (elements, widths) {
            (Some(_), Some(_)) => Ok(Shape(extents)),
            _ => Err(ShapeError::TooLarge { extents }),
        }
    }

    /// The shape of a single number.
    pub fn scalar() -> Shape {
        Shape(Vec::new())
    }

    /// The extents, outermost first.
    pub fn extents(&self) -> &[u64] {
        &self.0
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The number of elements; 1 for a scalar.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// The extent of the first axis, along which a variable is partitioned; 1 for a scalar.
    pub fn rows(&self) -> u64 {
        self.0.first().copied().unwrap_or(1)
    }

    /// The number of elements in one row; 1 for a scalar or a vector.
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
    fn counts_are_checked_at_the_border() {
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
