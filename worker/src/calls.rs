//! The calls of a coordinator: which have settled on every shard.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::call_window::CallWindow;
use pushpull_common::ids::{CallEpoch, CallNumber, CallSource, ShardId};
use pushpull_common::protocol::limits::COORDINATOR_NAME_BYTES_MAX;
use pushpull_common::protocol::message::{CallsAre, CallsQuery, CloseCalls, OpenCalls};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{CallId, CallRef, Message, Refusal};

use crate::client::SessionClient;
use crate::error::{ConfigError, Error};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::pause::Pause;

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
    /// The digests of the calls that have settled on a shard.
    pub digests: RecordedDigests,
}

/// The digests that shards have recorded of the settled calls of a coordinator
/// ([`CallRef::digest`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedDigests {
    /// The digest of call 1 and the shard that has recorded it; `None` if it is unknown.
    pub first: Option<(ShardId, u64)>,
    /// The shard that has recorded the most calls, which the other fields are about.
    pub shard: ShardId,
    /// The newest call whose digest is known; 0 if there is none.
    pub number: CallNumber,
    /// The digest of that call and of all before it.
    pub digest: u64,
}

impl RecordedDigests {
    fn of(shard: ShardId, calls: &CallsAre) -> RecordedDigests {
        let &CallsAre { first_digest, digest_of: number, digest, .. } = calls;
        let first = (first_digest != 0).then_some((shard, first_digest));
        RecordedDigests { first, shard, number, digest }
    }

    /// Returns the digest that call `number` must have, and the shard that has recorded it; `None`
    /// if any is right.
    #[doc(hidden)]
    pub fn expected(&self, number: u64) -> Option<(ShardId, u64)> {
        let of_number = (self.number.0 == number).then_some((self.shard, self.digest));
        let first = self.first.filter(|_| number == 1);
        [of_number, first].into_iter().flatten().find(|&(_, digest)| digest != 0)
    }
}

impl OpenedCalls {
    /// Returns what a push needs to count once for the call of this number. `settled` is the number
    /// up to which all calls have settled on every shard, by now. `digest` is 0 if it is unknown.
    pub fn call(&self, number: u64, settled: CallNumber, digest: u64) -> CallRef {
        let &OpenedCalls { source, epoch, .. } = self;
        CallRef { id: CallId { source, epoch, number: CallNumber(number) }, settled, digest }
    }
}

/// The name of a coordinator on the wire.
type CoordinatorName = Text<COORDINATOR_NAME_BYTES_MAX>;

/// One round of requests about the calls of a coordinator: to the step owner, which decides, and
/// then to every other shard.
///
/// **In**: the answer to each request. **Out**: the next request. The calls that the round finds
/// settled are those that have settled on every shard.
#[derive(Debug)]
pub(crate) struct CallsRound {
    name: CoordinatorName,
    kind: RoundKind,
    /// The shards that have not answered, the next one first.
    shards: VecDeque<ShardId>,
    found: Option<OpenedCalls>,
}

/// What a round requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// Opens the calls under a new epoch. Calls of older epochs are refused once all have answered.
    Open,
    /// Asks which calls have settled.
    Query,
    /// Closes the calls of this epoch. The step owner forgets them first, and then refuses every
    /// push of them, so that no late one counts on another shard.
    Close(CallEpoch),
}

impl CallsRound {
    /// Creates a round over the step owner and the shards of a plan.
    pub(crate) fn new(
        kind: RoundKind,
        name: &str,
        owner: ShardId,
        plan: &ShardingPlan,
    ) -> Result<CallsRound, Error> {
        let fits = CoordinatorName::new(name).filter(|_| !name.is_empty());
        let name = fits.ok_or_else(|| ConfigError::CoordinatorName { name: name.to_owned() })?;
        let others = plan.shards().iter().copied().filter(|&shard| shard != owner);
        let shards = std::iter::once(owner).chain(others).collect();
        Ok(CallsRound { name, kind, shards, found: None })
    }

    /// Returns the next request and its shard; `None` once every shard has answered.
    pub(crate) fn next(&self) -> Option<(ShardId, Message)> {
        let shard = *self.shards.front()?;
        let name = self.name.clone();
        let message = match self.kind {
            RoundKind::Open => {
                // The step owner assigns the epoch, and the other shards are told.
                let assigned = self.found.map(|found| (found.source, found.epoch));
                let (source, epoch) = assigned.unwrap_or((CallSource(0), CallEpoch(0)));
                OpenCalls { name, source, epoch }.into()
            }
            RoundKind::Query => CallsQuery { name }.into(),
            RoundKind::Close(epoch) => CloseCalls { name, epoch }.into(),
        };
        Some((shard, message))
    }

