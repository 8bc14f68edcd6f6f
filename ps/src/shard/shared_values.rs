//! Shares values with clients of the same host and user, which read them without requests.

use std::os::fd::OwnedFd;

use pushpull_common::protocol::{Message, Refusal};
use pushpull_common::shared_values::ValueCounts;
use pushpull_store::arena::Budget;

use super::steps::Steps;
use super::variables::Variables;
use super::{Detail, VariablesState};
use crate::error::StorageError;

/// Returns the refusal of shared memory. The client continues over its connection.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
}

impl Variables {
    /// Shares the values with the client of a connection. Returns the answer and the descriptors.
    pub(super) fn share(
        &mut self,
        budget: &Budget,
        steps: &Steps,
        connection: u64,
        kind: u16,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let counts = self.counts(steps);
        let VariablesState::Ready(store) = &mut self.state else {
            return Err(Refusal::NotInitialized {});
        };
        match store.share(connection, counts, budget) {
            Ok((shared, descriptors)) => Ok((shared.into(), descriptors)),
            Err(StorageError::DoesNotFit { need, limit }) => {
                Err(Refusal::DoesNotFit { need, limit })
            }
            // The memory cannot be shared, or no descriptors are left. The client continues with
            // pulls over its connection.
            Err(error) => Err(unsupported(kind, &error.to_string())),
        }
    }

    /// Returns the counts that clients read beside shared values.
    pub(super) fn counts(&self, steps: &Steps) -> ValueCounts {
        ValueCounts {
            version: self.version,
            gradients: self.gradients,
            step: steps.step().0,
            serves: steps.served_step(),
            epoch: self.epoch.0.into(),
        }
    }
}
