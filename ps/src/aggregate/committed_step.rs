//! The decisions of the step owner about pushes: admitted, over, committed.

use smallvec::SmallVec;

use super::clipping::BitwiseF64;
use super::data_position::DataBatch;
use crate::client_key::ClientKey;

/// An admitted push: a permanent part of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdmittedPush {
    pub(crate) token: u64,
    pub(crate) holder: ClientKey,
    /// The clipping factor: the gradient is multiplied by it.
    pub(crate) factor: BitwiseF64,
    /// The batch of the declared data set, spent when the step is committed.
    pub(crate) batch: Option<DataBatch>,
}

/// The outcome of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TokenOutcome {
    /// Its push is a permanent part of this step.
    Admitted { step: u64 },
    /// Its step was committed without it, or the token was taken back.
    Over,
}

/// A committed step: the tokens of its pushes, in the order of their summation. The decision is
/// final and may be sent repeatedly.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CommittedStep {
    /// The step number, counted from 0.
    pub(crate) step: u64,
    pub(crate) tokens: PerPush<u64>,
    /// The clipping factor of each push.
    pub(crate) factors: PerPush<BitwiseF64>,
}

/// A list with one item per push of a step. Up to 8 items, enough for most steps, need no heap.
pub(crate) type PerPush<T> = SmallVec<[T; 8]>;
