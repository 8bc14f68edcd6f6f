//! Modules and launches, and what a fault leaves behind.

use std::ffi::{CStr, CString, c_void};
use std::sync::mpsc;

use crate::harness::{CORRECT, FAULTY, made, send, turn};

#[test]
fn a_fault_of_a_kernel_is_sticky_and_drops_what_is_queued() {
    let driver = turn();
    let stream = driver.stream();
    let function = driver.function(FAULTY, c"read");
    let input = driver.device(256);
    let output = driver.device(256);
    assert_eq!((driver.cuMemsetD32Async)(input, 0, 64, stream), 0);
    assert_eq!(driver.launch(function, 64, stream, &[output, input]), 0);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(driver.launch(function, 65, stream, &[output, input]), 0);
    let (sender, receiver) = mpsc::channel::<()>();
    let argument = Box::into_raw(Box::new(sender)).cast();
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    assert_eq!((driver.cuEventRecord)(event, stream), 0);
    assert_eq!((driver.cuStreamQuery)(stream), 600);
    assert_eq!((driver.cuLaunchHostFunc)(stream, send, argument), 700);
    assert_eq!((driver.cuStreamSynchronize)(stream), 700);
    assert_eq!((driver.cuEventQuery)(event), 700);
    let mut address = 0;
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 4), 700);
    assert!(receiver.try_recv().is_err());
    let faults = driver.control.faults();
    assert_eq!(faults.len(), 1);
    assert!(faults[0].contains("kernel read, block (0, 0, 0), thread (64, 0, 0)"), "{faults:?}");
    // What is given back is given back, though the call returns the error.
    let before = driver.control.leaks().device_allocations;
    assert_eq!((driver.cuMemFree_v2)(input), 700);
    assert_eq!(driver.control.leaks().device_allocations, before - 1);
    // A context that is made again has no fault.
    assert_eq!((driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    let context = made(|out| (driver.cuDevicePrimaryCtxRetain)(out, 0));
    assert_ne!(context, driver.context);
    assert_eq!((driver.cuCtxSynchronize)(), 709);
    assert_eq!((driver.cuCtxSetCurrent)(context), 0);
    assert_eq!((driver.cuCtxSynchronize)(), 0);
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    let driver = turn();
    let function = driver.function(CORRECT, c"spin");
    let out = driver.device(4096 * 4);
    let arguments = [out, 1];
    assert_eq!(driver.launch(function, 1024, 0, &arguments), 0);
    assert_eq!(driver.launch(function, 1025, 0, &arguments), 1);
    assert_eq!(driver.launch(function, 0, 0, &arguments), 1);
    let pointers: Vec<*const c_void> =
        arguments.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
    let launch = |grid_y, shared| {
        let none = std::ptr::null();
        let pointers = pointers.as_ptr();
        (driver.cuLaunchKernel)(function, 1, grid_y, 1, 32, 1, 1, shared, 0, pointers, none)
    };
    assert_eq!(launch(1, 48 * 1024), 0);
    assert_eq!(launch(1, 48 * 1024 + 1), 1);
    assert_eq!(launch(65_536, 0), 1);
    assert_eq!((driver.cuCtxSynchronize)(), 0);
    assert_eq!(driver.control.calls_of("kernel spin"), 2);
}

#[test]
fn a_module_that_cannot_be_run_is_refused_with_its_reason() {
    let driver = turn();
    let load = |text: &str| {
        let text = CString::new(text).unwrap();
        let mut module = 0;
        (driver.cuModuleLoadData)(&raw mut module, text.as_ptr())
    };
    let head = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry k() {\n";
    assert_eq!(load(&format!("{head}ret;\n}}\n")), 0);
    assert_eq!(load(&format!("{head}sqrt.full.f32 %f1, %f2;\n}}\n")), 218);
    assert_eq!(load("nonsense"), 218);
    assert!(driver.control.faults()[0].contains("unknown instruction: sqrt.full.f32"));
    driver.control.set_driver_version(11080);
    assert_eq!(load(CORRECT), 222);
    driver.control.set_driver_version(12000);
    driver.control.set_compute_capability(60);
    assert_eq!(load(CORRECT), 209);
    driver.control.set_compute_capability(70);
    // The log of the compiler.
    let text = CString::new(format!("{head}frobnicate.u32 %r1;\n}}\n")).unwrap();
    let mut log = [0u8; 40];
    let values = [log.as_mut_ptr().cast::<c_void>(), 40 as *mut c_void];
    let mut module = 0;
    let options = [5, 6];
    let code = (driver.cuModuleLoadDataEx)(
        &raw mut module,
        text.as_ptr(),
        2,
        options.as_ptr(),
        values.as_ptr(),
    );
    assert_eq!(code, 218);
    let log = CStr::from_bytes_until_nul(&log).unwrap().to_str().unwrap();
    assert_eq!(log, "line 5: unknown instruction: frobnicate");
}

#[test]
fn variables_of_modules_have_addresses() {
    let driver = turn();
    let text = CString::new(CORRECT).unwrap();
    let module = made(|out| (driver.cuModuleLoadData)(out, text.as_ptr()));
    let mut address = 0;
    let mut size = 0;
    let find = |name: &CStr, address: &mut u64, size: &mut usize| {
        (driver.cuModuleGetGlobal_v2)(address, size, module, name.as_ptr())
    };
    assert_eq!(find(c"weights", &mut address, &mut size), 0);
    assert_eq!(size, 16);
    let mut weights = [0u8; 16];
    assert_eq!((driver.cuMemcpyDtoH_v2)(weights.as_mut_ptr(), address, 16), 0);
    assert_eq!(weights[4..8], 2f32.to_le_bytes());
    assert_eq!(find(c"missing", &mut address, &mut size), 500);
    assert_eq!((driver.cuModuleUnload)(module), 0);
    assert_eq!((driver.cuModuleUnload)(module), 400);
}
