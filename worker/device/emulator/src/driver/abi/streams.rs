//! `cuStream*` and `cuLaunchHostFunc`.

use std::ffi::c_void;

use super::pointers::Out;
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::host_functions::schedule;
use crate::driver::state::{DriverState, Reached};
use crate::driver::stream::EmulatedStream;
use crate::driver::work::{HostFunction, StreamWork};

super::driver_functions! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) |state| create(state, stream, flags);
    // The queued work is still done, when a caller waits for the context.
    fn cuStreamDestroy_v2(stream: u64) |state| {
        let found = state.streams.get_mut(&stream).filter(|stream| !stream.is_destroyed);
        let found = found.ok_or(DriverErrorCode::INVALID_HANDLE)?;
        found.is_destroyed = true;
        let context = found.context;
        if found.queue.is_empty() {
            state.streams.remove(&stream);
        }
        state.sticky(context)
    };
    wait cuStreamSynchronize(stream: u64) |state| {
        let context = state.current()?;
        let handle = state.stream(stream, context)?;
        let queued = state.streams.get(&handle).map_or(0, |stream| stream.queued);
        Ok((context, vec![(handle, queued)]))
    };
    // A query does one piece of work, so that a caller who polls makes progress, and one who
    // expects to find it done does not.
    fn cuStreamQuery(stream: u64) |state| {
        let context = state.current()?;
        let handle = state.stream(stream, context)?;
        let queued = state.streams.get(&handle).map_or(0, |stream| stream.queued);
        match state.advance((handle, queued)) {
            Reached::Yes => {
                state.host_knows((handle, queued));
                state.sticky(context)
            }
            _ => Err(DriverErrorCode::NOT_READY),
        }
    };
    fn cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) |state| {
        let context = state.current()?;
        let handle = state.stream(stream, context)?;
        let event = state.event(event)?;
        let place = event.place;
        let clock = event.clock.clone();
        match place {
            Some((other, number)) if other != handle => {
                if let Some(stream) = state.streams.get_mut(&handle) {
                    stream.clock.join(&clock);
                }
                state.queue(handle, StreamWork::WaitFor { stream: other, number }).map(|_| ())
            }
            // An event that was not recorded, or in this stream, holds nothing up.
            _ => Ok(()),
        }
    };
    fn cuLaunchHostFunc(stream: u64, function: Option<HostFunction>, argument: *mut c_void) |state| {
        let context = state.current()?;
        let handle = state.stream(stream, context)?;
        let function = function.ok_or(DriverErrorCode::INVALID_VALUE)?;
        let work = StreamWork::HostFunction { function, argument: argument as usize };
        let (handle, number) = state.queue(handle, work)?;
        schedule(handle, number);
        Ok(())
    };
}

/// Flag 1 lets a stream run beside the default stream.
fn create(state: &mut DriverState, stream: Out<u64>, flags: u32) -> DriverResult {
    let context = state.current()?;
    stream.check()?;
    if flags > 1 {
        return Err(DriverErrorCode::INVALID_VALUE);
    }
    let handle = state.new_handle();
    state.streams.insert(handle, EmulatedStream::new(context, flags == 0));
    stream.set(handle)
}
