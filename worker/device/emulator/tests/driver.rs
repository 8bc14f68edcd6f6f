//! Calls the shared library as a program does that opens the driver.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use pushpull_cuda_emulator::Leaks;
use pushpull_cuda_emulator::control::{Control, library_path};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The functions of the driver that the tests call.
macro_rules! driver {
    ($($name:ident($($of:ty),*);)*) => {
        #[derive(Clone, Copy)]
        #[allow(non_snake_case, reason = "the names are those of the driver API")]
        struct Driver { $($name: extern "C" fn($($of),*) -> u32,)* control: Control }

        impl Driver {
            fn open() -> Driver {
                let path = library_path().expect("the shared library is built with the tests");
                let path = CString::new(path.to_str().unwrap()).unwrap();
                // SAFETY: the path ends with a zero, and loading the library runs no code.
                let library = unsafe { dlopen(path.as_ptr(), 2) };
                assert!(!library.is_null());
                // SAFETY: the library is open, and the name ends with a zero.
                let symbol = |name: &CStr| unsafe { dlsym(library, name.as_ptr()) }.cast_const();
                // SAFETY: the library is the one of this package, and it is never closed.
                let control = unsafe { Control::from_symbols(symbol) }.unwrap();
                Driver {
                    $($name: {
                        let name = CString::new(stringify!($name)).unwrap();
                        let address = symbol(&name);
                        assert!(!address.is_null(), "{name:?}");
                        // SAFETY: the function has these arguments.
                        unsafe { std::mem::transmute::<*const c_void, extern "C" fn($($of),*) -> u32>(address) }
                    },)*
                    control,
                }
            }
        }
    };
}

driver! {
    cuInit(u32);
    cuDriverGetVersion(*mut i32);
    cuDeviceGetCount(*mut i32);
    cuDeviceGet(*mut i32, i32);
    cuDevicePrimaryCtxRetain(*mut u64, i32);
    cuDevicePrimaryCtxRelease_v2(i32);
    cuCtxSetCurrent(u64);
    cuCtxSynchronize();
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemFreeAsync(u64, u64);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemHostAlloc(*mut *mut u8, usize, u32);
    cuMemFreeHost(*mut u8);
    cuMemHostRegister_v2(*mut u8, usize, u32);
    cuMemHostUnregister(*mut u8);
    cuMemcpyHtoD_v2(u64, *const u8, usize);
    cuMemcpyDtoH_v2(*mut u8, u64, usize);
    cuMemcpyHtoDAsync_v2(u64, *const u8, usize, u64);
    cuMemcpyDtoHAsync_v2(*mut u8, u64, usize, u64);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, u64);
    cuMemsetD8Async(u64, u8, usize, u64);
    cuMemsetD32Async(u64, u32, usize, u64);
    cuStreamCreate(*mut u64, u32);
    cuStreamDestroy_v2(u64);
    cuStreamSynchronize(u64);
    cuStreamQuery(u64);
    cuStreamWaitEvent(u64, u64, u32);
    cuEventCreate(*mut u64, u32);
    cuEventDestroy_v2(u64);
    cuEventRecord(u64, u64);
    cuEventQuery(u64);
    cuEventSynchronize(u64);
    cuEventElapsedTime(*mut f32, u64, u64);
    cuLaunchHostFunc(u64, extern "C" fn(*mut c_void), *mut c_void);
    cuModuleLoadData(*mut u64, *const c_char);
    cuModuleLoadDataEx(*mut u64, *const c_char, u32, *const i32, *const *mut c_void);
    cuModuleUnload(u64);
    cuModuleGetFunction(*mut u64, u64, *const c_char);
    cuModuleGetGlobal_v2(*mut u64, *mut usize, u64, *const c_char);
    cuLaunchKernel(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const c_void, *const c_void);
    cuGetErrorName(u32, *mut *const c_char);
    cuGetProcAddress_v2(*const c_char, *mut *const c_void, i32, u64, *mut i32);
}

