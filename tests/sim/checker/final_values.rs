//! [`FinalValues`]: the values after the end of the training.

use pushpull_common::ids::GlobalStep;

/// The values that the first worker has pulled after the end of the training on all workers.
#[derive(Debug, Default)]
pub(super) struct FinalValues {
    first: Option<(GlobalStep, Vec<u8>)>,
}

impl FinalValues {
    /// Checks that every worker gets the same.
    pub(super) fn pulled(&mut self, step: GlobalStep, bytes: Vec<u8>) {
        let (first_step, first) = self.first.get_or_insert_with(|| (step, bytes.clone()));
        assert_eq!(step, *first_step, "the step of the final values");
        assert!(bytes == *first, "two workers have different final values");
    }

    /// Returns whether a worker has pulled them.
    pub(super) fn are_pulled(&self) -> bool {
        self.first.is_some()
    }
}
