//! Which pushes make a step: the decisions of the step owner in synchronous mode, the same for
//! every shard.
//!
//! A worker is granted a *token*: the right to give one gradient to the step under way. When every
//! shard holds its push whole, the push is *admitted*, for good. When enough are admitted the step
//! is *committed*: it is made of these pushes in this order, and tokens whose pushes were not
//! admitted are over. The next step begins when every shard has applied this one.
//!
//! Tokens are numbered and no number is used twice. A push whose token is neither out nor admitted
//! is over, whoever brings it and whenever it comes: a shard that holds one asks, and is told.
//!
//! There is no clock in here: that somebody is lost, or took too long, is told from outside.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::{SmallVec, smallvec};

use super::clipping::{self, Exact};
use crate::planted::{Bug, PlantedBugs};
use crate::shard::replicas::ClientKey;

/// What a step is to be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rule {
    /// Gradients that a step takes.
    pub(crate) aggregate: u32,
    /// Replicas that are expected.
    pub(crate) total: u32,
    /// However few replicas are left, a step takes no fewer gradients than this.
    pub(crate) floor: u32,
    /// Whether gradients are admitted in the order of the replicas' ranks, so that they are added up
    /// in the same order in every run.
    pub(crate) ordered: bool,
    /// Tokens out and pushes admitted at a time: every shard has a room for each. No fewer than
    /// `aggregate`, as pushes lie in their rooms until the step is applied.
    pub(crate) push_slots: usize,
    /// No step is begun after this one.
    pub(crate) last_step: Option<u64>,
    /// Gradients of a larger norm, over all shards, are scaled down to this.
    pub(crate) clip: Option<Exact>,
}

impl Rule {
    /// Gradients that one replica may give to a step: `ceil(aggregate / total)`.
    pub(crate) fn share(&self) -> u32 {
        self.aggregate.div_ceil(self.total.max(1))
    }
}

/// A token that is out, or whose push is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grant {
    pub(crate) token: u64,
    pub(crate) holder: ClientKey,
}

/// A push that is a part of a step, for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Admitted {
    pub(crate) token: u64,
    pub(crate) holder: ClientKey,
    /// What its gradient is multiplied by.
    pub(crate) factor: Exact,
}

/// What a request for a token meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Granted(Grant),
    /// The holder has given its share to this step, or there is no room; wait.
    Wait,
    /// There will be no more steps.
    Ended,
}

/// What became of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// Its push is a part of this step, for good.
    Admitted { step: u64 },
    /// Its step has passed, or it was taken back.
    Over,
}

/// A step that is to be applied: its pushes, by their tokens, in this order. True for good, and may
/// be said again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Committed {
    /// Counted from 0.
    pub(crate) step: u64,
    pub(crate) tokens: PerPush<u64>,
    /// What the gradient of each is multiplied by.
    pub(crate) factors: PerPush<Exact>,
}

/// Something of each push of a step; of as many as most steps have it takes no memory of its own.
pub(crate) type PerPush<T> = SmallVec<[T; 8]>;

/// A token that is out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Out {
    holder: ClientKey,
    /// Of the shards that hold its push whole, what the squares of its elements come to there. Not
    /// durable: they say it again.
    held: SmallVec<[Option<Exact>; 4]>,
}

/// The step owner's account of the step under way.
///
/// Inputs: [`StepCoordinator::join`], [`StepCoordinator::lose`], [`StepCoordinator::fence`], [`StepCoordinator::ask`],
/// [`StepCoordinator::take_back`] from workers and their leases; [`StepCoordinator::held`],
/// [`StepCoordinator::applied`] from shards. Outputs: [`StepCoordinator::verdicts`] for workers,
/// [`StepCoordinator::committed`] for shards.
///
/// Invariants: what is admitted stays admitted; tokens are out only while no shard has the step
/// before still to apply; a holder has at most [`Rule::share`] tokens and admitted pushes in a step;
/// tokens out and admitted pushes are at most [`Rule::push_slots`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepCoordinator {
    rule: Rule,
    planted: PlantedBugs,
    shards: usize,
    /// Steps committed.
    step: u64,
    next_token: u64,
    out: BTreeMap<u64, Out>,
    /// The pushes of the step under way, or of the last one while it is being applied, in order.
    admitted: Vec<Admitted>,
    /// Whether the last step is committed and not applied everywhere.
    applying: bool,
    /// Gradients that the step under way takes.
    goal: u32,
    /// The replicas that are there, and their ranks.
    live: BTreeMap<ClientKey, u32>,
    /// The replicas that have ever been there, as long as the others are expected.
    seen: BTreeSet<ClientKey>,
    expecting: bool,
    /// Whether no more tokens are given out.
    finished: bool,
    /// Steps that each shard has applied. Not durable.
    applied: Vec<u64>,
    verdicts: PerPush<(Grant, Verdict)>,
}

