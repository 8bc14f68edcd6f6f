//! `cuLaunchKernel`.

use std::ffi::c_void;

use super::modules::kernel;
use super::pointers::Array;
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::state::DriverState;
use crate::driver::work::{PendingLaunch, StreamWork};
use crate::machine::Launch;

super::driver_functions! {
    fn cuLaunchKernel(
        function: u64,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: u64,
        parameters: Array<*const c_void>,
        extra: Array<*const c_void>,
    ) |state| {
        if !extra.is_null() {
            return Err(DriverErrorCode::NOT_SUPPORTED);
        }
        let grid = [grid_x, grid_y, grid_z];
        let block = [block_x, block_y, block_z];
        launch(state, function, grid, block, shared, stream, parameters)
    };
}

fn launch(
    state: &mut DriverState,
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    arguments: Array<*const c_void>,
) -> DriverResult {
    let context = state.current()?;
    let stream = state.stream(stream, context)?;
    let kernel = kernel(state, function)?;
    let end = kernel.parameters.iter().map(|place| place.offset + place.size).max().unwrap_or(0);
    let mut parameters = vec![0u8; end];
    for (at, place) in kernel.parameters.iter().enumerate() {
        let argument = arguments.at(at)?;
        if argument.is_null() {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and the caller's argument has the size of the kernel's
        // parameter.
        let bytes = unsafe { std::slice::from_raw_parts(argument.cast::<u8>(), place.size) };
        parameters[place.offset..place.offset + place.size].copy_from_slice(bytes);
    }
    let name = kernel.name.clone();
    let (module, _) = state.functions.get(&function).ok_or(DriverErrorCode::INVALID_HANDLE)?;
    let module = *module;
    let loaded = state.modules.get(&module).ok_or(DriverErrorCode::INVALID_HANDLE)?;
    if loaded.context != context {
        return Err(DriverErrorCode::INVALID_HANDLE);
    }
    let program = loaded.program.clone();
    let kernel = program.kernels.get(&name).ok_or(DriverErrorCode::INVALID_HANDLE)?;
    let dynamic_shared = shared as usize;
    let checked = Launch {
        program: &program,
        kernel,
        grid,
        block,
        dynamic_shared,
        parameters: &parameters,
        number: 0,
        steps_max: 0,
    };
    if let Err(error) = checked.check() {
        state.fault(error.to_string());
        return Err(DriverErrorCode::INVALID_VALUE);
    }
    state.calls.count(&format!("kernel {name}"));
    let pending = PendingLaunch {
        module,
        kernel: name,
        program: program.clone(),
        grid,
        block,
        dynamic_shared,
        parameters,
    };
    state.queue(stream, StreamWork::Launch(Box::new(pending))).map(|_| ())
}
