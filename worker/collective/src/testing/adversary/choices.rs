//! The choices that an input encodes.

use std::time::Duration;

use pushpull_common::protocol::limits::RING_SIZE_MAX;

/// Boundary values of fields and limits, and their neighbours.
const EDGES: [u64; 10] = [
    0,
    1,
    RING_SIZE_MAX as u64 - 1,
    RING_SIZE_MAX as u64,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    u64::MAX / 2,
    u64::MAX / 2 + 1,
    u64::MAX - 1,
    u64::MAX,
];

/// Bytes that are read as choices. After the last byte every read returns 0.
#[derive(Debug)]
pub(super) struct RingChoices<'a> {
    bytes: &'a [u8],
}

impl<'a> RingChoices<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> RingChoices<'a> {
        RingChoices { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    /// Returns a number below `limit`, which is at most 256.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit.max(1)
    }

    /// Returns true once in `times`; always false when the input is used up.
    pub(super) fn one_in(&mut self, times: usize) -> bool {
        !self.is_empty() && self.below(times) == times - 1
    }

    /// Returns a number near `honest`: mostly that, sometimes anything.
    pub(super) fn around(&mut self, honest: u64) -> u64 {
        match self.below(24) {
            0 => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
            1 => EDGES[self.below(EDGES.len())],
            2 => honest.wrapping_add(1),
            3 => honest.wrapping_sub(1),
            _ => honest,
        }
    }

    /// Returns one of these values.
    pub(super) fn of<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len())]
    }

    /// Returns a span of time, around a lease.
    pub(super) fn time(&mut self, lease: Duration) -> Duration {
        self.of(&[
            Duration::ZERO,
            lease / 50,
            lease / 8,
            lease / 4,
            lease / 2,
            lease - Duration::from_nanos(1),
            lease,
            3 * lease,
        ])
    }
}
