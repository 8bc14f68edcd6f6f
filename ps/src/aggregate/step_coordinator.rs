//! The step coordinator: the step owner's decisions about synchronous steps, binding for all
//! shards.
//!
//! A worker is granted a *token*: the right to contribute one gradient to the current step. When
//! every shard holds the whole push, the coordinator *admits* it permanently. When enough pushes
//! are admitted, it *commits* the step: these pushes, in this order. Tokens whose pushes were not
//! admitted are then over. The next step begins when every shard has applied this one.
//!
//! Token numbers are never reused. A push whose token is neither outstanding nor admitted is over,
//! regardless of its sender and its time of arrival. A shard that holds such a push asks the step
//! owner and learns that it is over.
//!
//! This module has no clock: the caller reports lost replicas and expired tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use pushpull_common::ids::ClientEpoch;
use pushpull_common::protocol::message::EndReason;
use pushpull_store::planted::{Bug, PlantedBugs};
use smallvec::smallvec;

use super::clipping::{self, BitwiseF64};
use super::current_step::{AdmittedPush, CommittedStep, CurrentStep, PerPush, TokenOutcome};
use super::data_position::BatchTaker;
#[cfg(test)]
use super::data_position::DataPosition;
use super::step_replicas::StepReplicas;
use super::step_rule::StepRule;
use super::token_issuer::TokenResponse;
use super::token_ledger::{Issued, OutstandingToken, TokenLedger};
use crate::client_key::ClientKey;

/// A granted token and its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grant {
    pub(crate) token: u64,
    pub(crate) holder: ClientKey,
}

/// The step owner's state of the current synchronous step.
///
/// Inputs: [`StepCoordinator::join`], [`StepCoordinator::lose`],
/// [`StepCoordinator::end_old_tokens`], [`StepCoordinator::request`] and
/// [`StepCoordinator::take_back`] from workers and their leases; [`StepCoordinator::held`] and
/// [`StepCoordinator::applied`] from shards. Outputs: [`StepCoordinator::verdicts`] for workers,
/// [`StepCoordinator::committed`] for shards.
///
/// Invariants:
///
/// - An admitted push stays admitted.
/// - Tokens are outstanding only while every shard has applied the previous step.
/// - A holder has at most [`StepRule::share`] outstanding tokens and admitted pushes in a step.
/// - There are at most [`StepRule::push_slots`] outstanding tokens and admitted pushes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepCoordinator {
    rule: StepRule,
    planted: PlantedBugs,
    shards: usize,
    /// Counts the committed steps.
    pub(crate) ledger: TokenLedger,
    /// The step that is being made or applied.
    pub(crate) current: CurrentStep,
    replicas: StepReplicas,
    /// The number of steps that each shard has applied. Not durable.
    applied: Vec<u64>,
    verdicts: PerPush<(Grant, TokenOutcome)>,
}

impl StepCoordinator {
    /// Creates a coordinator at step 0, without replicas.
    pub(crate) fn new(rule: StepRule, shards: usize, planted: PlantedBugs) -> StepCoordinator {
        StepCoordinator {
            rule,
            planted,
            shards,
            ledger: TokenLedger::new(),
            current: CurrentStep::new(rule.aggregate),
            replicas: StepReplicas::new(rule.total),
            applied: vec![0; shards],
            verdicts: PerPush::new(),
        }
    }

    /// Returns the number of committed steps.
    pub(crate) fn step(&self) -> u64 {
        self.ledger.steps.step
    }

    /// Returns whether some shard has not reported every step as applied. The next step has then
    /// not begun.
    pub(crate) fn is_behind(&self) -> bool {
        let mut behind = self.applied.iter().map(|&steps| steps < self.ledger.steps.step);
        let all = self.planted.has(Bug::BeginEarly);
        if all { behind.all(|behind| behind) } else { behind.any(|behind| behind) }
    }

    /// Returns the indices of the shards that have not reported every step as applied.
    pub(crate) fn shards_behind(&self) -> impl Iterator<Item = usize> {
        let behind =
            self.applied.iter().enumerate().filter(|&(_, &steps)| steps < self.ledger.steps.step);
        behind.map(|(shard, _)| shard)
    }

    /// Returns the indices of the shards that have not reported a push which other shards hold,
    /// each with the number of such pushes.
    pub(crate) fn shards_lacking(&self) -> impl Iterator<Item = (usize, usize)> {
        let partly = |out: &&OutstandingToken| out.held.iter().any(Option::is_some);
        let lacked = move |shard: usize| {
            self.ledger.iter().filter(partly).filter(|out| out.held[shard].is_none()).count()
        };
        (0..self.shards).map(move |shard| (shard, lacked(shard))).filter(|&(_, lacked)| lacked > 0)
    }

