//! The choices that an input encodes.

use std::time::Duration;

/// Boundary values of fields and limits, and their neighbours.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    8,
    64,
    1 << 20,
    (1 << 20) + 1,
    u32::MAX as u64,
    1 << 48,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Bytes that are read as choices. After the last byte every read returns 0.
#[derive(Debug)]
pub(super) struct ServiceChoices<'a> {
    bytes: &'a [u8],
}

impl<'a> ServiceChoices<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> ServiceChoices<'a> {
        ServiceChoices { bytes }
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

    /// Returns a number of a client: mostly small, sometimes anything.
    pub(super) fn number(&mut self) -> u64 {
        match self.below(16) {
            0 => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
            1 => EDGES[self.below(EDGES.len())],
            _ => self.below(12) as u64,
        }
    }

    /// Returns one of these values.
    pub(super) fn of<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len())]
    }

    /// Returns a span of time, around a lease.
    pub(super) fn time(&mut self, lease: Duration) -> Duration {
        self.of(&[Duration::ZERO, lease / 50, lease / 8, lease / 2, lease, 3 * lease])
    }
}
