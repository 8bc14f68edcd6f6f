//! Gradients that come too late to be of use: passed over, or dropped before they are applied.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::Outcome;
use pushpull_common::protocol::message::{Operation, PushPart};

use super::replicas::ClientKey;
use super::{Part, Shard};
use crate::planted::Bug;

impl Shard {
    /// Whether a gradient comes too late to be of use, as far as this shard knows: it is not worth
    /// receiving.
    pub(super) fn comes_too_late(
        &self,
        client: ClientKey,
        step: GlobalStep,
        part: &PushPart,
    ) -> bool {
        if part.operation != (Operation::Gradient {}) {
            return false;
        }
        match (&self.owner, &self.follower) {
            (Some(owner), Some(_)) if self.config.planted.has(Bug::KeyByReplica) => {
                !owner.has_out(client)
            }
            (Some(owner), Some(_)) => !owner.holds(client, part.token, part.generation),
            (None, Some(follower)) => step.0 < follower.step(),
            // What is whole has the token, whatever else is sent under it.
            (Some(owner), None) => {
                owner.holds(client, part.token, part.generation)
                    && owner.is_too_old(part.token, step)
                    && !self.is_whole(part.token)
            }
            (None, None) => false,
        }
    }

    /// Passes over a part of a gradient that comes too late, and says so once it is whole.
    pub(super) fn pass_over(
        &mut self,
        now: Instant,
        client: ClientKey,
        part: &Part,
        token: TokenId,
    ) {
        let (sequence, push_slot) = (part.request.sequence, part.push_slot);
        if let Some(inbox) = &mut self.inbox
            && inbox.find(client, sequence) == Some(push_slot)
        {
            inbox.release(push_slot);
            self.give_parked_push_slots(now);
        }
        if part.whole.is_none() {
            return;
        }
        let outcome = self.too_late(token);
        self.replicas.client_mut(client).window.settle(sequence, outcome);
        self.answer_push(part.connection, part.request, outcome, false);
        self.grant_parked_tokens(now);
    }

    /// Drops a gradient that is whole, if other steps have been made since that leave it too old to be
    /// applied.
    pub(super) fn drop_if_too_old(&mut self, now: Instant, push_slot: u32) -> bool {
        let (Some(owner), Some(inbox)) = (&self.owner, &mut self.inbox) else { return false };
        let too_old = inbox.arrival(push_slot).is_some_and(|push| {
            push.operation == Operation::Gradient {} && owner.is_too_old(push.token, push.step)
        });
        if !too_old {
            return false;
        }
        let Some((client, push)) = inbox.take(push_slot) else { return false };
        self.drop_stale_streaming();
        let outcome = self.too_late(push.token);
        self.give_parked_push_slots(now);
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        self.grant_parked_tokens(now);
        true
    }

    /// What is said of a gradient that comes too late. In asynchronous mode its token is used up.
    fn too_late(&mut self, token: TokenId) -> Outcome {
        self.counters.gradients_stale.add(1);
        if let Some(owner) = self.owner.as_mut().filter(|_| self.follower.is_none()) {
            owner.waste(token);
        }
        Outcome::Stale { current: GlobalStep(self.committed_steps()) }
    }
}
