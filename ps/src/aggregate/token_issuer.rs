//! The token issuer: the step owner's global step and its tokens, in either mode.
//!
//! In asynchronous mode [`AsynchronousTokens`] grants tokens and counts steps. In synchronous mode
//! [`StepCoordinator`] grants tokens and decides their outcomes. Both keep their tokens in
//! [`TokenLedger`]: the holder of each, its age and its return are the same in both modes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pushpull_common::data_set::DataSet;
use pushpull_common::ids::{ClientEpoch, GlobalStep, TokenId};
use pushpull_common::protocol::Grant;
use pushpull_common::protocol::message::EndReason;

use super::asynchronous_tokens::AsynchronousTokens;
use super::data_position::{DataBatch, DataPosition};
use super::step_coordinator::StepCoordinator;
use super::token_ledger::{HeldOn, Issued, OutstandingToken, StepState, TokenLedger};
use crate::client_key::ClientKey;

/// The answer to a request for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenResponse {
    /// A token.
    Granted(Issued),
    /// The client must wait. In asynchronous mode every remaining step is promised, or other
    /// replicas have to catch up. In synchronous mode the replica has used its share of this step
    /// or is not live, no push slot is free, or the previous step is still being applied.
    Wait,
    /// No more tokens will be granted.
    Ended(EndReason),
}

/// Grants tokens and counts steps.
///
/// Invariants: token numbers increase and are never reused; `step` decreases only when a checkpoint
/// is restored.
#[derive(Debug)]
pub(crate) enum TokenIssuer {
    Asynchronous(Box<AsynchronousTokens>),
    Synchronous(Box<StepCoordinator>),
}

impl TokenIssuer {
    /// Returns the tokens of asynchronous mode.
    pub(crate) fn asynchronous_tokens(&self) -> Option<&AsynchronousTokens> {
        match self {
            TokenIssuer::Asynchronous(tokens) => Some(tokens),
            TokenIssuer::Synchronous(_) => None,
        }
    }

    pub(crate) fn asynchronous_tokens_mut(&mut self) -> Option<&mut AsynchronousTokens> {
        match self {
            TokenIssuer::Asynchronous(tokens) => Some(tokens),
            TokenIssuer::Synchronous(_) => None,
        }
    }

    /// Returns the step coordinator of synchronous mode.
    pub(crate) fn coordinator(&self) -> Option<&StepCoordinator> {
        match self {
            TokenIssuer::Asynchronous(_) => None,
            TokenIssuer::Synchronous(coordinator) => Some(coordinator),
        }
    }

    pub(crate) fn coordinator_mut(&mut self) -> Option<&mut StepCoordinator> {
        match self {
            TokenIssuer::Asynchronous(_) => None,
            TokenIssuer::Synchronous(coordinator) => Some(coordinator),
        }
    }

    /// Returns the outstanding tokens, and the steps.
    pub(crate) fn ledger(&self) -> &TokenLedger {
        match self {
            TokenIssuer::Asynchronous(tokens) => &tokens.ledger,
            TokenIssuer::Synchronous(coordinator) => &coordinator.ledger,
        }
    }

    fn ledger_mut(&mut self) -> &mut TokenLedger {
        match self {
            TokenIssuer::Asynchronous(tokens) => &mut tokens.ledger,
            TokenIssuer::Synchronous(coordinator) => &mut coordinator.ledger,
        }
    }

