//! `cuEvent*`.

use super::pointers::Out;
use crate::driver::code::{DriverErrorCode, DriverResult};
use crate::driver::order::Clock;
use crate::driver::state::{DriverState, Reached};
use crate::driver::stream::EmulatedEvent;
use crate::driver::work::StreamWork;

super::driver_functions! {
    fn cuEventCreate(event: Out<u64>, flags: u32) |state| {
        let context = state.current()?;
        event.check()?;
        if flags > 7 {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        let handle = state.new_handle();
        let has_time = flags & DISABLE_TIMING == 0;
        let clock = Clock::default();
        let event_state = EmulatedEvent { context, has_time, place: None, clock, reached: None };
        state.events.insert(handle, event_state);
        event.set(handle)
    };
    fn cuEventDestroy_v2(event: u64) |state| {
        let removed = state.events.remove(&event).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        state.sticky(removed.context)
    };
    fn cuEventRecord(event: u64, stream: u64) |state| record(state, event, stream);
    fn cuEventQuery(event: u64) |state| {
        let event = state.event(event)?;
        let context = event.context;
        let place = event.place;
        state.sticky(context)?;
        match place.map_or(Reached::Yes, |place| state.advance(place)) {
            Reached::Yes => {
                if let Some(place) = place {
                    state.host_knows(place);
                }
                state.sticky(context)
            }
            _ => Err(DriverErrorCode::NOT_READY),
        }
    };
    wait cuEventSynchronize(event: u64) |state| {
        let event = state.event(event)?;
        state.sticky(event.context)?;
        Ok((event.context, event.place.into_iter().collect()))
    };
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) |state| {
        elapsed(state, milliseconds, start, end)
    };
}

fn record(state: &mut DriverState, handle: u64, stream: u64) -> DriverResult {
    let context = state.current()?;
    if state.event(handle)?.context != context {
        return Err(DriverErrorCode::INVALID_HANDLE);
    }
    let stream = state.stream(stream, context)?;
    let place = state.queue(stream, StreamWork::Record { event: handle })?;
    let clock = state.streams.get(&stream).map(|stream| stream.clock.clone()).unwrap_or_default();
    if let Some(event) = state.events.get_mut(&handle) {
        event.place = Some(place);
        event.reached = None;
        event.clock = clock;
    }
    Ok(())
}

fn elapsed(state: &DriverState, milliseconds: Out<f32>, start: u64, end: u64) -> DriverResult {
    let start = state.event(start)?;
    let end = state.event(end)?;
    let recorded = start.place.is_some() && end.place.is_some();
    if !recorded || !start.has_time || !end.has_time {
        return Err(DriverErrorCode::INVALID_HANDLE);
    }
    match (start.reached, end.reached) {
        (Some(start), Some(end)) => {
            milliseconds.set(end.saturating_duration_since(start).as_secs_f32() * 1000.0)
        }
        _ => Err(DriverErrorCode::NOT_READY),
    }
}

const DISABLE_TIMING: u32 = 2;
