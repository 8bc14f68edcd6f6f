//! `cuDevicePrimaryCtx*` and `cuCtx*`.

use super::pointers::Out;
use crate::driver::code::DriverErrorCode;
use crate::driver::context::{current_handle, set_current};

super::driver_functions! {
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) |state| {
        let index = state.device_index(device)?;
        context.check()?;
        if let Some(handle) = state.devices[index].primary {
            if let Some(primary) = state.contexts.get_mut(&handle) {
                primary.retains += 1;
            }
            return context.set(handle);
        }
        let handle = state.create_context(index);
        state.devices[index].primary = Some(handle);
        context.set(handle)
    };
    fn cuDevicePrimaryCtxRelease_v2(device: i32) |state| {
        let index = state.device_index(device)?;
        let handle = state.devices[index].primary.ok_or(DriverErrorCode::INVALID_CONTEXT)?;
        let primary = state.contexts.get_mut(&handle).ok_or(DriverErrorCode::INVALID_CONTEXT)?;
        primary.retains -= 1;
        if primary.retains == 0 {
            state.destroy_context(handle);
        }
        Ok(())
    };
    fn cuCtxGetCurrent(context: Out<u64>) |_| context.set(current_handle());
    fn cuCtxSetCurrent(context: u64) |state| {
        if context != 0 && !state.contexts.contains_key(&context) {
            return Err(DriverErrorCode::INVALID_CONTEXT);
        }
        set_current(context);
        Ok(())
    };
    wait cuCtxSynchronize() |state| {
        let context = state.current()?;
        Ok((context, state.all_work(context)))
    };
}
