//! The step owner: the global step, and the tokens that are the right to move it.
//!
//! In asynchronous mode a token is granted while `step + tokens out < last_step`, so that the end
//! is exact under any number of workers: every token out is a step promised. How far replicas may run
//! ahead of each other is said by [`BoundedStaleness`], if at all. In synchronous mode
//! [`StepCoordinator`] says who gets one, and what becomes of it; its holder, its time and its return are
//! kept here all the same.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::EndReason;
use smallvec::SmallVec;

use super::bounded_staleness::{BoundedStaleness, Progress};
use super::recall::Recalls;
use super::step_coordinator::{Asked, Grant, PerPush, StepCoordinator, Verdict};
use crate::shard::changed::Changed;
use crate::shard::replicas::ClientKey;

/// Token numbers stay below this: one is packed beside other bits where it is kept.
pub(crate) const TOKEN_LIMIT: u64 = 1 << 56;

/// The generation of a token: a number made of the token and of the epoch of the client that it is
/// granted to.
///
/// Every shard can make it, so that a shard which grants no tokens refuses a gradient whose client has
/// made its token up or has it from another client. It is no secret.
pub(crate) fn generation_of(token: TokenId, holder: ClientEpoch) -> u32 {
    // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) spreads both over all bits.
    let mut mixed = token.0 ^ holder.0.rotate_left(32);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Without a token the generation is 0.
    ((mixed >> 32) as u32).max(1)
}

/// A token that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Issued {
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    pub(crate) step: GlobalStep,
}

/// What a request for a token meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// A token.
    Granted(Issued),
    /// Every remaining step is promised, or others have to catch up; wait.
    Wait,
    /// There will be no more.
    Ended(EndReason),
}

#[derive(Debug)]
struct Out {
    holder: ClientKey,
    issued: Issued,
    since: Instant,
}

/// The tokens of a holder: mostly the one it trains under.
type Tokens = SmallVec<[u64; 4]>;

/// Grants tokens and counts steps.
///
/// Invariants: in asynchronous mode, `step + out <= last_step`; token ids rise and are never reused; `step` never falls.
#[derive(Debug)]
pub(crate) struct StepOwner {
    step: u64,
    last_step: Option<u64>,
    finished: bool,
    next_token: u64,
    out: BTreeMap<u64, Out>,
    /// The tokens that are out, by their holders, in rising order.
    held: BTreeMap<ClientKey, Tokens>,
    /// The holders whose tokens have changed since the last commit.
    changed: Changed,
    token_timeout: Option<Duration>,
    /// In asynchronous mode, where there are other shards.
    recalls: Recalls,
    /// In synchronous mode.
    coordinator: Option<StepCoordinator>,
    /// In asynchronous mode, if nobody may run far ahead of the others.
    bounded_staleness: Option<BoundedStaleness>,
    /// In asynchronous mode, if a gradient that is staler than this is dropped.
    reject_older: Option<u64>,
}

