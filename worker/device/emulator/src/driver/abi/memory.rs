//! Allocations of device and host memory.

use super::pointers::{HostPointer, Out};
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::device::EmulatedDevice;
use crate::driver::state::DriverState;
use crate::driver::work::StreamWork;

super::driver_functions! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) |state| allocate(state, address, bytes);
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: u64) |state| {
        let context = state.current()?;
        state.stream(stream, context)?;
        allocate(state, address, bytes)
    };
    // Queued work that uses the memory is a use after free: the host has not waited for it.
    fn cuMemFree_v2(address: u64) |state| {
        let context = state.current_even_if_faulty()?;
        if address == 0 {
            return state.sticky(context);
        }
        begin_free(state, address)?;
        state.check_host_order(address);
        state.free(address).map_err(|_| DriverErrorCode::INVALID_VALUE)?;
        state.sticky(context)
    };
    fn cuMemFreeAsync(address: u64, stream: u64) |state| {
        let context = state.current_even_if_faulty()?;
        let stream = state.stream(stream, context)?;
        if address == 0 {
            return state.sticky(context);
        }
        begin_free(state, address)?;
        if state.sticky(context).is_ok() {
            state.queue(stream, StreamWork::Free { address })?;
        }
        state.sticky(context)
    };
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |state| {
        let context = state.current()?;
        let bytes = state.settings.memory_bytes;
        let used = state.device_of(context)?.used();
        free.set(bytes.saturating_sub(used))?;
        total.set(bytes)
    };
    fn cuMemHostAlloc(pointer: Out<*mut u8>, bytes: usize, _flags: u32) |state| {
        state.current()?;
        pointer.check()?;
        pointer.set(state.host.allocate(bytes)?)
    };
    fn cuMemFreeHost(pointer: HostPointer) |state| {
        let context = state.current_even_if_faulty()?;
        let size = state.host.allocated(pointer.address())?;
        state.drop_host_range(pointer.address(), size, "free");
        state.host.free(pointer.address())?;
        state.sticky(context)
    };
    fn cuMemHostRegister_v2(pointer: HostPointer, bytes: usize, _flags: u32) |state| {
        state.current()?;
        state.host.register(pointer.address(), bytes)
    };
    fn cuMemHostUnregister(pointer: HostPointer) |state| {
        let context = state.current_even_if_faulty()?;
        let size = state.host.registered(pointer.address())?;
        state.drop_host_range(pointer.address(), size, "unregistration");
        state.host.unregister(pointer.address())?;
        state.sticky(context)
    };
}

fn allocate(state: &mut DriverState, address: Out<u64>, bytes: usize) -> DriverResult {
    let context = state.current()?;
    address.check()?;
    let total = state.settings.memory_bytes;
    address.set(state.device_of(context)?.allocate(bytes, total)?)
}

fn begin_free(state: &mut DriverState, address: u64) -> DriverResult {
    let device = EmulatedDevice::index_of(address).and_then(|index| state.devices.get_mut(index));
    let result =
        device.ok_or(DriverErrorCode::INVALID_VALUE).and_then(|device| device.begin_free(address));
    if result.is_err() {
        state.fault(format!("free of {address:#x}, which is not a live allocation"));
    }
    result
}
