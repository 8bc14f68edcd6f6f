//! Stale gradients: skips their parts, or drops them before they are applied.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{Operation, PushPart};
use pushpull_store::testing::planted::Bug;

use super::intake::Intake;
use super::output::Outputs;
use super::peers::Peers;
use super::steps::Steps;
use super::{IncomingPart, Shard};
use crate::client_key::ClientKey;

impl Shard {
    /// Drops a complete gradient if it has become too old since to be applied. Returns whether it
    /// was dropped.
    pub(super) fn drop_if_too_old(&mut self, now: Instant, push_slot: u32) -> bool {
        let (Some(owner), Some(inbox)) = (&self.steps.owner, &mut self.intake.inbox) else {
            return false;
        };
        let too_old = inbox.arrival(push_slot).is_some_and(|push| {
            let tokens = owner.asynchronous_tokens();
            push.operation == Operation::Gradient {}
                && tokens.is_some_and(|tokens| tokens.is_too_old(push.token, push.step))
        });
        if !too_old {
            return false;
        }
        let Some((client, push)) = inbox.take(push_slot) else { return false };
        let outcome = self.steps.stale_outcome(push.token);
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        true
    }
}

impl Intake {
    /// Returns whether a part belongs to a gradient that is stale as far as this shard knows, and
    /// is not worth receiving.
    pub(super) fn is_stale_part(
        &self,
        steps: &Steps,
        client: ClientKey,
        step: GlobalStep,
        part: &PushPart,
    ) -> bool {
        if part.operation != (Operation::Gradient {}) {
            return false;
        }
        match (&steps.owner, &steps.follower) {
            (Some(owner), Some(_)) if self.config.planted.has(Bug::KeyByReplica) => {
                !owner.has_out(client)
            }
            (Some(owner), Some(_)) => !owner.ledger().holds(client, part.token, part.generation),
            (None, Some(follower)) => step.0 < follower.step(),
            // A complete push owns its token, even if other parts are sent under it.
            (Some(owner), None) => {
                let tokens = owner.asynchronous_tokens();
                owner.ledger().holds(client, part.token, part.generation)
                    && tokens.is_some_and(|tokens| tokens.is_too_old(part.token, step))
                    && !self.is_whole(part.token)
            }
            (None, None) => false,
        }
    }

    /// Skips a part of a stale gradient. The last part is answered with the outcome.
    pub(super) fn skip_stale_part(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut Outputs,
        client: ClientKey,
        part: &IncomingPart,
        token: TokenId,
    ) {
        let (sequence, push_slot) = (part.request.sequence, part.push_slot);
        if let Some(inbox) = &mut self.inbox
            && inbox.find(client, sequence) == Some(push_slot)
        {
            inbox.release(push_slot);
        }
        if part.whole.is_none() {
            return;
        }
        let outcome = steps.stale_outcome(token);
        peers.registry.client_mut(client).window.settle(sequence, outcome);
        out.answer_push(part.connection, part.request, outcome, false);
    }
}