    /// Returns whether this replica is live.
    pub(crate) fn is_live(&self, replica: ClientKey) -> bool {
        self.replicas.is_live(replica)
    }

    /// Returns the number of expected replicas that have not joined yet.
    pub(crate) fn expects(&self) -> u32 {
        self.replicas.expected()
    }

    /// Returns whether the live and the expected replicas, with the pushes admitted so far, are too
    /// few to complete the step.
    pub(crate) fn is_short(&self) -> bool {
        !self.is_behind() && self.potential() < self.current.goal()
    }

    /// Discards the state that is not durable, as a kill does. Shards report theirs again.
    #[cfg(test)]
    pub(crate) fn restart(&mut self) {
        self.set_shards(self.shards);
        self.verdicts.clear();
        if let Some(data) = &self.ledger.data {
            let set = data.set().clone();
            let free = data.free().collect::<Vec<_>>();
            let mut data = DataPosition::restored(set, data.next(), free, self.planted);
            self.ledger
                .iter()
                .filter_map(|out| out.issued.batch)
                .for_each(|b| data.restore_held(b));
            self.ledger.data = Some(data);
        }
        self.restore_step(self.current.clone());
    }

    /// Restores the step that an earlier process was making.
    pub(crate) fn restore_step(&mut self, current: CurrentStep) {
        self.current = current;
        if self.planted.has(Bug::ForgetAdmissions) && !self.current.is_applying() {
            self.current.forget();
        }
        if let Some(data) = self.ledger.data.as_mut().filter(|_| !self.current.is_applying()) {
            let batches = self.current.admitted().iter().filter_map(|push| push.batch);
            batches.for_each(|batch| data.restore_held(batch));
        }
    }

    /// Restores the live replicas with their ranks, and all replicas that had joined. Others are
    /// still expected if no step has been committed.
    pub(crate) fn restore_live(
        &mut self,
        live: BTreeMap<ClientKey, u32>,
        seen: BTreeSet<ClientKey>,
    ) {
        self.replicas.restore(live, seen, self.ledger.steps.step == 0);
    }

    /// Stops granting tokens. The last step consists of the admitted pushes and the pushes of
    /// outstanding tokens.
    pub(crate) fn finish(&mut self) {
        self.ledger.steps.finished = true;
        self.advance();
    }

    /// Restores an outstanding token.
    ///
    /// Must be called before [`StepCoordinator::restore_step`].
    /// Returns false if its batch cannot have been granted with it.
    pub(crate) fn restore_token(
        &mut self,
        holder: ClientKey,
        issued: Issued,
        since: Instant,
    ) -> bool {
        self.ledger.restore(holder, issued, since, smallvec![None; self.shards])
    }

    /// Restarts at this step with the live replicas, because other values have been restored.
    pub(crate) fn roll_back(&mut self, step: u64) {
        self.ledger.steps.step = step;
        self.ledger.steps.finished = false;
        self.forget_tokens();
        self.advance();
    }

    /// Forgets the tokens and the admitted pushes, because another restore epoch begins.
    pub(crate) fn forget_tokens(&mut self) {
        self.ledger.clear();
        for push in self.current.forget() {
            self.ledger.put_back(push.batch);
        }
        self.applied.fill(0);
        self.verdicts.clear();
    }

    /// Sets the number of shards. Each must report again which pushes it holds.
    pub(crate) fn set_shards(&mut self, shards: usize) {
        self.shards = shards;
        self.applied = vec![0; shards];
        self.ledger.iter_mut().for_each(|out| out.held = smallvec![None; shards]);
    }

    /// Adds a replica: a new one, one that returns, or a new incarnation. `rank`, the index of its
    /// task, is its position where gradients are admitted in order.
    pub(crate) fn join(&mut self, replica: ClientKey, rank: u32) {
        self.replicas.join(replica, rank);
        self.advance();
    }

    /// Removes a replica that is lost or has left.
    pub(crate) fn lose(&mut self, replica: ClientKey) {
        self.replicas.lose(replica);
        self.end_old_tokens(replica);
    }

    /// Ends the tokens of an older incarnation of this replica. Its admitted pushes stay.
    pub(crate) fn end_old_tokens(&mut self, replica: ClientKey) {
        if !self.planted.has(Bug::KeepLostTokens) {
            self.end_tokens(|grant| grant.holder == replica);
        }
        self.advance();
    }

    /// Stops expecting the replicas that have not joined yet.
    pub(crate) fn expect_nobody(&mut self) {
        self.replicas.expect_nobody();
        self.advance();
    }

    /// Ends a token that was returned or has timed out. Returns false if it is not outstanding.
    pub(crate) fn take_back(&mut self, token: u64) -> bool {
        let ended = self.end_tokens(|grant| grant.token == token);
        self.advance();
        ended
    }

