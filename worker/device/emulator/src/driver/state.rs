//! [`DriverState`]: everything that the driver knows.

use std::collections::BTreeMap;

use super::call_log::CallLog;
use super::code::{DriverErrorCode, DriverResult};
use super::context::{EmulatedContext, current_handle};
use super::device::EmulatedDevice;
use super::host_memory::PageLockedMemory;
use super::leaks::Leaks;
use super::modules::LoadedModule;
use super::order::Clock;
use super::settings::Settings;
use super::stream::{EmulatedEvent, EmulatedStream};
use super::work::{HostFunction, StreamWork};
use crate::machine::{DeviceFault, DeviceFaultKind};

mod execution;

/// Everything that the driver knows.
///
/// Streams are lazy: work is done when a caller waits for it, asks for it, or has queued a host
/// function behind it. A fault makes the error of its context sticky, and the queued work of the
/// context is dropped.
#[derive(Debug, Default)]
pub(crate) struct DriverState {
    pub(crate) is_initialized: bool,
    pub(crate) settings: Settings,
    pub(crate) calls: CallLog,
    pub(crate) faults: Vec<String>,
    pub(crate) devices: Vec<EmulatedDevice>,
    pub(crate) contexts: BTreeMap<u64, EmulatedContext>,
    pub(crate) streams: BTreeMap<u64, EmulatedStream>,
    pub(crate) events: BTreeMap<u64, EmulatedEvent>,
    pub(crate) modules: BTreeMap<u64, LoadedModule>,
    /// The module and the name of each function that was looked up.
    pub(crate) functions: BTreeMap<u64, (u64, String)>,
    pub(crate) host: PageLockedMemory,
    /// The vector clock of the host: the work that it has waited for.
    pub(crate) host_clock: Clock,
    /// The number of asynchronous copies from or to pageable memory of the host.
    pub(crate) pageable_copies: u64,
    /// The number of instructions that all launches have executed.
    pub(crate) instructions: u64,
    /// Bugs for kernels: an original text of a module, and what is compiled instead.
    pub(crate) planted: Vec<(String, String)>,
    launches: u64,
    handles: u64,
}

/// A stream, and the number of the work up to which it is waited for.
pub(crate) type StreamPosition = (u64, u64);

/// Whether a target is reached after a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    Yes,
    /// Something was done.
    NotYet,
    /// A host function has to return first.
    HostFunction,
}

impl DriverState {
    /// A state with the settings of the environment.
    pub(crate) fn from_environment() -> DriverState {
        let (settings, failures) = Settings::from_variables(|name| std::env::var(name).ok());
        let mut state = DriverState::with_settings(settings);
        for failure in failures {
            state.calls.fail(failure);
        }
        state
    }

    /// A state in which nothing has happened.
    pub(crate) fn with_settings(settings: Settings) -> DriverState {
        let devices = (0..settings.devices).map(EmulatedDevice::new).collect();
        DriverState { settings, devices, ..DriverState::default() }
    }

    /// A state with the settings of the environment, in which no handle of this one is used again.
    pub(crate) fn fresh(&self) -> DriverState {
        DriverState {
            handles: self.handles,
            launches: self.launches,
            ..DriverState::from_environment()
        }
    }

    /// Resets the driver to its initial state. Handles are not used again.
    pub(crate) fn reset(&mut self, settings: Settings) {
        let handles = self.handles;
        let launches = self.launches;
        *self = DriverState { handles, launches, ..DriverState::with_settings(settings) };
    }

    /// A handle that looks like a pointer.
    pub(crate) fn new_handle(&mut self) -> u64 {
        self.handles += 1;
        0x5000_0000 + self.handles * 16
    }

    /// Notes what the host did wrong.
    pub(crate) fn fault(&mut self, message: String) {
        self.faults.push(message);
    }

