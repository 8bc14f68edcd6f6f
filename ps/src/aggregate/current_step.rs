//! The step that is being made on the step owner, and the decisions about its pushes.

use smallvec::SmallVec;

use super::clipping::BitwiseF64;
use super::data_position::DataBatch;
use crate::client_key::ClientKey;

/// The current synchronous step, or the last one while it is being applied.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CurrentStep {
    /// The admitted pushes, in order.
    admitted: Vec<AdmittedPush>,
    /// Whether the step is committed and not yet applied by every shard.
    applying: bool,
    /// The number of gradients that the step takes.
    goal: u32,
}

impl CurrentStep {
    /// Creates a step that takes `goal` gradients and has none.
    pub(crate) fn new(goal: u32) -> CurrentStep {
        CurrentStep { admitted: Vec::new(), applying: false, goal }
    }

    /// Creates the step of an earlier process: its pushes, whether it was committed, and the number
    /// of gradients that it takes.
    pub(crate) fn restored(admitted: Vec<AdmittedPush>, applying: bool, goal: u32) -> CurrentStep {
        CurrentStep { admitted, applying, goal }
    }

    /// Returns the admitted pushes, in order.
    pub(crate) fn admitted(&self) -> &[AdmittedPush] {
        &self.admitted
    }

    /// Returns whether the step is committed and some shards may not have applied it yet.
    pub(crate) fn is_applying(&self) -> bool {
        self.applying
    }

    /// Returns the number of gradients that the step takes.
    pub(crate) fn goal(&self) -> u32 {
        self.goal
    }

    /// Returns the number of admitted pushes.
    pub(super) fn len(&self) -> usize {
        self.admitted.len()
    }

    /// Returns whether no push is admitted.
    pub(super) fn is_empty(&self) -> bool {
        self.admitted.is_empty()
    }

    /// Returns whether the push of this token is admitted.
    pub(crate) fn has(&self, token: u64) -> bool {
        self.admitted.iter().any(|push| push.token == token)
    }

    /// Counts the admitted pushes of a holder.
    pub(super) fn count_of(&self, holder: ClientKey) -> usize {
        self.admitted.iter().filter(|push| push.holder == holder).count()
    }

    /// Returns whether the step takes more gradients.
    pub(super) fn has_room(&self) -> bool {
        (self.admitted.len() as u32) < self.goal
    }

    /// Sets how many gradients the step takes, of `reach` that it can get. A replica that joins
    /// during a step enlarges the next one, not this one.
    pub(super) fn set_goal(&mut self, reach: u32) {
        self.goal = if self.admitted.is_empty() { reach } else { self.goal.min(reach) };
    }

    pub(super) fn admit(&mut self, push: AdmittedPush) {
        self.admitted.push(push);
    }

    /// Commits the step if it has all its gradients. Returns whether it has.
    pub(super) fn commit(&mut self) -> bool {
        let is_whole = !self.admitted.is_empty() && !self.has_room();
        self.applying |= is_whole;
        is_whole
    }

    /// Begins the next step if this one is committed: every shard has applied it.
    pub(super) fn applied(&mut self) {
        if std::mem::take(&mut self.applying) {
            self.admitted.clear();
        }
    }

    /// Forgets the admitted pushes. Returns those whose step is not committed.
    pub(super) fn forget(&mut self) -> Vec<AdmittedPush> {
        let admitted = std::mem::take(&mut self.admitted);
        if std::mem::take(&mut self.applying) { Vec::new() } else { admitted }
    }

    /// Returns the commit of the step, whose number is `step`, while it is being applied.
    pub(super) fn committed(&self, step: u64) -> Option<CommittedStep> {
        self.applying.then(|| CommittedStep {
            step,
            tokens: self.admitted.iter().map(|push| push.token).collect(),
            factors: self.admitted.iter().map(|push| push.factor).collect(),
        })
    }
}

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
