//! Opens the emulated driver for a test.

use std::ffi::CStr;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use pushpull_cuda_emulator::Leaks;
use pushpull_cuda_emulator::control::{Control, library_path};
use pushpull_device::Device;

/// The emulated driver, for one test at a time. Nothing may be wrong at the end of a test.
pub(crate) struct Emulator {
    control: Control,
    /// Whether faults and leaks are expected.
    pub(crate) expects_faults: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Emulator {
    /// Waits for the emulator, and resets it.
    pub(crate) fn start() -> Emulator {
        static TURN: Mutex<()> = Mutex::new(());
        static CONTROL: OnceLock<Control> = OnceLock::new();
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = *CONTROL.get_or_init(open);
        control.reset();
        Emulator { control, expects_faults: false, _turn }
    }

    /// Waits until the host has given everything back. What a dropped copy held is given back by
    /// another thread.
    #[track_caller]
    pub(crate) fn await_no_leaks(&self) {
        for _ in 0..2_000 {
            if self.control.leaks() == Leaks::default() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(self.control.leaks(), Leaks::default());
    }

    /// Opens the processor and the first device.
    pub(crate) fn devices(&self) -> [Device; 2] {
        [Device::cpu_threads(1).unwrap(), Device::cuda(0).unwrap()]
    }
}

impl Deref for Emulator {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.await_no_leaks();
            let is_right = self.expects_faults || self.control.faults().is_empty();
            assert!(is_right, "{:?}", self.control.faults());
        }
    }
}

/// Loads the library. When the devices open the driver by its name, the linker finds it loaded.
fn open() -> Control {
    let path = library_path().expect("the emulator is built with the tests");
    // SAFETY: Loading the library runs no code.
    let library = unsafe { Library::new(path) }.unwrap();
    // SAFETY: The symbol is used as what it is by the control.
    let symbol = |name: &CStr| unsafe {
        let symbol = library.get::<*const std::ffi::c_void>(name.to_bytes_with_nul());
        symbol.map_or(std::ptr::null(), |symbol| *symbol)
    };
    // SAFETY: The library is that of the crate, and is never closed.
    let control = unsafe { Control::from_symbols(symbol) }.unwrap();
    std::mem::forget(library);
    control
}

/// Returns values in -1..1 that follow from a seed.
pub(crate) fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Asserts that values differ by at most `tolerance`, relative to the greater of the expected value
/// and 1. NaN is expected where it is.
#[track_caller]
pub(crate) fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let is_same = found == expected || (found.is_nan() && expected.is_nan());
        let is_close = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(is_same || is_close, "element {index} is {found} instead of {expected}");
    }
}
