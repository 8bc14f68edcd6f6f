//! [`Device`]: a device with its memory.

use std::collections::BTreeMap;

use super::code::{Code, Status};
use super::order::History;
use crate::machine::{FaultKind, GlobalMemory};

/// A device with its memory.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) memory: GlobalMemory,
    /// The allocations that are not freed, with their sizes and contexts.
    allocations: BTreeMap<u64, Allocation>,
    /// For each allocation, which work used it.
    pub(crate) histories: BTreeMap<u64, History>,
    /// The handle of the primary context, while it is retained.
    pub(crate) primary: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    size: usize,
    /// Whether a stream frees it when it gets there.
    freeing: bool,
}

impl Device {
    pub(crate) fn new(index: usize) -> Device {
        let memory = GlobalMemory::new((index as u64 + 1) << DEVICE_BITS);
        Device { memory, allocations: BTreeMap::new(), histories: BTreeMap::new(), primary: None }
    }

    /// The index of the device that an address belongs to.
    pub(crate) fn index_of(address: u64) -> Option<usize> {
        usize::try_from(address >> DEVICE_BITS).ok()?.checked_sub(1)
    }

    /// The bytes that are allocated.
    pub(crate) fn used(&self) -> usize {
        self.live().map(|allocation| allocation.size.next_multiple_of(256)).sum()
    }

    pub(crate) fn allocate(&mut self, size: usize, total: usize) -> Status<u64> {
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if size > total.saturating_sub(self.used()) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let address = self.memory.allocate(size);
        self.allocations.insert(address, Allocation { size, freeing: false });
        Ok(address)
    }

    /// Notes that an allocation is freed now or later. Fails if it is not live.
    pub(crate) fn begin_free(&mut self, address: u64) -> Status {
        let allocation = self.allocations.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
        if allocation.freeing {
            return Err(Code::INVALID_VALUE);
        }
        allocation.freeing = true;
        Ok(())
    }

    /// Frees an allocation for good.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), FaultKind> {
        self.allocations.remove(&address);
        self.histories.remove(&address);
        match self.memory.free(address) {
            Some(_) => Ok(()),
            None => Err(FaultKind::Host { message: format!("free of {address:#x}") }),
        }
    }

    /// How many allocations are live, and their bytes.
    pub(crate) fn live_count(&self) -> (u64, u64) {
        self.live().fold((0, 0), |(count, bytes), a| (count + 1, bytes + a.size as u64))
    }

    fn live(&self) -> impl Iterator<Item = &Allocation> {
        self.allocations.values().filter(|allocation| !allocation.freeing)
    }
}

/// Each device has this many bits of addresses.
const DEVICE_BITS: u32 = 40;
