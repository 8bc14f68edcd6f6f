//! The step owner: counts the global step and grants tokens.
//!
//! In asynchronous mode a token is granted while `step + outstanding tokens < last_step`. Every
//! outstanding token is a promised step, so the last step is exact with any number of workers.
//! [`BoundedStaleness`] optionally limits how far replicas may run ahead of each other. In
//! synchronous mode [`StepCoordinator`] grants tokens and decides their outcomes. In both modes
//! this module keeps a token's holder, its age and its return.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::EndReason;
use smallvec::SmallVec;

use super::bounded_staleness::{BoundedStaleness, ReplicaProgress};
use super::recall::Recalls;
use super::step_coordinator::{Grant, GrantOutcome, PerPush, StepCoordinator, TokenOutcome};
use crate::client_key::ChangedClients;
use crate::client_key::ClientKey;

/// The exclusive upper bound of token numbers: durable words pack a token beside other bits.
pub(crate) const TOKEN_LIMIT: u64 = 1 << 56;

/// Returns the generation of a token: a hash of the token and of the epoch of the client that it is
/// granted to.
///
/// Every shard can compute it. A shard that grants no tokens therefore rejects a gradient whose
/// client invented its token or has it from another client. The generation is not secret.
pub(crate) fn generation_of(token: TokenId, holder: ClientEpoch) -> u32 {
    // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) mixes both into all bits.
    let mut mixed = token.0 ^ holder.0.rotate_left(32);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Generation 0 means that there is no token.
    ((mixed >> 32) as u32).max(1)
}

/// An outstanding token, as its holder receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Issued {
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    pub(crate) step: GlobalStep,
}

/// The answer to a request for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenResponse {
    /// A token.
    Granted(Issued),
    /// The client must wait: every remaining step is promised, or other replicas have to catch up.
    Wait,
    /// No more tokens will be granted.
    Ended(EndReason),
}

#[derive(Debug)]
struct OutstandingToken {
    holder: ClientKey,
    issued: Issued,
    since: Instant,
}

/// The tokens of one holder; usually only the one it trains under.
type HeldTokens = SmallVec<[u64; 4]>;

/// Grants tokens and counts steps.
///
/// Invariants: in asynchronous mode, `step + outstanding tokens <= last_step`; token numbers
/// increase and are never reused; `step` decreases only when a checkpoint is restored.
#[derive(Debug)]
pub(crate) struct StepOwner {
    step: u64,
    last_step: Option<u64>,
    finished: bool,
    next_token: u64,
    out: BTreeMap<u64, OutstandingToken>,
    /// The outstanding tokens of each holder, in ascending order.
    held: BTreeMap<ClientKey, HeldTokens>,
    /// The holders whose tokens or progress have changed since the last commit.
    changed: ChangedClients,
    token_timeout: Option<Duration>,
    /// Used in asynchronous mode with several shards.
    recalls: Recalls,
    /// Used in synchronous mode.
    coordinator: Option<StepCoordinator>,
    /// Used in asynchronous mode if replicas may not run far ahead of each other.
    bounded_staleness: Option<BoundedStaleness>,
    /// The staleness above which a gradient is dropped, in asynchronous mode.
    reject_older: Option<u64>,
}

/// The durable state of a step owner, except for its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepState {
    pub(crate) step: u64,
    pub(crate) next_token: u64,
    pub(crate) finished: bool,
}

impl StepOwner {
    pub(crate) fn new(
        last_step: Option<u64>,
        token_timeout: Option<Duration>,
        coordinator: Option<StepCoordinator>,
    ) -> Self {
        StepOwner {
            step: 0,
            last_step,
            finished: false,
            next_token: 1,
            out: BTreeMap::new(),
            held: BTreeMap::new(),
            changed: ChangedClients::default(),
            token_timeout,
            recalls: Recalls::default(),
            coordinator,
            bounded_staleness: None,
            reject_older: None,
        }
    }

