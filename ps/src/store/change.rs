//! What a push does to a stretch of values: the same in place and on the way to another block.

use bytemuck::Pod;
use pushpull_common::tensor::{DType, Element};

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
                const $slots: usize = $crate::store::SLOTS_MAX;
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

/// Values that a push changes on their way to another place.
pub(super) trait Streams {
    /// Has each stretch of them changed, with its slots and what the push has for it.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>));
}

impl Change<'_> {
    /// How many slots change, too: the first that there are.
    pub(crate) fn slots(self) -> usize {
        match self {
            Change::Gradient { optimizer, .. } => optimizer.slots().len(),
            Change::Assign | Change::Add { .. } => 0,
        }
    }

    /// The type of values that it computes, which may not be finite though what they are computed from is.
    pub(crate) fn written(self) -> Option<DType> {
        match self {
            Change::Gradient { dtype, .. } | Change::Add { dtype } => Some(dtype),
            Change::Assign => None,
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

    /// Writes what values become elsewhere, and what their slots do; false if there is no loop for that,
    /// and they were not asked for.
    pub(super) fn stream(self, streams: &mut impl Streams) -> bool {
        let Change::Gradient { optimizer, at, dtype } = self else { return false };
        match dtype {
            DType::F32 => optimizer.stream_runs_f32(at, &mut |change| streams.each::<f32>(change)),
            DType::F64 => optimizer.stream_runs_f64(at, &mut |change| streams.each::<f64>(change)),
            _ => false,
        }
    }
}

fn add<T: Element>(run: Run<'_, T>, add: impl Fn(T, T) -> T) {
    for (value, &more) in run.values.iter_mut().zip(run.gradient) {
        *value = add(*value, more);
    }
}
