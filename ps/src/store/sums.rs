//! What values and slots hold, added up for rules that must know whole variables.

use std::ops::Range;

use pushpull_common::tensor::{DType, Element};

use super::{Change, Input, SLOTS_MAX, Store};
use crate::optimizer::{SumRun, Sums};

/// How much of what is given is added up at a time: a rule reckons some numbers for each piece, and nothing
/// is written.
const PIECE_BYTES: usize = 16 << 10;

impl Store {
    /// Adds a range, which lies within one partition and is changed by nothing yet, to the sums that
    /// the rule of this change makes of its variable. The ranges of a variable come in order.
    pub(crate) fn add_up(
        &self,
        change: Change<'_>,
        range: Range<u64>,
        mut input: Input<'_>,
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
