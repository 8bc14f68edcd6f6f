//! Coordinators that a worker opens and closes.

use pushpull_common::ids::CoordinatorEpoch;

use super::Worker;
use crate::coordinators::OpenedCoordinator;
use crate::error::Error;

impl Worker {
    /// Opens a coordinator on all shards under a new epoch, creates or resumes it. Returns it with
    /// the effects that have settled on every shard; the calls of the others are to run, again if
    /// they were before.
    ///
    /// The name is 1 to 64 bytes long. A coordinator keeps its effects from the oldest unsettled
    /// one to the newest below [`EFFECT_WINDOW`](pushpull_common::protocol::limits::EFFECT_WINDOW),
    /// and closes at its end.
    ///
    /// # Errors
    /// [`Error::Refused`] with [`Refusal::Busy`](pushpull_common::protocol::Refusal::Busy) if a
    /// shard remembers too many coordinators, with
    /// [`Refusal::CoordinatorEpoch`](pushpull_common::protocol::Refusal::CoordinatorEpoch) if
    /// another process has opened it meanwhile, and with
    /// [`Refusal::Unsupported`](pushpull_common::protocol::Refusal::Unsupported) in synchronous
    /// mode; [`Error::NotJoined`].
    pub async fn open_coordinator(&mut self, name: &str) -> Result<OpenedCoordinator, Error> {
        let plan = self.model("open a coordinator")?.plan.clone();
        self.client.open_coordinator(&plan, name).await
    }

    /// Returns a coordinator with the effects that have settled on every shard by now.
    ///
    /// # Errors
    /// [`Error::Refused`] with
    /// [`Refusal::UnknownCoordinator`](pushpull_common::protocol::Refusal::UnknownCoordinator) if a
    /// shard does not know the coordinator; [`Error::NotJoined`].
    pub async fn settled_effects(&mut self, name: &str) -> Result<OpenedCoordinator, Error> {
        let plan = self.model("ask for settled effects")?.plan.clone();
        self.client.settled_effects(&plan, name).await
    }

    /// Closes a coordinator: every shard forgets it, and refuses late pushes of its effects. The
    /// first effect under this name has number 1 again after the next [`Worker::open_coordinator`].
    ///
    /// # Errors
    /// [`Error::Refused`] with
    /// [`Refusal::CoordinatorEpoch`](pushpull_common::protocol::Refusal::CoordinatorEpoch) if this
    /// is not the newest epoch; [`Error::NotJoined`].
    pub async fn close_coordinator(
        &mut self,
        name: &str,
        epoch: CoordinatorEpoch,
    ) -> Result<(), Error> {
        let plan = self.model("close a coordinator")?.plan.clone();
        self.client.close_coordinator(&plan, name, epoch).await
    }
}
