//! Shares values with clients of the same host and user, which read them without requests.

use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_common::shared_values::ValueCounts;

use super::{Detail, Shard, VariablesState};
use crate::error::StorageError;
use crate::store::VALUES;

impl Shard {
    /// Returns the counts that clients read beside shared values.
    pub(super) fn counts(&self) -> ValueCounts {
        ValueCounts {
            version: self.variables.version,
            gradients: self.variables.gradients,
            step: self.steps.step().0,
            serves: self.steps.served_step(),
            epoch: self.variables.epoch.0.into(),
        }
    }

    /// Handles a client's request for shared values.
    pub(super) fn share(&mut self, connection: u64, request: Envelope, kind: u16, wants: u64) {
        if let Err(refusal) = self.check_share_request(connection, kind, wants) {
            return self.out.refuse(connection, request, refusal);
        }
        let counts = self.counts();
        let VariablesState::Ready(store) = &mut self.variables.state else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        match store.share(connection, counts, &self.files.budget) {
            Ok((shared, descriptors)) => {
                self.peers.send_shared(
                    &mut self.out,
                    connection,
                    request,
                    shared.into(),
                    descriptors,
                );
            }
            Err(StorageError::DoesNotFit { need, limit }) => {
                self.out.refuse(connection, request, Refusal::DoesNotFit { need, limit });
            }
            Err(error) => {
                // The memory cannot be shared, or no descriptors are left. The client continues
                // with pulls over its connection.
                let detail = Detail::clipped(error.to_string());
                self.out.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
    }

    fn check_share_request(&self, connection: u64, kind: u16, wants: u64) -> Result<(), Refusal> {
        self.peers.check_shareable(connection, kind)?;
        match wants & VALUES {
            0 => Err(unsupported(kind, "none of the requested memory is shared")),
            _ => Ok(()),
        }
    }
}

/// Returns the refusal of shared memory. The client continues over its connection.
pub(super) fn unsupported(kind: u16, why: &str) -> Refusal {
    Refusal::Unsupported { kind, detail: Detail::clipped(why) }
}
