//! `cuMemcpy*` and `cuMemset*`.

use super::pointers::Host;
use crate::driver::code::{Code, Status};
use crate::driver::state::{State, Target};
use crate::driver::work::{Source, Work};

super::driver_functions! {
    wait cuMemcpyHtoD_v2(to: u64, from: Host, bytes: usize) |state| {
        let from = Source::Staged(from.bytes(bytes)?);
        now(state, Work::HostToDevice { to, from })
    };
    wait cuMemcpyDtoH_v2(to: Host, from: u64, bytes: usize) |state| {
        check(to, bytes)?;
        now(state, Work::DeviceToHost { to: to.address(), from, size: bytes })
    };
    wait cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) |state| {
        now(state, Work::DeviceToDevice { to, from, size: bytes })
    };
    wait cuMemsetD8_v2(to: u64, value: u8, count: usize) |state| {
        now(state, Work::Fill { to, value: vec![value], count })
    };
    wait cuMemsetD32_v2(to: u64, value: u32, count: usize) |state| {
        now(state, Work::Fill { to, value: value.to_le_bytes().into(), count })
    };
    fn cuMemcpyHtoDAsync_v2(to: u64, from: Host, bytes: usize, stream: u64) |state| {
        check(from, bytes)?;
        let at = from.address();
        let from = if state.host.is_pinned(at, bytes) {
            Source::Pinned { at, size: bytes }
        } else {
            state.pageable_copies += 1;
            Source::Staged(from.bytes(bytes)?)
        };
        later(state, stream, Work::HostToDevice { to, from })
    };
    fn cuMemcpyDtoHAsync_v2(to: Host, from: u64, bytes: usize, stream: u64) |state| {
        check(to, bytes)?;
        if !state.host.is_pinned(to.address(), bytes) {
            state.pageable_copies += 1;
        }
        later(state, stream, Work::DeviceToHost { to: to.address(), from, size: bytes })
    };
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |state| {
        later(state, stream, Work::DeviceToDevice { to, from, size: bytes })
    };
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64) |state| {
        later(state, stream, Work::Fill { to, value: vec![value], count })
    };
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: u64) |state| {
        later(state, stream, Work::Fill { to, value: value.to_le_bytes().into(), count })
    };
}

fn check(host: Host, bytes: usize) -> Status {
    if host.address() == 0 && bytes > 0 { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

/// Queues work on the default stream, to be waited for.
fn now(state: &mut State, work: Work) -> Status<(u64, Vec<Target>)> {
    let context = state.current()?;
    let stream = state.stream(0, context)?;
    let target = state.queue(stream, work)?;
    Ok((context, vec![target]))
}

fn later(state: &mut State, stream: u64, work: Work) -> Status {
    let context = state.current()?;
    let stream = state.stream(stream, context)?;
    state.queue(stream, work).map(|_| ())
}
