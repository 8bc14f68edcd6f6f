//! Opens the shared library, and makes calls short.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};

use pushpull_cuda_emulator::control::{Control, Library};

/// The functions of the driver that the tests call.
macro_rules! driver {
    ($($name:ident($($of:ty),*);)*) => {
        #[derive(Clone, Copy)]
        #[allow(non_snake_case, reason = "the names are those of the driver API")]
        pub(crate) struct Driver { $(pub(crate) $name: extern "C" fn($($of),*) -> u32,)* pub(crate) control: Control }

        impl Driver {
            fn open() -> Driver {
                let library = Library::open();
                Driver {
                    $($name: {
                        let name = CString::new(stringify!($name)).unwrap();
                        let address = library.symbol(&name);
                        assert!(!address.is_null(), "{name:?}");
                        // SAFETY: the function has these arguments.
                        unsafe { std::mem::transmute::<*const c_void, extern "C" fn($($of),*) -> u32>(address) }
                    },)*
                    control: library.control(),
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
}

/// The driver with a context. Tests take turns, for a process has one driver.
pub(crate) struct DriverHarness {
    pub(crate) driver: Driver,
    pub(crate) context: u64,
    _turn: MutexGuard<'static, ()>,
}

impl std::ops::Deref for DriverHarness {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

pub(crate) fn turn() -> DriverHarness {
    static TURNS: Mutex<()> = Mutex::new(());
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = *DRIVER.get_or_init(Driver::open);
    driver.control.reset();
    assert_eq!((driver.cuInit)(0), 0);
    let context = made(|out| (driver.cuDevicePrimaryCtxRetain)(out, 0));
    assert_eq!((driver.cuCtxSetCurrent)(context), 0);
    DriverHarness { driver, context, _turn: turn }
}

/// The result of a call that must succeed.
pub(crate) fn made<T: Default>(call: impl FnOnce(*mut T) -> u32) -> T {
    let mut value = T::default();
    assert_eq!(call(&raw mut value), 0);
    value
}

impl DriverHarness {
    pub(crate) fn stream(&self) -> u64 {
        made(|out| (self.cuStreamCreate)(out, 1))
    }

    pub(crate) fn device(&self, bytes: usize) -> u64 {
        made(|out| (self.cuMemAlloc_v2)(out, bytes))
    }

    pub(crate) fn pinned(&self, bytes: usize) -> *mut u8 {
        let mut at = std::ptr::null_mut();
        assert_eq!((self.cuMemHostAlloc)(&raw mut at, bytes, 1), 0);
        at
    }

    pub(crate) fn function(&self, text: &str, name: &CStr) -> u64 {
        let text = CString::new(text).unwrap();
        let module = made(|out| (self.cuModuleLoadData)(out, text.as_ptr()));
        made(|out| (self.cuModuleGetFunction)(out, module, name.as_ptr()))
    }

    pub(crate) fn launch(
        &self,
        function: u64,
        threads: u32,
        stream: u64,
        arguments: &[u64],
    ) -> u32 {
        let arguments: Vec<*const c_void> =
            arguments.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
        let pointers = arguments.as_ptr();
        let none = std::ptr::null();
        (self.cuLaunchKernel)(function, 1, 1, 1, threads, 1, 1, 0, stream, pointers, none)
    }

    /// The first byte of memory that a copy writes.
    pub(crate) fn byte(&self, at: *const u8) -> u8 {
        // SAFETY: the memory belongs to the test, which has initialized it.
        unsafe { at.read_volatile() }
    }
}

pub(crate) const CORRECT: &str = include_str!("../kernels/correct.ptx");
pub(crate) const FAULTY: &str = include_str!("../kernels/faulty.ptx");

/// A host function that sends to the channel in its argument.
pub(crate) extern "C" fn send(argument: *mut c_void) {
    // SAFETY: the test has made the argument from such a box.
    let sender = unsafe { Box::from_raw(argument.cast::<mpsc::Sender<()>>()) };
    sender.send(()).unwrap();
}