/// What a step owner remembers across a restart, its tokens aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steps {
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
            changed: Changed::default(),
            token_timeout,
            recalls: Recalls::default(),
            coordinator,
            bounded_staleness: None,
            reject_older: None,
        }
    }

    /// Bounds how far replicas run ahead of each other, and how stale a gradient may be.
    pub(crate) fn bounded(self, wait_ahead: Option<u64>, reject_older: Option<u64>) -> Self {
        StepOwner { bounded_staleness: wait_ahead.map(BoundedStaleness::new), reject_older, ..self }
    }

    /// Whether whoever has waited longest for a token is the next to get one.
    pub(crate) fn serves_in_turn(&self) -> bool {
        self.coordinator.is_none() && self.bounded_staleness.is_none()
    }

    /// How far replicas are, if that matters.
    pub(crate) fn bounded_staleness(&self) -> Option<&BoundedStaleness> {
        self.bounded_staleness.as_ref()
    }

    /// Puts back how far a replica was when an earlier process stopped.
    pub(crate) fn restore_progress(&mut self, replica: ClientKey, progress: Progress) {
        if let Some(bounded_staleness) = &mut self.bounded_staleness {
            bounded_staleness.restore(replica, progress);
        }
    }

    /// What makes a step, in synchronous mode.
    pub(crate) fn coordinator(&self) -> Option<&StepCoordinator> {
        self.coordinator.as_ref()
    }

    /// The same, to be told something: what it decides is taken in by [`StepOwner::decided`].
    pub(crate) fn coordinator_mut(&mut self) -> Option<&mut StepCoordinator> {
        self.coordinator.as_mut()
    }

    /// Takes in what was decided in synchronous mode: tokens that are no longer out.
    pub(crate) fn decided(&mut self) -> PerPush<(Grant, Verdict)> {
        let Some(coordinator) = &mut self.coordinator else { return PerPush::new() };
        let verdicts = coordinator.verdicts();
        self.step = coordinator.step();
        for (grant, _) in &verdicts {
            self.take_back(grant.token);
        }
        verdicts
    }

    /// What is to be remembered, beside the tokens of each holder.
    pub(crate) fn steps(&self) -> Steps {
        let StepOwner { step, next_token, finished, .. } = *self;
        let step = self.coordinator.as_ref().map_or(step, StepCoordinator::step);
        Steps { step, next_token, finished }
    }

    /// Goes on where an earlier process stopped.
    pub(crate) fn restore(&mut self, steps: Steps) {
        let Steps { step, next_token, finished } = steps;
        (self.step, self.next_token, self.finished) = (step, next_token.max(1), finished);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.resume(self.step, self.next_token, finished);
        }
    }

    /// Takes back every token: another restore epoch begins.
    pub(crate) fn forget_tokens(&mut self) {
        self.take_back_all(|_| true);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.reset(self.step);
        }
    }

    /// Goes back to the step of a checkpoint. Token ids go on.
    pub(crate) fn go_back(&mut self, step: GlobalStep) {
        self.step = step.0;
        self.finished = false;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.reset(self.step);
        }
        self.changed.extend(self.bounded_staleness.iter_mut().flat_map(BoundedStaleness::reset));
    }

    /// Puts a token back that was out when an earlier process stopped; its time starts anew. False
    /// if it cannot have been out: it is out to another, or was never granted.
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

    /// The tokens that a client holds, in rising order.
    pub(crate) fn tokens_of(&self, holder: ClientKey) -> impl Iterator<Item = Issued> {
        let tokens = self.held.get(&holder).into_iter().flatten();
        tokens.filter_map(|token| self.out.get(token)).map(|out| out.issued)
    }

    /// Puts the holders whose tokens have changed since this was last asked behind others.
    pub(crate) fn append_changed(&mut self, all: &mut Vec<ClientKey>) {
        self.changed.append_to(all);
    }

    fn give_out(&mut self, holder: ClientKey, issued: Issued, now: Instant) {
        self.out.insert(issued.token.0, Out { holder, issued, since: now });
        self.held.entry(holder).or_default().push(issued.token.0);
        self.changed.insert(holder);
    }

    fn take_back(&mut self, token: u64) -> Option<Out> {
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

    /// Takes back every token that `gone` says; how many there were.
    fn take_back_all(&mut self, gone: impl Fn(&Out) -> bool) -> usize {
        let tokens: Vec<u64> =
            self.out.values().filter(|out| gone(out)).map(|out| out.issued.token.0).collect();
        tokens.iter().filter_map(|&token| self.take_back(token)).count()
    }

    /// Whether a step has been made, or a gradient is to be a part of one.
    pub(crate) fn has_trained(&self) -> bool {
        let admitted = self.coordinator.as_ref().is_some_and(|a| !a.admitted().is_empty());
        self.steps().step > 0 || admitted
    }

    pub(crate) fn step(&self) -> GlobalStep {
        GlobalStep(self.step)
    }

    /// The tokens that are out.
    pub(crate) fn tokens_out(&self) -> usize {
        self.out.len()
    }

    /// Whether a token is out to this client, and not being recalled from it.
    pub(crate) fn has_out(&self, holder: ClientKey) -> bool {
        self.tokens_of(holder).any(|issued| !self.recalls.has(issued.token))
    }

    /// Who holds the tokens that are out, each once.
    pub(crate) fn holders(&self) -> impl Iterator<Item = ClientKey> {
        self.held.keys().copied()
    }

    /// The token that a client was given and does not know of: the answer to it was lost. Those
    /// for which `kept` says so are no such: an older self of the client has pushed under them. Nor are
    /// those that are being recalled: the client could not know that they are.
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

    /// Asks for a token, for the self of the client that has this epoch.
    pub(crate) fn request(
        &mut self,
        holder: ClientKey,
        epoch: ClientEpoch,
        now: Instant,
    ) -> Request {
        let asked = match &mut self.coordinator {
            Some(coordinator) => coordinator.ask(holder),
            None => self.ask_alone(holder),
        };
        let token = match asked {
            Asked::Granted(grant) => TokenId(grant.token),
            Asked::Wait => return Request::Wait,
            Asked::Ended if self.finished => return Request::Ended(EndReason::Finished {}),
            Asked::Ended => return Request::Ended(EndReason::LastStep {}),
        };
        self.next_token = token.0 + 1;
        let generation = generation_of(token, epoch);
        let issued = Issued { token, generation, step: GlobalStep(self.step) };
        self.give_out(holder, issued, now);
        Request::Granted(issued)
    }

    /// What whoever asks for a token meets in asynchronous mode.
    fn ask_alone(&mut self, holder: ClientKey) -> Asked {
        let last = self.last_step.unwrap_or(u64::MAX);
        if self.finished || self.step >= last {
            return Asked::Ended;
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
            true => Asked::Wait,
            false => Asked::Granted(Grant { token: self.next_token, holder }),
        }
    }

    /// Whether a replica is too far ahead of the slowest to be given a token.
    pub(crate) fn is_ahead(&self, replica: ClientKey) -> bool {
        let making = self.held.get(&replica).map_or(0, |tokens| tokens.len());
        self.bounded_staleness
            .as_ref()
            .is_some_and(|bounded_staleness| !bounded_staleness.may_begin(replica, making))
    }

    /// Whether the client holds this token in this generation.
    pub(crate) fn holds(&self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let out = self.out.get(&token.0);
        out.is_some_and(|out| out.holder == holder && out.issued.generation == generation)
    }

    /// How stale a gradient under a token that is out would be now: how many steps were made since
    /// the values were read at step `read`, which cannot have been before the token was granted.
    pub(crate) fn staleness(&self, token: TokenId, read: GlobalStep) -> u64 {
        let granted_at = self.out.get(&token.0).map_or(self.step, |out| out.issued.step.0);
        self.step - read.0.clamp(granted_at, self.step)
    }

    /// Whether a gradient under a token that is out is too stale to be applied.
    pub(crate) fn is_too_old(&self, token: TokenId, read: GlobalStep) -> bool {
        self.reject_older.is_some_and(|limit| self.staleness(token, read) > limit)
    }

    /// Spends a token that `holds` has confirmed: the step moves on. Returns the staleness.
    pub(crate) fn spend(&mut self, token: TokenId, read: GlobalStep) -> u64 {
        let staleness = self.staleness(token, read);
        self.waste(token);
        self.step += 1;
        staleness
    }

    /// Takes back a token whose gradient was made, and makes no step.
    pub(crate) fn waste(&mut self, token: TokenId) {
        if let (Some(out), Some(bounded_staleness)) =
            (self.take_back(token.0), &mut self.bounded_staleness)
        {
            bounded_staleness.made_one(out.holder);
        }
    }

    /// Takes a token back unspent; false if the client did not hold it.
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

    /// Takes back all tokens of a client that has left or is lost; how many there were. Tokens
    /// for which `keep` says so stay: their push is whole and belongs to the server.
    pub(crate) fn drop_client(&mut self, gone: ClientKey, keep: impl Fn(TokenId) -> bool) -> usize {
        self.leave(gone);
        self.take_back_all(|out| out.holder == gone && !keep(out.issued.token))
    }

    /// Nobody is held back by a client that has left or is lost.
    pub(crate) fn leave(&mut self, gone: ClientKey) {
        if let Some(bounded_staleness) = &mut self.bounded_staleness {
            bounded_staleness.leave(gone);
            self.changed.insert(gone);
        }
    }

    /// Begins to recall the tokens whose holder is gone, and those that have been out for longer than the
    /// timeout, except those for which `keep` says so. Those that are recalled anew.
    pub(crate) fn recall(
        &mut self,
        now: Instant,
        gone: impl Fn(ClientKey) -> bool,
        keep: impl Fn(TokenId) -> bool,
    ) -> Vec<TokenId> {
        let expired = |out: &Out| {
            let held = now.saturating_duration_since(out.since);
            self.token_timeout.is_some_and(|timeout| held >= timeout)
        };
        let due = |out: &&Out| (expired(out) || gone(out.holder)) && !keep(out.issued.token);
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

    /// The tokens that are being recalled.
    pub(crate) fn recalls(&self) -> &Recalls {
        &self.recalls
    }

    /// A shard says whether it has applied the push of a token that is being recalled.
    pub(crate) fn recall_answered(&mut self, token: TokenId, shard: ShardId, applied: bool) {
        self.recalls.answered(token, shard, applied);
    }

    /// Takes back the recalled tokens that these shards have all said to be free, except those for
    /// which `keep` says so; how many there were.
    pub(crate) fn take_back_free(
        &mut self,
        shards: &[ShardId],
        keep: impl Fn(TokenId) -> bool,
    ) -> usize {
        let free: Vec<TokenId> = self.recalls.free(shards).filter(|&token| !keep(token)).collect();
        free.iter().filter_map(|token| self.take_back(token.0)).count()
    }

    /// Takes back the tokens that have been out for longer than the timeout, except those for
    /// which `keep` says so; how many there were.
    pub(crate) fn expire(&mut self, now: Instant, keep: impl Fn(TokenId) -> bool) -> usize {
        let Some(timeout) = self.token_timeout else {
            return 0;
        };
        let expired = |out: &Out| now.saturating_duration_since(out.since) >= timeout;
        let gone = |out: &Out| expired(out) && !keep(out.issued.token);
        if let Some(coordinator) = &mut self.coordinator {
            for out in self.out.values().filter(|out| gone(out)) {
                coordinator.take_back(out.issued.token.0);
            }
        }
        self.take_back_all(gone)
    }

    /// This server was paused: nobody could spend a token for so long.
    pub(crate) fn excuse(&mut self, pause: Duration, now: Instant) {
        for out in self.out.values_mut() {
            out.since = (out.since + pause).min(now);
        }
        self.recalls.excuse(pause, now);
    }

    /// Ends the training: no more tokens. Tokens that are out may still be spent.
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
            assert!(out.iter().eq(self.out.keys()), "the same tokens are out");
        } else if let Some(last) = self.last_step {
            assert!(self.step + self.out.len() as u64 <= last);
        }
        assert!(self.out.keys().all(|&token| token < self.next_token));
        let recalled = self.recalls.tokens().all(|token| self.out.contains_key(&token.0));
        assert!(recalled, "what is recalled is out");
        let held: usize = self.held.values().map(|tokens| tokens.len()).sum();
        assert_eq!(held, self.out.len(), "every token has one holder");
    }

    /// Who holds a token that is out.
    pub(crate) fn holder_of(&self, token: TokenId) -> Option<ClientKey> {
        self.out.get(&token.0).map(|out| out.holder)
    }

    /// Whether a token is out in this generation, to whomever.
    pub(crate) fn is_out(&self, token: TokenId, generation: u32) -> bool {
        self.out.get(&token.0).is_some_and(|out| out.issued.generation == generation)
    }

    /// The tokens that are out, and their holders.
    pub(crate) fn outstanding(&self) -> impl Iterator<Item = (TokenId, ClientKey)> {
        self.out.values().map(|out| (out.issued.token, out.holder))
    }

    /// Whether a request of this client would have to wait.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_none_for(&self, client: ClientKey) -> bool {
        if let Some(coordinator) = &self.coordinator {
            return coordinator.clone().ask(client) == Asked::Wait;
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

    fn granted(request: Request) -> Issued {
        match request {
            Request::Granted(issued) => issued,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_last_step_is_exact_and_tokens_out_are_promised() {
        let now = Instant::now();
        let mut owner = StepOwner::new(Some(3), None, None);
        let first = granted(owner.request(A, EPOCH, now));
        let second = granted(owner.request(B, EPOCH, now));
        assert_eq!(owner.spend(first.token, GlobalStep(0)), 0);
        granted(owner.request(A, EPOCH, now));
        assert_eq!(owner.request(A, EPOCH, now), Request::Wait);
        assert_eq!(
            owner.spend(second.token, GlobalStep(0)),
            1,
            "one step passed since it was granted"
        );
        owner.check_invariants();
        // A is lost: its token's step is promised to somebody else.
        assert_eq!(owner.drop_client(A, |_| false), 1);
        let last = granted(owner.request(B, EPOCH, now));
        assert!(
            !owner.holds(A, last.token, last.generation)
                && owner.holds(B, last.token, last.generation)
        );
        owner.spend(last.token, last.step);
        assert_eq!(owner.request(A, EPOCH, now), Request::Ended(EndReason::LastStep {}));
        assert_eq!(owner.step(), GlobalStep(3));
        owner.check_invariants();
    }

    #[test]
    fn a_token_held_too_long_goes_back_and_its_push_is_refused() {
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
            "ids are not reused"
        );
    }

    #[test]
    fn finishing_ends_tokens_at_once_but_not_those_that_are_out() {
        let now = Instant::now();
        let mut owner = StepOwner::new(None, None, None);
        let issued = granted(owner.request(A, EPOCH, now));
        owner.finish();
        assert_eq!(owner.request(B, EPOCH, now), Request::Ended(EndReason::Finished {}));
        assert!(owner.holds(A, issued.token, issued.generation));
        assert!(!owner.give_back(B, issued.token, issued.generation));
        assert_eq!(owner.spend(issued.token, issued.step), 0);
    }

    /// One thing that happens, as `(what, to whom)`.
    fn play(owner: &mut StepOwner, bound: u64, what: u8, who: u32, now: Instant) {
        let who = ClientKey(who);
        let tokens: Vec<Issued> = owner.tokens_of(who).collect();
        match (what, tokens.first()) {
            (0..4, _) => {
                let ahead = owner.is_ahead(who);
                let counted = owner
                    .bounded_staleness()
                    .is_some_and(|bounded_staleness| bounded_staleness.of(who).counts);
                let asked = owner.request(who, EPOCH, now);
                assert!(!counted || ahead == (asked == Request::Wait), "{who:?}: {asked:?}");
            }
            (4..7, Some(issued)) => _ = owner.spend(issued.token, issued.step),
            (7, Some(issued)) => owner.waste(issued.token),
            (8, Some(issued)) => assert!(owner.give_back(who, issued.token, issued.generation)),
            (9, _) => _ = owner.drop_client(who, |_| false),
            _ => {}
        }
        owner.check_invariants();
        let bounded_staleness = owner.bounded_staleness().unwrap();
        let Some(slowest) = bounded_staleness.slowest() else { return };
        for who in (0..4).map(ClientKey).filter(|&who| bounded_staleness.of(who).counts) {
            let begun = bounded_staleness.of(who).made + owner.tokens_of(who).count() as u64;
            assert!(begun <= slowest + bound, "{who:?} has begun {begun}, the slowest {slowest}");
        }
        let idle = |who: &ClientKey| owner.tokens_of(*who).count() == 0;
        assert!(
            !bounded_staleness.the_slowest().filter(idle).any(|who| owner.is_ahead(who)),
            "nobody can go on"
        );
    }

    proptest::proptest! {
        #[test]
        fn nobody_is_further_ahead_than_the_bound_and_the_slowest_can_always_go_on(
            bound in 1_u64..5,
            events in proptest::collection::vec((0_u8..10, 0_u32..4), 0..200),
        ) {
            let now = Instant::now();
            let mut owner = StepOwner::new(None, None, None).bounded(Some(bound), None);
            for (what, who) in events {
                play(&mut owner, bound, what, who, now);
            }
        }
    }
}
