//! Matrix products, on the threads of a pool.

use super::pool::ThreadPool;

/// A matrix over values in the processor's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMatrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    strides: (usize, usize),
}

impl<'a> HostMatrix<'a> {
    /// Creates a matrix. `strides` are the distances in values between rows and between columns.
    ///
    /// # Panics
    /// If they reach beyond the values.
    pub(crate) fn new(
        values: &'a [f32],
        rows: usize,
        columns: usize,
        strides: (usize, usize),
    ) -> HostMatrix<'a> {
        if rows > 0 && columns > 0 {
            let last = (rows - 1) * strides.0 + (columns - 1) * strides.1;
            assert!(last < values.len(), "the matrix ends at value {last} of {}", values.len());
        }
        HostMatrix { values, rows, columns, strides }
    }

    /// Returns the part of the matrix with these rows and columns.
    fn part(self, rows: AxisRange, columns: AxisRange) -> HostMatrix<'a> {
        let first = match rows.length > 0 && columns.length > 0 {
            true => rows.start * self.strides.0 + columns.start * self.strides.1,
            // An empty part has no first value.
            false => 0,
        };
        let values = &self.values[first..];
        HostMatrix { values, rows: rows.length, columns: columns.length, ..self }
    }
}

/// Consecutive rows or columns.
#[derive(Clone, Copy, Debug)]
struct AxisRange {
    start: usize,
    length: usize,
}

impl AxisRange {
    fn all(length: usize) -> AxisRange {
        AxisRange { start: 0, length }
    }

    /// Returns part `index` of a range that is cut every `step`.
    fn part(length: usize, step: usize, index: usize) -> AxisRange {
        let start = index * step;
        AxisRange { start, length: step.min(length - start) }
    }
}

/// The memory of a product. Its parts are written at the same time.
#[derive(Clone, Copy)]
struct Product {
    values: *mut f32,
    /// Distance in values between rows.
    stride: usize,
}

// SAFETY: Each thread writes a part of its own. See `ThreadPool::multiply`.
unsafe impl Send for Product {}
// SAFETY: As above.
unsafe impl Sync for Product {}

/// Parts start at multiples of this, so that they consist of the same tiles as the whole. The sides
/// of all tiles of `matrixmultiply` divide it: they are 4, 8 or 16.
const PART_STEP: usize = 16;

/// Operations (multiply and add) below which one thread is faster than two.
const PARALLEL_MIN: usize = 1 << 21;

impl ThreadPool {
    /// Writes `a * b + beta * product`. The columns of `a` are as many as the rows of `b`, and
    /// `product` has `a.rows * b.columns` elements.
    pub(crate) fn multiply(
        &self,
        a: HostMatrix<'_>,
        b: HostMatrix<'_>,
        beta: f32,
        product: &mut [f32],
    ) {
        let rows = a.rows;
        let inner = a.columns;
        let columns = b.columns;
        assert!(inner == b.rows && product.len() == rows * columns, "the matrices fit");
        let product = Product { values: product.as_mut_ptr(), stride: columns };
        let threads = match rows.saturating_mul(inner).saturating_mul(columns) >= PARALLEL_MIN {
            true => self.threads(),
            false => 1,
        };
        let step = rows.max(columns).div_ceil(threads).next_multiple_of(PART_STEP).max(1);
        let parts = rows.max(columns).div_ceil(step);
        self.run(parts, &|index| {
            let (row_part, column_part) = match rows >= columns {
                true => (AxisRange::part(rows, step, index), AxisRange::all(columns)),
                false => (AxisRange::all(rows), AxisRange::part(columns, step, index)),
            };
            let a = a.part(row_part, AxisRange::all(inner));
            let b = b.part(AxisRange::all(inner), column_part);
            // SAFETY: `product` has rows * columns values, is borrowed mutably by this call, and
            // outlives it. No other index has a row and a column of this part.
            unsafe { multiply_part(a, b, beta, product, row_part.start, column_part.start) };
        });
    }
}

/// Multiplies into the part of `product` that starts at a row and a column.
///
/// # Safety
///
/// The part of `a.rows` rows and `b.columns` columns lies within the product, and no other thread
/// accesses it meanwhile.
unsafe fn multiply_part(
    a: HostMatrix<'_>,
    b: HostMatrix<'_>,
    beta: f32,
    product: Product,
    row: usize,
    column: usize,
) {
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    // SAFETY: The pointers and strides stay within the three slices.
    // - A matrix is within its values, which its constructor checks, or a part of such a matrix.
    // - The caller guarantees that the part of the product lies within it and is not shared, so it
    //   overlaps neither `a` nor `b`.
    // - No offset overflows: a slice has at most isize::MAX bytes, and a stride that is multiplied
    //   by anything but 0 is at most the number of values.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.values.as_ptr(),
            a.strides.0 as isize,
            a.strides.1 as isize,
            b.values.as_ptr(),
            b.strides.0 as isize,
            b.strides.1 as isize,
            beta,
            product.values.add(row * product.stride + column),
            product.stride as isize,
            1,
        );
    }
}
