//! The control interface: what a test sets and asks of the emulator beside the driver API.
//!
//! A test opens the [`Library`], which looks the functions up by their names. All functions may be
//! called from any thread at any time, also before `cuInit`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::driver::{Leaks, with_state};

/// Forgets everything, and takes the settings of the environment again. Handles and pointers from
/// before are no longer valid. Memory of the host that was not freed stays allocated.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_reset() {
    with_state(|state| *state = state.fresh());
}

/// Sets the number of devices, and forgets everything else.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_set_devices(count: u32) {
    with_state(|state| {
        let settings = state.settings.clone();
        state.reset(crate::driver::Settings { devices: count as usize, ..settings });
    });
}

/// Sets the version that `cuDriverGetVersion` returns, which limits the PTX that can be loaded.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_set_driver_version(version: i32) {
    with_state(|state| state.settings.driver_version = version);
}

/// Sets the bytes of memory of each device. Live allocations stay.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_set_memory(bytes: u64) {
    with_state(|state| state.settings.memory_bytes = bytes as usize);
}

/// Sets the compute capability, such as 70. A module for a newer one cannot be loaded.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_set_compute_capability(capability: u32) {
    with_state(|state| state.settings.compute_capability = capability);
}

/// Sets how many instructions a launch may execute before it is taken to be endless.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_set_steps_max(steps: u64) {
    with_state(|state| state.settings.steps_max = steps);
}

/// Lets the `nth` call from now of a function return a code without doing anything. The first call
/// is number 1. The name `*` stands for every function. Returns 0 if `name` is null.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_fail(name: *const c_char, nth: u64, code: u32) -> u32 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: the pointer is not null, and the caller's text ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with_state(|state| state.calls.fail((name, nth, code)));
    1
}

/// Plants a bug: where a module that is loaded from now on has the text `original`, the text
/// `planted` is compiled instead. Returns 0 if either is null.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_plant(original: *const c_char, planted: *const c_char) -> u32 {
    if original.is_null() || planted.is_null() {
        return 0;
    }
    // SAFETY: neither pointer is null, and the caller's texts end with a zero.
    let [original, planted] = unsafe { [original, planted].map(|text| CStr::from_ptr(text)) }
        .map(|text| text.to_string_lossy().into_owned());
    with_state(|state| state.planted.push((original, planted)));
    1
}

/// Writes the number of calls of each function, one `name count` a line; launches are counted as
/// `kernel name count`, too. Returns the length of the whole text, of which at most `capacity`
/// bytes are written, without a zero at the end.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_calls(buffer: *mut u8, capacity: usize) -> usize {
    copy_text(&with_state(|state| state.calls.text()), buffer, capacity)
}

/// Writes all faults since the last reset, one a line, as [`pushpull_emulator_calls`] does.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_faults(buffer: *mut u8, capacity: usize) -> usize {
    let text = with_state(|state| {
        state.faults.iter().map(|fault| format!("{fault}\n")).collect::<String>()
    });
    copy_text(&text, buffer, capacity)
}

/// Writes what the host has not given back.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_leaks(leaks: *mut Leaks) {
    if !leaks.is_null() {
        // SAFETY: the pointer is not null, and the caller has room for one value.
        unsafe { leaks.write(with_state(|state| state.leaks())) }
    }
}

/// Returns how many asynchronous copies had pageable memory on the host's side.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_pageable_copies() -> u64 {
    with_state(|state| state.pageable_copies)
}

/// Returns how many instructions all launches have executed.
#[unsafe(no_mangle)]
extern "C" fn pushpull_emulator_instructions() -> u64 {
    with_state(|state| state.instructions)
}

fn copy_text(text: &str, buffer: *mut u8, capacity: usize) -> usize {
    if !buffer.is_null() {
        // SAFETY: the pointer is not null, and the caller has room for `capacity` bytes.
        unsafe { buffer.copy_from_nonoverlapping(text.as_ptr(), text.len().min(capacity)) }
    }
    text.len()
}