impl StepCoordinator {
    /// At the first step, with nobody there.
    pub(crate) fn new(rule: Rule, shards: usize, planted: PlantedBugs) -> StepCoordinator {
        StepCoordinator {
            rule,
            planted,
            shards,
            step: 0,
            next_token: 1,
            out: BTreeMap::new(),
            admitted: Vec::new(),
            applying: false,
            goal: rule.aggregate,
            live: BTreeMap::new(),
            seen: BTreeSet::new(),
            expecting: true,
            finished: false,
            applied: vec![0; shards],
            verdicts: PerPush::new(),
        }
    }

    /// Steps committed.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Gradients that the step under way takes.
    pub(crate) fn goal(&self) -> u32 {
        self.goal
    }

    /// The pushes of the step under way, or of the last while it is applied, in order.
    pub(crate) fn admitted(&self) -> &[Admitted] {
        &self.admitted
    }

    /// Whether the pushes that are admitted make a step that shards may have still to apply.
    pub(crate) fn is_applying(&self) -> bool {
        self.applying
    }

    /// Whether some shard has not said that it has applied every step: the next has not begun.
    pub(crate) fn is_behind(&self) -> bool {
        let mut behind = self.applied.iter().map(|&steps| steps < self.step);
        let all = self.planted.has(Bug::BeginEarly);
        if all { behind.all(|behind| behind) } else { behind.any(|behind| behind) }
    }

    /// The shards that have not said that they have applied every step, by their places.
    pub(crate) fn shards_behind(&self) -> impl Iterator<Item = usize> {
        let behind = self.applied.iter().enumerate().filter(|&(_, &steps)| steps < self.step);
        behind.map(|(shard, _)| shard)
    }

    /// The shards that have not said that they hold a push which others hold, by their places; and how many such
    /// pushes each lacks.
    pub(crate) fn shards_lacking(&self) -> impl Iterator<Item = (usize, usize)> {
        let partly = |out: &&Out| out.held.iter().any(Option::is_some);
        let lacked = move |shard: usize| {
            self.out.values().filter(partly).filter(|out| out.held[shard].is_none()).count()
        };
        (0..self.shards).map(move |shard| (shard, lacked(shard))).filter(|&(_, lacked)| lacked > 0)
    }

    /// Whether this replica is there.
    pub(crate) fn is_live(&self, replica: ClientKey) -> bool {
        self.live.contains_key(&replica)
    }

    /// Replicas that are expected and have not been seen.
    pub(crate) fn expects(&self) -> u32 {
        let seen = u32::try_from(self.seen.len()).unwrap_or(u32::MAX);
        if self.expecting { self.rule.total.saturating_sub(seen) } else { 0 }
    }

    /// Whether those who are left, with those who are expected, are too few for a step.
    pub(crate) fn is_short(&self) -> bool {
        !self.is_behind() && self.potential() < self.goal
    }

    /// Forgets what is not durable, as a process does that is killed: shards say it again.
    #[cfg(test)]
    pub(crate) fn restart(&mut self) {
        self.set_shards(self.shards);
        self.verdicts.clear();
        let (admitted, applying, goal) = (self.admitted.clone(), self.applying, self.goal);
        self.restore_admitted(admitted, applying, goal);
    }

    /// Goes on where an earlier process stopped: after so many steps, with tokens numbered so far.
    pub(crate) fn resume(&mut self, step: u64, next_token: u64, finished: bool) {
        (self.step, self.next_token, self.finished) = (step, next_token, finished);
    }

    /// Puts back what was admitted when an earlier process stopped, and whether that step was
    /// committed.
    pub(crate) fn restore_admitted(&mut self, admitted: Vec<Admitted>, applying: bool, goal: u32) {
        (self.admitted, self.applying, self.goal) = (admitted, applying, goal);
        if self.planted.has(Bug::ForgetAdmissions) && !applying {
            self.admitted.clear();
        }
    }

    /// Puts back who was there, with their ranks, and who had been there; if no step has been made yet,
    /// others are still expected.
    pub(crate) fn restore_live(
        &mut self,
        live: BTreeMap<ClientKey, u32>,
        seen: BTreeSet<ClientKey>,
    ) {
        self.expecting = self.step == 0;
        (self.live, self.seen) = (live, seen);
    }

