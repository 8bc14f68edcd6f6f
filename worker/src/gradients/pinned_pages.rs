//! Memory that devices copy from and to by themselves.

use std::ops::Range;
use std::sync::Arc;

use pushpull_device::Device;

use super::gradient_buffer::{AlignedBuffer, BufferWords, GradientBuffer};

impl AlignedBuffer {
    /// Moves the values to pages that a device copies from and to by itself, unless the system has
    /// none: copies are only slower then.
    pub(crate) fn pin(&mut self, device: &Device) {
        if let BufferWords::Heap(words) = &self.0
            && let Ok(mut pinned) = device.pinned(words.len())
        {
            pinned.copy_from_slice(words);
            self.0 = BufferWords::Pinned(Arc::new(pinned));
        }
    }
}

impl GradientBuffer {
    /// Prepares the memory of ranges for copies from a device.
    pub(crate) fn prepare_copies(&mut self, device: &Device, ranges: &[Range<usize>]) {
        for range in ranges {
            match self.locate(range).0 {
                0 => self.heap.pin(device),
                slot => self.slots[slot - 1].memory.lock_pages(device),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_values_are_those_of_the_heap() {
        let device = Device::cpu_threads(1).unwrap();
        let mut buffer = AlignedBuffer::of_bytes(20);
        buffer.bytes_mut()[19] = 7;
        buffer.pin(&device);
        assert_eq!((buffer.bytes().len(), buffer.bytes()[19]), (24, 7));
        let pinned = buffer.pinned().unwrap();
        let other = AlignedBuffer::pinned_like(pinned, 20);
        assert!(other.is_of(20) && other.pinned().is_some() && other.bytes() == [0; 24]);
        // A copy that reads the pages keeps what it reads.
        let copying = pinned.clone();
        buffer.bytes_mut()[19] = 8;
        assert!(buffer.pinned().is_none() && buffer.bytes()[19] == 8);
        let read: &[u8] = bytemuck::cast_slice(&copying);
        assert_eq!(read[19], 7);
        assert_eq!(buffer.clone().bytes(), buffer.bytes());
        buffer.pin(&device);
        buffer.resize(9);
        assert_eq!(buffer.bytes().len(), 16);
    }
}
