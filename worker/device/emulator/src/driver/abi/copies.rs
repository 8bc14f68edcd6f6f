//! `cuMemcpy*` and `cuMemset*`.

use super::pointers::HostPointer;
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::state::{DriverState, StreamPosition};
use crate::driver::work::{CopySource, StreamWork};

super::driver_functions! {
    wait cuMemcpyHtoD_v2(to: u64, from: HostPointer, bytes: usize) |state| {
        let from = CopySource::Staged(from.bytes(bytes)?);
        now(state, StreamWork::HostToDevice { to, from })
    };
    wait cuMemcpyDtoH_v2(to: HostPointer, from: u64, bytes: usize) |state| {
        check(to, bytes)?;
        now(state, StreamWork::DeviceToHost { to: to.address(), from, size: bytes })
    };
    wait cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) |state| {
        now(state, StreamWork::DeviceToDevice { to, from, size: bytes })
    };
    wait cuMemsetD8_v2(to: u64, value: u8, count: usize) |state| {
        now(state, StreamWork::Fill { to, value: vec![value], count })
    };
    wait cuMemsetD32_v2(to: u64, value: u32, count: usize) |state| {
        now(state, StreamWork::Fill { to, value: value.to_le_bytes().into(), count })
    };
    fn cuMemcpyHtoDAsync_v2(to: u64, from: HostPointer, bytes: usize, stream: u64) |state| {
        check(from, bytes)?;
        let at = from.address();
        let from = if state.host.is_pinned(at, bytes) {
            CopySource::Pinned { at, size: bytes }
        } else {
            state.pageable_copies += 1;
            CopySource::Staged(from.bytes(bytes)?)
        };
        later(state, stream, StreamWork::HostToDevice { to, from })
    };
    fn cuMemcpyDtoHAsync_v2(to: HostPointer, from: u64, bytes: usize, stream: u64) |state| {
        check(to, bytes)?;
        if !state.host.is_pinned(to.address(), bytes) {
            state.pageable_copies += 1;
        }
        later(state, stream, StreamWork::DeviceToHost { to: to.address(), from, size: bytes })
    };
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |state| {
        later(state, stream, StreamWork::DeviceToDevice { to, from, size: bytes })
    };
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64) |state| {
        later(state, stream, StreamWork::Fill { to, value: vec![value], count })
    };
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: u64) |state| {
        later(state, stream, StreamWork::Fill { to, value: value.to_le_bytes().into(), count })
    };
}

fn check(host: HostPointer, bytes: usize) -> DriverResult {
    if host.address() == 0 && bytes > 0 { Err(DriverErrorCode::INVALID_VALUE) } else { Ok(()) }
}

/// Queues work on the default stream, to be waited for.
fn now(state: &mut DriverState, work: StreamWork) -> DriverResult<(u64, Vec<StreamPosition>)> {
    let context = state.current()?;
    let stream = state.stream(0, context)?;
    let target = state.queue(stream, work)?;
    Ok((context, vec![target]))
}

fn later(state: &mut DriverState, stream: u64, work: StreamWork) -> DriverResult {
    let context = state.current()?;
    let stream = state.stream(stream, context)?;
    state.queue(stream, work).map(|_| ())
}
