//! One shard's part in the step under way: it applies what the step owner has committed, once.
//!
//! A shard decides nothing by counting.

use super::clipping::Exact;
use super::step_coordinator::{Committed, PerPush};
use crate::planted::{Bug, PlantedBugs};

/// What a shard knows of the step under way. Durable, beside this: the steps applied.
///
/// Invariant: a step is applied once, after it is committed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepFollower {
    step: u64,
    committed: Option<Committed>,
    planted: PlantedBugs,
}

/// With so many whole pushes the planted bug takes a step for committed.
const ALONE: usize = 2;

impl StepFollower {
    /// After so many steps.
    pub(crate) fn new(step: u64, planted: PlantedBugs) -> StepFollower {
        StepFollower { step, committed: None, planted }
    }

    /// Steps applied.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Takes in what the step owner says.
    pub(crate) fn learn(&mut self, committed: &Committed) {
        if committed.step == self.step {
            self.committed = Some(committed.clone());
        }
    }

    /// The pushes of these tokens lie whole here: what a shard makes of it by itself is nothing.
    pub(crate) fn whole(&mut self, tokens: impl Iterator<Item = u64>) {
        if self.planted.has(Bug::CommitAlone) {
            let tokens: PerPush<u64> = tokens.collect();
            let factors = tokens.iter().map(|_| Exact::ONE).collect();
            let committed = Committed { step: self.step, tokens, factors };
            self.committed = (committed.tokens.len() >= ALONE).then_some(committed);
        }
    }

    /// The tokens of the pushes that are to be applied now, as their mean, in this order.
    pub(crate) fn due(&self) -> Option<&[u64]> {
        self.committed.as_ref().map(|committed| &committed.tokens[..])
    }

    /// What their gradients are multiplied by, in the same order.
    pub(crate) fn factors(&self) -> impl Iterator<Item = f64> {
        let factors = self.committed.iter().flat_map(|committed| &committed.factors);
        factors.map(|factor| factor.get())
    }

    /// They are applied.
    pub(crate) fn applied(&mut self) {
        *self = StepFollower::new(self.step + 1, self.planted);
    }
}