/// The driver with a context. Tests take turns, for a process has one driver.
struct Turn {
    driver: Driver,
    context: u64,
    _turn: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Turn {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

fn turn() -> Turn {
    static TURNS: Mutex<()> = Mutex::new(());
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = *DRIVER.get_or_init(Driver::open);
    driver.control.reset();
    assert_eq!((driver.cuInit)(0), 0);
    let context = made(|out| (driver.cuDevicePrimaryCtxRetain)(out, 0));
    assert_eq!((driver.cuCtxSetCurrent)(context), 0);
    Turn { driver, context, _turn: turn }
}

/// The result of a call that must succeed.
fn made<T: Default>(call: impl FnOnce(*mut T) -> u32) -> T {
    let mut value = T::default();
    assert_eq!(call(&raw mut value), 0);
    value
}

impl Turn {
    fn stream(&self) -> u64 {
        made(|out| (self.cuStreamCreate)(out, 1))
    }

    fn device(&self, bytes: usize) -> u64 {
        made(|out| (self.cuMemAlloc_v2)(out, bytes))
    }

    fn pinned(&self, bytes: usize) -> *mut u8 {
        let mut at = std::ptr::null_mut();
        assert_eq!((self.cuMemHostAlloc)(&raw mut at, bytes, 1), 0);
        at
    }

    fn function(&self, text: &str, name: &CStr) -> u64 {
        let text = CString::new(text).unwrap();
        let module = made(|out| (self.cuModuleLoadData)(out, text.as_ptr()));
        made(|out| (self.cuModuleGetFunction)(out, module, name.as_ptr()))
    }

    fn launch(&self, function: u64, threads: u32, stream: u64, arguments: &[u64]) -> u32 {
        let arguments: Vec<*const c_void> =
            arguments.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
        let pointers = arguments.as_ptr();
        let none = std::ptr::null();
        (self.cuLaunchKernel)(function, 1, 1, 1, threads, 1, 1, 0, stream, pointers, none)
    }

    /// The first byte of memory that a copy writes.
    fn byte(&self, at: *const u8) -> u8 {
        // SAFETY: the memory belongs to the test, which has initialized it.
        unsafe { at.read_volatile() }
    }
}

const CORRECT: &str = include_str!("kernels/correct.ptx");
const FAULTY: &str = include_str!("kernels/faulty.ptx");

#[test]
fn a_copy_is_done_when_its_stream_is_waited_for() {
    let driver = turn();
    let (stream, device, host) = (driver.stream(), driver.device(64), driver.pinned(64));
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, stream), 0);
    assert_eq!(driver.byte(host), 0xff);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(driver.byte(host), 7);
    // Page-locked memory is read when the stream gets there, not when the copy is queued.
    assert_eq!((driver.cuMemcpyHtoDAsync_v2)(device, host, 64, stream), 0);
    // SAFETY: the memory is 64 bytes long.
    unsafe { host.write_bytes(9, 64) };
    let mut pageable = [0u8; 64];
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(pageable.as_mut_ptr(), device, 64, stream), 0);
    assert_eq!(driver.byte(pageable.as_ptr()), 0);
    assert_eq!((driver.cuCtxSynchronize)(), 0);
    assert_eq!(driver.byte(pageable.as_ptr()), 9);
    assert_eq!(driver.control.pageable_copies(), 1);
}

#[test]
fn polling_makes_progress() {
    let driver = turn();
    let (stream, device) = (driver.stream(), driver.device(64));
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    assert_eq!((driver.cuEventQuery)(event), 0);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuEventRecord)(event, stream), 0);
    assert_eq!((driver.cuStreamQuery)(stream), 600);
    assert_eq!((driver.cuEventQuery)(event), 600);
    assert_eq!((driver.cuEventQuery)(event), 0);
    assert_eq!((driver.cuStreamQuery)(stream), 0);
    let later: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    assert_eq!((driver.cuEventRecord)(later, stream), 0);
    let mut elapsed = -1f32;
    assert_eq!((driver.cuEventElapsedTime)(&raw mut elapsed, event, later), 600);
    assert_eq!((driver.cuEventSynchronize)(later), 0);
    assert_eq!((driver.cuEventElapsedTime)(&raw mut elapsed, event, later), 0);
    assert!(elapsed >= 0.0);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let driver = turn();
    let (first, second) = (driver.stream(), driver.stream());
    let (device, host) = (driver.device(64), driver.pinned(64));
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 2));
    assert_eq!((driver.cuMemsetD8Async)(device, 3, 64, first), 0);
    assert_eq!((driver.cuEventRecord)(event, first), 0);
    assert_eq!((driver.cuMemsetD8Async)(device, 4, 64, first), 0);
    assert_eq!((driver.cuStreamWaitEvent)(second, event, 0), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, second), 0);
    assert_eq!((driver.cuStreamSynchronize)(second), 0);
    assert_eq!(driver.byte(host), 3);
    // Without the event, nothing orders the streams: the memory is not set yet.
    let fresh = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(fresh, 4, 64, first), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, fresh, 64, second), 0);
    assert_eq!((driver.cuStreamSynchronize)(second), 700);
    assert!(driver.control.faults()[0].contains("uninitialized"), "{:?}", driver.control.faults());
}