    /// Takes the answer of the shard that is next.
    pub(crate) fn answered(&mut self, answer: &Message) -> Result<(), Error> {
        match (self.kind, answer) {
            (RoundKind::Close(_), Message::CallsClosed(_)) => {}
            (RoundKind::Open | RoundKind::Query, Message::CallsAre(calls)) => {
                let window = CallWindow::of(calls.settled, calls.window);
                let window = window.ok_or(Error::Ended { doing: self.doing() })?;
                let &CallsAre { source, epoch, .. } = calls;
                let shard = self.shards.front().copied().unwrap_or_default();
                let digests = RecordedDigests::of(shard, calls);
                let opened = OpenedCalls { source, epoch, window, digests };
                let found = self.found.get_or_insert(opened);
                // Under another source nothing of this one has settled there.
                if source != found.source {
                    found.window = found.window.intersection(CallWindow::default());
                } else {
                    found.window = found.window.intersection(window);
                    let first = found.digests.first.or(digests.first);
                    if digests.number > found.digests.number {
                        found.digests = digests;
                    }
                    found.digests.first = first;
                }
            }
            _ => return Err(Error::Ended { doing: self.doing() }),
        }
        self.shards.pop_front();
        Ok(())
    }

    /// Returns the calls that a round without a next request has found; `None` if it has closed
    /// them.
    pub(crate) fn found(&self) -> Option<OpenedCalls> {
        self.found
    }

    /// Returns the operation, as in "cannot open calls".
    pub(crate) fn doing(&self) -> &'static str {
        match self.kind {
            RoundKind::Open => "open calls",
            RoundKind::Query => "ask for settled calls",
            RoundKind::Close(_) => "close calls",
        }
    }
}

/// The pause before a request that a shard could not judge is sent again.
const ROUND_PAUSE: Duration = Duration::from_millis(100);

impl SessionClient {
    /// Opens the calls of a coordinator on the step owner and on every shard of a plan, under a new
    /// epoch. Calls of older epochs are refused once this returns.
    pub(crate) async fn open_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCalls, Error> {
        let round = self.run_round(CallsRound::new(RoundKind::Open, name, self.owner, plan)?);
        round.await?.ok_or(Error::Ended { doing: "open calls" })
    }

    /// Returns the calls of a coordinator that have settled on the step owner and on every shard of
    /// a plan by now. The epoch is the step owner's.
    pub(crate) async fn settled_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCalls, Error> {
        let round = self.run_round(CallsRound::new(RoundKind::Query, name, self.owner, plan)?);
        round.await?.ok_or(Error::Ended { doing: "ask for settled calls" })
    }

    /// Closes the calls of a coordinator on the step owner and on every shard of a plan.
    pub(crate) async fn close_calls(
        &self,
        plan: &ShardingPlan,
        name: &str,
        epoch: CallEpoch,
    ) -> Result<(), Error> {
        let kind = RoundKind::Close(epoch);
        self.run_round(CallsRound::new(kind, name, self.owner, plan)?).await.map(|_| ())
    }

    async fn run_round(&self, mut round: CallsRound) -> Result<Option<OpenedCalls>, Error> {
        let begun = Instant::now();
        while let Some((shard, message)) = round.next() {
            let doing = round.doing();
            let timeout = self.config.timeout;
            match self.request(doing, shard, message, Bytes::new(), timeout).await {
                Ok(answer) => round.answered(&answer.0)?,
                // The shard has not heard yet of what the step owner has assigned.
                Err(Error::Refused { refusal: Refusal::Unavailable { .. }, .. })
                    if begun.elapsed() + ROUND_PAUSE < timeout =>
                {
                    Pause::new(ROUND_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(round.found())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_the_shard_that_has_recorded_it() {
        let shards = [0, 1].map(|shard| ShardId { task: 0, shard });
        // The first shard knows call 1, and the second knows more calls.
        let answers = [(8, 1, 8), (0, 5, 9)].map(|(first_digest, digest_of, digest)| CallsAre {
            source: CallSource(2),
            epoch: CallEpoch(3),
            settled: CallNumber(digest_of),
            window: 0,
            first_digest,
            digest_of: CallNumber(digest_of),
            digest,
        });
        for order in [[0, 1], [1, 0]] {
            let mut round = CallsRound {
                name: CoordinatorName::clipped("trainer"),
                kind: RoundKind::Query,
                shards: order.map(|index| shards[index]).into(),
                found: None,
            };
            for index in order {
                round.answered(&answers[index].clone().into()).unwrap();
            }
            let digests = round.found().unwrap().digests;
            assert_eq!(digests.expected(1), Some((shards[0], 8)));
            assert_eq!(digests.expected(5), Some((shards[1], 9)));
            assert_eq!(digests.expected(2), None);
        }
    }
}
