//! `cuInit` and `cuDevice*`.

use super::pointers::Out;
use crate::driver::code::DriverErrorCode;

super::driver_functions! {
    fn cuInit(flags: u32) |state| {
        if flags != 0 {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        if state.devices.is_empty() {
            return Err(DriverErrorCode::NO_DEVICE);
        }
        state.is_initialized = true;
        Ok(())
    };
    fn cuDriverGetVersion(version: Out<i32>) |state| version.set(state.settings.driver_version);
    fn cuDeviceGetCount(count: Out<i32>) |state| count.set(state.devices.len() as i32);
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) |state| {
        state.device_index(ordinal)?;
        device.set(ordinal)
    };
    fn cuDeviceGetName(name: Out<u8>, length: i32, device: i32) |state| {
        let index = state.device_index(device)?;
        let length = usize::try_from(length).map_err(|_| DriverErrorCode::INVALID_VALUE)?;
        name.set_text(&format!("Emulated device {index}"), length)
    };
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) |state| {
        state.device_index(device)?;
        bytes.set(state.settings.memory_bytes)
    };
    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) |state| {
        state.device_index(device)?;
        let capability = state.settings.compute_capability as i32;
        value.set(match attribute {
            75 => capability / 10,
            76 => capability % 10,
            _ => attribute_of(attribute, device),
        })
    };
}

/// An attribute by its number in the driver API. One that is not listed is 0.
fn attribute_of(attribute: i32, device: i32) -> i32 {
    match attribute {
        // Threads of a block, and a block along each axis.
        1..=3 => 1024,
        4 => 64,
        // A grid along each axis.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory of a block, with and without opting in, and of a multiprocessor.
        8 | 97 => 48 * 1024,
        81 => 96 * 1024,
        // Constant memory.
        9 => 64 * 1024,
        // The threads of a warp.
        10 => 32,
        // Registers of a block and of a multiprocessor.
        12 | 82 => 65_536,
        // Clock rates of the processor and of its memory, in kHz.
        13 | 36 => 1_000_000,
        // Multiprocessors.
        16 => 4,
        // The host's memory can be mapped; kernels run side by side; addresses are unified;
        // streams have priorities; memory pools.
        19 | 31 | 41 | 78 | 115 => 1,
        // The bus.
        33 => device + 1,
        37 => 256,
        38 => 1 << 20,
        39 => 2048,
        // Engines for asynchronous copies.
        40 => 2,
        _ => 0,
    }
}