#[test]
fn the_default_stream_is_ordered_with_blocking_ones() {
    let driver = turn();
    let blocking: u64 = made(|out| (driver.cuStreamCreate)(out, 0));
    let device = driver.device(4);
    assert_eq!((driver.cuMemsetD32Async)(device, 5, 1, blocking), 0);
    let mut value = [0u8; 4];
    assert_eq!((driver.cuMemcpyDtoH_v2)(value.as_mut_ptr(), device, 4), 0);
    assert_eq!(value, [5, 0, 0, 0]);
}

extern "C" fn send(argument: *mut c_void) {
    // SAFETY: the test has made the argument from such a box.
    let sender = unsafe { Box::from_raw(argument.cast::<mpsc::Sender<()>>()) };
    sender.send(()).unwrap();
}

#[test]
fn a_host_function_is_called_after_the_work_before_it() {
    let driver = turn();
    let (stream, device, host) = (driver.stream(), driver.device(64), driver.pinned(64));
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, stream), 0);
    let (sender, receiver) = mpsc::channel::<()>();
    let argument = Box::into_raw(Box::new(sender)).cast();
    assert_eq!((driver.cuLaunchHostFunc)(stream, send, argument), 0);
    // Nobody waits for the stream.
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(driver.byte(host), 7);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
}

static CODE: AtomicU32 = AtomicU32::new(0);

extern "C" fn calls_the_driver(argument: *mut c_void) {
    // SAFETY: the test has lent the function of the driver.
    let driver = unsafe { &*argument.cast::<Driver>() };
    CODE.store((driver.cuCtxSynchronize)(), Ordering::SeqCst);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    let driver = turn();
    let stream = driver.stream();
    let argument = std::ptr::from_ref::<Driver>(&driver.driver).cast_mut().cast();
    assert_eq!((driver.cuLaunchHostFunc)(stream, calls_the_driver, argument), 0);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(CODE.load(Ordering::SeqCst), 800);
    assert_eq!(driver.control.faults(), ["cuCtxSynchronize called by a host function"]);
}

#[test]
fn a_fault_of_a_kernel_is_sticky_and_drops_what_is_queued() {
    let driver = turn();
    let stream = driver.stream();
    let function = driver.function(FAULTY, c"read");
    let (input, output) = (driver.device(256), driver.device(256));
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
fn memory_that_a_queued_copy_uses_is_not_freed() {
    for registered in [false, true] {
        let driver = turn();
        let (stream, device) = (driver.stream(), driver.device(64));
        let mut own = vec![1u8; 64];
        let host = if registered { own.as_mut_ptr() } else { driver.pinned(64) };
        if registered {
            assert_eq!((driver.cuMemHostRegister_v2)(host, 64, 1), 0);
            assert_eq!((driver.cuMemHostRegister_v2)(host, 64, 1), 712);
        }
        assert_eq!((driver.cuMemcpyHtoDAsync_v2)(device, host, 64, stream), 0);
        let code = if registered {
            (driver.cuMemHostUnregister)(host)
        } else {
            (driver.cuMemFreeHost)(host)
        };
        assert_eq!(code, 700);
        assert_eq!((driver.cuStreamSynchronize)(stream), 700);
        assert!(driver.control.faults()[0].contains("page-locked memory that a queued copy uses"));
        assert_eq!((driver.cuMemHostUnregister)(host), 713);
    }
}

#[test]
fn freed_device_memory_is_not_used() {
    let driver = turn();
    let (stream, device) = (driver.stream(), driver.device(64));
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 0);
    assert_eq!((driver.cuStreamSynchronize)(stream), 700);
    assert!(driver.control.faults()[0].contains("use after free"));
    let driver = {
        drop(driver);
        turn()
    };
    let (stream, device) = (driver.stream(), driver.device(64));
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemFreeAsync)(device, stream), 0);
    assert_eq!((driver.cuMemFreeAsync)(device, stream), 1);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 1);
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
    let (mut module, options) = (0, [5, 6]);
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
    let (mut address, mut size) = (0, 0);
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

