//! The checker of a declared data set: every batch counts exactly once.

use std::collections::{BTreeMap, BTreeSet};

use pushpull_common::data_set::{DataSet, SampleRange};
use pushpull_common::protocol::Grant;

/// The batches of the tokens of a run.
#[derive(Debug, Default)]
pub(super) struct SamplesChecker {
    set: Option<DataSet>,
    /// By token: the samples from which its gradient was computed.
    of_token: BTreeMap<u64, SampleRange>,
    /// The samples that workers spent without a gradient. A worker may have been killed before the
    /// step owner knew.
    skipped: BTreeSet<SampleRange>,
}

impl SamplesChecker {
    pub(super) fn new(set: Option<DataSet>) -> SamplesChecker {
        SamplesChecker { set, ..SamplesChecker::default() }
    }

    /// Whether a data set is declared.
    pub(super) fn is_consumed(&self) -> bool {
        self.set.is_some()
    }

    pub(super) fn pushed(&mut self, token: u64, samples: Option<SampleRange>) {
        assert_eq!(samples.is_some(), self.set.is_some(), "token {token} has samples: {samples:?}");
        samples.map(|samples| self.of_token.insert(token, samples));
    }

    pub(super) fn skipped(&mut self, grant: Grant) {
        self.skipped.extend(grant.samples);
    }

    /// Records that the gradient of a token may not count on the step owner, and that its batch is
    /// not granted again.
    pub(super) fn counts_partly(&mut self, token: u64) {
        self.skipped.extend(self.of_token.get(&token));
    }

    /// Checks that the gradients of these tokens count every batch of all epochs once, except for
    /// skipped ones. `steps` is the number of gradients that count, if each makes a step: some of
    /// their tokens may then be unknown.
    pub(super) fn finish(&self, counted: impl Iterator<Item = u64>, steps: Option<u64>) {
        let Some(set) = &self.set else { return };
        let mut missing: BTreeSet<SampleRange> =
            (0..set.all_batches()).map(|batch| set.range(batch)).collect();
        for token in counted {
            let samples = self.of_token[&token];
            assert!(
                missing.remove(&samples),
                "{samples:?} of token {token} count again, or never were"
            );
        }
        match steps {
            None => {
                missing.retain(|samples| !self.skipped.contains(samples));
                assert!(missing.is_empty(), "{missing:?} never count");
            }
            Some(steps) => {
                let least = set.all_batches() - self.skipped.len() as u64;
                let possible = least..=set.all_batches();
                assert!(possible.contains(&steps), "{steps} steps for {possible:?} batches");
            }
        }
    }
}
