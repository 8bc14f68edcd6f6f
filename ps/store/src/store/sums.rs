//! Sums over whole variables, for rules that need them before they change any element.

use std::ops::Range;

use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::{SumRun, Sums};

use super::Store;
use crate::change::{Change, ChangeInput, SLOTS_MAX};

/// The size of a chunk of input to sum, in bytes. It is larger than for changes: a rule has a fixed
/// cost for each chunk, and nothing is written.
const PIECE_BYTES: usize = 16 << 10;

impl Store {
    /// Adds a range to the sums of its variable. The range must be in one partition and not yet
    /// changed; the ranges of a variable must come in order.
    pub fn add_up(
        &self,
        change: Change<'_>,
        range: Range<u64>,
        mut input: ChangeInput<'_>,
        sums: &mut Sums,
    ) {
        for (logical, within) in self.pieces_of(&range) {
            let values = self.values.blocks.read(self.values.committed_block(logical));
            let mut slots: [&[u8]; SLOTS_MAX] = Default::default();
            if let Some(pool) = self.slots.as_ref().filter(|_| change.slots() > 0) {
                let committed = pool.committed_block(logical);
                for (part, slot) in slots.iter_mut().enumerate().take(change.slots()) {
                    *slot = pool.blocks.read_part(committed, part);
                }
            }
            input.each_of::<PIECE_BYTES>(within, |within, bytes| {
                let slots = slots.map(|slot| slot.get(within.clone()).unwrap_or_default());
                change.add_up(&values[within], &slots[..change.slots()], bytes, sums);
            });
        }
    }
}

impl Change<'_> {
    fn add_up(self, values: &[u8], slots: &[&[u8]], input: &[u8], sums: &mut Sums) {
        let Change::Gradient { optimizer, at, dtype } = self else { return };
        match dtype {
            DType::F32 => {
                run(values, slots, input, |run| optimizer.sum_f32(at, run, sums));
            }
            DType::F64 => {
                run(values, slots, input, |run| optimizer.sum_f64(at, run, sums));
            }
            _ => unreachable!("only floating-point variables are trainable"),
        }
    }
}

fn run<T: Element>(
    values: &[u8],
    slots: &[&[u8]],
    gradient: &[u8],
    add_up: impl FnOnce(SumRun<'_, T>),
) {
    let mut typed: [&[T]; SLOTS_MAX] = Default::default();
    for (typed, slot) in typed.iter_mut().zip(slots) {
        *typed = bytemuck::cast_slice(slot);
    }
    let (values, gradient) = (bytemuck::cast_slice(values), bytemuck::cast_slice(gradient));
    add_up(SumRun::new(values, &typed[..slots.len()], gradient));
}
