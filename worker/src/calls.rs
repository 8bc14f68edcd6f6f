//! The calls of a coordinator: which have settled on every shard.

use bytes::Bytes;
use pushpull_common::call_window::CallWindow;
use pushpull_common::ids::{CallEpoch, CallNumber, CallSource, ShardId};
use pushpull_common::protocol::limits::COORDINATOR_NAME_BYTES_MAX;
use pushpull_common::protocol::message::{CallsAre, CallsQuery, CloseCalls, OpenCalls};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{CallId, CallRef, Message};

use crate::client::SessionClient;
use crate::error::{ConfigError, Error};
use crate::gradients::sharding_plan::ShardingPlan;

/// The calls of a coordinator, which it has opened on every shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedCalls {
    /// The number space of the calls.
    pub source: CallSource,
    /// The epoch of the coordinator. Pushes of calls under older ones are refused.
    pub epoch: CallEpoch,
    /// The calls that have settled on every shard.
    pub window: CallWindow,
}

impl OpenedCalls {
    /// Returns what a push needs to count once for the call of this number. `settled` is the number
    /// up to which all calls have settled on every shard, by now.
    pub fn call(&self, number: u64, settled: CallNumber) -> CallRef {
        let &OpenedCalls { source, epoch, .. } = self;
        CallRef { id: CallId { source, epoch, number: CallNumber(number) }, settled }
    }
}

/// The name of a coordinator on the wire.
type CoordinatorName = Text<COORDINATOR_NAME_BYTES_MAX>;

fn name_of(name: &str) -> Result<CoordinatorName, Error> {
    let fits = CoordinatorName::new(name).filter(|_| !name.is_empty());
    Ok(fits.ok_or_else(|| ConfigError::CoordinatorName { name: name.to_owned() })?)
}

impl SessionClient {
    /// Opens the calls of a coordinator on the step owner and on every shard of a plan, under a new
    /// epoch. Calls of older epochs are refused once this returns.
    pub(crate) async fn open_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCalls, Error> {
        let name = name_of(name)?;
        let (source, epoch) = (CallSource(0), CallEpoch(0));
        let open = OpenCalls { name: name.clone(), source, epoch };
        // The step owner assigns the epoch, and the other shards are told.
        let (CallsAre { source, epoch, .. }, mut window) =
            self.ask_for_calls("open calls", self.owner, open).await?;
        for shard in self.others(plan) {
            let open = OpenCalls { name: name.clone(), source, epoch };
            let (_, other) = self.ask_for_calls("open calls", shard, open).await?;
            window = window.intersection(other);
        }
        Ok(OpenedCalls { source, epoch, window })
    }

    /// Returns the calls of a coordinator that have settled on the step owner and on every shard of
    /// a plan by now. The epoch is the step owner's.
    pub(crate) async fn settled_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCalls, Error> {
        let (doing, name) = ("ask for settled calls", name_of(name)?);
        let query = CallsQuery { name: name.clone() };
        let (CallsAre { source, epoch, .. }, mut window) =
            self.ask_for_calls(doing, self.owner, query).await?;
        for shard in self.others(plan) {
            let query = CallsQuery { name: name.clone() };
            let (calls, other) = self.ask_for_calls(doing, shard, query).await?;
            // Under another source nothing of this one has settled there.
            let other = if calls.source == source { other } else { CallWindow::default() };
            window = window.intersection(other);
        }
        Ok(OpenedCalls { source, epoch, window })
    }

    /// Closes the calls of a coordinator. The step owner forgets them first, and then refuses every
    /// push of them, so that no late one counts on another shard.
    pub(crate) async fn close_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
        epoch: CallEpoch,
    ) -> Result<(), Error> {
        let (doing, name) = ("close calls", name_of(name)?);
        for shard in std::iter::once(self.owner).chain(self.others(plan)) {
            let (timeout, close) = (self.config.timeout, CloseCalls { name: name.clone(), epoch });
            match self.request(doing, shard, close, Bytes::new(), timeout).await?.0 {
                Message::CallsClosed(_) => {}
                _ => return Err(Error::Ended { doing }),
            }
        }
        Ok(())
    }

    async fn ask_for_calls(
        &self,
        doing: &'static str,
        shard: ShardId,
        message: impl Into<Message>,
    ) -> Result<(CallsAre, CallWindow), Error> {
        match self.request(doing, shard, message, Bytes::new(), self.config.timeout).await?.0 {
            Message::CallsAre(calls) => {
                let window = CallWindow::of(calls.settled, calls.window);
                window.map(|window| (calls, window)).ok_or(Error::Ended { doing })
            }
            _ => Err(Error::Ended { doing }),
        }
    }

    fn others(&self, plan: &ShardingPlan) -> impl Iterator<Item = ShardId> {
        plan.shards().iter().copied().filter(|&shard| shard != self.owner)
    }
}
