//! `cuMemPool*`: each device has one pool, whose attributes change nothing.

use std::ffi::c_void;

use super::pointers::Out;
use crate::driver::code::Code;

super::driver_functions! {
    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) |state| {
        pool.set(POOLS + state.device_index(device)? as u64 * 16)
    };
    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) |state| {
        pool.set(POOLS + state.device_index(device)? as u64 * 16)
    };
    fn cuDeviceSetMemPool(device: i32, _pool: u64) |state| state.device_index(device).map(|_| ());
    fn cuMemPoolSetAttribute(_pool: u64, _attribute: i32, _value: *mut c_void) |_| Ok(());
    fn cuMemPoolGetAttribute(_pool: u64, _attribute: i32, value: Out<u64>) |_| value.set(0);
    fn cuMemPoolTrimTo(_pool: u64, _bytes: usize) |_| Ok(());
    fn cuMemPoolCreate(_pool: Out<u64>, _properties: *const c_void) |_| Err(Code::NOT_SUPPORTED);
    fn cuMemPoolDestroy(_pool: u64) |_| Err(Code::NOT_SUPPORTED);
}

/// Where the handles of pools begin.
const POOLS: u64 = 0x4000_0000;