    /// Ends a token, and spends its batch without a gradient.
    pub(crate) fn skip(&mut self, token: u64) {
        if let Some(out) = self.ledger.spend(token) {
            let grant = Grant { token, holder: out.holder };
            self.verdicts.push((grant, TokenOutcome::Over));
        }
        self.advance();
    }

    /// Answers a token request from the incarnation of a replica that has this epoch.
    pub(crate) fn request(
        &mut self,
        replica: ClientKey,
        epoch: ClientEpoch,
        now: Instant,
    ) -> TokenResponse {
        if let Some(denial) = self.denial(replica) {
            return denial;
        }
        let held = smallvec![None; self.shards];
        let taker = self.taker(replica);
        let issued = self.ledger.grant(replica, epoch, taker, now, held);
        // The last batch may complete a step of fewer gradients.
        self.advance();
        issued.map_or(TokenResponse::Wait, TokenResponse::Granted)
    }

    /// Returns how a replica takes batches.
    fn taker(&self, replica: ClientKey) -> BatchTaker {
        match (self.ordered_ranks(), self.replicas.rank(replica)) {
            (Some(ranks), Some(rank)) => BatchTaker::Rank { rank, ranks },
            _ => BatchTaker::Client(replica),
        }
    }

    /// Returns the number of ranks, if gradients are admitted in rank order.
    pub(crate) fn ordered_ranks(&self) -> Option<u32> {
        self.rule.ordered.then_some(self.rule.total)
    }

    /// Returns the answer to a replica that cannot be granted a token now.
    pub(crate) fn denial(&self, replica: ClientKey) -> Option<TokenResponse> {
        if self.is_completing() {
            return Some(TokenResponse::Wait);
        }
        if let Some(reason) = self.end_reason() {
            return Some(TokenResponse::Ended(reason));
        }
        let free = self.ledger.len() + self.current.len() < self.rule.push_slots;
        let has_share = self.given_to(replica) >= self.rule.share() as usize;
        let waits = !self.is_live(replica)
            || has_share
            || !free
            || !self.ledger.has_batch_for(self.taker(replica));
        waits.then_some(TokenResponse::Wait)
    }

    /// Returns whether the values of a step are still to come. A replica that learns that training
    /// has ended must find the values of the last step.
    fn is_completing(&self) -> bool {
        self.is_behind() || self.ledger.steps.finished && !self.current.is_empty()
    }

