//! What a push does to a stretch of values: the same in place and on the way to another block.

use bytemuck::Pod;
use pushpull_common::tensor::{DType, Element};

use super::SLOTS_MAX;
use crate::optimizer::{ApplyAt, Optimizer, Run, StreamRun};

/// Calls a function for a number of slots, which most rules have few of: what is done for each of many
/// rows is compiled for just as many.
macro_rules! with_slots {
    ($count:expr, $slots:ident => $call:expr) => {
        match $count {
            0 => {
                const $slots: usize = 0;
                $call
            }
            1 => {
                const $slots: usize = 1;
                $call
            }
            2 => {
                const $slots: usize = 2;
                $call
            }
            3 => {
                const $slots: usize = 3;
                $call
            }
            _ => {
                const $slots: usize = SLOTS_MAX;
                $call
            }
        }
    };
}
pub(crate) use with_slots;

/// What a push does to values of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'a> {
    /// The optimizer takes the input as their gradient.
    Gradient {
        /// The rule.
        optimizer: &'a dyn Optimizer,
        /// Which update it is.
        at: ApplyAt,
        /// Their type.
        dtype: DType,
    },
    /// They become the input.
    Assign,
    /// The input is added; integers wrap.
    Add {
        /// Their type.
        dtype: DType,
    },
}

/// Values that a push changes, stretches of them that lie apart, as rows do.
pub(crate) trait Stretches {
    /// Has each of them changed, with its slots and what the push has for it.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>));
}

impl Change<'_> {
    /// How many slots change, too: the first that there are.
    pub(crate) fn slots(self) -> usize {
        match self {
            Change::Gradient { optimizer, .. } => optimizer.slots().len(),
            Change::Assign | Change::Add { .. } => 0,
        }
    }

    /// Changes values where they lie.
    pub(crate) fn in_place(self, values: &mut impl Stretches) {
        match self {
            Change::Gradient { optimizer, at, dtype } => match dtype {
                DType::F32 => {
                    optimizer.apply_runs_f32(at, &mut |change| values.each::<f32>(change));
                }
                DType::F64 => {
                    optimizer.apply_runs_f64(at, &mut |change| values.each::<f64>(change));
                }
                _ => unreachable!("only floating-point variables are trainable"),
            },
            Change::Assign => {
                values.each::<u8>(&mut |run| run.values.copy_from_slice(run.gradient))
            }
            Change::Add { dtype } => match dtype {
                DType::F32 => values.each(&mut |run| add::<f32>(run, |a, b| a + b)),
                DType::F64 => values.each(&mut |run| add::<f64>(run, |a, b| a + b)),
                DType::I64 => values.each(&mut |run| add::<i64>(run, i64::wrapping_add)),
                _ => unreachable!("a catalogue holds known types only"),
            },
        }
    }

    /// Writes what they become elsewhere; false if there is no loop for it, and nothing was
    /// written.
    pub(super) fn streamed(
        self,
        past_cache: bool,
        values: &[u8],
        values_out: &mut [u8],
        slots: &[&[u8]],
        slots_out: &mut [&mut [u8]],
        input: &[u8],
    ) -> bool {
        let Change::Gradient { optimizer, at, dtype } = self else { return false };
        match dtype {
            DType::F32 => stream::<f32>(values, values_out, slots, slots_out, input, |run| {
                optimizer.stream_f32(at, StreamRun { past_cache, ..run })
            }),
            DType::F64 => stream::<f64>(values, values_out, slots, slots_out, input, |run| {
                optimizer.stream_f64(at, StreamRun { past_cache, ..run })
            }),
            _ => false,
        }
    }
}

fn stream<T: Element>(
    values: &[u8],
    values_out: &mut [u8],
    slots: &[&[u8]],
    slots_out: &mut [&mut [u8]],
    gradient: &[u8],
    rule: impl FnOnce(StreamRun<'_, T>) -> bool,
) -> bool {
    let count = slots.len();
    let (mut from, mut out): ([&[T]; SLOTS_MAX], [&mut [T]; SLOTS_MAX]) = Default::default();
    for (index, (slot, slot_out)) in slots.iter().zip(slots_out).enumerate() {
        from[index] = bytemuck::cast_slice(slot);
        out[index] = bytemuck::cast_slice_mut(slot_out);
    }
    rule(StreamRun {
        values: bytemuck::cast_slice(values),
        values_out: bytemuck::cast_slice_mut(values_out),
        slots: &from[..count],
        slots_out: &mut out[..count],
        gradient: bytemuck::cast_slice(gradient),
        past_cache: false,
    })
}

fn add<T: Element>(run: Run<'_, T>, add: impl Fn(T, T) -> T) {
    for (value, &more) in run.values.iter_mut().zip(run.gradient) {
        *value = add(*value, more);
    }
}
