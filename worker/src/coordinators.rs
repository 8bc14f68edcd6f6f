//! A coordinator that is open on every shard, and which of its effects have settled on all of them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber, ShardId};
use pushpull_common::protocol::limits::COORDINATOR_NAME_BYTES_MAX;
use pushpull_common::protocol::message::{
    CloseCoordinator, CoordinatorIs, CoordinatorQuery, OpenCoordinator,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{EffectId, EffectRef, Message, Refusal};

use crate::client::SessionClient;
use crate::error::{ConfigError, Error};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::pause::Pause;

/// A coordinator that is open on every shard.
///
/// It schedules calls. The *effect* of a call is the gradient that it pushes, which counts once on
/// each shard however often the call is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedCoordinator {
    /// The id, under which the effects are numbered.
    pub coordinator: CoordinatorId,
    /// The epoch. Pushes of effects under older ones are refused.
    pub epoch: CoordinatorEpoch,
    /// The effects that have settled on every shard.
    pub window: EffectWindow,
    /// The digests of the effects that have settled on a shard.
    pub digests: RecordedDigests,
}

/// The digests that shards have recorded of the settled effects of a coordinator
/// ([`EffectRef::digest`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedDigests {
    /// The digest of effect 1 and the shard that has recorded it; `None` if it is unknown.
    pub first: Option<(ShardId, u64)>,
    /// The shard that has recorded the most effects, which the other fields are about.
    pub shard: ShardId,
    /// The newest effect whose digest is known; 0 if there is none.
    pub number: EffectNumber,
    /// The digest of that effect and of all before it.
    pub digest: u64,
}

impl RecordedDigests {
    fn of(shard: ShardId, answer: &CoordinatorIs) -> RecordedDigests {
        let &CoordinatorIs { first_digest, digest_of: number, digest, .. } = answer;
        let first = (first_digest != 0).then_some((shard, first_digest));
        RecordedDigests { first, shard, number, digest }
    }

    /// Returns the digest that effect `number` must have, and the shard that has recorded it;
    /// `None` if any is right.
    #[doc(hidden)]
    pub fn expected(&self, number: u64) -> Option<(ShardId, u64)> {
        let of_number = (self.number.0 == number).then_some((self.shard, self.digest));
        let first = self.first.filter(|_| number == 1);
        [of_number, first].into_iter().flatten().find(|&(_, digest)| digest != 0)
    }
}

impl OpenedCoordinator {
    /// Returns the effect of this number, which a push carries to count once. `settled` is the
    /// number up to which all effects have settled on every shard, by now. `digest` is 0 if it is
    /// unknown.
    pub fn effect(&self, number: u64, settled: EffectNumber, digest: u64) -> EffectRef {
        let &OpenedCoordinator { coordinator, epoch, .. } = self;
        EffectRef {
            id: EffectId { coordinator, epoch, number: EffectNumber(number) },
            settled,
            digest,
        }
    }
}

/// The name of a coordinator on the wire.
type CoordinatorName = Text<COORDINATOR_NAME_BYTES_MAX>;

/// One round of requests about a coordinator: to the step owner, which decides, and
/// then to every other shard.
///
/// **In**: the answer to each request. **Out**: the next request. The effects that the round finds
/// settled are those that have settled on every shard.
#[derive(Debug)]
pub(crate) struct CoordinatorRound {
    name: CoordinatorName,
    kind: RoundKind,
    /// The shards that have not answered, the next one first.
    shards: VecDeque<ShardId>,
    found: Option<OpenedCoordinator>,
}

/// What a round requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// Opens the coordinator under a new epoch. Older epochs are refused once all have answered.
    Open,
    /// Asks which effects have settled.
    Query,
    /// Closes the coordinator of this epoch. The step owner forgets it first, and then refuses
    /// every push of its effects, so that no late one counts on another shard.
    Close(CoordinatorEpoch),
}

impl CoordinatorRound {
    /// Creates a round over the step owner and the shards of a plan.
    pub(crate) fn new(
        kind: RoundKind,
        name: &str,
        owner: ShardId,
        plan: &ShardingPlan,
    ) -> Result<CoordinatorRound, Error> {
        let fits = CoordinatorName::new(name).filter(|_| !name.is_empty());
        let name = fits.ok_or_else(|| ConfigError::CoordinatorName { name: name.to_owned() })?;
        let others = plan.shards().iter().copied().filter(|&shard| shard != owner);
        let shards = std::iter::once(owner).chain(others).collect();
        Ok(CoordinatorRound { name, kind, shards, found: None })
    }