    /// Returns why training has ended; `None` if it goes on, or if the last step is not complete.
    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        match self.ledger.steps {
            _ if self.is_completing() => None,
            steps if steps.finished => Some(EndReason::Finished {}),
            steps if self.rule.last_step.is_some_and(|last| steps.step >= last) => {
                Some(EndReason::LastStep {})
            }
            _ if self.ledger.data_has_ended() && self.current.is_empty() => {
                Some(EndReason::DataEnd {})
            }
            _ => None,
        }
    }

    /// Returns the outstanding tokens, in ascending order.
    pub(crate) fn tokens_out(&self) -> impl Iterator<Item = Grant> {
        self.ledger.iter().map(|out| Grant { token: out.issued.token.0, holder: out.holder })
    }

    /// Counts this holder's outstanding tokens and admitted pushes.
    fn given_to(&self, holder: ClientKey) -> usize {
        self.ledger.count_of(holder) + self.current.count_of(holder)
    }

    /// Records that a shard holds the whole push of this token, with the sum of the squares of its
    /// elements there. Returns false if the push is over and can be discarded.
    #[must_use]
    pub(crate) fn held(&mut self, shard: usize, token: u64, squares: BitwiseF64) -> bool {
        if let Some(out) = self.ledger.get_mut(token) {
            out.held[shard] = Some(squares);
            self.advance();
            return true;
        }
        self.is_of_use(token)
    }

    /// Returns whether the push of this token is, or may become, a part of the current step.
    pub(crate) fn is_of_use(&self, token: u64) -> bool {
        self.ledger.get(token).is_some() || self.current.has(token)
    }

    /// Records that a shard has applied `steps` steps.
    pub(crate) fn applied(&mut self, shard: usize, steps: u64) {
        self.applied[shard] = self.applied[shard].max(steps);
        self.advance();
    }

    /// Returns the outcomes of tokens that were decided since the last call.
    pub(crate) fn verdicts(&mut self) -> PerPush<(Grant, TokenOutcome)> {
        std::mem::take(&mut self.verdicts)
    }

    /// Returns the committed step that some shards may not have applied yet.
    pub(crate) fn committed(&self) -> Option<CommittedStep> {
        self.current.committed(self.ledger.steps.step.checked_sub(1)?)
    }

    /// Returns how many gradients this step can reach: those that live and expected replicas can
    /// give, and the admitted ones of absent replicas.
    fn potential(&self) -> u32 {
        let of_absent = self.current.admitted().iter().filter(|grant| !self.is_live(grant.holder));
        (self.replicas.count())
            .saturating_mul(self.rule.share())
            .saturating_add(of_absent.count() as u32)
    }

    fn end_tokens(&mut self, which: impl Fn(&Grant) -> bool) -> bool {
        let ended: PerPush<Grant> = self.tokens_out().filter(which).collect();
        for &grant in &ended {
            self.ledger.take_back(grant.token);
            self.verdicts.push((grant, TokenOutcome::Over));
        }
        !ended.is_empty()
    }

    /// Makes every decision that is possible now.
    fn advance(&mut self) {
        if self.is_behind() {
            return;
        }
        self.current.applied();
        let reach = match self.grants_no_more() {
            true => (self.current.len() + self.ledger.len()) as u32,
            false => self.rule.aggregate.min(self.potential()).max(self.rule.floor),
        };
        self.current.set_goal(reach.min(self.rule.aggregate));
        while self.current.has_room()
            && let Some(grant) = self.next_to_admit()
        {
            let Grant { token, holder } = grant;
            let Some(out) = self.ledger.admit(token) else { break };
            let factor = match self.rule.clip {
                Some(bound) => clipping::factor(bound, out.held.into_iter().flatten()),
                None => BitwiseF64::ONE,
            };
            self.current.admit(AdmittedPush { token, holder, factor, batch: out.issued.batch });
            self.verdicts.push((grant, TokenOutcome::Admitted { step: self.ledger.steps.step }));
        }
        if self.current.commit() {
            self.ledger.steps.step += 1;
            self.replicas.expect_nobody();
            for push in self.current.admitted() {
                self.ledger.spend_batch(push.batch);
            }
            if self.planted.has(Bug::KeepStaleBatch) {
                self.ledger.iter_mut().for_each(|out| out.issued.batch = None);
            }
            self.end_tokens(|_| true);
        }
    }

    /// Returns whether no replica without a token is granted one in this step, unless a batch is
    /// given back.
    pub(crate) fn grants_no_more(&self) -> bool {
        let Some(ranks) = self.ordered_ranks().filter(|_| self.ledger.data.is_some()) else {
            return self.ledger.steps.finished || self.ledger.data_is_exhausted();
        };
        let tokens = self.ledger.iter().filter_map(|out| out.issued.batch);
        let admitted = self.current.admitted().iter().filter_map(|push| push.batch);
        let given: PerPush<u64> = tokens.chain(admitted).map(|b| b.0 % u64::from(ranks)).collect();
        // A rank may run out of batches before others, if it has skipped one.
        let has_more = |rank: u32| {
            let taker = BatchTaker::Rank { rank, ranks };
            !given.contains(&u64::from(rank)) && self.ledger.has_batch_for(taker)
        };
        self.ledger.steps.finished || !(0..ranks).any(has_more)
    }

    /// Returns the push to admit next, among those that every shard holds: the one with the oldest
    /// token or, in rank order, the one with the next rank.
    fn next_to_admit(&self) -> Option<Grant> {
        let early = self.planted.has(Bug::AdmitBeforeWhole);
        let mut whole = self.ledger.iter().filter_map(|out| {
            let mut held = out.held.iter().map(Option::is_some);
            let whole = if early { held.any(|held| held) } else { held.all(|held| held) };
            whole.then_some(Grant { token: out.issued.token.0, holder: out.holder })
        });
        if !self.rule.ordered {
            return whole.next();
        }
        let next_rank = match self.grants_no_more() {
            false => Some(self.current.len() as u32),
            // A replica without a token gets none any more, so its rank is skipped.
            true => self.ledger.iter().filter_map(|out| self.replicas.rank(out.holder)).min(),
        };
        whole.find(|grant| self.replicas.rank(grant.holder) == next_rank)
    }

    /// Checks the invariants, for tests. Returns a description of the first violation.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check(&self) -> Result<(), String> {
        let out: Vec<Grant> = self.tokens_out().collect();
        let admitted = self.current.admitted();
        if self.current.is_applying() && !out.is_empty() {
            return Err(format!("tokens {out:?} are outstanding while a step is applied"));
        }
        if admitted.len() as u32 > self.rule.aggregate {
            return Err(format!("too many pushes are admitted: {admitted:?}"));
        }
        if admitted.len() + out.len() > self.rule.push_slots {
            return Err(format!("{admitted:?} and {out:?} exceed the push slots"));
        }
        for holder in self.replicas.live() {
            if self.given_to(holder) > self.rule.share() as usize {
                return Err(format!("{holder:?} exceeds its share of the step"));
            }
        }
        Ok(())
    }

    /// Returns the planted bugs.
    #[cfg(test)]
    pub(crate) fn planted(&self) -> PlantedBugs {
        self.planted
    }
}
