//! The step follower: one shard's part in a synchronous step.
//!
//! A shard applies exactly what the step owner has committed, once. It decides nothing by counting
//! its own pushes.

use super::clipping::Exact;
use super::step_coordinator::{Committed, PerPush};
use crate::planted::{Bug, PlantedBugs};

/// A shard's view of the current step. Only the number of applied steps is durable, and it is
/// stored elsewhere.
///
/// Invariant: each step is applied once, after it is committed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepFollower {
    step: u64,
    committed: Option<Committed>,
    planted: PlantedBugs,
}

/// The number of whole pushes that [`Bug::CommitAlone`] takes for a committed step.
const COMMIT_ALONE_PUSHES: usize = 2;

impl StepFollower {
    /// Creates a follower that has applied `step` steps.
    pub(crate) fn new(step: u64, planted: PlantedBugs) -> StepFollower {
        StepFollower { step, committed: None, planted }
    }

    /// Returns the number of applied steps.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Records a step that the step owner has committed. Ignored unless it is the next step.
    pub(crate) fn learn(&mut self, committed: &Committed) {
        if committed.step == self.step {
            self.committed = Some(committed.clone());
        }
    }

    /// Passes the tokens of the pushes that this shard holds whole. Only [`Bug::CommitAlone`] uses
    /// them.
    pub(crate) fn whole(&mut self, tokens: impl Iterator<Item = u64>) {
        if self.planted.has(Bug::CommitAlone) {
            let tokens: PerPush<u64> = tokens.collect();
            let factors = tokens.iter().map(|_| Exact::ONE).collect();
            let committed = Committed { step: self.step, tokens, factors };
            self.committed = (committed.tokens.len() >= COMMIT_ALONE_PUSHES).then_some(committed);
        }
    }

    /// Returns the tokens of the pushes to apply now, as their mean and in this order.
    pub(crate) fn due(&self) -> Option<&[u64]> {
        self.committed.as_ref().map(|committed| &committed.tokens[..])
    }

    /// Returns the clipping factors of these pushes, in the same order.
    pub(crate) fn factors(&self) -> impl Iterator<Item = f64> {
        let factors = self.committed.iter().flat_map(|committed| &committed.factors);
        factors.map(|factor| factor.get())
    }

    /// Records that the committed step is applied.
    pub(crate) fn applied(&mut self) {
        *self = StepFollower::new(self.step + 1, self.planted);
    }
}