    /// Limits how far replicas run ahead of each other, and how stale a gradient may be.
    pub(crate) fn with_staleness_limits(
        self,
        wait_ahead: Option<u64>,
        reject_older: Option<u64>,
    ) -> Self {
        StepOwner { bounded_staleness: wait_ahead.map(BoundedStaleness::new), reject_older, ..self }
    }

    /// Returns whether tokens are granted strictly in the order of the requests.
    pub(crate) fn serves_in_turn(&self) -> bool {
        self.coordinator.is_none() && self.bounded_staleness.is_none()
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

    /// Returns the step coordinator, in synchronous mode.
    pub(crate) fn coordinator(&self) -> Option<&StepCoordinator> {
        self.coordinator.as_ref()
    }

    /// Returns the step coordinator, in synchronous mode, for an input. Call
    /// [`StepOwner::apply_verdicts`] afterwards.
    pub(crate) fn coordinator_mut(&mut self) -> Option<&mut StepCoordinator> {
        self.coordinator.as_mut()
    }

    /// Processes the coordinator's decisions: takes back the tokens that are no longer outstanding.
    /// Returns their outcomes.
    pub(crate) fn apply_verdicts(&mut self) -> PerPush<(Grant, TokenOutcome)> {
        let Some(coordinator) = &mut self.coordinator else { return PerPush::new() };
        let verdicts = coordinator.verdicts();
        self.step = coordinator.step();
        for (grant, _) in &verdicts {
            self.take_back(grant.token);
        }
        verdicts
    }

    /// Returns the durable state, except for the tokens of each holder.
    pub(crate) fn steps(&self) -> StepState {
        let StepOwner { step, next_token, finished, .. } = *self;
        let step = self.coordinator.as_ref().map_or(step, StepCoordinator::step);
        StepState { step, next_token, finished }
    }

    /// Resumes from the state of an earlier process.
    pub(crate) fn restore(&mut self, steps: StepState) {
        let StepState { step, next_token, finished } = steps;
        (self.step, self.next_token, self.finished) = (step, next_token.max(1), finished);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.resume(self.step, self.next_token, finished);
        }
    }