    /// No more tokens are given out: the last step is made of what is admitted and of the pushes of
    /// tokens that are out.
    pub(crate) fn finish(&mut self) {
        self.finished = true;
        self.advance();
    }

    /// Puts back a token that was out.
    ///
    /// Before what was admitted is.
    pub(crate) fn restore_token(&mut self, grant: Grant) {
        let out = Out { holder: grant.holder, held: smallvec![None; self.shards] };
        self.out.insert(grant.token, out);
    }

    /// Begins at this step, with those who are there: other values have been restored.
    pub(crate) fn reset(&mut self, step: u64) {
        self.step = step;
        self.out.clear();
        self.admitted.clear();
        self.applying = false;
        self.finished = false;
        self.applied.fill(0);
        self.verdicts.clear();
        self.advance();
    }

    /// So many shards take part. They have still to say what they hold.
    pub(crate) fn set_shards(&mut self, shards: usize) {
        self.shards = shards;
        self.applied = vec![0; shards];
        self.out.values_mut().for_each(|out| out.held = smallvec![None; shards]);
    }

    /// A replica is there: new, back, or in place of an older self. Its rank, the index of its
    /// task, says when it is its turn where gradients are admitted in order.
    pub(crate) fn join(&mut self, replica: ClientKey, rank: u32) {
        self.live.insert(replica, rank);
        if self.expecting {
            self.seen.insert(replica);
        }
        self.advance();
    }

    /// A replica is lost, or has left.
    pub(crate) fn lose(&mut self, replica: ClientKey) {
        self.live.remove(&replica);
        self.fence(replica);
    }

    /// What an older self of this replica was granted is over; what it had pushed stays if it was
    /// admitted.
    pub(crate) fn fence(&mut self, replica: ClientKey) {
        if !self.planted.has(Bug::KeepLostTokens) {
            self.end_tokens(|grant| grant.holder == replica);
        }
        self.advance();
    }

    /// Replicas that have not been seen yet are expected no longer.
    pub(crate) fn expect_nobody(&mut self) {
        self.stop_expecting();
        self.advance();
    }

    fn stop_expecting(&mut self) {
        self.expecting = false;
        self.seen.clear();
    }

    /// Takes a token back: it is returned, or was out for too long. False if it is not out.
    pub(crate) fn take_back(&mut self, token: u64) -> bool {
        let ended = self.end_tokens(|grant| grant.token == token);
        self.advance();
        ended
    }

    /// A replica asks for a token.
    pub(crate) fn ask(&mut self, replica: ClientKey) -> Asked {
        // Whoever hears that it has ended finds the last step's values.
        if self.is_behind() {
            return Asked::Wait;
        }
        if self.finished {
            return if self.admitted.is_empty() { Asked::Ended } else { Asked::Wait };
        }
        if self.rule.last_step.is_some_and(|last| self.step >= last) {
            return Asked::Ended;
        }
        if !self.live.contains_key(&replica) {
            return Asked::Wait;
        }
        let has = self.given_to(replica);
        let free = self.out.len() + self.admitted.len() < self.rule.push_slots;
        if has >= self.rule.share() as usize || !free {
            return Asked::Wait;
        }
        let token = self.next_token;
        self.next_token += 1;
        self.out.insert(token, Out { holder: replica, held: smallvec![None; self.shards] });
        Asked::Granted(Grant { token, holder: replica })
    }

    /// The tokens that are out, in rising order.
    pub(crate) fn tokens_out(&self) -> impl Iterator<Item = Grant> {
        self.out.iter().map(|(&token, out)| Grant { token, holder: out.holder })
    }

    /// How many tokens of this holder are out, or have their pushes admitted.
    fn given_to(&self, holder: ClientKey) -> usize {
        let admitted = self.admitted.iter().map(|push| push.holder);
        let holders = self.out.values().map(|out| out.holder).chain(admitted);
        holders.filter(|&other| other == holder).count()
    }

    /// A shard holds the push of this token whole, the squares of whose elements come to this there;
    /// false if it is over, and of no use to anybody.
    #[must_use]
    pub(crate) fn held(&mut self, shard: usize, token: u64, squares: Exact) -> bool {
        if let Some(out) = self.out.get_mut(&token) {
            out.held[shard] = Some(squares);
            self.advance();
            return true;
        }
        self.is_of_use(token)
    }

    /// Whether the push of this token is, or may become, a part of the step under way.
    pub(crate) fn is_of_use(&self, token: u64) -> bool {
        self.out.contains_key(&token) || self.admitted.iter().any(|grant| grant.token == token)
    }

