//! [`EmulatedDevice`]: a device with its memory.

use std::collections::BTreeMap;

use super::code::{DriverErrorCode, DriverResult};
use super::order::UseHistory;
use crate::machine::{DeviceFaultKind, GlobalMemory};

/// A device with its memory.
#[derive(Debug)]
pub(crate) struct EmulatedDevice {
    pub(crate) memory: GlobalMemory,
    /// The allocations that are not freed, with their sizes and contexts.
    allocations: BTreeMap<u64, DeviceAllocation>,
    /// For each allocation, which work used it.
    pub(crate) histories: BTreeMap<u64, UseHistory>,
    /// The handle of the primary context, while it is retained.
    pub(crate) primary: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct DeviceAllocation {
    size: usize,
    /// Whether a stream frees it when it gets there.
    freeing: bool,
}

impl EmulatedDevice {
    pub(crate) fn new(index: usize) -> EmulatedDevice {
        let memory = GlobalMemory::new((index as u64 + 1) << DEVICE_BITS);
        EmulatedDevice {
            memory,
            allocations: BTreeMap::new(),
            histories: BTreeMap::new(),
            primary: None,
        }
    }

    /// The index of the device that an address belongs to.
    pub(crate) fn index_of(address: u64) -> Option<usize> {
        usize::try_from(address >> DEVICE_BITS).ok()?.checked_sub(1)
    }

    /// The bytes that are allocated.
    pub(crate) fn used(&self) -> usize {
        self.live().map(|allocation| allocation.size.next_multiple_of(256)).sum()
    }

    pub(crate) fn allocate(&mut self, size: usize, total: usize) -> DriverResult<u64> {
        if size == 0 {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        if size > total.saturating_sub(self.used()) {
            return Err(DriverErrorCode::OUT_OF_MEMORY);
        }
        let address = self.memory.allocate(size);
        self.allocations.insert(address, DeviceAllocation { size, freeing: false });
        Ok(address)
    }

    /// Notes that an allocation is freed now or later. Fails if it is not live.
    pub(crate) fn begin_free(&mut self, address: u64) -> DriverResult {
        let allocation =
            self.allocations.get_mut(&address).ok_or(DriverErrorCode::INVALID_VALUE)?;
        if allocation.freeing {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        allocation.freeing = true;
        Ok(())
    }

    /// Frees an allocation for good.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), DeviceFaultKind> {
        self.allocations.remove(&address);
        self.histories.remove(&address);
        match self.memory.free(address) {
            Some(_) => Ok(()),
            None => Err(DeviceFaultKind::Host { message: format!("free of {address:#x}") }),
        }
    }

    /// Returns the number of live allocations and the sum of their bytes.
    pub(crate) fn live_count(&self) -> (u64, u64) {
        self.live().fold((0, 0), |(count, bytes), a| (count + 1, bytes + a.size as u64))
    }

    fn live(&self) -> impl Iterator<Item = &DeviceAllocation> {
        self.allocations.values().filter(|allocation| !allocation.freeing)
    }
}

/// Each device has this many bits of addresses.
const DEVICE_BITS: u32 = 40;
