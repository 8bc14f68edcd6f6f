//! The CUDA driver: its library, its version and its error codes.

use std::sync::OnceLock;

use cudarc::driver::DriverError;
use libloading::Library;

use crate::error::ComputeError;

/// The file names of the driver's library; the first that is found counts.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The lowest supported driver version, CUDA 12.0. Older drivers do not translate the kernels.
const VERSION_MIN: i32 = 12_000;

/// The functions that are called. They are checked before, because cudarc panics on a missing one.
const FUNCTIONS: [&str; 29] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
];

/// Opens the driver once for the whole process. The result does not change: the library stays
/// loaded, and so does a refusal.
pub(crate) fn open() -> Result<(), ComputeError> {
    static RESULT: OnceLock<Result<(), ComputeError>> = OnceLock::new();
    RESULT.get_or_init(probe).clone()
}

fn probe() -> Result<(), ComputeError> {
    // SAFETY: The library is the system's driver; what it runs when it is loaded is trusted as the
    // driver itself is.
    let load = |name: &&str| unsafe { Library::new(*name) }.ok();
    let Some(library) = LIBRARIES.iter().find_map(load) else {
        return Err(ComputeError::NoDriver { tried: &LIBRARIES });
    };
    for function in FUNCTIONS {
        // SAFETY: The symbol is looked for and not used.
        if unsafe { library.get::<*const ()>(function.as_bytes()) }.is_err() {
            return Err(ComputeError::DriverLacks { function });
        }
    }
    // SAFETY: The type is that of this function in the driver's interface. It may be called before
    // all others.
    let version = unsafe {
        let get = library
            .get::<unsafe extern "C" fn(*mut i32) -> u32>(b"cuDriverGetVersion")
            .map_err(|_| ComputeError::DriverLacks { function: "cuDriverGetVersion" })?;
        let mut version = 0;
        match get(&mut version) {
            0 => version,
            code => return Err(ComputeError::Cuda { call: "cuDriverGetVersion", code }),
        }
    };
    // cudarc opens the same library again. It stays loaded until then.
    std::mem::forget(library);
    match version >= VERSION_MIN {
        true => Ok(()),
        false => Err(ComputeError::DriverTooOld { found: version, needed: VERSION_MIN }),
    }
}

/// Converts an error of cudarc, which must not be formatted without a driver.
pub(crate) fn failed(call: &'static str) -> impl Fn(DriverError) -> ComputeError {
    move |DriverError(code)| ComputeError::Cuda { call, code: code as u32 }
}

/// Returns the number of devices that the process may use.
pub(crate) fn device_count() -> Result<u32, ComputeError> {
    open()?;
    match cudarc::driver::result::init() {
        Ok(()) => {}
        // The driver answers so if there is no device, or if none is visible.
        Err(DriverError(code)) if code as u32 == NO_DEVICE => return Ok(0),
        Err(error) => return Err(failed("cuInit")(error)),
    }
    let count = cudarc::driver::result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
    Ok(count.max(0) as u32)
}

const NO_DEVICE: u32 = 100;
