//! The step follower: one shard's part in a synchronous step.
//!
//! A shard applies exactly what the step owner has committed, once. It decides nothing by counting
//! its own pushes.

use pushpull_store::planted::{Bug, PlantedBugs};

use super::clipping::BitwiseF64;
use super::current_step::{CommittedStep, PerPush};

/// A shard's view of the current step. Only the number of applied steps is durable, and it is
/// stored elsewhere.
///
/// Invariant: each step is applied once, after it is committed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepFollower {
    step: u64,
    committed: Option<CommittedStep>,
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
    pub(crate) fn receive_commit(&mut self, committed: &CommittedStep) {
        if committed.step == self.step {
            self.committed = Some(committed.clone());
        }
    }

    /// Passes the tokens of the pushes that this shard holds whole. Only [`Bug::CommitAlone`] uses
    /// them.
    pub(crate) fn report_whole(&mut self, tokens: impl Iterator<Item = u64>) {
        if self.planted.has(Bug::CommitAlone) {
            let tokens: PerPush<u64> = tokens.collect();
            let factors = tokens.iter().map(|_| BitwiseF64::ONE).collect();
            let committed = CommittedStep { step: self.step, tokens, factors };
            self.committed = (committed.tokens.len() >= COMMIT_ALONE_PUSHES).then_some(committed);
        }
    }

    /// Returns the tokens of the pushes to apply now, as their mean and in this order.
    pub(crate) fn tokens_to_apply(&self) -> Option<&[u64]> {
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