    /// A shard has applied so many steps.
    pub(crate) fn applied(&mut self, shard: usize, steps: u64) {
        self.applied[shard] = self.applied[shard].max(steps);
        self.advance();
    }

    /// What became of tokens since this was last asked.
    pub(crate) fn verdicts(&mut self) -> PerPush<(Grant, Verdict)> {
        std::mem::take(&mut self.verdicts)
    }

    /// The step that some shards have still to apply.
    pub(crate) fn committed(&self) -> Option<Committed> {
        self.applying.then(|| Committed {
            step: self.step - 1,
            tokens: self.admitted.iter().map(|push| push.token).collect(),
            factors: self.admitted.iter().map(|push| push.factor).collect(),
        })
    }

    /// How many gradients those who are here can give to this step, with what is admitted of those
    /// who are not.
    fn potential(&self) -> u32 {
        let of_the_gone = self.admitted.iter().filter(|grant| !self.is_live(grant.holder));
        (self.live.len() as u32)
            .saturating_add(self.expects())
            .saturating_mul(self.rule.share())
            .saturating_add(of_the_gone.count() as u32)
    }

    fn end_tokens(&mut self, which: impl Fn(&Grant) -> bool) -> bool {
        let ended: PerPush<Grant> = self.tokens_out().filter(which).collect();
        for &grant in &ended {
            self.out.remove(&grant.token);
            self.verdicts.push((grant, Verdict::Over));
        }
        !ended.is_empty()
    }

    /// Decides what can be decided now.
    fn advance(&mut self) {
        if self.is_behind() {
            return;
        }
        if self.applying {
            self.applying = false;
            self.admitted.clear();
        }
        let reach = match self.finished {
            true => (self.admitted.len() + self.out.len()) as u32,
            false => self.rule.aggregate.min(self.potential()).max(self.rule.floor),
        };
        // Whoever comes while a step is under way makes the next one larger, not this one.
        self.goal = if self.admitted.is_empty() { reach } else { self.goal.min(reach) };
        while (self.admitted.len() as u32) < self.goal
            && let Some(grant) = self.next_to_admit()
        {
            let Grant { token, holder } = grant;
            let held = self.out.remove(&token).into_iter().flat_map(|out| out.held);
            let factor = match self.rule.clip {
                Some(bound) => clipping::factor(bound, held.flatten()),
                None => Exact::ONE,
            };
            self.admitted.push(Admitted { token, holder, factor });
            self.verdicts.push((grant, Verdict::Admitted { step: self.step }));
        }
        if !self.admitted.is_empty() && self.admitted.len() as u32 >= self.goal {
            self.applying = true;
            self.step += 1;
            self.stop_expecting();
            self.end_tokens(|_| true);
        }
    }

    /// The push that is admitted next: of those that every shard holds, the one whose token is the
    /// oldest, or whose turn it is.
    fn next_to_admit(&self) -> Option<Grant> {
        let early = self.planted.has(Bug::AdmitBeforeWhole);
        let mut whole = self.out.iter().filter_map(|(&token, Out { holder, held })| {
            let mut held = held.iter().map(Option::is_some);
            let whole = if early { held.any(|held| held) } else { held.all(|held| held) };
            whole.then_some(Grant { token, holder: *holder })
        });
        if !self.rule.ordered {
            return whole.next();
        }
        let rank = |holder: &ClientKey| self.live.get(holder).copied();
        let turn = match self.finished {
            false => Some(self.admitted.len() as u32),
            // Those who have no token get none any more.
            true => self.out.values().filter_map(|out| rank(&out.holder)).min(),
        };
        whole.find(|grant| rank(&grant.holder) == turn)
    }

    /// Asserts the invariants, for tests: what is wrong, if something is.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check(&self) -> Result<(), String> {
        let out: Vec<Grant> = self.tokens_out().collect();
        if self.applying && !out.is_empty() {
            return Err(format!("{out:?} are out while a step is applied"));
        }
        if self.admitted.len() as u32 > self.rule.aggregate {
            return Err(format!("{:?} are admitted", self.admitted));
        }
        if self.admitted.len() + out.len() > self.rule.push_slots {
            return Err(format!("{:?} and {out:?} have no room", self.admitted));
        }
        for holder in self.live.keys() {
            if self.given_to(*holder) > self.rule.share() as usize {
                return Err(format!("{holder:?} has more than its share"));
            }
        }
        Ok(())
    }

    /// The planted bug, if there is one.
    #[cfg(test)]
    pub(crate) fn planted(&self) -> PlantedBugs {
        self.planted
    }
}
