//! [`Cublas`]: NVIDIA's library of matrix products, on machines that have it.

use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::gemm::{CudaMatrix, StridedShape};
use crate::error::ComputeError;

/// The file names of the library; the first that is found counts. All these versions have the
/// functions that are called.
const LIBRARIES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];

/// The environment variable that names the library's file, or `none`.
const VARIABLE: &str = "PUSHPULL_CUBLAS";

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle) -> u32;
type Destroy = unsafe extern "C" fn(Handle) -> u32;
type SetStream = unsafe extern "C" fn(Handle, CUstream) -> u32;
type Sgemm = unsafe extern "C" fn(
    handle: Handle,
    transposes_a: u32,
    transposes_b: u32,
    m: i32,
    n: i32,
    k: i32,
    alpha: *const f32,
    a: u64,
    lda: i32,
    b: u64,
    ldb: i32,
    beta: *const f32,
    c: u64,
    ldc: i32,
) -> u32;

/// The functions of the library, which stays loaded.
#[derive(Clone, Copy, Debug)]
struct CublasFunctions {
    create: Create,
    destroy: Destroy,
    set_stream: SetStream,
    sgemm: Sgemm,
}

impl CublasFunctions {
    /// Opens the library once for the whole process.
    fn open() -> Option<CublasFunctions> {
        static FUNCTIONS: OnceLock<Option<CublasFunctions>> = OnceLock::new();
        *FUNCTIONS.get_or_init(|| {
            let named = std::env::var(VARIABLE).ok();
            let names = match &named {
                Some(name) if name == "none" => return None,
                Some(name) => vec![name.as_str()],
                None => LIBRARIES.to_vec(),
            };
            // SAFETY: The library is NVIDIA's, or the one that the user names; what it runs when it
            // is loaded is trusted as the driver is.
            let load = |name: &str| unsafe { Library::new(name) }.ok();
            let library = names.into_iter().find_map(load)?;
            // SAFETY: The types are those of the functions in the library's interface.
            let functions = unsafe {
                CublasFunctions {
                    create: *library.get(b"cublasCreate_v2").ok()?,
                    destroy: *library.get(b"cublasDestroy_v2").ok()?,
                    set_stream: *library.get(b"cublasSetStream_v2").ok()?,
                    sgemm: *library.get(b"cublasSgemm_v2").ok()?,
                }
            };
            std::mem::forget(library);
            Some(functions)
        })
    }
}

/// The library with its handle for the stream of one device.
#[derive(Debug)]
pub(crate) struct Cublas {
    functions: CublasFunctions,
    /// Locked because the library allows one caller of a handle at a time.
    handle: Mutex<LibraryHandle>,
}

#[derive(Debug)]
struct LibraryHandle(Handle);

// SAFETY: Any thread may use a handle, one at a time.
unsafe impl Send for LibraryHandle {}

impl Cublas {
    /// Opens the library for a stream of the context that is bound. `None` if the machine has none
    /// that can be used.
    pub(super) fn open(stream: CUstream) -> Option<Cublas> {
        let functions = CublasFunctions::open()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: The context is bound, and the handle has room for one value.
        if unsafe { (functions.create)(&mut handle) } != 0 {
            return None;
        }
        let cublas = Cublas { functions, handle: Mutex::new(LibraryHandle(handle)) };
        // SAFETY: The handle is the library's, and the stream is one of the same context.
        let set = unsafe { (functions.set_stream)(handle, stream) };
        (set == 0).then_some(cublas)
    }

    /// Queues `a * b + beta * product`, or returns `None` if the library has no such product. The
    /// context is bound.
    ///
    /// # Safety
    ///
    /// The strides stay within the values of the matrices. The product has a row for each row of
    /// `a`, and a column for each column of `b`. The columns of `a` are as many as the rows of `b`,
    /// and at least one.
    pub(super) unsafe fn multiply(
        &self,
        a: CudaMatrix<'_>,
        b: CudaMatrix<'_>,
        beta: f32,
        product: u64,
    ) -> Option<Result<(), ComputeError>> {
        let sizes = [b.columns, a.rows, a.columns].map(i32::try_from);
        let [Ok(columns), Ok(rows), Ok(inner)] = sizes else { return None };
        // The library stores by columns. So it is told of the transposed product, which is that of
        // the transposed matrices in the other order.
        let [(transposes_b, step_b), (transposes_a, step_a)] =
            [layout(b.shape())?, layout(a.shape())?];
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: The caller guarantees that the matrices are as they are described here. The
        // factors are read before the function returns.
        let code = unsafe {
            (self.functions.sgemm)(
                handle.0,
                transposes_b,
                transposes_a,
                columns,
                rows,
                inner,
                &1.0,
                b.values.pointer(),
                step_b,
                a.values.pointer(),
                step_a,
                &beta,
                product,
                columns,
            )
        };
        Some(match code {
            0 => Ok(()),
            code => Err(ComputeError::Cuda { call: "cublasSgemm", code }),
        })
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Nobody hears of an error here.
        // SAFETY: The handle is the library's, and is not used any more.
        let _ = unsafe { (self.functions.destroy)(handle.0) };
    }
}

/// Returns the layout of the transposed of a matrix for a library that stores by columns. It is
/// whether the library transposes the stored values (1) or not (0), and the distance between their
/// columns. `None` if there is no such layout.
fn layout(((rows, columns), strides): StridedShape) -> Option<(u32, i32)> {
    let (transposes, step) = match strides {
        (step, 1) if step >= columns => (0, step),
        (1, step) if step >= rows => (1, step),
        _ => return None,
    };
    i32::try_from(step).ok().map(|step| (transposes, step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_of_matrices() {
        let cases = [
            (((3, 5), (5, 1)), Some((0, 5))),
            (((3, 5), (7, 1)), Some((0, 7))),
            (((3, 5), (1, 3)), Some((1, 3))),
            // One row or column, stored either way.
            (((1, 5), (5, 1)), Some((0, 5))),
            (((1, 5), (1, 1)), Some((1, 1))),
            (((5, 1), (1, 1)), Some((0, 1))),
            (((5, 1), (1, 5)), Some((1, 5))),
            // Elements that are apart, or rows that overlap.
            (((3, 5), (10, 2)), None),
            (((3, 5), (4, 1)), None),
            (((3, 5), (1 << 31, 1)), None),
        ];
        for (shape, expected) in cases {
            assert_eq!(layout(shape), expected, "{shape:?}");
        }
    }
}
