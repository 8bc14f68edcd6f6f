//! The tokens of asynchronous mode: the global step, the last step, bounded staleness and recalls.
//!
//! A token is granted while `step + outstanding tokens < last_step`. Every outstanding token is a
//! promised step, so the last step is exact with any number of workers. [`BoundedStaleness`]
//! optionally limits how far replicas may run ahead of each other.

use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::EndReason;
use pushpull_store::planted::{Bug, PlantedBugs};

use super::bounded_staleness::{BoundedStaleness, ReplicaProgress};
use super::data_position::BatchTaker;
use super::push_audit::PushAudits;
use super::recall::Recalls;
use super::token_issuer::TokenResponse;
use super::token_ledger::{HeldOn, OutstandingToken, StepState, TokenLedger};
use crate::client_key::ClientKey;

/// Grants tokens and counts steps in asynchronous mode.
///
/// Invariants: `step + outstanding tokens <= last_step`; recalled tokens are outstanding.
#[derive(Debug)]
pub(crate) struct AsynchronousTokens {
    pub(crate) ledger: TokenLedger,
    last_step: Option<u64>,
    /// Used with several shards.
    pub(crate) recalls: Recalls,
    /// Used with several shards.
    pub(crate) audits: PushAudits,
    /// Used if replicas may not run far ahead of each other.
    bounded_staleness: Option<BoundedStaleness>,
    /// The staleness above which a gradient is dropped.
    reject_older: Option<u64>,
    planted: PlantedBugs,
}

impl AsynchronousTokens {
    /// Creates the tokens of a training that has not begun. `wait_ahead` limits how far replicas
    /// run ahead of each other, and `reject_older` how stale a gradient may be.
    pub(crate) fn new(
        last_step: Option<u64>,
        wait_ahead: Option<u64>,
        reject_older: Option<u64>,
        planted: PlantedBugs,
    ) -> AsynchronousTokens {
        AsynchronousTokens {
            ledger: TokenLedger::new(),
            last_step,
            recalls: Recalls::default(),
            audits: PushAudits::default(),
            bounded_staleness: wait_ahead.map(BoundedStaleness::new),
            reject_older,
            planted,
        }
    }

    /// Returns the replicas' progress, if it is bounded.
    pub(crate) fn bounded_staleness(&self) -> Option<&BoundedStaleness> {
        self.bounded_staleness.as_ref()
    }

    /// Restores a replica's progress from an earlier process.
    pub(crate) fn restore_progress(&mut self, replica: ClientKey, progress: ReplicaProgress) {
        if let Some(bounded_staleness) = &mut self.bounded_staleness {
            bounded_staleness.restore(replica, progress);
        }
    }

    /// Resets the step to that of a checkpoint. Token numbers keep increasing.
    pub(crate) fn roll_back(&mut self, step: GlobalStep) {
        self.ledger.steps.step = step.0;
        self.ledger.steps.finished = false;
        self.ledger.steps.partly_applied = 0;
        self.audits.clear();
        let replicas = self.bounded_staleness.iter_mut().flat_map(BoundedStaleness::reset);
        self.ledger.changed.extend(replicas);
    }

    /// Answers a token request from the incarnation of the client that has this epoch.
    pub(crate) fn request(
        &mut self,
        holder: ClientKey,
        epoch: ClientEpoch,
        now: Instant,
    ) -> TokenResponse {
        if let Some(reason) = self.end_reason() {
            return TokenResponse::Ended(reason);
        }
        if self.bounded_staleness.as_mut().is_some_and(|bounded| bounded.enter(holder)) {
            self.ledger.changed.insert(holder);
        }
        if self.all_are_promised() || self.is_ahead(holder) {
            return TokenResponse::Wait;
        }
        let taker = BatchTaker::Client(holder);
        let issued = self.ledger.grant(holder, epoch, taker, now, HeldOn::new());
        issued.map_or(TokenResponse::Wait, TokenResponse::Granted)
    }