    /// Returns why no more tokens are granted; `None` if they are, or if the last step is not
    /// complete.
    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.end_reason(),
            TokenIssuer::Synchronous(coordinator) => coordinator.end_reason(),
        }
    }

    /// Returns whether tokens are granted strictly in the order of the requests.
    pub(crate) fn serves_in_turn(&self) -> bool {
        self.asynchronous_tokens().is_some_and(|tokens| tokens.bounded_staleness().is_none())
    }

    /// Returns the durable state, except for the tokens of each holder.
    pub(crate) fn steps(&self) -> StepState {
        self.ledger().steps
    }

    pub(crate) fn step(&self) -> GlobalStep {
        GlobalStep(self.steps().step)
    }

    /// Resumes from the state of an earlier process.
    pub(crate) fn restore(&mut self, steps: StepState) {
        self.ledger_mut().steps = StepState { next_token: steps.next_token.max(1), ..steps };
    }

    /// Restores a token that was outstanding in an earlier process; its timeout starts again.
    /// Returns false if it cannot have been outstanding: another client holds it, or it was never
    /// granted.
    pub(crate) fn restore_token(
        &mut self,
        holder: ClientKey,
        issued: Issued,
        now: Instant,
    ) -> bool {
        let StepState { step, next_token, .. } = self.steps();
        let granted = (1..next_token).contains(&issued.token.0) && issued.step.0 <= step;
        let out = granted && self.ledger().get(issued.token.0).is_none();
        match self {
            _ if !out => false,
            TokenIssuer::Asynchronous(tokens) => {
                tokens.ledger.restore(holder, issued, now, HeldOn::new())
            }
            TokenIssuer::Synchronous(coordinator) => coordinator.restore_token(holder, issued, now),
        }
    }

    /// Takes back every token, because another restore epoch begins.
    pub(crate) fn forget_tokens(&mut self) {
        match self {
            TokenIssuer::Asynchronous(tokens) => {
                tokens.audits.clear();
                self.take_back_all(|_| true);
            }
            TokenIssuer::Synchronous(coordinator) => coordinator.forget_tokens(),
        }
    }

    /// Resets the step to that of a checkpoint. Token numbers keep increasing.
    pub(crate) fn roll_back(&mut self, step: GlobalStep) {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.roll_back(step),
            TokenIssuer::Synchronous(coordinator) => coordinator.roll_back(step.0),
        }
    }

    /// Returns whether a holder has changed since the last commit.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_changed(&self) -> bool {
        !self.ledger().changed.is_empty() || self.ledger().data_replaced
    }

    /// Appends to `all` the holders that have changed since the last call.
    pub(crate) fn append_changed(&mut self, all: &mut Vec<ClientKey>) {
        self.ledger_mut().changed.append_to(all);
    }

    /// Takes back every token that satisfies `gone`, and returns their number.
    fn take_back_all(&mut self, gone: impl Fn(&OutstandingToken) -> bool) -> usize {
        let tokens = self.ledger().numbers(gone);
        tokens.iter().for_each(|&token| self.take_back(token));
        tokens.len()
    }

    fn take_back(&mut self, token: u64) {
        match self {
            TokenIssuer::Asynchronous(tokens) => _ = tokens.take_back(token),
            TokenIssuer::Synchronous(coordinator) => _ = coordinator.take_back(token),
        }
    }

    /// Sets the data set and the position in it. Outstanding tokens lose their batches.
    pub(crate) fn set_data(&mut self, data: Option<DataPosition>) {
        let ledger = self.ledger_mut();
        let holders: Vec<ClientKey> = ledger.holders().collect();
        ledger.changed.extend(holders);
        ledger.iter_mut().for_each(|out| out.issued.batch = None);
        ledger.data = data;
        ledger.data_replaced = true;
    }

    /// Continues with more epochs of the same data. Tokens keep their batches.
    pub(crate) fn extend_data(&mut self, set: DataSet) {
        let ledger = self.ledger_mut();
        ledger.data.iter_mut().for_each(|data| data.extend(set.clone()));
        ledger.data_replaced = true;
    }

    /// Returns whether the data position has changed since the last call.
    pub(crate) fn take_data_changed(&mut self) -> bool {
        let ledger = self.ledger_mut();
        let moved = ledger.data.as_mut().is_some_and(DataPosition::take_changed);
        std::mem::take(&mut ledger.data_replaced) | moved
    }

    /// Returns the declared data set with the batches that are neither spent nor new: those that
    /// the values of a checkpoint lack.
    pub(crate) fn unspent_batches(&self) -> Option<(&DataPosition, BTreeSet<DataBatch>)> {
        let data = self.ledger().data.as_ref()?;
        let mut unspent: BTreeSet<DataBatch> = data.free().collect();
        if !data.spends_early() {
            unspent.extend(self.held_batches());
        }
        Some((data, unspent))
    }

    /// Yields the batches of outstanding tokens, and of admitted pushes whose step is not
    /// committed.
    fn held_batches(&self) -> impl Iterator<Item = DataBatch> {
        let tokens = self.ledger().iter().filter_map(|out| out.issued.batch);
        let admitted = self.coordinator().filter(|coordinator| !coordinator.current.is_applying());
        let admitted = admitted.into_iter().flat_map(|coordinator| coordinator.current.admitted());
        tokens.chain(admitted.filter_map(|push| push.batch))
    }

    /// Returns the grant of an issued token for its holder. With data it names the samples of the
    /// token's batch, and those that the holder will probably be granted next.
    pub(crate) fn grant(&mut self, holder: ClientKey, issued: Issued, push_slot: u32) -> Grant {
        let Issued { token, generation, step, batch } = issued;
        let ranks = self.coordinator().and_then(StepCoordinator::ordered_ranks);
        let mut samples = None;
        let mut ahead = None;
        if let (Some(data), Some(batch)) = (&mut self.ledger_mut().data, batch) {
            samples = Some(data.range(batch));
            ahead = data.ahead(holder, batch, ranks).map(|batch| data.range(batch));
        }
        Grant { token, generation, step, push_slot, samples, ahead }
    }

    /// Returns whether a step has been made, or a gradient is admitted to one.
    pub(crate) fn has_trained(&self) -> bool {
        let admitted = self.coordinator().is_some_and(|a| !a.current.admitted().is_empty());
        self.steps().step > 0 || admitted
    }

    /// Returns whether this client holds a token that is not being recalled.
    pub(crate) fn has_out(&self, holder: ClientKey) -> bool {
        self.ledger().of(holder).any(|issued| !self.is_recalled(issued.token))
    }

    fn is_recalled(&self, token: TokenId) -> bool {
        self.asynchronous_tokens().is_some_and(|tokens| tokens.recalls.has(token))
    }

    /// Returns a token that was granted to a client in an answer that it did not receive: one above
    /// `newest`, the newest token it knows.
    ///
    /// Tokens that satisfy `kept` are excluded: an older incarnation of the client has pushed under
    /// them. So are tokens that are being recalled, because the client cannot know that they are.
    pub(crate) fn lost_answer(
        &self,
        holder: ClientKey,
        newest: TokenId,
        kept: impl Fn(TokenId) -> bool,
    ) -> Option<Issued> {
        let unknown = |issued: &Issued| {
            issued.token > newest && !kept(issued.token) && !self.is_recalled(issued.token)
        };
        self.ledger().of(holder).find(unknown)
    }

    /// Answers a token request from the incarnation of the client that has this epoch.
    pub(crate) fn request(
        &mut self,
        holder: ClientKey,
        epoch: ClientEpoch,
        now: Instant,
    ) -> TokenResponse {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.request(holder, epoch, now),
            TokenIssuer::Synchronous(coordinator) => coordinator.request(holder, epoch, now),
        }
    }

    /// Ends an unspent token. Its batch is spent without a gradient. Returns false if the client
    /// does not hold it.
    pub(crate) fn skip(&mut self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let held = self.ledger().holds(holder, token, generation);
        match self {
            _ if !held => {}
            TokenIssuer::Asynchronous(tokens) => tokens.skip(token),
            TokenIssuer::Synchronous(coordinator) => coordinator.skip(token.0),
        }
        held
    }

    /// Takes back an unspent token. Returns false if the client does not hold it.
    pub(crate) fn give_back(&mut self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let held = self.ledger().holds(holder, token, generation);
        if held {
            self.take_back(token.0);
        }
        held
    }

    /// Takes back the tokens of a client that has left, is lost, or is fenced by a newer
    /// incarnation that replaces it. Returns the number of tokens that do not satisfy `keep`.
    ///
    /// In asynchronous mode tokens that satisfy `keep` stay: their pushes are whole and belong to
    /// the server. In synchronous mode only admitted pushes do.
    pub(crate) fn drop_client(
        &mut self,
        gone: ClientKey,
        fenced: bool,
        keep: impl Fn(TokenId) -> bool,
    ) -> usize {
        let is_lost = |out: &OutstandingToken| out.holder == gone && !keep(out.issued.token);
        if let Some(data) = &mut self.ledger_mut().data {
            data.forget(gone);
        }
        match self {
            TokenIssuer::Asynchronous(tokens) => {
                tokens.leave(gone);
                self.take_back_all(is_lost)
            }
            TokenIssuer::Synchronous(coordinator) => {
                let lost = coordinator.ledger.numbers(is_lost).len();
                match fenced {
                    true => coordinator.end_old_tokens(gone),
                    false => coordinator.lose(gone),
                }
                lost
            }
        }
    }

    /// Takes back the tokens that have been held for `timeout`, except those that satisfy `keep`.
    /// Returns their number.
    pub(crate) fn expire(
        &mut self,
        now: Instant,
        timeout: Option<Duration>,
        keep: impl Fn(TokenId) -> bool,
    ) -> usize {
        self.take_back_all(|out| out.is_expired(now, timeout) && !keep(out.issued.token))
    }

    /// Extends all time limits by a pause of this server, during which no token could be spent.
    pub(crate) fn extend_deadlines(&mut self, pause: Duration, now: Instant) {
        self.ledger_mut().extend_deadlines(pause, now);
        if let Some(tokens) = self.asynchronous_tokens_mut() {
            tokens.audits.extend_deadlines(pause, now);
        }
    }

    /// Ends training: grants no more tokens. Outstanding tokens may still be spent.
    pub(crate) fn finish(&mut self) {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.ledger.steps.finished = true,
            TokenIssuer::Synchronous(coordinator) => coordinator.finish(),
        }
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.check_invariants(),
            TokenIssuer::Synchronous(coordinator) => assert_eq!(coordinator.check(), Ok(())),
        }
        let next_token = self.steps().next_token;
        assert!(self.ledger().iter().all(|out| out.issued.token.0 < next_token));
        self.ledger().check_invariants();
        if let Some(data) = &self.ledger().data {
            data.check_invariants(self.held_batches());
        }
    }

    /// Returns whether a request of this client would have to wait.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_none_for(&self, client: ClientKey) -> bool {
        match self {
            TokenIssuer::Asynchronous(tokens) => tokens.has_none_for(client),
            TokenIssuer::Synchronous(coordinator) => {
                coordinator.denial(client) == Some(TokenResponse::Wait)
            }
        }
    }
}

#[cfg(test)]
mod tests;