    /// Returns the next request and its shard; `None` once every shard has answered.
    pub(crate) fn next(&self) -> Option<(ShardId, Message)> {
        let shard = *self.shards.front()?;
        let name = self.name.clone();
        let message = match self.kind {
            RoundKind::Open => {
                // The step owner assigns the epoch, and the other shards are told.
                let assigned = self.found.map(|found| (found.coordinator, found.epoch));
                let (coordinator, epoch) =
                    assigned.unwrap_or((CoordinatorId(0), CoordinatorEpoch(0)));
                OpenCoordinator { name, coordinator, epoch }.into()
            }
            RoundKind::Query => CoordinatorQuery { name }.into(),
            RoundKind::Close(epoch) => CloseCoordinator { name, epoch }.into(),
        };
        Some((shard, message))
    }

    /// Takes the answer of the shard that is next.
    pub(crate) fn answered(&mut self, answer: &Message) -> Result<(), Error> {
        match (self.kind, answer) {
            (RoundKind::Close(_), Message::CoordinatorClosed(_)) => {}
            (RoundKind::Open | RoundKind::Query, Message::CoordinatorIs(known)) => {
                let window = EffectWindow::of(known.settled, known.window);
                let window = window.ok_or(Error::Ended { doing: self.doing() })?;
                let &CoordinatorIs { coordinator, epoch, .. } = known;
                let shard = self.shards.front().copied().unwrap_or_default();
                let digests = RecordedDigests::of(shard, known);
                let opened = OpenedCoordinator { coordinator, epoch, window, digests };
                let found = self.found.get_or_insert(opened);
                // Under another id nothing of this one has settled there.
                if coordinator != found.coordinator {
                    found.window = found.window.intersection(EffectWindow::default());
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

    /// Returns the coordinator that a round without a next request has found; `None` if it has
    /// closed it.
    pub(crate) fn found(&self) -> Option<OpenedCoordinator> {
        self.found
    }

    /// Returns the operation, as in "cannot open a coordinator".
    pub(crate) fn doing(&self) -> &'static str {
        match self.kind {
            RoundKind::Open => "open a coordinator",
            RoundKind::Query => "ask for settled effects",
            RoundKind::Close(_) => "close a coordinator",
        }
    }
}

/// The pause before a request that a shard could not judge is sent again.
const ROUND_PAUSE: Duration = Duration::from_millis(100);

impl SessionClient {
    /// Opens a coordinator on the step owner and on every shard of a plan, under a new epoch.
    /// Pushes of older epochs are refused once this returns.
    pub(crate) async fn open_coordinator(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCoordinator, Error> {
        let round = self.run_round(CoordinatorRound::new(RoundKind::Open, name, self.owner, plan)?);
        round.await?.ok_or(Error::Ended { doing: "open a coordinator" })
    }

    /// Returns a coordinator with its effects that have settled on the step owner and on every
    /// shard of a plan by now. The epoch is the step owner's.
    pub(crate) async fn settled_effects(
        &self,
        plan: &ShardingPlan,
        name: &str,
    ) -> Result<OpenedCoordinator, Error> {
        let round =
            self.run_round(CoordinatorRound::new(RoundKind::Query, name, self.owner, plan)?);
        round.await?.ok_or(Error::Ended { doing: "ask for settled effects" })
    }

    /// Closes a coordinator on the step owner and on every shard of a plan.
    pub(crate) async fn close_coordinator(
        &self,
        plan: &ShardingPlan,
        name: &str,
        epoch: CoordinatorEpoch,
    ) -> Result<(), Error> {
        let kind = RoundKind::Close(epoch);
        self.run_round(CoordinatorRound::new(kind, name, self.owner, plan)?).await.map(|_| ())
    }

    async fn run_round(
        &self,
        mut round: CoordinatorRound,
    ) -> Result<Option<OpenedCoordinator>, Error> {
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
        // The first shard knows effect 1, and the second knows more effects.
        let answers =
            [(8, 1, 8), (0, 5, 9)].map(|(first_digest, digest_of, digest)| CoordinatorIs {
                coordinator: CoordinatorId(2),
                epoch: CoordinatorEpoch(3),
                settled: EffectNumber(digest_of),
                window: 0,
                first_digest,
                digest_of: EffectNumber(digest_of),
                digest,
            });
        for order in [[0, 1], [1, 0]] {
            let mut round = CoordinatorRound {
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