    /// Returns why no more tokens are granted; `None` if they are.
    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        let StepState { step, finished, .. } = self.ledger.steps;
        match self.last_step {
            _ if finished => Some(EndReason::Finished {}),
            Some(last) if step >= last => Some(EndReason::LastStep {}),
            _ if self.ledger.data_has_ended() => Some(EndReason::DataEnd {}),
            _ => None,
        }
    }

    /// Returns whether every remaining step is promised to an outstanding token.
    fn all_are_promised(&self) -> bool {
        self.ledger.steps.step + self.ledger.len() as u64 >= self.last_step.unwrap_or(u64::MAX)
    }

    /// Returns whether a replica is too far ahead of the slowest to be granted a token.
    pub(crate) fn is_ahead(&self, replica: ClientKey) -> bool {
        let making = self.ledger.count_of(replica);
        let bounded_staleness = self.bounded_staleness.as_ref();
        bounded_staleness.is_some_and(|bounded| !bounded.may_begin(replica, making))
    }

    /// Returns the current staleness of a gradient under an outstanding token: the number of steps
    /// since its values were read at step `read`. The values cannot have been read before the token
    /// was granted, so an earlier `read` counts as the step of the grant.
    pub(crate) fn staleness(&self, token: TokenId, read: GlobalStep) -> u64 {
        let step = self.ledger.steps.step;
        let granted_at = self.ledger.get(token.0).map_or(step, |out| out.issued.step.0);
        step - read.0.clamp(granted_at, step)
    }

    /// Returns whether a gradient under an outstanding token is too stale to be applied.
    pub(crate) fn is_too_old(&self, token: TokenId, read: GlobalStep) -> bool {
        self.reject_older.is_some_and(|limit| self.staleness(token, read) > limit)
    }

    /// Spends an outstanding token, and advances the step. Returns the staleness.
    pub(crate) fn spend(&mut self, token: TokenId, read: GlobalStep) -> u64 {
        let staleness = self.staleness(token, read);
        let spent = self.ledger.spend(token.0);
        self.token_ended(spent.as_ref(), true);
        self.ledger.steps.step += 1;
        staleness
    }

    /// Takes back a token whose gradient was computed but is not applied. The step does not
    /// advance, and the token's batch will be granted again.
    pub(crate) fn take_back_stale(&mut self, token: TokenId) {
        let stale = match self.planted.has(Bug::KeepStaleBatch) {
            true => self.ledger.spend(token.0),
            false => self.ledger.take_back(token.0),
        };
        self.token_ended(stale.as_ref(), true);
    }

    /// Takes back an outstanding token.
    pub(crate) fn take_back(&mut self, token: u64) -> Option<OutstandingToken> {
        let out = self.ledger.take_back(token);
        self.token_ended(out.as_ref(), false);
        out
    }

    /// Spends the batch of an outstanding token without a gradient, and ends the token.
    pub(crate) fn skip(&mut self, token: TokenId) {
        let skipped = self.ledger.spend(token.0);
        self.token_ended(skipped.as_ref(), false);
    }

    /// Ends the recall of a token, and counts its gradient if its holder has `made` one.
    fn token_ended(&mut self, out: Option<&OutstandingToken>, made: bool) {
        let Some(out) = out else { return };
        self.recalls.end(out.issued.token.0);
        if let Some(bounded_staleness) = self.bounded_staleness.as_mut().filter(|_| made) {
            bounded_staleness.made_one(out.holder);
        }
    }

    /// Stops counting the progress of a client that has left or is lost.
    pub(crate) fn leave(&mut self, gone: ClientKey) {
        if let Some(bounded_staleness) = &mut self.bounded_staleness {
            bounded_staleness.leave(gone);
            self.ledger.changed.insert(gone);
        }
    }

    /// Begins to recall the tokens whose holder is gone and those that have been held for
    /// `timeout`, except those that satisfy `keep`. Returns the tokens whose recall is new.
    pub(crate) fn recall(
        &mut self,
        now: Instant,
        timeout: Option<Duration>,
        gone: impl Fn(ClientKey) -> bool,
        keep: impl Fn(TokenId) -> bool,
    ) -> Vec<TokenId> {
        let is_due = |out: &OutstandingToken| {
            (out.is_expired(now, timeout) || gone(out.holder)) && !keep(out.issued.token)
        };
        let mut due: Vec<TokenId> = self.ledger.numbers(is_due).into_iter().map(TokenId).collect();
        due.retain(|&token| self.recalls.begin(token));
        due
    }

    /// Records a shard's answer: whether it has applied the push of a token that is being recalled.
    pub(crate) fn recall_answered(&mut self, token: TokenId, shard: ShardId, applied: bool) {
        self.recalls.answered(token, shard, applied);
    }

    /// Takes back the recalled tokens that all these shards have reported free, except those that
    /// satisfy `keep`. Returns their number.
    pub(crate) fn take_back_free(
        &mut self,
        shards: &[ShardId],
        keep: impl Fn(TokenId) -> bool,
    ) -> usize {
        let free: Vec<TokenId> = self.recalls.free(shards).filter(|&token| !keep(token)).collect();
        free.iter().filter_map(|token| self.take_back(token.0)).count()
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        if let Some(last) = self.last_step {
            assert!(self.ledger.steps.step + self.ledger.len() as u64 <= last);
        }
        let recalled = self.recalls.tokens().all(|token| self.ledger.get(token.0).is_some());
        assert!(recalled, "recalled tokens are outstanding");
    }

    /// Returns whether a request of this client would have to wait.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_none_for(&self, client: ClientKey) -> bool {
        let has_batch = self.ledger.has_batch_for(BatchTaker::Client(client));
        let waits = self.all_are_promised() || self.is_ahead(client) || !has_batch;
        waits && self.end_reason().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::token_issuer::TokenIssuer;
    use crate::aggregate::token_ledger::Issued;

    const EPOCH: ClientEpoch = ClientEpoch(3);

    fn asynchronous(owner: &mut TokenIssuer) -> &mut AsynchronousTokens {
        owner.asynchronous_tokens_mut().unwrap()
    }

    /// Plays one event, given as an operation and a client.
    fn play(owner: &mut TokenIssuer, bound: u64, operation: u8, client: u32, now: Instant) {
        let client = ClientKey(client);
        let tokens: Vec<Issued> = owner.ledger().of(client).collect();
        match (operation, tokens.first()) {
            (0..4, _) => {
                let ahead = asynchronous(owner).is_ahead(client);
                let counted = asynchronous(owner)
                    .bounded_staleness()
                    .is_some_and(|bounded_staleness| bounded_staleness.of(client).counts);
                let asked = owner.request(client, EPOCH, now);
                assert!(
                    !counted || ahead == (asked == TokenResponse::Wait),
                    "{client:?}: {asked:?}"
                );
            }
            (4..7, Some(issued)) => _ = asynchronous(owner).spend(issued.token, issued.step),
            (7, Some(issued)) => asynchronous(owner).take_back_stale(issued.token),
            (8, Some(issued)) => assert!(owner.give_back(client, issued.token, issued.generation)),
            (9, _) => _ = owner.drop_client(client, false, |_| false),
            _ => {}
        }
        owner.check_invariants();
        let tokens = owner.asynchronous_tokens().unwrap();
        let bounded_staleness = tokens.bounded_staleness().unwrap();
        let Some(slowest) = bounded_staleness.slowest() else { return };
        for client in (0..4).map(ClientKey).filter(|&client| bounded_staleness.of(client).counts) {
            let begun =
                bounded_staleness.of(client).made + owner.ledger().of(client).count() as u64;
            assert!(
                begun <= slowest + bound,
                "{client:?} has begun {begun}, the slowest {slowest}"
            );
        }
        let idle = |client: &ClientKey| owner.ledger().of(*client).count() == 0;
        assert!(
            !bounded_staleness.the_slowest().filter(idle).any(|client| tokens.is_ahead(client)),
            "the slowest replica is blocked"
        );
    }

    proptest::proptest! {
        #[test]
        fn replicas_stay_within_the_bound_and_the_slowest_is_never_blocked(
            bound in 1_u64..5,
            events in proptest::collection::vec((0_u8..10, 0_u32..4), 0..200),
        ) {
            let now = Instant::now();
            let tokens = AsynchronousTokens::new(None, Some(bound), None, PlantedBugs::default());
            let mut owner = TokenIssuer::Asynchronous(Box::new(tokens));
            for (operation, client) in events {
                play(&mut owner, bound, operation, client, now);
            }
        }
    }
}