/// The control functions of an emulator that was opened as a library.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    reset: extern "C" fn(),
    set_devices: extern "C" fn(u32),
    set_driver_version: extern "C" fn(i32),
    set_memory: extern "C" fn(u64),
    set_compute_capability: extern "C" fn(u32),
    set_steps_max: extern "C" fn(u64),
    fail: extern "C" fn(*const c_char, u64, u32) -> u32,
    plant: extern "C" fn(*const c_char, *const c_char) -> u32,
    calls: extern "C" fn(*mut u8, usize) -> usize,
    faults: extern "C" fn(*mut u8, usize) -> usize,
    leaks: extern "C" fn(*mut Leaks),
    pageable_copies: extern "C" fn() -> u64,
    instructions: extern "C" fn() -> u64,
}

impl Control {
    /// Looks the functions up in a library. `None` if one is missing: the library is not this one.
    ///
    /// # Safety
    ///
    /// `symbol` returns null or the address of the symbol of that name, in a library that stays
    /// loaded. If the library has the symbols, it is the one of this crate in the same version.
    unsafe fn from_symbols(symbol: impl Fn(&CStr) -> *const c_void) -> Option<Control> {
        macro_rules! function {
            ($name:literal as $of:ty) => {{
                let address = symbol($name);
                if address.is_null() {
                    return None;
                }
                // SAFETY: the caller promises that the symbol is this function of this version.
                unsafe { std::mem::transmute::<*const c_void, $of>(address) }
            }};
        }
        Some(Control {
            reset: function!(c"pushpull_emulator_reset" as extern "C" fn()),
            set_devices: function!(c"pushpull_emulator_set_devices" as extern "C" fn(u32)),
            set_driver_version: function!(
                c"pushpull_emulator_set_driver_version" as extern "C" fn(i32)
            ),
            set_memory: function!(c"pushpull_emulator_set_memory" as extern "C" fn(u64)),
            set_compute_capability: function!(
                c"pushpull_emulator_set_compute_capability" as extern "C" fn(u32)
            ),
            set_steps_max: function!(c"pushpull_emulator_set_steps_max" as extern "C" fn(u64)),
            fail: function!(
                c"pushpull_emulator_fail" as extern "C" fn(*const c_char, u64, u32) -> u32
            ),
            plant: function!(
                c"pushpull_emulator_plant" as extern "C" fn(*const c_char, *const c_char) -> u32
            ),
            calls: function!(c"pushpull_emulator_calls" as extern "C" fn(*mut u8, usize) -> usize),
            faults: function!(
                c"pushpull_emulator_faults" as extern "C" fn(*mut u8, usize) -> usize
            ),
            leaks: function!(c"pushpull_emulator_leaks" as extern "C" fn(*mut Leaks)),
            pageable_copies: function!(
                c"pushpull_emulator_pageable_copies" as extern "C" fn() -> u64
            ),
            instructions: function!(c"pushpull_emulator_instructions" as extern "C" fn() -> u64),
        })
    }

    /// Forgets everything, and takes the settings of the environment again.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// Sets the number of devices, and forgets everything else.
    pub fn set_devices(&self, count: u32) {
        (self.set_devices)(count);
    }

    /// Sets the version of the driver, such as 12000.
    pub fn set_driver_version(&self, version: i32) {
        (self.set_driver_version)(version);
    }

    /// Sets the bytes of memory of each device.
    pub fn set_memory(&self, bytes: u64) {
        (self.set_memory)(bytes);
    }

    /// Sets the compute capability, such as 70.
    pub fn set_compute_capability(&self, capability: u32) {
        (self.set_compute_capability)(capability);
    }

    /// Sets how many instructions a launch may execute.
    pub fn set_steps_max(&self, steps: u64) {
        (self.set_steps_max)(steps);
    }