    /// Takes back every token, because another restore epoch begins.
    pub(crate) fn forget_tokens(&mut self) {
        self.take_back_all(|_| true);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.reset(self.step);
        }
    }

    /// Resets the step to that of a checkpoint. Token numbers keep increasing.
    pub(crate) fn roll_back(&mut self, step: GlobalStep) {
        self.step = step.0;
        self.finished = false;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.reset(self.step);
        }
        self.changed.extend(self.bounded_staleness.iter_mut().flat_map(BoundedStaleness::reset));
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
        let granted = (1..self.next_token).contains(&issued.token.0) && issued.step.0 <= self.step;
        let out = granted && !self.out.contains_key(&issued.token.0);
        if out {
            self.give_out(holder, issued, now);
            if let Some(coordinator) = &mut self.coordinator {
                coordinator.restore_token(Grant { token: issued.token.0, holder });
            }
        }
        out
    }

    /// Returns the tokens that a client holds, in ascending order.
    pub(crate) fn tokens_of(&self, holder: ClientKey) -> impl Iterator<Item = Issued> {
        let tokens = self.held.get(&holder).into_iter().flatten();
        tokens.filter_map(|token| self.out.get(token)).map(|out| out.issued)
    }

    /// Appends to `all` the holders that have changed since the last call.
    pub(crate) fn append_changed(&mut self, all: &mut Vec<ClientKey>) {
        self.changed.append_to(all);
    }

    fn give_out(&mut self, holder: ClientKey, issued: Issued, now: Instant) {
        self.out.insert(issued.token.0, OutstandingToken { holder, issued, since: now });
        self.held.entry(holder).or_default().push(issued.token.0);
        self.changed.insert(holder);
    }

    fn take_back(&mut self, token: u64) -> Option<OutstandingToken> {
        let out = self.out.remove(&token)?;
        self.recalls.end(token);
        if let Some(tokens) = self.held.get_mut(&out.holder) {
            tokens.retain(|other| *other != token);
            if tokens.is_empty() {
                self.held.remove(&out.holder);
            }
        }
        self.changed.insert(out.holder);
        Some(out)
    }

    /// Takes back every token that satisfies `gone`, and returns their number.
    fn take_back_all(&mut self, gone: impl Fn(&OutstandingToken) -> bool) -> usize {
        let tokens: Vec<u64> =
            self.out.values().filter(|out| gone(out)).map(|out| out.issued.token.0).collect();
        tokens.iter().filter_map(|&token| self.take_back(token)).count()
    }

    /// Returns whether a step has been made, or a gradient is admitted to one.
    pub(crate) fn has_trained(&self) -> bool {
        let admitted = self.coordinator.as_ref().is_some_and(|a| !a.admitted().is_empty());
        self.steps().step > 0 || admitted
    }

    pub(crate) fn step(&self) -> GlobalStep {
        GlobalStep(self.step)
    }

    /// Returns the number of outstanding tokens.
    pub(crate) fn tokens_out(&self) -> usize {
        self.out.len()
    }

    /// Returns whether this client holds a token that is not being recalled.
    pub(crate) fn has_out(&self, holder: ClientKey) -> bool {
        self.tokens_of(holder).any(|issued| !self.recalls.has(issued.token))
    }

    /// Returns each client that holds a token, once.
    pub(crate) fn holders(&self) -> impl Iterator<Item = ClientKey> {
        self.held.keys().copied()
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
            issued.token > newest && !kept(issued.token) && !self.recalls.has(issued.token)
        };
        self.tokens_of(holder).find(unknown)
    }

    /// Answers a token request from the incarnation of the client that has this epoch.
    pub(crate) fn request(
        &mut self,
        holder: ClientKey,
        epoch: ClientEpoch,
        now: Instant,
    ) -> TokenResponse {
        let asked = match &mut self.coordinator {
            Some(coordinator) => coordinator.request_token(holder),
            None => self.request_token_asynchronous(holder),
        };
        let token = match asked {
            GrantOutcome::Granted(grant) => TokenId(grant.token),
            GrantOutcome::Wait => return TokenResponse::Wait,
            GrantOutcome::Ended if self.finished => {
                return TokenResponse::Ended(EndReason::Finished {});
            }
            GrantOutcome::Ended => return TokenResponse::Ended(EndReason::LastStep {}),
        };
        self.next_token = token.0 + 1;
        let generation = generation_of(token, epoch);
        let issued = Issued { token, generation, step: GlobalStep(self.step) };
        self.give_out(holder, issued, now);
        TokenResponse::Granted(issued)
    }

    /// Answers a token request in asynchronous mode.
    fn request_token_asynchronous(&mut self, holder: ClientKey) -> GrantOutcome {
        let last = self.last_step.unwrap_or(u64::MAX);
        if self.finished || self.step >= last {
            return GrantOutcome::Ended;
        }
        if self
            .bounded_staleness
            .as_mut()
            .is_some_and(|bounded_staleness| bounded_staleness.enter(holder))
        {
            self.changed.insert(holder);
        }
        let promised = self.step + self.out.len() as u64 >= last;
        match promised || self.is_ahead(holder) {
            true => GrantOutcome::Wait,
            false => GrantOutcome::Granted(Grant { token: self.next_token, holder }),
        }
    }

    /// Returns whether a replica is too far ahead of the slowest to be granted a token.
    pub(crate) fn is_ahead(&self, replica: ClientKey) -> bool {
        let making = self.held.get(&replica).map_or(0, |tokens| tokens.len());
        self.bounded_staleness
            .as_ref()
            .is_some_and(|bounded_staleness| !bounded_staleness.may_begin(replica, making))
    }

    /// Returns whether the client holds this token with this generation.
    pub(crate) fn holds(&self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let out = self.out.get(&token.0);
        out.is_some_and(|out| out.holder == holder && out.issued.generation == generation)
    }

    /// Returns the current staleness of a gradient under an outstanding token: the number of steps
    /// since its values were read at step `read`. The values cannot have been read before the token
    /// was granted, so an earlier `read` counts as the step of the grant.
    pub(crate) fn staleness(&self, token: TokenId, read: GlobalStep) -> u64 {
        let granted_at = self.out.get(&token.0).map_or(self.step, |out| out.issued.step.0);
        self.step - read.0.clamp(granted_at, self.step)
    }

    /// Returns whether a gradient under an outstanding token is too stale to be applied.
    pub(crate) fn is_too_old(&self, token: TokenId, read: GlobalStep) -> bool {
        self.reject_older.is_some_and(|limit| self.staleness(token, read) > limit)
    }

    /// Spends a token that [`StepOwner::holds`] has confirmed, and advances the step. Returns the
    /// staleness.
    pub(crate) fn spend(&mut self, token: TokenId, read: GlobalStep) -> u64 {
        let staleness = self.staleness(token, read);
        self.spend_without_step(token);
        self.step += 1;
        staleness
    }

    /// Takes back a token whose gradient was computed but is not applied. The step does not
    /// advance.
    pub(crate) fn spend_without_step(&mut self, token: TokenId) {
        if let (Some(out), Some(bounded_staleness)) =
            (self.take_back(token.0), &mut self.bounded_staleness)
        {
            bounded_staleness.made_one(out.holder);
        }
    }

    /// Takes back an unspent token. Returns false if the client does not hold it.
    pub(crate) fn give_back(&mut self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let held = self.holds(holder, token, generation);
        if held {
            self.take_back(token.0);
            if let Some(coordinator) = &mut self.coordinator {
                coordinator.take_back(token.0);
            }
        }
        held
    }

    /// Takes back the tokens of a client that has left or is lost, and returns their number. Tokens
    /// that satisfy `keep` stay: their pushes are whole and belong to the server.
    pub(crate) fn drop_client(&mut self, gone: ClientKey, keep: impl Fn(TokenId) -> bool) -> usize {
        self.leave(gone);
        self.take_back_all(|out| out.holder == gone && !keep(out.issued.token))
    }

    /// Stops counting the progress of a client that has left or is lost.
    pub(crate) fn leave(&mut self, gone: ClientKey) {
        if let Some(bounded_staleness) = &mut self.bounded_staleness {
            bounded_staleness.leave(gone);
            self.changed.insert(gone);
        }
    }

    /// Begins to recall the tokens whose holder is gone and those that have timed out, except those
    /// that satisfy `keep`. Returns the tokens whose recall is new.
    pub(crate) fn recall(
        &mut self,
        now: Instant,
        gone: impl Fn(ClientKey) -> bool,
        keep: impl Fn(TokenId) -> bool,
    ) -> Vec<TokenId> {
        let expired = |out: &OutstandingToken| {
            let held = now.saturating_duration_since(out.since);
            self.token_timeout.is_some_and(|timeout| held >= timeout)
        };
        let due =
            |out: &&OutstandingToken| (expired(out) || gone(out.holder)) && !keep(out.issued.token);
        let mut due: Vec<TokenId> =
            self.out.values().filter(due).map(|out| out.issued.token).collect();
        due.retain(|&token| self.recalls.begin(token, now));
        due
    }

    /// Restarts the time limit of recalls whose holders are present.
    pub(crate) fn put_off_recalls(&mut self, now: Instant, is_here: impl Fn(ClientKey) -> bool) {
        let holder = |token: TokenId| self.out.get(&token.0).map(|out| out.holder);
        self.recalls.put_off(now, |token| holder(token).is_some_and(&is_here));
    }

    /// Returns the recalls in progress.
    pub(crate) fn recalls(&self) -> &Recalls {
        &self.recalls
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

    /// Takes back the tokens that have timed out, except those that satisfy `keep`. Returns their
    /// number.
    pub(crate) fn expire(&mut self, now: Instant, keep: impl Fn(TokenId) -> bool) -> usize {
        let Some(timeout) = self.token_timeout else {
            return 0;
        };
        let expired = |out: &OutstandingToken| now.saturating_duration_since(out.since) >= timeout;
        let gone = |out: &OutstandingToken| expired(out) && !keep(out.issued.token);
        if let Some(coordinator) = &mut self.coordinator {
            for out in self.out.values().filter(|out| gone(out)) {
                coordinator.take_back(out.issued.token.0);
            }
        }
        self.take_back_all(gone)
    }

    /// Extends all time limits by a pause of this server, during which no token could be spent.
    pub(crate) fn extend_deadlines(&mut self, pause: Duration, now: Instant) {
        for out in self.out.values_mut() {
            out.since = (out.since + pause).min(now);
        }
        self.recalls.extend_deadlines(pause, now);
    }

    /// Ends training: grants no more tokens. Outstanding tokens may still be spent.
    pub(crate) fn finish(&mut self) {
        self.finished = true;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.finish();
        }
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        if let Some(coordinator) = &self.coordinator {
            assert_eq!(coordinator.check(), Ok(()));
            let out: Vec<u64> = coordinator.tokens_out().map(|grant| grant.token).collect();
            assert!(
                out.iter().eq(self.out.keys()),
                "the coordinator disagrees about outstanding tokens"
            );
        } else if let Some(last) = self.last_step {
            assert!(self.step + self.out.len() as u64 <= last);
        }
        assert!(self.out.keys().all(|&token| token < self.next_token));
        let recalled = self.recalls.tokens().all(|token| self.out.contains_key(&token.0));
        assert!(recalled, "recalled tokens are outstanding");
        let held: usize = self.held.values().map(|tokens| tokens.len()).sum();
        assert_eq!(held, self.out.len(), "every token has one holder");
    }

    /// Returns the holder of an outstanding token.
    pub(crate) fn holder_of(&self, token: TokenId) -> Option<ClientKey> {
        self.out.get(&token.0).map(|out| out.holder)
    }

    /// Returns whether a token is outstanding with this generation, for any holder.
    pub(crate) fn is_out(&self, token: TokenId, generation: u32) -> bool {
        self.out.get(&token.0).is_some_and(|out| out.issued.generation == generation)
    }

    /// Returns the outstanding tokens and their holders.
    pub(crate) fn outstanding(&self) -> impl Iterator<Item = (TokenId, ClientKey)> {
        self.out.values().map(|out| (out.issued.token, out.holder))
    }

    /// Returns whether a request of this client would have to wait.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_none_for(&self, client: ClientKey) -> bool {
        if let Some(coordinator) = &self.coordinator {
            return coordinator.clone().request_token(client) == GrantOutcome::Wait;
        }
        let last = self.last_step.unwrap_or(u64::MAX);
        let promised = self.step + self.out.len() as u64 >= last;
        !self.finished && self.step < last && (promised || self.is_ahead(client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientKey = ClientKey(0);
    const B: ClientKey = ClientKey(1);
    const EPOCH: ClientEpoch = ClientEpoch(3);

    fn granted(request: TokenResponse) -> Issued {
        match request {
            TokenResponse::Granted(issued) => issued,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_last_step_is_exact_because_outstanding_tokens_are_promised() {
        let now = Instant::now();
        let mut owner = StepOwner::new(Some(3), None, None);
        let first = granted(owner.request(A, EPOCH, now));
        let second = granted(owner.request(B, EPOCH, now));
        assert_eq!(owner.spend(first.token, GlobalStep(0)), 0);
        granted(owner.request(A, EPOCH, now));
        assert_eq!(owner.request(A, EPOCH, now), TokenResponse::Wait);
        assert_eq!(
            owner.spend(second.token, GlobalStep(0)),
            1,
            "one step passed since it was granted"
        );
        owner.check_invariants();
        // A is lost, so its token's step can be promised to another client.
        assert_eq!(owner.drop_client(A, |_| false), 1);
        let last = granted(owner.request(B, EPOCH, now));
        assert!(
            !owner.holds(A, last.token, last.generation)
                && owner.holds(B, last.token, last.generation)
        );
        owner.spend(last.token, last.step);
        assert_eq!(owner.request(A, EPOCH, now), TokenResponse::Ended(EndReason::LastStep {}));
        assert_eq!(owner.step(), GlobalStep(3));
        owner.check_invariants();
    }

    #[test]
    fn an_expired_token_is_taken_back_and_no_longer_held() {
        let start = Instant::now();
        let mut owner = StepOwner::new(Some(1), Some(Duration::from_secs(10)), None);
        let issued = granted(owner.request(A, EPOCH, start));
        let later = start + Duration::from_secs(9);
        assert_eq!(owner.expire(later, |_| false), 0);
        let later = start + Duration::from_secs(10);
        assert_eq!(owner.expire(later, |token| token == issued.token), 0, "its push is whole");
        assert_eq!(owner.expire(later, |_| false), 1);
        assert!(!owner.holds(A, issued.token, issued.generation));
        assert_ne!(
            granted(owner.request(B, EPOCH, later)).token,
            issued.token,
            "token numbers are not reused"
        );
    }

    #[test]
    fn finish_ends_grants_but_not_outstanding_tokens() {
        let now = Instant::now();
        let mut owner = StepOwner::new(None, None, None);
        let issued = granted(owner.request(A, EPOCH, now));
        owner.finish();
        assert_eq!(owner.request(B, EPOCH, now), TokenResponse::Ended(EndReason::Finished {}));
        assert!(owner.holds(A, issued.token, issued.generation));
        assert!(!owner.give_back(B, issued.token, issued.generation));
        assert_eq!(owner.spend(issued.token, issued.step), 0);
    }

    /// Plays one event, given as an operation and a client.
    fn play(owner: &mut StepOwner, bound: u64, operation: u8, client: u32, now: Instant) {
        let client = ClientKey(client);
        let tokens: Vec<Issued> = owner.tokens_of(client).collect();
        match (operation, tokens.first()) {
            (0..4, _) => {
                let ahead = owner.is_ahead(client);
                let counted = owner
                    .bounded_staleness()
                    .is_some_and(|bounded_staleness| bounded_staleness.of(client).counts);
                let asked = owner.request(client, EPOCH, now);
                assert!(
                    !counted || ahead == (asked == TokenResponse::Wait),
                    "{client:?}: {asked:?}"
                );
            }
            (4..7, Some(issued)) => _ = owner.spend(issued.token, issued.step),
            (7, Some(issued)) => owner.spend_without_step(issued.token),
            (8, Some(issued)) => assert!(owner.give_back(client, issued.token, issued.generation)),
            (9, _) => _ = owner.drop_client(client, |_| false),
            _ => {}
        }
        owner.check_invariants();
        let bounded_staleness = owner.bounded_staleness().unwrap();
        let Some(slowest) = bounded_staleness.slowest() else { return };
        for client in (0..4).map(ClientKey).filter(|&client| bounded_staleness.of(client).counts) {
            let begun = bounded_staleness.of(client).made + owner.tokens_of(client).count() as u64;
            assert!(
                begun <= slowest + bound,
                "{client:?} has begun {begun}, the slowest {slowest}"
            );
        }
        let idle = |client: &ClientKey| owner.tokens_of(*client).count() == 0;
        assert!(
            !bounded_staleness.the_slowest().filter(idle).any(|client| owner.is_ahead(client)),
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
            let mut owner = StepOwner::new(None, None, None).with_staleness_limits(Some(bound), None);
            for (operation, client) in events {
                play(&mut owner, bound, operation, client, now);
            }
        }
    }
}
