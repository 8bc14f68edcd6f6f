//! The effect of a push on values: the same in blocks, in shadow blocks and in rows of tables.

use bytemuck::Pod;
use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::{ApplyAt, Optimizer, Run, StreamRun};

use crate::error::StorageError;

/// The maximum number of slots of an optimizer.
pub const SLOTS_MAX: usize = 8;

/// One of the arrays of equal layout that a shard stores: the values, or a slot by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredStream {
    /// The values.
    Values,
    /// The slot with this index among those of the variable's optimizer.
    Slot(usize),
}

impl StoredStream {
    /// Returns 0 for the values, and from 1 on for slots.
    pub fn number(self) -> usize {
        match self {
            StoredStream::Values => 0,
            StoredStream::Slot(index) => 1 + index,
        }
    }
}

/// Evaluates an expression with the number of slots as a constant, so that the loop over many rows
/// is compiled for that number. Most rules have few slots.
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
                const $slots: usize = $crate::change::SLOTS_MAX;
                $call
            }
        }
    };
}
pub(crate) use with_slots;

/// The effect of a push on values of one type.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// The optimizer applies the input as a gradient.
    Gradient {
        /// The optimizer of the variable.
        optimizer: &'a dyn Optimizer,
        /// The number of the update.
        at: ApplyAt,
        /// The type of the values.
        dtype: DType,
    },
    /// The input replaces the values.
    Assign,
    /// The input is added to the values; integers wrap.
    Add {
        /// The type of the values.
        dtype: DType,
    },
}

/// No block is free because all are pinned. The change continues after a pull has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoFreeBlock;

/// The reason why a change cannot begin or continue now. Nothing is lost; the change is retried.
#[derive(Debug)]
pub enum Stalled {
    /// Existing memory is pinned: see [`NoFreeBlock`].
    NoFreeBlock,
    /// New memory cannot be allocated. The change has not begun.
    Growth(Box<StorageError>),
}

impl From<NoFreeBlock> for Stalled {
    fn from(NoFreeBlock: NoFreeBlock) -> Stalled {
        Stalled::NoFreeBlock
    }
}

impl From<StorageError> for Stalled {
    fn from(error: StorageError) -> Stalled {
        Stalled::Growth(Box::new(error))
    }
}

/// Runs of values that a push changes in place. They need not be adjacent, as rows are not.
pub(crate) trait InPlaceRuns {
    /// Calls `change` with each run: its values, its slots and its input.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>));
}

/// Runs of values that a push writes to shadow blocks.
pub(crate) trait ShadowRuns {
    /// Calls `change` with each run: its values, its slots, its input and its destination.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>));
}

impl Change<'_> {
    /// Returns how many slots change. They are the first ones of each block.
    pub(crate) fn slots(self) -> usize {
        match self {
            Change::Gradient { optimizer, .. } => optimizer.slots().len(),
            Change::Assign | Change::Add { .. } => 0,
        }
    }

    /// Returns the type of the values if they are computed. Such values can be non-finite although
    /// all operands are finite.
    pub(crate) fn computed_dtype(self) -> Option<DType> {
        match self {
            Change::Gradient { dtype, .. } | Change::Add { dtype } => Some(dtype),
            Change::Assign => None,
        }
    }

    /// Changes values in place.
    pub(crate) fn in_place(self, values: &mut impl InPlaceRuns) {
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

    /// Writes the new values and slots to shadow blocks. Returns false, without calling `streams`,
    /// if there is no loop for that.
    pub(crate) fn stream(self, streams: &mut impl ShadowRuns) -> bool {
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
