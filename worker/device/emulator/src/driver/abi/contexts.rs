//! `cuDevicePrimaryCtx*` and `cuCtx*`.

use super::pointers::Out;
use crate::driver::code::Code;
use crate::driver::context::{current_handle, pop_current, push_current, set_current};

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
        let handle = state.create_context(index, true);
        state.devices[index].primary = Some(handle);
        context.set(handle)
    };
    fn cuDevicePrimaryCtxRelease_v2(device: i32) |state| {
        let index = state.device_index(device)?;
        let handle = state.devices[index].primary.ok_or(Code::INVALID_CONTEXT)?;
        let primary = state.contexts.get_mut(&handle).ok_or(Code::INVALID_CONTEXT)?;
        primary.retains -= 1;
        if primary.retains == 0 {
            state.destroy_context(handle);
        }
        Ok(())
    };
    fn cuDevicePrimaryCtxReset_v2(device: i32) |state| {
        let index = state.device_index(device)?;
        if let Some(handle) = state.devices[index].primary {
            state.destroy_context(handle);
        }
        Ok(())
    };
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) |state| {
        let index = state.device_index(device)?;
        flags.set(0)?;
        active.set(i32::from(state.devices[index].primary.is_some()))
    };
    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, _flags: u32) |state| {
        state.device_index(device).map(|_| ())
    };
    fn cuCtxCreate_v2(context: Out<u64>, _flags: u32, device: i32) |state| {
        let index = state.device_index(device)?;
        context.check()?;
        let handle = state.create_context(index, false);
        push_current(handle);
        context.set(handle)
    };
    fn cuCtxDestroy_v2(context: u64) |state| {
        match state.contexts.get(&context) {
            Some(found) if !found.is_primary => state.destroy_context(context),
            _ => return Err(Code::INVALID_CONTEXT),
        }
        if current_handle() == context {
            pop_current();
        }
        Ok(())
    };
    fn cuCtxGetCurrent(context: Out<u64>) |_| context.set(current_handle());
    fn cuCtxSetCurrent(context: u64) |state| {
        if context != 0 && !state.contexts.contains_key(&context) {
            return Err(Code::INVALID_CONTEXT);
        }
        set_current(context);
        Ok(())
    };
    fn cuCtxPushCurrent_v2(context: u64) |state| {
        if !state.contexts.contains_key(&context) {
            return Err(Code::INVALID_CONTEXT);
        }
        push_current(context);
        Ok(())
    };
    fn cuCtxPopCurrent_v2(context: Out<u64>) |_| {
        let popped = pop_current().ok_or(Code::INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    };
    fn cuCtxGetDevice(device: Out<i32>) |state| {
        let context = state.current()?;
        device.set(state.contexts.get(&context).map_or(0, |context| context.device) as i32)
    };
    fn cuCtxGetApiVersion(context: u64, version: Out<u32>) |state| {
        state.contexts.get(&context).ok_or(Code::INVALID_CONTEXT)?;
        version.set(3020)
    };
    wait cuCtxSynchronize() |state| {
        let context = state.current()?;
        Ok((context, state.all_work(context)))
    };
    fn cuCtxGetFlags(flags: Out<u32>) |state| {
        state.current()?;
        flags.set(0)
    };
    fn cuCtxSetFlags(_flags: u32) |state| state.current().map(|_| ());
    fn cuCtxGetLimit(value: Out<usize>, _limit: i32) |state| {
        state.current()?;
        value.set(0)
    };
    fn cuCtxSetLimit(_limit: i32, _value: usize) |state| state.current().map(|_| ());
    fn cuCtxGetCacheConfig(config: Out<i32>) |state| {
        state.current()?;
        config.set(0)
    };
    fn cuCtxSetCacheConfig(_config: i32) |state| state.current().map(|_| ());
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |state| {
        state.current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    };
}