    /// Lets the `nth` call from now of a function return a code. The name `*` stands for every one.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        (self.fail)(name.as_ptr(), nth, code);
    }

    /// Compiles `planted` instead of the text `original` in modules that are loaded from now on,
    /// until the next reset.
    pub fn plant(&self, original: &CStr, planted: &CStr) {
        (self.plant)(original.as_ptr(), planted.as_ptr());
    }

    /// The number of calls of each function since the last reset.
    pub fn calls(&self) -> Vec<(String, u64)> {
        let lines = read_text(self.calls);
        let split = lines.lines().filter_map(|line| line.rsplit_once(' '));
        split.map(|(name, count)| (name.to_owned(), count.parse().unwrap_or(0))).collect()
    }

    /// The number of calls of one function, or of launches of `kernel name`.
    pub fn calls_of(&self, name: &str) -> u64 {
        self.calls().iter().find(|(called, _)| called == name).map_or(0, |(_, count)| *count)
    }

    /// The faults since the last reset.
    pub fn faults(&self) -> Vec<String> {
        read_text(self.faults).lines().map(str::to_owned).collect()
    }

    /// Returns the counts of objects that the host has not released.
    pub fn leaks(&self) -> Leaks {
        let mut leaks = Leaks::default();
        (self.leaks)(&raw mut leaks);
        leaks
    }

    /// Returns the number of asynchronous copies from or to pageable memory of the host.
    pub fn pageable_copies(&self) -> u64 {
        (self.pageable_copies)()
    }

    /// Returns the number of instructions that all launches have executed.
    pub fn instructions(&self) -> u64 {
        (self.instructions)()
    }
}

/// Reads a text whose length is not known. It may grow meanwhile.
fn read_text(function: extern "C" fn(*mut u8, usize) -> usize) -> String {
    let mut bytes = vec![0; 4096];
    loop {
        let length = function(bytes.as_mut_ptr(), bytes.len());
        if length <= bytes.len() {
            bytes.truncate(length);
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        bytes.resize(length, 0);
    }
}

/// The shared library, opened by a test as a program opens the driver. It stays open.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    handle: *mut c_void,
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

impl Library {
    /// Opens the library that was built with the test. A driver that is opened by its name later is
    /// this library.
    ///
    /// # Panics
    /// If it was not built, or cannot be loaded.
    pub fn open() -> Library {
        const RTLD_NOW: c_int = 2;
        let path = CString::new(library_path().into_os_string().into_vec());
        let path = path.expect("a path has no zero");
        // SAFETY: the path ends with a zero, and loading the library runs no code.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        assert!(!handle.is_null(), "cannot load {path:?}");
        Library { handle }
    }

    /// Returns the address of a function, or null.
    pub fn symbol(&self, name: &CStr) -> *const c_void {
        // SAFETY: the library is open, and the name ends with a zero.
        unsafe { dlsym(self.handle, name.as_ptr()) }
    }

    /// Returns its control functions.
    ///
    /// # Panics
    /// If it lacks one: it is of another version.
    pub fn control(&self) -> Control {
        // SAFETY: the library is that of this crate, built with the test, and is never closed.
        let control = unsafe { Control::from_symbols(|name| self.symbol(name)) };
        control.expect("the library was built with the test")
    }
}

/// Puts the library into a folder under both names of a driver, for the path of libraries of
/// another process.
///
/// # Errors
/// If the links cannot be made.
///
/// # Panics
/// If the library was not built.
pub fn link_as_driver(folder: &Path) -> std::io::Result<()> {
    let path = library_path();
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::os::unix::fs::symlink(&path, folder.join(name))?;
    }
    Ok(())
}

/// Returns the path of the library.
///
/// Cargo puts the library of a dependency into the folder `deps`, where the executables of tests
/// are, and that of the package itself one folder above.
fn library_path() -> PathBuf {
    let executable = std::env::current_exe().expect("a test has an executable");
    let name = "libpushpull_cuda_emulator.so";
    let folders = executable.ancestors().skip(1).take(2);
    let mut paths = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    paths.find(|path| path.exists()).expect("the emulator is built with the tests")
}
