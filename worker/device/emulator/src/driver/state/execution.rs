//! Does the work of streams.

use std::ops::Range;
use std::time::Instant;

use super::{DriverState, Reached, StreamPosition};
use crate::driver::device::EmulatedDevice;
use crate::driver::order::{Clock, Use};
use crate::driver::work::{CopySource, PendingLaunch, StreamWork};
use crate::machine::{DeviceFault, DeviceFaultKind, GlobalMemory, Launch, run};

impl DriverState {
    /// Does one piece of work towards a target.
    pub(crate) fn advance(&mut self, (handle, number): StreamPosition) -> Reached {
        let Some(stream) = self.streams.get_mut(&handle) else { return Reached::Yes };
        if stream.done >= number {
            return Reached::Yes;
        }
        match stream.queue.front() {
            None => return Reached::Yes,
            Some(StreamWork::HostFunction { .. }) => return Reached::HostFunction,
            Some(&StreamWork::WaitFor { stream: other, number }) => {
                match self.advance((other, number)) {
                    Reached::Yes => {}
                    other => return other,
                }
                // The other stream may have had a fault that dropped the work of this one.
                if let Some(stream) = self.streams.get_mut(&handle)
                    && matches!(stream.queue.front(), Some(StreamWork::WaitFor { .. }))
                {
                    stream.finish_first();
                }
                return Reached::NotYet;
            }
            Some(_) => {}
        }
        let context = stream.context;
        let number = stream.done + 1;
        let Some(work) = stream.queue.front_mut() else { return Reached::Yes };
        let work = std::mem::replace(work, StreamWork::Nothing);
        let clock = stream.first_clock();
        let uses = work.memory_used();
        let result = self.execute(context, (handle, number), &clock, work);
        if result.is_ok() {
            for (address, size, writes, what) in uses {
                self.note_use(address, vec![0..size; 1], writes, what, (handle, number), &clock);
            }
        }
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.finish_first();
        }
        if let Err(fault) = result {
            self.sticky_fault(context, &fault);
        }
        Reached::NotYet
    }

    fn execute(
        &mut self,
        context: u64,
        place: StreamPosition,
        clock: &Clock,
        work: StreamWork,
    ) -> Result<(), Box<DeviceFault>> {
        let result = match work {
            StreamWork::HostToDevice { to, from: CopySource::Staged(bytes) } => {
                self.memory(to, |memory| memory.copy_in(to, &bytes))
            }
            StreamWork::HostToDevice { to, from: CopySource::Pinned { at, size } } => {
                // SAFETY: the memory was page-locked when the copy was queued. Work that uses it is
                // taken back when it is freed or unregistered, and the host keeps registered memory
                // until the stream is done.
                let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, size) };
                self.memory(to, |memory| memory.copy_in(to, bytes))
            }
            StreamWork::DeviceToHost { to, from, size } => {
                let mut bytes = vec![0; size];
                let result = self.memory(from, |memory| memory.copy_out(from, &mut bytes));
                if result.is_ok() {
                    // SAFETY: the host keeps memory that it has a copy written to until the stream
                    // is done; page-locked memory as above.
                    unsafe { (to as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), size) };
                }
                result
            }
            StreamWork::DeviceToDevice { to, from, size } => self.copy(to, from, size),
            StreamWork::Fill { to, value, count } => {
                self.memory(to, |memory| memory.fill(to, &value, count))
            }
            StreamWork::Free { address } => self.free_in_order(address, place, clock),
            StreamWork::Launch(launch) => return self.launch(context, &launch, place, clock),
            StreamWork::Record { event } => {
                if let Some(event) = self.events.get_mut(&event)
                    && event.place == Some(place)
                {
                    event.reached = Some(Instant::now());
                }
                Ok(())
            }
            StreamWork::WaitFor { .. } | StreamWork::HostFunction { .. } | StreamWork::Nothing => {
                Ok(())
            }
        };
        result.map_err(|kind| Box::new(DeviceFault { kind, location: None }))
    }

    /// Runs a function on the memory that an address belongs to.
    fn memory<T>(
        &mut self,
        address: u64,
        function: impl FnOnce(&mut GlobalMemory) -> Result<T, DeviceFaultKind>,
    ) -> Result<T, DeviceFaultKind> {
        let device =
            EmulatedDevice::index_of(address).and_then(|index| self.devices.get_mut(index));
        match device {
            Some(device) => function(&mut device.memory),
            None => Err(DeviceFaultKind::Host {
                message: format!("no device has address {address:#x}"),
            }),
        }
    }

    fn copy(&mut self, to: u64, from: u64, size: usize) -> Result<(), DeviceFaultKind> {
        if EmulatedDevice::index_of(to) == EmulatedDevice::index_of(from) {
            return self.memory(to, |memory| memory.copy(to, from, size));
        }
        let mut bytes = vec![0; size];
        self.memory(from, |memory| memory.copy_out(from, &mut bytes))?;
        self.memory(to, |memory| memory.copy_in(to, &bytes))
    }

    /// Frees an allocation for good.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), DeviceFaultKind> {
        match EmulatedDevice::index_of(address).and_then(|index| self.devices.get_mut(index)) {
            Some(device) => device.free(address),
            None => Err(DeviceFaultKind::Host {
                message: format!("no device has address {address:#x}"),
            }),
        }
    }

    fn launch(
        &mut self,
        context: u64,
        pending: &PendingLaunch,
        place: StreamPosition,
        clock: &Clock,
    ) -> Result<(), Box<DeviceFault>> {
        self.launches += 1;
        let number = self.launches;
        let steps_max = self.settings.steps_max;
        let missing = |what: &str| {
            let message = format!("launch of {}: no {what}", pending.kernel);
            Box::new(DeviceFault { kind: DeviceFaultKind::Host { message }, location: None })
        };
        let kernel = pending.program.kernels.get(&pending.kernel);
        let kernel = kernel.ok_or_else(|| missing("kernel"))?;
        let device = self.device_of(context).map_err(|_| missing("device"))?;
        let launch = Launch {
            program: &pending.program,
            kernel,
            grid: pending.grid,
            block: pending.block,
            dynamic_shared: pending.dynamic_shared,
            parameters: &pending.parameters,
            number,
            steps_max,
        };
        let steps = run(&launch, &mut device.memory)?;
        let footprints = device.memory.footprints(number);
        self.instructions += steps;
        for (address, footprint) in footprints {
            for (ranges, writes) in [(footprint.read, false), (footprint.written, true)] {
                self.note_use(
                    address,
                    ranges,
                    writes,
                    format!("kernel {}", pending.kernel),
                    place,
                    clock,
                );
            }
        }
        Ok(())
    }

    /// Notes that work uses ranges from an address on, and whether other work does that nothing
    /// orders with it. The result depends on the order, so it is a fault also where it was right.
    fn note_use(
        &mut self,
        address: u64,
        mut ranges: Vec<Range<usize>>,
        writes: bool,
        what: String,
        place: StreamPosition,
        clock: &Clock,
    ) {
        let device =
            EmulatedDevice::index_of(address).and_then(|index| self.devices.get_mut(index));
        let Some(device) = device else { return };
        let Some((base, _)) = device.memory.allocation_of(address) else { return };
        let start = (address - base) as usize;
        ranges.retain(|range| !range.is_empty());
        for range in &mut ranges {
            *range = start + range.start..start + range.end;
        }
        if ranges.is_empty() {
            return;
        }
        let history = device.histories.entry(base).or_default();
        let (stream, number) = place;
        let new = Use { stream, number, writes, ranges, what: what.clone() };
        if let Some((earlier, at)) = history.note(new, clock) {
            self.fault(format!(
                "no order: {what} and {earlier} of another stream use offset {at} of the \
                 allocation at {base:#x}"
            ));
        }
    }

    fn free_in_order(
        &mut self,
        address: u64,
        place: StreamPosition,
        clock: &Clock,
    ) -> Result<(), DeviceFaultKind> {
        let device = EmulatedDevice::index_of(address).and_then(|index| self.devices.get(index));
        let size = device.and_then(|device| device.memory.allocation_of(address));
        let all = 0..size.map_or(0, |(_, size)| size);
        self.note_use(address, vec![all; 1], true, "free".to_owned(), place, clock);
        self.free(address)
    }

    /// Notes if the host frees an allocation without having waited for the work that used it.
    pub(crate) fn check_host_order(&mut self, address: u64) {
        let device = EmulatedDevice::index_of(address).and_then(|index| self.devices.get(index));
        let history = device.and_then(|device| device.histories.get(&address));
        let earlier = history.and_then(|history| history.unknown(&self.host_clock));
        if let Some(earlier) = earlier.map(str::to_owned) {
            self.fault(format!("no order: free and {earlier} that the host has not waited for"));
        }
    }
}
