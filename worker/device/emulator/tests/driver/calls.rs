//! Failures on demand, null pointers and names.

use std::ffi::CStr;

use crate::harness::{made, turn};

#[test]
fn calls_fail_when_they_are_told_to() {
    let driver = turn();
    driver.control.fail(c"cuMemAlloc_v2", 2, 2);
    let mut address = 0;
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 4), 0);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 4), 2);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 4), 0);
    assert_eq!(driver.control.calls_of("cuMemAlloc_v2"), 3);
    driver.control.fail(c"*", 1, 999);
    assert_eq!((driver.cuCtxSynchronize)(), 999);
    driver.control.set_devices(0);
    assert_eq!((driver.cuInit)(0), 100);
    driver.control.set_devices(2);
    let mut count = 0;
    let mut device = 0;
    assert_eq!((driver.cuDeviceGetCount)(&raw mut count), 3);
    assert_eq!((driver.cuInit)(0), 0);
    assert_eq!((driver.cuDeviceGetCount)(&raw mut count), 0);
    assert_eq!(count, 2);
    assert_eq!((driver.cuDeviceGet)(&raw mut device, 2), 101);
    assert_eq!((driver.cuCtxSynchronize)(), 709);
    driver.control.set_driver_version(12080);
    assert_eq!(made(|out| (driver.cuDriverGetVersion)(out)), 12080);
}

#[test]
fn null_pointers_are_refused() {
    let driver = turn();
    use std::ptr::{null, null_mut};
    assert_eq!((driver.cuMemAlloc_v2)(null_mut(), 4), 1);
    assert_eq!((driver.cuStreamCreate)(null_mut(), 0), 1);
    assert_eq!((driver.cuModuleLoadData)(null_mut(), null()), 1);
    assert_eq!((driver.cuMemcpyHtoD_v2)(driver.device(4), null(), 4), 1);
    assert_eq!((driver.cuMemHostAlloc)(null_mut(), 4, 0), 1);
    assert_eq!((driver.cuLaunchKernel)(5, 1, 1, 1, 1, 1, 1, 0, 0, null(), null()), 400);
    assert_eq!((driver.cuCtxSetCurrent)(0), 0);
    assert_eq!((driver.cuCtxSynchronize)(), 201);
}

#[test]
fn errors_have_names() {
    let driver = turn();
    let mut name = std::ptr::null();
    assert_eq!((driver.cuGetErrorName)(700, &raw mut name), 0);
    // SAFETY: the driver has returned a text.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!((driver.cuGetErrorName)(12345, &raw mut name), 1);
}
