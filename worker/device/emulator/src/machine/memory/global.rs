//! [`GlobalMemory`]: the memory of a device.

use std::collections::BTreeMap;

use super::POISON;
use super::access::Access;
use super::bitmap::Bitmap;
use super::race::{Footprint, Race, RaceShadow};
use crate::machine::fault::{DeviceFaultKind, Other};
use crate::ptx::Space;

/// The memory of a device: allocations with shadows.
///
/// Addresses are never used twice, so an access of freed memory is told from one that is out of
/// bounds.
#[derive(Clone, Debug)]
pub struct GlobalMemory {
    /// Sorted by their addresses.
    allocations: Vec<ShadowedAllocation>,
    freed: BTreeMap<u64, u64>,
    next: u64,
}

#[derive(Clone, Debug)]
struct ShadowedAllocation {
    base: u64,
    bytes: Vec<u8>,
    written: Bitmap,
    races: RaceShadow,
    read_only: bool,
}

impl GlobalMemory {
    /// An empty memory whose addresses begin at `base`.
    pub fn new(base: u64) -> GlobalMemory {
        GlobalMemory { allocations: Vec::new(), freed: BTreeMap::new(), next: base }
    }

    /// Allocates bytes without a value, and returns their address.
    pub fn allocate(&mut self, size: usize) -> u64 {
        let base = self.next;
        // A gap keeps an index beyond one allocation out of the next.
        self.next = (base + size as u64 + GAP).next_multiple_of(ALIGN);
        self.allocations.push(ShadowedAllocation {
            base,
            bytes: vec![POISON; size],
            written: Bitmap::new(size),
            races: RaceShadow::default(),
            read_only: false,
        });
        base
    }

    /// Allocates a variable with its value.
    pub fn allocate_variable(&mut self, value: &[u8], read_only: bool) -> u64 {
        let base = self.allocate(value.len());
        if let Some(allocation) = self.allocations.last_mut() {
            allocation.bytes.copy_from_slice(value);
            allocation.written.set(0, value.len());
            allocation.read_only = read_only;
        }
        base
    }

    /// Frees an allocation, and returns its size. The address must be one that was allocated.
    pub fn free(&mut self, base: u64) -> Option<usize> {
        let at = self.allocations.binary_search_by_key(&base, |a| a.base).ok()?;
        let size = self.allocations.remove(at).bytes.len();
        self.freed.insert(base, size as u64);
        Some(size)
    }

    /// The address and size of the allocation around an address.
    pub fn allocation_of(&self, address: u64) -> Option<(u64, usize)> {
        let allocation = &self.allocations[self.find(address)?];
        let inside = address < allocation.base + allocation.bytes.len() as u64;
        inside.then_some((allocation.base, allocation.bytes.len()))
    }