    /// Notes a fault of a context, whose error becomes sticky.
    pub(crate) fn sticky_fault(&mut self, context: u64, fault: &DeviceFault) {
        self.fault(fault.to_string());
        if let Some(context) = self.contexts.get_mut(&context) {
            context.sticky.get_or_insert(DriverErrorCode::ILLEGAL_ADDRESS);
        }
        for stream in self.streams.values_mut().filter(|stream| stream.context == context) {
            stream.abandon();
        }
    }

    /// Fails if an earlier fault has made the context unusable.
    pub(crate) fn sticky(&self, context: u64) -> DriverResult {
        match self.contexts.get(&context).map(|context| context.sticky) {
            None => Err(DriverErrorCode::CONTEXT_IS_DESTROYED),
            Some(Some(code)) => Err(code),
            Some(None) => Ok(()),
        }
    }

    /// The context of the calling thread, which must be usable.
    pub(crate) fn current(&self) -> DriverResult<u64> {
        let handle = self.current_even_if_faulty()?;
        self.sticky(handle)?;
        Ok(handle)
    }

    /// The context of the calling thread, which may have a fault: for what is given back.
    pub(crate) fn current_even_if_faulty(&self) -> DriverResult<u64> {
        match current_handle() {
            0 => Err(DriverErrorCode::INVALID_CONTEXT),
            handle if self.contexts.contains_key(&handle) => Ok(handle),
            _ => Err(DriverErrorCode::CONTEXT_IS_DESTROYED),
        }
    }

    pub(crate) fn device_index(&self, device: i32) -> DriverResult<usize> {
        let index = usize::try_from(device).map_err(|_| DriverErrorCode::INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(DriverErrorCode::INVALID_DEVICE) }
    }

    /// The device of a context.
    pub(crate) fn device_of(&mut self, context: u64) -> DriverResult<&mut EmulatedDevice> {
        let context = self.contexts.get(&context).ok_or(DriverErrorCode::CONTEXT_IS_DESTROYED)?;
        self.devices.get_mut(context.device).ok_or(DriverErrorCode::INVALID_DEVICE)
    }

    pub(crate) fn create_context(&mut self, device: usize) -> u64 {
        let handle = self.new_handle();
        let null_stream = self.new_handle();
        self.streams.insert(null_stream, EmulatedStream::new(handle, true));
        let context = EmulatedContext { device, retains: 1, sticky: None, null_stream };
        self.contexts.insert(handle, context);
        handle
    }

    /// Ends a context. What lived in it stays counted as leaked.
    pub(crate) fn destroy_context(&mut self, handle: u64) {
        let Some(context) = self.contexts.remove(&handle) else { return };
        for stream in self.streams.values_mut().filter(|stream| stream.context == handle) {
            stream.abandon();
        }
        self.streams.remove(&context.null_stream);
        if let Some(device) = self.devices.get_mut(context.device)
            && device.primary == Some(handle)
        {
            device.primary = None;
        }
    }

    /// The stream of a handle, which must belong to the context. 0 to 2 are the default stream.
    pub(crate) fn stream(&self, handle: u64, context: u64) -> DriverResult<u64> {
        if handle <= 2 {
            let context =
                self.contexts.get(&context).ok_or(DriverErrorCode::CONTEXT_IS_DESTROYED)?;
            return Ok(context.null_stream);
        }
        match self.streams.get(&handle) {
            Some(stream) if stream.is_destroyed => Err(DriverErrorCode::INVALID_HANDLE),
            Some(stream) if stream.context != context => Err(DriverErrorCode::INVALID_HANDLE),
            Some(_) => Ok(handle),
            None => Err(DriverErrorCode::INVALID_HANDLE),
        }
    }

    pub(crate) fn event(&self, handle: u64) -> DriverResult<&EmulatedEvent> {
        self.events.get(&handle).ok_or(DriverErrorCode::INVALID_HANDLE)
    }

