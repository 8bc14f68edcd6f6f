//! Casts between `f32` and the half types, on the threads of a pool.

use super::pool::{ELEMENTS_AT_ONCE, ThreadPool};
use crate::cast::Half;

impl ThreadPool {
    pub(crate) fn round<H: Half>(&self, values: &[f32], halves: &mut [H]) {
        self.for_chunks(halves, ELEMENTS_AT_ONCE, |chunk, halves| {
            let values = &values[chunk * ELEMENTS_AT_ONCE..];
            H::round(&values[..halves.len()], halves);
        });
    }

    pub(crate) fn widen<H: Half>(&self, halves: &[H], values: &mut [f32]) {
        self.for_chunks(values, ELEMENTS_AT_ONCE, |chunk, values| {
            let halves = &halves[chunk * ELEMENTS_AT_ONCE..];
            H::widen(&halves[..values.len()], values);
        });
    }
}