    /// Writes bytes from the host.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not inside one allocation.
    pub fn copy_in(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceFaultKind> {
        let Some((allocation, at)) = self.host_place(address, bytes.len())? else { return Ok(()) };
        allocation.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        allocation.written.set(at, bytes.len());
        Ok(())
    }

    /// Reads bytes to the host.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not inside one allocation, or if one has no value.
    pub fn copy_out(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceFaultKind> {
        let Some((allocation, at)) = self.host_place(address, bytes.len())? else { return Ok(()) };
        if let Some(unwritten) = allocation.written.first_unset(at, bytes.len()) {
            let address = allocation.base + unwritten as u64;
            return Err(DeviceFaultKind::Uninitialized { space: Space::Global, address });
        }
        bytes.copy_from_slice(&allocation.bytes[at..at + bytes.len()]);
        Ok(())
    }

    /// Copies bytes, with the knowledge which of them have a value.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not inside one allocation on either side, or if the sides overlap.
    pub fn copy(&mut self, to: u64, from: u64, size: usize) -> Result<(), DeviceFaultKind> {
        let Some((source, at)) = self.host_place(from, size)? else { return Ok(()) };
        let bytes = source.bytes[at..at + size].to_vec();
        let is_whole = source.written.first_unset(at, size).is_none();
        let unwritten: Vec<usize> = match is_whole {
            true => Vec::new(),
            false => (0..size).filter(|offset| !source.written.get(at + offset)).collect(),
        };
        if from < to + size as u64 && to < from + size as u64 {
            return Err(DeviceFaultKind::OverlappingCopy { to, from, size });
        }
        let Some((target, at)) = self.host_place(to, size)? else { return Ok(()) };
        target.bytes[at..at + size].copy_from_slice(&bytes);
        target.written.set(at, size);
        for offset in unwritten {
            target.written.unset(at + offset, 1);
        }
        Ok(())
    }

    /// Fills memory with copies of a value.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not inside one allocation.
    pub fn fill(
        &mut self,
        address: u64,
        value: &[u8],
        count: usize,
    ) -> Result<(), DeviceFaultKind> {
        let size = value.len() * count;
        let Some((allocation, at)) = self.host_place(address, size)? else { return Ok(()) };
        for part in allocation.bytes[at..at + size].chunks_exact_mut(value.len()) {
            part.copy_from_slice(value);
        }
        allocation.written.set(at, size);
        Ok(())
    }

    /// Returns the parts of each allocation that a launch has used, by addresses of the
    /// allocations.
    pub(crate) fn footprints(&self, launch: u64) -> Vec<(u64, Footprint)> {
        let mut all = Vec::new();
        for allocation in &self.allocations {
            let mut footprint = Footprint::default();
            allocation.races.footprint(launch, &mut footprint);
            if footprint != Footprint::default() {
                all.push((allocation.base, footprint));
            }
        }
        all
    }

    /// Reads at most 16 bytes for a thread. `hint` is where the last such access was.
    pub(crate) fn read(
        &mut self,
        address: u64,
        size: usize,
        access: Access,
        hint: &mut usize,
    ) -> Result<[u8; 16], DeviceFaultKind> {
        let (allocation, at) = self.place(address, size, hint)?;
        if !allocation.written.has_all(at, size) {
            let unwritten = allocation.written.first_unset(at, size).unwrap_or(at);
            let address = allocation.base + unwritten as u64;
            return Err(DeviceFaultKind::Uninitialized { space: Space::Global, address });
        }
        if !allocation.read_only {
            allocation.note(at, size, access)?;
        }
        let mut value = [0; 16];
        value[..size].copy_from_slice(&allocation.bytes[at..at + size]);
        Ok(value)
    }

    /// Writes at most 16 bytes for a thread.
    pub(crate) fn write(
        &mut self,
        address: u64,
        value: &[u8],
        access: Access,
        hint: &mut usize,
    ) -> Result<(), DeviceFaultKind> {
        let (allocation, at) = self.place(address, value.len(), hint)?;
        if allocation.read_only {
            return Err(DeviceFaultKind::ReadOnly { address });
        }
        allocation.note(at, value.len(), access)?;
        allocation.written.set(at, value.len());
        allocation.bytes[at..at + value.len()].copy_from_slice(value);
        Ok(())
    }

    /// The last allocation that begins at or before an address.
    fn find(&self, address: u64) -> Option<usize> {
        self.allocations.partition_point(|a| a.base <= address).checked_sub(1)
    }

    fn place(
        &mut self,
        address: u64,
        size: usize,
        hint: &mut usize,
    ) -> Result<(&mut ShadowedAllocation, usize), DeviceFaultKind> {
        let hit = self.allocations.get(*hint).is_some_and(|a| a.contains(address, size));
        if !hit {
            match self.find(address).filter(|&at| self.allocations[at].contains(address, size)) {
                Some(found) => *hint = found,
                None => return Err(self.outside(address, size)),
            }
        }
        let allocation = &mut self.allocations[*hint];
        if !address.is_multiple_of(size as u64) {
            let space = Space::Global;
            return Err(DeviceFaultKind::Misaligned { space, address, size });
        }
        let at = (address - allocation.base) as usize;
        Ok((allocation, at))
    }

    fn host_place(
        &mut self,
        address: u64,
        size: usize,
    ) -> Result<Option<(&mut ShadowedAllocation, usize)>, DeviceFaultKind> {
        if size == 0 {
            return Ok(None);
        }
        let found = self.find(address).filter(|&at| self.allocations[at].contains(address, size));
        let Some(found) = found else { return Err(self.outside(address, size)) };
        let allocation = &mut self.allocations[found];
        let at = (address - allocation.base) as usize;
        Ok(Some((allocation, at)))
    }

    /// The fault of an access that no allocation contains.
    fn outside(&self, address: u64, size: usize) -> DeviceFaultKind {
        let freed = self.freed.range(..=address).next_back();
        if let Some((&base, &length)) = freed
            && address < base + length
        {
            return DeviceFaultKind::UseAfterFree {
                address,
                size,
                allocation: (base, length as usize),
            };
        }
        let near = self.find(address).map(|at| &self.allocations[at]);
        let near = near.filter(|near| address < near.base + near.bytes.len() as u64 + NEAR);
        let after = self.allocations.iter().find(|a| a.base > address && a.base - address < NEAR);
        let allocation = near.or(after).map(|near| (near.base, near.bytes.len()));
        DeviceFaultKind::OutOfBounds { space: Space::Global, address, size, allocation }
    }
}

impl ShadowedAllocation {
    fn contains(&self, address: u64, size: usize) -> bool {
        let length = self.bytes.len() as u64;
        address >= self.base
            && address - self.base <= length
            && length - (address - self.base) >= size as u64
    }

    fn note(&mut self, at: usize, size: usize, access: Access) -> Result<(), DeviceFaultKind> {
        let base = self.base;
        self.races.note(at, size, access).map_err(|Race { at, block, thread, wrote }| {
            let other = Other { block, thread, wrote };
            DeviceFaultKind::Race { space: Space::Global, address: base + at as u64, other }
        })
    }
}

/// Allocations of the driver are aligned to 256 bytes.
const ALIGN: u64 = 256;
const GAP: u64 = 4096;
/// The largest distance, in bytes, at which an address is reported as out of an allocation's
/// bounds.
const NEAR: u64 = 1 << 20;