    /// Queues work, and returns its place.
    ///
    /// The default stream and the blocking streams of a context wait for each other.
    pub(crate) fn queue(&mut self, handle: u64, work: StreamWork) -> DriverResult<StreamPosition> {
        let stream = self.streams.get(&handle).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        let context = stream.context;
        let null = self.contexts.get(&context).map(|context| context.null_stream);
        let mut before = Vec::new();
        for (&other, stream) in &self.streams {
            let ordered = stream.context == context
                && stream.is_blocking
                && stream.done < stream.queued
                && other != handle
                && (Some(handle) == null || Some(other) == null);
            if ordered {
                let wait = StreamWork::WaitFor { stream: other, number: stream.queued };
                before.push((wait, stream.clock.clone()));
            }
        }
        let stream = self.streams.get_mut(&handle).ok_or(DriverErrorCode::INVALID_HANDLE)?;
        stream.clock.join(&self.host_clock);
        if stream.is_blocking {
            for (wait, clock) in before {
                stream.clock.join(&clock);
                stream.push(handle, wait);
            }
        }
        Ok((handle, stream.push(handle, work)))
    }

    /// Notes that the host has waited for what a stream has done.
    pub(crate) fn host_knows(&mut self, (handle, _): StreamPosition) {
        if let Some(stream) = self.streams.get(&handle) {
            self.host_clock.join(&stream.done_clock);
        }
    }

    /// The last work of every stream of a context.
    pub(crate) fn all_work(&self, context: u64) -> Vec<StreamPosition> {
        let streams = self.streams.iter().filter(|(_, stream)| stream.context == context);
        streams.map(|(&handle, stream)| (handle, stream.queued)).collect()
    }

    /// Takes work back that uses host memory which is given back, for it would be used after it.
    pub(crate) fn drop_host_range(&mut self, at: usize, size: usize, what: &str) {
        let mut contexts = Vec::new();
        for stream in self.streams.values_mut() {
            for work in stream.queue.iter_mut().filter(|work| work.uses_host(at, size)) {
                *work = StreamWork::Nothing;
                contexts.push(stream.context);
            }
        }
        for context in contexts {
            let message = format!("{what} of page-locked memory that a queued copy uses");
            let fault = DeviceFault { kind: DeviceFaultKind::Host { message }, location: None };
            self.sticky_fault(context, &fault);
        }
    }

    /// The host function that is this work of a stream, unless it was dropped after a fault.
    pub(crate) fn begin_host_function(
        &mut self,
        handle: u64,
        number: u64,
    ) -> Option<(HostFunction, usize)> {
        let stream = self.streams.get_mut(&handle)?;
        if stream.done + 1 != number {
            return None;
        }
        let Some(&StreamWork::HostFunction { function, argument }) = stream.queue.front() else {
            return None;
        };
        stream.is_calling = true;
        self.host_clock.join(&stream.done_clock);
        Some((function, argument))
    }

    /// Notes that the host function of a stream has returned.
    pub(crate) fn end_host_function(&mut self, handle: u64) {
        if let Some(stream) = self.streams.get_mut(&handle).filter(|stream| stream.is_calling) {
            stream.finish_first();
            // A thread that the host function notifies knows that the work before it is done.
            self.host_clock.join(&stream.done_clock);
        }
    }

    /// Returns the counts of objects that the host has not released.
    pub(crate) fn leaks(&self) -> Leaks {
        let null = |handle| self.contexts.values().any(|context| context.null_stream == handle);
        let live =
            |(handle, stream): &(&u64, &EmulatedStream)| !stream.is_destroyed && !null(**handle);
        let memory = self.devices.iter().map(EmulatedDevice::live_count);
        let memory = memory.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        let (pinned_allocations, registrations) = self.host.counts();
        Leaks {
            device_allocations: memory.0,
            device_bytes: memory.1,
            pinned_allocations,
            registrations,
            streams: self.streams.iter().filter(live).count() as u64,
            events: self.events.len() as u64,
            modules: self.modules.len() as u64,
            contexts: self.contexts.values().map(|context| u64::from(context.retains)).sum(),
        }
    }
}
