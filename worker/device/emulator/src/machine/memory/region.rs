//! [`Region`]: the shared memory of a block or the local memory of a thread.

use super::POISON;
use super::bitmap::Bitmap;
use crate::machine::fault::DeviceFaultKind;
use crate::ptx::Space;
use std::ops::Range;

/// A small memory that begins at address 0 and has gaps between its variables.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    space: Space,
    bytes: Vec<u8>,
    mapped: Bitmap,
    written: Bitmap,
}

impl Region {
    pub(crate) fn new(space: Space, size: usize) -> Region {
        let mapped = Bitmap::new(size);
        let written = Bitmap::new(size);
        Region { space, bytes: vec![POISON; size], mapped, written }
    }

    /// Makes a range of bytes accessible, without a value.
    pub(crate) fn map(&mut self, range: Range<usize>) {
        if self.bytes.len() < range.end {
            let mut larger = Region::new(self.space, range.end.next_power_of_two());
            for at in 0..self.bytes.len() {
                if self.mapped.get(at) {
                    larger.mapped.set(at, 1);
                }
                if self.written.get(at) {
                    larger.written.set(at, 1);
                }
            }
            larger.bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
            *self = larger;
        }
        self.mapped.set(range.start, range.len());
        self.written.unset(range.start, range.len());
    }

    /// Takes the mapping of a range back.
    pub(crate) fn unmap(&mut self, range: Range<usize>) {
        self.mapped.unset(range.start, range.len());
    }

    /// Forgets every value.
    pub(crate) fn forget(&mut self) {
        self.written.clear();
        self.bytes.fill(POISON);
    }

    pub(crate) fn read(&self, at: u64, size: usize) -> Result<[u8; 16], DeviceFaultKind> {
        let place = self.place(at, size)?;
        if !self.written.has_all(place, size) {
            let unwritten = self.written.first_unset(place, size).unwrap_or(place);
            return Err(DeviceFaultKind::Uninitialized {
                space: self.space,
                address: unwritten as u64,
            });
        }
        let mut value = [0; 16];
        value[..size].copy_from_slice(&self.bytes[place..place + size]);
        Ok(value)
    }

    pub(crate) fn write(&mut self, at: u64, value: &[u8]) -> Result<(), DeviceFaultKind> {
        let place = self.place(at, value.len())?;
        self.written.set(place, value.len());
        self.bytes[place..place + value.len()].copy_from_slice(value);
        Ok(())
    }

    fn place(&self, at: u64, size: usize) -> Result<usize, DeviceFaultKind> {
        let space = self.space;
        let address = at;
        let place = usize::try_from(at).unwrap_or(usize::MAX);
        let inside = place.checked_add(size).is_some_and(|end| end <= self.bytes.len());
        if !inside || !self.mapped.has_all(place, size) {
            return Err(DeviceFaultKind::OutOfBounds { space, address, size, allocation: None });
        }
        if !place.is_multiple_of(size.next_power_of_two()) {
            return Err(DeviceFaultKind::Misaligned { space, address, size });
        }
        Ok(place)
    }
}
