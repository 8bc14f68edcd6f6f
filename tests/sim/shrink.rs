//! The search for a smaller scenario that still fails.

use std::collections::BTreeSet;

use crate::scenario::{Scenario, Sizes};

/// The maximum number of scenarios that one search runs.
pub(crate) const RERUNS_MAX: u32 = 60;

/// The state of a search.
struct Search<F> {
    smallest: Scenario,
    fails: F,
    reruns: u32,
}

/// Searches for a smaller scenario for which `fails` still returns true.
///
/// `faults` is the number of faults in the plan of `scenario`, and `sizes` are its sizes. Runs at
/// most [`RERUNS_MAX`] scenarios. Returns the smallest scenario found and the number of reruns.
pub(crate) fn shrink(
    scenario: &Scenario,
    faults: usize,
    sizes: Sizes,
    fails: impl FnMut(&Scenario) -> bool,
) -> (Scenario, u32) {
    let mut search = Search { smallest: scenario.clone(), fails, reruns: 0 };
    search.leave_faults_out((0..faults).collect());
    search.make_smaller(sizes);
    // A smaller cluster may fail with fewer faults.
    let left = (0..faults).filter(|fault| !search.smallest.without.contains(fault));
    search.leave_faults_out(left.collect());
    (search.smallest, search.reruns)
}

impl<F: FnMut(&Scenario) -> bool> Search<F> {
    /// Runs a smaller scenario unless the limit is reached. If it fails, it becomes the smallest.
    fn try_smaller(&mut self, smaller: Scenario) -> bool {
        if smaller == self.smallest || self.reruns == RERUNS_MAX {
            return false;
        }
        self.reruns += 1;
        let fails = (self.fails)(&smaller);
        if fails {
            self.smallest = smaller;
        }
        fails
    }

    /// Leaves faults out: all at first, then halves, down to one at a time.
    fn leave_faults_out(&mut self, mut left: Vec<usize>) {
        let mut count = left.len();
        while count > 0 {
            for chunk in left.clone().chunks(count) {
                let without = self.smallest.without.iter().chain(chunk).copied();
                let without: BTreeSet<usize> = without.collect();
                if self.try_smaller(Scenario { without, ..self.smallest.clone() }) {
                    left.retain(|fault| !chunk.contains(fault));
                }
            }
            count = if count == 1 { 0 } else { count.min(left.len()).div_ceil(2) };
        }
    }

    /// Bounds each size in turn: tries the least size, then bisects.
    fn make_smaller(&mut self, mut sizes: Sizes) {
        let mut least = Sizes::LEAST;
        for (which, (_, &mut least)) in least.named().into_iter().enumerate() {
            let mut fails = sizes.named()[which].1.to_owned();
            let mut low = least;
            while low < fails {
                let bound = if low == least { least } else { low.midpoint(fails) };
                let mut at_most = self.smallest.at_most;
                *at_most.named()[which].1 = bound;
                match self.try_smaller(Scenario { at_most, ..self.smallest.clone() }) {
                    true => fails = bound,
                    false => low = bound + 1,
                }
            }
        }
    }
}
