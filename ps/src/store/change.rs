//! What a push does to a stretch of values: the same in place and on the way to another block.

use pushpull_common::tensor::{DType, Element};

use super::SLOTS_MAX;
use crate::optimizer::{ApplyAt, Optimizer, Run, StreamRun};

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

/// What changes a row: its values, its slots and its input.
pub(crate) type ChangeRow<'a> = dyn FnMut(&mut [u8], &mut [&mut [u8]], &[u8]) + 'a;

impl Change<'_> {
    /// How many slots change, too: the first that there are.
    pub(crate) fn slots(self) -> usize {
        match self {
            Change::Gradient { optimizer, .. } => optimizer.slots().len(),
            Change::Assign | Change::Add { .. } => 0,
        }
    }

    pub(crate) fn in_place(self, values: &mut [u8], slots: &mut [&mut [u8]], input: &[u8]) {
        match self {
            Change::Gradient { optimizer, at, dtype } => match dtype {
                DType::F32 => {
                    run::<f32>(values, slots, input, |run| optimizer.apply_f32(at, run));
                }
                DType::F64 => {
                    run::<f64>(values, slots, input, |run| optimizer.apply_f64(at, run));
                }
                _ => unreachable!("only floating-point variables are trainable"),
            },
            Change::Assign => values.copy_from_slice(input),
            Change::Add { dtype } => match dtype {
                DType::F32 => add::<f32>(values, input, |a, b| a + b),
                DType::F64 => add::<f64>(values, input, |a, b| a + b),
                DType::I64 => add::<i64>(values, input, i64::wrapping_add),
                _ => unreachable!("a catalogue holds known types only"),
            },
        }
    }

    /// Changes rows where they lie, one by one: `rows` is called once, with what changes a row.
    pub(crate) fn each_in_place(self, rows: &mut dyn FnMut(&mut ChangeRow<'_>)) {
        match self {
            Change::Gradient { optimizer, at, dtype: DType::F32 } => {
                optimizer.apply_runs_f32(at, &mut |change| {
                    rows(&mut |values, slots, input| {
                        run::<f32>(values, slots, input, &mut *change)
                    });
                });
            }
            Change::Gradient { optimizer, at, dtype: DType::F64 } => {
                optimizer.apply_runs_f64(at, &mut |change| {
                    rows(&mut |values, slots, input| {
                        run::<f64>(values, slots, input, &mut *change)
                    });
                });
            }
            _ => rows(&mut |values, slots, input| self.in_place(values, slots, input)),
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

fn run<T: Element>(
    values: &mut [u8],
    slots: &mut [&mut [u8]],
    gradient: &[u8],
    rule: impl FnOnce(Run<'_, T>),
) {
    let count = slots.len();
    let mut typed: [&mut [T]; SLOTS_MAX] = Default::default();
    for (typed, slot) in typed.iter_mut().zip(slots) {
        *typed = bytemuck::cast_slice_mut(slot);
    }
    let slots = &mut typed[..count];
    let (values, gradient) = (bytemuck::cast_slice_mut(values), bytemuck::cast_slice(gradient));
    rule(Run { values, slots, gradient });
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

fn add<T: Element>(values: &mut [u8], bytes: &[u8], add: impl Fn(T, T) -> T) {
    let values: &mut [T] = bytemuck::cast_slice_mut(values);
    for (value, &more) in values.iter_mut().zip(bytemuck::cast_slice::<u8, T>(bytes)) {
        *value = add(*value, more);
    }
}