#[test]
fn memory_is_limited() {
    let driver = turn();
    driver.control.set_memory(1 << 20);
    let first = driver.device(1 << 19);
    let mut address = 0;
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, (1 << 19) + 1), 2);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 0), 1);
    let (mut free, mut total) = (0, 0);
    assert_eq!((driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (1 << 19, 1 << 20));
    assert_eq!((driver.cuMemFree_v2)(first), 0);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 1 << 20), 0);
}

#[test]
fn leaks_are_counted() {
    let driver = turn();
    let mine = Leaks { contexts: 1, ..Leaks::default() };
    assert_eq!(driver.control.leaks(), mine);
    let (stream, device, host) = (driver.stream(), driver.device(100), driver.pinned(10));
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    let leaks = Leaks {
        device_allocations: 1,
        device_bytes: 100,
        pinned_allocations: 1,
        streams: 1,
        events: 1,
        ..mine
    };
    assert_eq!(driver.control.leaks(), leaks);
    assert_eq!((driver.cuStreamDestroy_v2)(stream), 0);
    assert_eq!((driver.cuStreamDestroy_v2)(stream), 400);
    assert_eq!((driver.cuEventDestroy_v2)(event), 0);
    assert_eq!((driver.cuMemFreeHost)(host), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 0);
    assert_eq!(driver.control.leaks(), mine);
    assert_eq!((driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    assert_eq!(driver.control.leaks(), Leaks::default());
}

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
    let (mut count, mut device) = (0, 0);
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
fn errors_have_names_and_functions_addresses() {
    let driver = turn();
    let mut name = std::ptr::null();
    assert_eq!((driver.cuGetErrorName)(700, &raw mut name), 0);
    // SAFETY: the driver has returned a text.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!((driver.cuGetErrorName)(12345, &raw mut name), 1);
    let (mut address, mut status) = (std::ptr::null(), 5);
    let find = driver.cuGetProcAddress_v2;
    assert_eq!(find(c"cuMemAlloc".as_ptr(), &raw mut address, 12000, 0, &raw mut status), 0);
    assert_eq!((address, status), (driver.cuMemAlloc_v2 as *const c_void, 0));
    assert_eq!(find(c"cuMissing".as_ptr(), &raw mut address, 12000, 0, &raw mut status), 500);
    assert_eq!(status, 1);
}

#[test]
fn threads_use_the_driver_at_the_same_time() {
    let driver = turn();
    let (copy, context) = (driver.driver, driver.context);
    let threads: Vec<_> = (0..4u8)
        .map(|value| {
            std::thread::spawn(move || {
                assert_eq!((copy.cuCtxSetCurrent)(context), 0);
                let stream = made(|out| (copy.cuStreamCreate)(out, 1));
                for _ in 0..50 {
                    let device = made(|out| (copy.cuMemAlloc_v2)(out, 256));
                    assert_eq!((copy.cuMemsetD8Async)(device, value, 256, stream), 0);
                    let (sender, receiver) = mpsc::channel::<()>();
                    let argument = Box::into_raw(Box::new(sender)).cast();
                    assert_eq!((copy.cuLaunchHostFunc)(stream, send, argument), 0);
                    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
                    let mut host = [0u8; 256];
                    assert_eq!((copy.cuMemcpyDtoH_v2)(host.as_mut_ptr(), device, 256), 0);
                    assert_eq!(host, [value; 256]);
                    assert_eq!((copy.cuMemFree_v2)(device), 0);
                }
                assert_eq!((copy.cuStreamDestroy_v2)(stream), 0);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(driver.control.leaks(), Leaks { contexts: 1, ..Leaks::default() });
    assert!(driver.control.faults().is_empty());
}

#[test]
fn overlapping_and_partial_copies_keep_what_has_a_value() {
    let driver = turn();
    let (stream, device) = (driver.stream(), driver.device(64));
    let other = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 1, 32, stream), 0);
    assert_eq!((driver.cuMemcpyDtoDAsync_v2)(other, device, 64, stream), 0);
    let mut host = [0u8; 64];
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((driver.cuMemcpyDtoH_v2)(host.as_mut_ptr(), other, 32), 0);
    assert_eq!((driver.cuMemcpyDtoH_v2)(host.as_mut_ptr(), other, 33), 700);
    assert!(driver.control.faults()[0].starts_with("read of uninitialized memory"));
}
