//! The calls of a coordinator, by a worker.

use pushpull_common::ids::CallEpoch;

use super::Worker;
use crate::calls::OpenedCalls;
use crate::error::Error;

impl Worker {
    /// Opens the calls of a coordinator on all shards under a new epoch, creates them or resumes.
    /// Returns the calls that have settled on every shard; the others are to be executed, again if
    /// they were before.
    ///
    /// The name is 1 to 64 bytes long. A coordinator keeps its calls from the oldest unsettled one
    /// to the newest below [`CALL_WINDOW`](pushpull_common::protocol::limits::CALL_WINDOW), and
    /// closes them at its end.
    ///
    /// # Errors
    /// [`Error::Refused`] with [`Refusal::Busy`](pushpull_common::protocol::Refusal::Busy) if a
    /// shard remembers too many coordinators, with
    /// [`Refusal::CallEpoch`](pushpull_common::protocol::Refusal::CallEpoch) if another coordinator
    /// has opened the calls meanwhile, and with
    /// [`Refusal::Unsupported`](pushpull_common::protocol::Refusal::Unsupported) in synchronous
    /// mode; [`Error::NotJoined`].
    pub async fn open_calls(&mut self, name: &str) -> Result<OpenedCalls, Error> {
        let plan = self.model("open calls")?.plan.clone();
        self.client.open_calls(&plan, name).await
    }

    /// Returns the calls of a coordinator that have settled on every shard by now.
    ///
    /// # Errors
    /// [`Error::Refused`] with
    /// [`Refusal::UnknownCalls`](pushpull_common::protocol::Refusal::UnknownCalls) if a shard does
    /// not know the coordinator; [`Error::NotJoined`].
    pub async fn settled_calls(&mut self, name: &str) -> Result<OpenedCalls, Error> {
        let plan = self.model("ask for settled calls")?.plan.clone();
        self.client.settled_calls(&plan, name).await
    }

    /// Closes the calls of a coordinator: every shard forgets them, and refuses late pushes of
    /// them. A call under this name has number 1 again after the next [`Worker::open_calls`].
    ///
    /// # Errors
    /// [`Error::Refused`] with
    /// [`Refusal::CallEpoch`](pushpull_common::protocol::Refusal::CallEpoch) if this is not the
    /// newest epoch; [`Error::NotJoined`].
    pub async fn close_calls(&mut self, name: &str, epoch: CallEpoch) -> Result<(), Error> {
        let plan = self.model("close calls")?.plan.clone();
        self.client.close_calls(&plan, name, epoch).await
    }
}
