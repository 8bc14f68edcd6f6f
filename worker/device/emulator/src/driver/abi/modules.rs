//! `cuModule*` and `cuFunc*`.

use std::ffi::{CStr, c_char, c_void};

use super::pointers::{Array, Out, TextPointer};
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::modules::load;
use crate::driver::state::DriverState;
use crate::driver::work::StreamWork;

super::driver_functions! {
    fn cuModuleLoadData(module: Out<u64>, image: TextPointer) |state| {
        load_text(state, module, image.read()?).map_err(|(code, _)| code)
    };
    fn cuModuleLoadDataEx(
        module: Out<u64>,
        image: TextPointer,
        count: u32,
        options: Array<i32>,
        values: Array<*mut c_void>,
    ) |state| {
        load_text(state, module, image.read()?).map_err(|(code, log)| {
            write_error_log(count, options, values, &log);
            code
        })
    };
    // A launch that is queued runs code that is gone.
    fn cuModuleUnload(module: u64) |state| {
        let removed = state.modules.remove(&module).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        state.functions.retain(|_, (of, _)| *of != module);
        let queued = state.streams.values().flat_map(|stream| &stream.queue);
        let is_used = |work: &StreamWork| {
            matches!(work, StreamWork::Launch(launch) if launch.module == module)
        };
        if queued.into_iter().any(is_used) {
            state.fault("unloading of a module that a queued launch uses".to_owned());
        }
        for &(address, _) in removed.variables.values() {
            // The address is of a variable that was allocated with the module.
            let _ = state.free(address);
        }
        state.sticky(removed.context)
    };
    fn cuModuleGetFunction(function: Out<u64>, module: u64, name: TextPointer) |state| {
        state.current()?;
        let name = name.name()?;
        function.check()?;
        let handle = state.new_handle();
        let found = state.modules.get_mut(&module).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        if !found.program.kernels.contains_key(name) {
            return Err(DriverErrorCode::NOT_FOUND);
        }
        let handle = *found.functions.entry(name.to_owned()).or_insert(handle);
        state.functions.insert(handle, (module, name.to_owned()));
        function.set(handle)
    };
    fn cuModuleGetGlobal_v2(
        address: Out<u64>,
        bytes: Out<usize>,
        module: u64,
        name: TextPointer,
    ) |state| {
        state.current()?;
        let found = state.modules.get(&module).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        let &(start, size) = found.variables.get(name.name()?).ok_or(DriverErrorCode::NOT_FOUND)?;
        address.set_if_wanted(start);
        bytes.set_if_wanted(size);
        Ok(())
    };
}

/// The kernel of a handle.
pub(super) fn kernel(state: &DriverState, function: u64) -> DriverResult<&crate::ptx::Kernel> {
    let (module, name) = state.functions.get(&function).ok_or(DriverErrorCode::INVALID_HANDLE)?;
    let module = state.modules.get(module).ok_or(DriverErrorCode::INVALID_HANDLE)?;
    module.program.kernels.get(name).ok_or(DriverErrorCode::INVALID_HANDLE)
}

fn load_text(
    state: &mut DriverState,
    module: Out<u64>,
    image: &CStr,
) -> Result<(), (DriverErrorCode, String)> {
    let plain = |code: DriverErrorCode| (code, String::new());
    let context = state.current().map_err(plain)?;
    module.check().map_err(plain)?;
    // A compiled image is not text.
    let text = image.to_str().map_err(|_| plain(DriverErrorCode::NO_BINARY))?;
    if text.starts_with("\x7fELF") {
        return Err(plain(DriverErrorCode::NO_BINARY));
    }
    let settings = state.settings.clone();
    let replace = |text: String, (original, planted): &(String, String)| {
        text.replace(original.as_str(), planted)
    };
    let text = state.planted.iter().fold(text.to_owned(), replace);
    let device = state.device_of(context).map_err(plain)?;
    match load(&text, context, device, &settings) {
        Ok(loaded) => {
            let handle = state.new_handle();
            state.modules.insert(handle, loaded);
            module.set(handle).map_err(plain)
        }
        Err((code, log)) => {
            state.fault(format!("module: {log}"));
            Err((code, log))
        }
    }
}

/// Writes the log into the buffer that the options of a load name, if they do.
fn write_error_log(count: u32, options: Array<i32>, values: Array<*mut c_void>, log: &str) {
    let find = |wanted: i32| {
        (0..count as usize).find_map(|at| match (options.at(at), values.at(at)) {
            (Ok(option), Ok(value)) if option == wanted => Some(value),
            _ => None,
        })
    };
    let (Some(buffer), Some(size)) = (find(ERROR_LOG_BUFFER), find(ERROR_LOG_BUFFER_SIZE)) else {
        return;
    };
    let size = size as usize;
    if buffer.is_null() || size == 0 {
        return;
    }
    let length = log.len().min(size - 1);
    // SAFETY: the caller has a buffer of this size, and the text with its end is not longer.
    unsafe {
        buffer.cast::<u8>().copy_from_nonoverlapping(log.as_ptr(), length);
        buffer.cast::<c_char>().add(length).write(0);
    }
}

const ERROR_LOG_BUFFER: i32 = 5;
const ERROR_LOG_BUFFER_SIZE: i32 = 6;
