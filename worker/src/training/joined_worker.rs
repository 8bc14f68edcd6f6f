//! [`JoinedWorker`]: a worker that has joined, and its values.

use super::local_values::LocalValues;
use crate::error::Error;
use crate::gradients::params::Params;
use crate::worker::Worker;

/// A worker that has joined, and its values.
#[derive(Debug)]
pub(super) struct JoinedWorker {
    pub(super) worker: Worker,
    pub(super) params: Params,
}

impl JoinedWorker {
    /// Averages the variables that are due after this many steps of the worker.
    pub(super) async fn average(&mut self, steps: u64) -> Result<(), Error> {
        self.worker.average(&mut self.params, steps).await
    }

    /// Gives the servers the chief's local values.
    pub(super) async fn publish(&mut self) -> Result<(), Error> {
        self.worker.publish(&self.params).await
    }

    /// Returns the replica's local values, for the next join; `None` if no variable is local.
    pub(super) fn local_values(&self) -> Option<LocalValues> {
        LocalValues::of(&self.params, self.worker.restore_epoch)
    }

    /// Takes the values that the replica had before it joined again.
    pub(super) fn take_local_values(&mut self, values: &LocalValues) {
        values.restore(&mut self.params, self.worker.restore_epoch);
    }
}
