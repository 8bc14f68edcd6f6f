//! Exhaustive exploration of the synchronous step rules: every state that a few replicas, shards
//! and faults can reach.
//!
//! The step owner ([`StepCoordinator`]) and a shard's part ([`StepFollower`]) are the real code. A
//! model shard adds push slots with whole pushes. A message may arrive at any time, and is sent
//! again after a restart. A killed process keeps its durable state.
//!
//! Every event is either *due* (it happens eventually, unless another event makes it moot) or a
//! *fault*, of which each setting allows a few. In every state without due events, training must
//! have ended. This rules out deadlock. It also rules out livelock, because due events always make
//! progress.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use pushpull_common::data_set::DataSet;
use pushpull_common::ids::ClientEpoch;
use pushpull_store::planted::{Bug, PlantedBugs};

use crate::aggregate::current_step::TokenOutcome;
use crate::aggregate::data_position::{DataBatch, DataPosition};
use crate::aggregate::step_coordinator::{Grant, StepCoordinator};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_rule::StepRule;
use crate::aggregate::token_issuer::{TokenIssuer, TokenResponse};
use crate::client_key::{ChangedClients, ClientKey};

/// The remaining number of each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Faults {
    /// A replica is killed. It may be restarted, and parts that it has sent may still arrive.
    kills: u8,
    /// A live replica is declared lost.
    losses: u8,
    /// A replica has no more work and leaves.
    leaves: u8,
    /// A token times out.
    timeouts: u8,
    /// The step owner is killed and restarted.
    owner_kills: u8,
    /// Another shard is killed and restarted.
    shard_kills: u8,
    /// A checkpoint is saved. It replaces the previous one.
    saves: u8,
    /// All servers lose their state, and the checkpoint is restored.
    restores: u8,
    /// A replica spends its batch without a gradient.
    skips: u8,
}

/// A configuration to explore.
#[derive(Clone, Copy, Debug)]
struct ModelSetting {
    name: &'static str,
    shards: usize,
    /// The number of replicas at the start, and of those that may join later.
    replicas: usize,
    late_replicas: usize,
    rule: StepRule,
    /// The number of batches of the declared data set; 0 for none.
    batches: u64,
    faults: Faults,
    /// Whether every event may be delayed. If not, an event whose delay cannot be observed happens
    /// at once; see [`ModelState::settle`].
    slow: bool,
    planted: PlantedBugs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ModelReplica {
    /// Not started yet.
    Absent,
    Idle,
    /// Has a token, has sent its push to the shards of the bit set `sent`, and may have received
    /// the push's outcome.
    Working {
        grant: Grant,
        step: u64,
        sent: u32,
        verdict: Option<TokenOutcome>,
    },
    Killed,
    Left,
}

/// A shard of the model: its durable pushes and its follower.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelShard {
    /// The tokens of the pushes that are whole on this shard.
    whole: BTreeSet<u64>,
    follower: StepFollower,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelState {
    /// The time of every event: no decision of the coordinator depends on time.
    now: Instant,
    owner: StepCoordinator,
    shards: Vec<ModelShard>,
    replicas: Vec<ModelReplica>,
    /// Parts of the pushes of killed replicas that may still arrive.
    delayed_pushes: Vec<DelayedPush>,
    /// The accepted pushes of steps that some shard has not applied yet, as step and token.
    accepted: BTreeSet<(u64, u64)>,
    /// The batches of the committed steps, and the number of these steps.
    spent: (BTreeSet<DataBatch>, u64),
    checkpoint: Option<ModelCheckpoint>,
    push_slots: usize,
    faults: Faults,
    slow: bool,
}

/// A checkpoint of a step, with the data position and the batches in its values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelCheckpoint {
    step: u64,
    data: DataPosition,
    spent: BTreeSet<DataBatch>,
}

/// Parts of the push of a killed replica, in transit to the shards of the bit set `left`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DelayedPush {
    token: u64,
    step: u64,
    left: u32,
}

/// An event that can happen in a state of the model.
#[derive(Clone, Copy, Debug)]
enum ModelEvent {
    // Due.
    Ask(usize),
    Rejoin(usize),
    Push { replica: usize, shard: usize },
    ReceiveVerdict(usize),
    ReportHeld { shard: usize, token: u64 },
    ReportApplied(usize),
    ReceiveCommit(usize),
    ApplyStep(usize),
    LeaseEnds(usize),
    JoinTimeout,
    // Faults.
    Kill(usize),
    Start(usize),
    LoseLive(usize),
    Leave(usize),
    TokenTimeout(usize),
    DeliverDelayed { delayed: usize, shard: usize },
    KillOwner,
    KillShard(usize),
    Save,
    Restore,
    Skip(usize),
}

impl ModelEvent {
    fn is_due(self) -> bool {
        !matches!(
            self,
            ModelEvent::Kill(_)
                | ModelEvent::Start(_)
                | ModelEvent::LoseLive(_)
                | ModelEvent::Leave(_)
                | ModelEvent::TokenTimeout(_)
                | ModelEvent::DeliverDelayed { .. }
                | ModelEvent::KillOwner
                | ModelEvent::KillShard(_)
                | ModelEvent::Save
                | ModelEvent::Restore
                | ModelEvent::Skip(_)
        )
    }
}

fn key(replica: usize) -> ClientKey {
    ClientKey(replica as u32)
}

impl ModelState {
    fn new(setting: &ModelSetting) -> ModelState {
        let ModelSetting { shards, rule, planted, .. } = *setting;
        let mut owner = StepCoordinator::new(rule, shards, planted);
        if setting.batches > 0 {
            let set = DataSet::new("data", setting.batches, 1).unwrap().epochs(1);
            owner.ledger.data = Some(DataPosition::new(set, planted));
        }
        for replica in 0..setting.replicas {
            owner.join(key(replica), replica as u32);
        }
        let shard = ModelShard { whole: BTreeSet::new(), follower: StepFollower::new(0, planted) };
        let mut replicas = vec![ModelReplica::Idle; setting.replicas];
        replicas.resize(setting.replicas + setting.late_replicas, ModelReplica::Absent);
        let faults = setting.faults;
        let slow = setting.slow;
        let push_slots = rule.push_slots;
        let shards = vec![shard; shards];
        let delayed_pushes = Vec::new();
        let accepted = BTreeSet::new();
        let now = Instant::now();
        ModelState {
            now,
            owner,
            shards,
            replicas,
            delayed_pushes,
            accepted,
            spent: (BTreeSet::new(), 0),
            checkpoint: None,
            push_slots,
            faults,
            slow,
        }
    }

    /// Returns the events that can happen in this state.
    fn events(&self) -> Vec<ModelEvent> {
        let mut events = Vec::new();
        for (index, replica) in self.replicas.iter().enumerate() {
            let live = self.owner.is_live(key(index));
            match *replica {
                ModelReplica::Absent => events.push(ModelEvent::Start(index)),
                ModelReplica::Left => {}
                ModelReplica::Killed => {
                    events.push(ModelEvent::Start(index));
                    if live {
                        events.push(ModelEvent::LeaseEnds(index));
                    }
                }
                ModelReplica::Idle => {
                    events.push(if live {
                        ModelEvent::Ask(index)
                    } else {
                        ModelEvent::Rejoin(index)
                    });
                    if live && self.faults.leaves > 0 {
                        events.push(ModelEvent::Leave(index));
                    }
                }
                ModelReplica::Working { sent, verdict, .. } => {
                    for shard in 0..self.shards.len() {
                        if sent & 1 << shard == 0 && self.has_free_slot(shard) {
                            events.push(ModelEvent::Push { replica: index, shard });
                        }
                    }
                    if verdict.is_none() && sent == 0 && self.faults.skips > 0 {
                        events.push(ModelEvent::Skip(index));
                    }
                    if verdict.is_some() {
                        events.push(ModelEvent::ReceiveVerdict(index));
                    } else if self.faults.timeouts > 0 {
                        events.push(ModelEvent::TokenTimeout(index));
                    }
                }
            }
            if matches!(replica, ModelReplica::Idle | ModelReplica::Working { .. }) {
                if self.faults.kills > 0 {
                    events.push(ModelEvent::Kill(index));
                }
                if self.faults.losses > 0 && live {
                    events.push(ModelEvent::LoseLive(index));
                }
            }
        }
        for (index, shard) in self.shards.iter().enumerate() {
            events.extend(
                shard.whole.iter().map(|&token| ModelEvent::ReportHeld { shard: index, token }),
            );
            events.extend([ModelEvent::ReportApplied(index), ModelEvent::ReceiveCommit(index)]);
            if shard.follower.tokens_to_apply().is_some() {
                events.push(ModelEvent::ApplyStep(index));
            }
            if self.faults.shard_kills > 0 {
                events.push(ModelEvent::KillShard(index));
            }
        }
        for (delayed, DelayedPush { left, .. }) in self.delayed_pushes.iter().enumerate() {
            let shards = 0..self.shards.len();
            let shards =
                shards.filter(|&shard| left & 1 << shard != 0 && self.has_free_slot(shard));
            events.extend(shards.map(|shard| ModelEvent::DeliverDelayed { delayed, shard }));
        }
        if self.owner.expects() > 0 {
            events.push(ModelEvent::JoinTimeout);
        }
        if self.faults.owner_kills > 0 {
            events.push(ModelEvent::KillOwner);
        }
        if self.faults.saves > 0 && !self.owner.is_behind() {
            events.push(ModelEvent::Save);
        }
        if self.faults.restores > 0 && self.checkpoint.is_some() {
            events.push(ModelEvent::Restore);
        }
        events
    }

    /// Returns the state after an event, or an error if the event violates an invariant.
    fn after(&self, event: ModelEvent) -> Result<ModelState, String> {
        let mut state = self.clone();
        match event {
            ModelEvent::Ask(replica) => {
                match state.owner.request(key(replica), ClientEpoch(0), self.now) {
                    TokenResponse::Granted(issued) => {
                        if let (Some(data), Some(batch)) =
                            (&mut state.owner.ledger.data, issued.batch)
                        {
                            data.ahead(key(replica), batch, self.owner.ordered_ranks());
                        }
                        let grant = Grant { token: issued.token.0, holder: key(replica) };
                        let step = self.owner.step();
                        state.replicas[replica] =
                            ModelReplica::Working { grant, step, sent: 0, verdict: None };
                    }
                    TokenResponse::Wait | TokenResponse::Ended(_) => {}
                }
            }
            ModelEvent::Rejoin(replica) => state.owner.join(key(replica), replica as u32),
            ModelEvent::Push { replica, shard } => {
                if let ModelReplica::Working { grant, step, sent, .. } =
                    &mut state.replicas[replica]
                {
                    *sent |= 1 << shard;
                    let token = grant.token;
                    let step = *step;
                    state.receive(shard, token, step);
                }
            }
            ModelEvent::ReceiveVerdict(replica) => state.resume_replica(replica)?,
            ModelEvent::ReportHeld { shard, token } => state.report_held(shard, token),
            ModelEvent::ReportApplied(shard) => {
                state.owner.applied(shard, self.shards[shard].follower.step());
            }
            ModelEvent::ReceiveCommit(shard) => {
                if let Some(committed) = self.owner.committed() {
                    state.shards[shard].follower.receive_commit(&committed);
                }
            }
            ModelEvent::ApplyStep(shard) => state.apply_step(shard)?,
            ModelEvent::LeaseEnds(replica) => state.owner.lose(key(replica)),
            ModelEvent::JoinTimeout => state.owner.expect_nobody(),
            ModelEvent::Kill(replica) => {
                state.faults.kills -= 1;
                if let ModelReplica::Working { grant, step, sent, .. } = self.replicas[replica] {
                    let left = !sent & ((1 << self.shards.len()) - 1);
                    state.delayed_pushes.push(DelayedPush { token: grant.token, step, left });
                }
                state.replicas[replica] = ModelReplica::Killed;
            }
            ModelEvent::Start(replica) => {
                state.owner.end_old_tokens(key(replica));
                state.owner.join(key(replica), replica as u32);
                state.replicas[replica] = ModelReplica::Idle;
            }
            ModelEvent::LoseLive(replica) => {
                state.faults.losses -= 1;
                state.owner.lose(key(replica));
            }
            ModelEvent::Leave(replica) => {
                state.faults.leaves -= 1;
                state.owner.lose(key(replica));
                state.replicas[replica] = ModelReplica::Left;
            }
            ModelEvent::TokenTimeout(replica) => {
                state.faults.timeouts -= 1;
                if let ModelReplica::Working { grant, .. } = self.replicas[replica] {
                    state.owner.take_back(grant.token);
                }
            }
            ModelEvent::DeliverDelayed { delayed, shard } => {
                let DelayedPush { token, step, left } = &mut state.delayed_pushes[delayed];
                *left &= !(1 << shard);
                let token = *token;
                let step = *step;
                state.receive(shard, token, step);
            }
            ModelEvent::KillOwner => {
                state.faults.owner_kills -= 1;
                state.owner.restart();
            }
            ModelEvent::KillShard(shard) => {
                state.faults.shard_kills -= 1;
                let step = self.shards[shard].follower.step();
                state.shards[shard].follower = StepFollower::new(step, self.owner.planted());
            }
            ModelEvent::Save => {
                state.faults.saves -= 1;
                state.checkpoint = self.save();
            }
            ModelEvent::Skip(replica) => {
                state.faults.skips -= 1;
                if let ModelReplica::Working { grant, .. } = self.replicas[replica] {
                    let out = self.owner.ledger.get(grant.token);
                    state.spent.0.extend(out.and_then(|out| out.issued.batch));
                    state.owner.skip(grant.token);
                }
            }
            ModelEvent::Restore => {
                state.faults.restores -= 1;
                state.restore();
            }
        }
        state.on_verdicts();
        state.record_commit()?;
        state.delayed_pushes.retain(|delayed| delayed.left != 0);
        if !self.slow {
            state.settle()?;
        }
        state.check()?;
        Ok(state)
    }

    /// Executes due events whose delay cannot be observed. Shards receive the committed step, the
    /// step owner receives the shards' reports, and pushes of which no part can arrive any more are
    /// dropped.
    fn settle(&mut self) -> Result<(), String> {
        // An event that is not settled after two rounds happens as a separate event.
        for _ in 0..2 {
            for shard in 0..self.shards.len() {
                if let Some(committed) = self.owner.committed() {
                    self.shards[shard].follower.receive_commit(&committed);
                }
                let whole: Vec<u64> = self.shards[shard].whole.iter().copied().collect();
                for token in whole {
                    if self.owner.is_of_use(token) || !self.may_be_sent(token) {
                        self.report_held(shard, token);
                    }
                }
                self.owner.applied(shard, self.shards[shard].follower.step());
            }
            self.on_verdicts();
            self.record_commit()?;
            for replica in 0..self.replicas.len() {
                if let ModelReplica::Working {
                    verdict: Some(TokenOutcome::Admitted { .. }), ..
                } = self.replicas[replica]
                {
                    self.resume_replica(replica)?;
                }
            }
        }
        Ok(())
    }

    /// Returns a checkpoint of the committed steps, all of which are applied.
    fn save(&self) -> Option<ModelCheckpoint> {
        let owner = TokenIssuer::Synchronous(Box::new(self.owner.clone()));
        let (data, unspent) = owner.unspent_batches()?;
        let data =
            DataPosition::restored(data.set().clone(), data.next(), unspent, self.owner.planted());
        Some(ModelCheckpoint { step: self.owner.step(), data, spent: self.spent.0.clone() })
    }

    /// Restores the checkpoint on all servers. Replicas join again.
    fn restore(&mut self) {
        let Some(ModelCheckpoint { step, data, spent }) = self.checkpoint.clone() else { return };
        let planted = self.owner.planted();
        self.owner.forget_tokens();
        self.owner.roll_back(step);
        if !planted.has(Bug::PositionNotRestored) {
            self.owner.ledger.data = Some(data);
        }
        self.spent = (spent, step);
        for shard in &mut self.shards {
            *shard =
                ModelShard { whole: BTreeSet::new(), follower: StepFollower::new(step, planted) };
        }
        (0..self.shards.len()).for_each(|shard| self.owner.applied(shard, step));
        self.delayed_pushes.clear();
        self.accepted.clear();
        for replica in &mut self.replicas {
            if matches!(replica, ModelReplica::Working { .. }) {
                *replica = ModelReplica::Idle;
            }
        }
    }

    /// Records the batches of a step that has just been committed.
    fn record_commit(&mut self) -> Result<(), String> {
        let step = self.owner.step();
        if !self.owner.current.is_applying() || self.spent.1 == step {
            return Ok(());
        }
        self.spent.1 = step;
        for batch in self.owner.current.admitted().iter().filter_map(|push| push.batch) {
            if !self.spent.0.insert(batch) {
                return Err(format!("step {step} counts {batch:?} again"));
            }
        }
        Ok(())
    }

    /// Returns whether parts of this token's push may still arrive.
    fn may_be_sent(&self, token: u64) -> bool {
        let working = self.replicas.iter().any(
            |replica| matches!(replica, ModelReplica::Working { grant, .. } if grant.token == token),
        );
        working || self.delayed_pushes.iter().any(|delayed| delayed.token == token)
    }

    fn has_free_slot(&self, shard: usize) -> bool {
        self.shards[shard].whole.len() < self.push_slots
    }

    /// Reports to the step owner that a shard holds a push. The shard drops the push if it is over.
    fn report_held(&mut self, shard: usize, token: u64) {
        if !self.owner.held(shard, token, 0.0.into()) {
            self.shards[shard].whole.remove(&token);
        }
    }

    /// Delivers the outcomes of pushes to their replicas.
    fn on_verdicts(&mut self) {
        // What a commit would save is no part of the state.
        self.owner.ledger.changed = ChangedClients::default();
        for (grant, verdict) in self.owner.verdicts() {
            if let TokenOutcome::Admitted { step } = verdict {
                self.accepted.insert((step, grant.token));
            }
            for replica in &mut self.replicas {
                if let ModelReplica::Working { grant: own, verdict: received, .. } = replica
                    && *own == grant
                {
                    *received = Some(verdict);
                }
            }
        }
    }

    /// Makes a replica idle after it has received the outcome of its push.
    fn resume_replica(&mut self, replica: usize) -> Result<(), String> {
        let everywhere = (1 << self.shards.len()) - 1;
        if let ModelReplica::Working { sent, verdict: Some(TokenOutcome::Admitted { .. }), .. } =
            self.replicas[replica]
            && sent != everywhere
        {
            return Err(format!("the push of replica {replica} was admitted before it was sent"));
        }
        self.replicas[replica] = ModelReplica::Idle;
        Ok(())
    }

    /// Delivers the push of a token that was granted at `step` to a shard with a free push slot.
    fn receive(&mut self, shard: usize, token: u64, step: u64) {
        let ModelShard { whole, follower } = &mut self.shards[shard];
        // This shard may have applied the push's step already.
        if follower.step() <= step {
            whole.insert(token);
            follower.report_whole(whole.iter().copied());
        }
    }

    /// Applies the step that is due on a shard.
    fn apply_step(&mut self, shard: usize) -> Result<(), String> {
        let ModelShard { whole, follower } = &mut self.shards[shard];
        let Some(tokens) = follower.tokens_to_apply().map(<[u64]>::to_vec) else { return Ok(()) };
        let step = follower.step();
        let admitted: Vec<u64> =
            self.owner.current.admitted().iter().map(|grant| grant.token).collect();
        if !self.owner.current.is_applying() || self.owner.step() != step + 1 {
            return Err(format!("shard {shard} applies step {step}, which is not committed"));
        }
        if tokens != admitted {
            return Err(format!("shard {shard} applies {tokens:?}, not {admitted:?}"));
        }
        let mut accepted = self.accepted.iter().filter(|(of, _)| *of == step);
        if let Some((_, token)) = accepted.find(|(_, token)| !tokens.contains(token)) {
            return Err(format!("token {token} was accepted, but step {step} lacks it"));
        }
        for token in tokens {
            if !whole.remove(&token) {
                return Err(format!("shard {shard} lacks the push of token {token}"));
            }
        }
        follower.applied();
        let applied = self.shards.iter().map(|shard| shard.follower.step()).min().unwrap_or(0);
        self.accepted.retain(|&(step, _)| step >= applied);
        Ok(())
    }

    /// Checks the invariants of every state.
    fn check(&self) -> Result<(), String> {
        // The holder of an outstanding token reads the same step on every shard.
        for grant in self.owner.tokens_out() {
            let step = self.owner.step();
            if let Some(shard) = self.shards.iter().position(|shard| shard.follower.step() != step)
            {
                return Err(format!(
                    "{grant:?} of step {step} is outstanding, shard {shard} is at another step"
                ));
            }
        }
        for (index, shard) in self.shards.iter().enumerate() {
            let applied = shard.follower.step();
            let committed = self.owner.step();
            if applied > committed || applied + 1 < committed {
                return Err(format!(
                    "shard {index} is at step {applied}, the owner at {committed}"
                ));
            }
        }
        let admitted =
            self.owner.current.admitted().iter().filter(|_| !self.owner.current.is_applying());
        let held = admitted.filter_map(|push| push.batch);
        if let Some(data) = &self.owner.ledger.data {
            let held = held.chain(self.owner.ledger.iter().filter_map(|out| out.issued.batch));
            let mut unspent: BTreeSet<DataBatch> = BTreeSet::new();
            if let Some(twice) = data.free().chain(held).find(|&batch| !unspent.insert(batch)) {
                return Err(format!("{twice:?} is unspent twice"));
            }
            if let Some(both) = unspent.intersection(&self.spent.0).next() {
                return Err(format!("{both:?} counts, and is unspent"));
            }
            if unspent.len() + self.spent.0.len() != data.next().0 as usize {
                return Err(format!("a batch before {:?} is lost", data.next()));
            }
        }
        self.owner.check()
    }

    /// Returns whether nothing needs to happen any more.
    fn is_over(&self, rule: &StepRule) -> bool {
        let ended = match &self.owner.ledger.data {
            Some(data) => self.spent.0.len() as u64 == data.set().batches(),
            None => rule.last_step == Some(self.owner.step()),
        };
        let ended = ended && !self.owner.current.is_applying();
        let alive = |replica: &ModelReplica| {
            matches!(replica, ModelReplica::Idle | ModelReplica::Working { .. })
        };
        let waits = self.owner.is_short() && rule.floor > 0;
        ended || waits || !self.replicas.iter().any(alive)
    }
}

#[derive(Debug, Default)]
struct Explored {
    states: usize,
    ends: usize,
}

/// Visits every state. An error is a violation, with the events that led to it.
fn explore(setting: &ModelSetting) -> Result<Explored, String> {
    fn fingerprint(state: &ModelState) -> u64 {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        hasher.finish()
    }
    let start = ModelState::new(setting);
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut explored = Explored { states: 1, ends: 0 };
    // The path to the current state: each state, its untried events, whether any event was due, and
    // the event that led to it.
    let events = start.events();
    let mut path: Vec<(ModelState, Vec<ModelEvent>, bool, Option<ModelEvent>)> =
        vec![(start, events, false, None)];
    while let Some((state, events, any_due, _)) = path.last_mut() {
        let Some(event) = events.pop() else {
            if !*any_due {
                explored.ends += 1;
                if !state.is_over(&setting.rule) {
                    let state = format!("{state:#?}");
                    return Err(failure_report(
                        setting,
                        &path,
                        &format!("nothing is due in {state}"),
                    ));
                }
            }
            path.pop();
            continue;
        };
        let next = match state.after(event) {
            Ok(next) => next,
            Err(broken) => {
                return Err(failure_report(setting, &path, &format!("after {event:?}: {broken}")));
            }
        };
        if next == *state {
            continue;
        }
        *any_due |= event.is_due();
        if seen.insert(fingerprint(&next)) {
            explored.states += 1;
            let events = next.events();
            path.push((next, events, false, Some(event)));
        }
    }
    Ok(explored)
}

fn failure_report(
    setting: &ModelSetting,
    path: &[(ModelState, Vec<ModelEvent>, bool, Option<ModelEvent>)],
    broken: &str,
) -> String {
    let events: Vec<String> =
        path.iter().filter_map(|(.., event)| event.map(|event| format!("{event:?}"))).collect();
    format!("{}: {broken}\nafter:\n  {}", setting.name, events.join("\n  "))
}

const NONE: Faults = Faults {
    kills: 0,
    losses: 0,
    leaves: 0,
    timeouts: 0,
    owner_kills: 0,
    shard_kills: 0,
    saves: 0,
    restores: 0,
    skips: 0,
};

fn rule(aggregate: u32, total: u32, steps: u64) -> StepRule {
    let share = aggregate.div_ceil(total);
    let push_slots = (share * total) as usize;
    StepRule {
        aggregate,
        total,
        floor: 0,
        ordered: false,
        push_slots,
        last_step: Some(steps),
        clip: None,
    }
}

fn settings(planted: PlantedBugs) -> Vec<ModelSetting> {
    let plain = ModelSetting {
        name: "",
        shards: 2,
        replicas: 2,
        late_replicas: 0,
        rule: rule(2, 2, 2),
        batches: 0,
        faults: NONE,
        slow: false,
        planted,
    };
    let kill = Faults { kills: 1, ..NONE };
    vec![
        ModelSetting {
            name: "all events delayed, step owner and replica are killed",
            rule: rule(2, 2, 1),
            faults: Faults { owner_kills: 1, ..kill },
            slow: true,
            ..plain
        },
        ModelSetting {
            name: "all events delayed, a replica is lost, a shard is killed",
            faults: Faults { losses: 1, shard_kills: 1, ..NONE },
            slow: true,
            ..plain
        },
        ModelSetting {
            name: "two replicas and the step owner are killed",
            rule: rule(2, 2, 1),
            faults: Faults { kills: 2, owner_kills: 1, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "a lost replica keeps pushing, a shard is killed",
            faults: Faults { losses: 1, shard_kills: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "one push slot for two replicas",
            rule: StepRule { push_slots: 1, ..rule(1, 2, 2) },
            faults: Faults { losses: 1, owner_kills: 1, timeouts: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "one backup replica, one replica is killed",
            replicas: 3,
            rule: rule(2, 3, 2),
            faults: kill,
            ..plain
        },
        ModelSetting {
            name: "a step that shrinks twice",
            replicas: 3,
            rule: rule(3, 3, 1),
            faults: Faults { leaves: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "one replica joins later, one leaves",
            replicas: 1,
            late_replicas: 1,
            faults: Faults { leaves: 1, losses: 1, owner_kills: 1, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "more gradients than replicas",
            rule: rule(3, 2, 1),
            faults: Faults { leaves: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "three shards",
            shards: 3,
            rule: rule(2, 2, 1),
            faults: Faults { owner_kills: 1, shard_kills: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "in rank order, without shrinking",
            rule: StepRule { ordered: true, floor: 2, ..rule(2, 2, 2) },
            faults: Faults { owner_kills: 1, ..kill },
            ..plain
        },
    ]
}

/// The settings with a data set: training ends when all its batches count, each once.
fn data_settings(planted: PlantedBugs) -> Vec<ModelSetting> {
    let endless = |aggregate, total| StepRule { last_step: None, ..rule(aggregate, total, 0) };
    let plain = ModelSetting {
        name: "",
        shards: 1,
        replicas: 2,
        late_replicas: 0,
        rule: endless(2, 2),
        batches: 3,
        faults: NONE,
        slow: false,
        planted,
    };
    let kill = Faults { kills: 1, ..NONE };
    vec![
        ModelSetting {
            name: "data: the last step has fewer gradients",
            shards: 2,
            faults: Faults { owner_kills: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "data: all events delayed, a replica is killed",
            faults: Faults { timeouts: 1, ..kill },
            slow: true,
            ..plain
        },
        ModelSetting {
            name: "data: one backup replica, one replica is killed",
            replicas: 3,
            rule: endless(2, 3),
            batches: 4,
            faults: Faults { owner_kills: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "data: a lost replica keeps pushing, one leaves",
            shards: 2,
            faults: Faults { losses: 1, leaves: 1, timeouts: 1, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "data: more gradients than replicas",
            rule: endless(3, 2),
            batches: 4,
            faults: Faults { owner_kills: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "data: one replica joins later",
            replicas: 1,
            late_replicas: 1,
            faults: Faults { losses: 1, owner_kills: 1, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "data: a checkpoint is saved and restored",
            shards: 2,
            faults: Faults { saves: 2, restores: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "data: a checkpoint with a backup replica",
            replicas: 3,
            rule: endless(2, 3),
            faults: Faults { saves: 1, restores: 2, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "data: in rank order, without shrinking",
            rule: StepRule { ordered: true, floor: 2, ..endless(2, 2) },
            batches: 5,
            faults: Faults { owner_kills: 1, saves: 1, restores: 1, timeouts: 1, ..kill },
            ..plain
        },
        ModelSetting {
            name: "data: in rank order, two batches are skipped",
            replicas: 3,
            rule: StepRule { ordered: true, floor: 3, ..endless(3, 3) },
            batches: 8,
            faults: Faults { owner_kills: 1, skips: 2, ..NONE },
            ..plain
        },
        ModelSetting {
            name: "data: a batch is skipped, a replica is killed",
            faults: Faults { skips: 1, timeouts: 1, ..kill },
            ..plain
        },
    ]
}

/// Explores every setting, and panics at the first violation. Returns the number of states.
pub(crate) fn suite(planted: PlantedBugs) -> usize {
    let mut states = 0;
    for setting in settings(planted).into_iter().chain(data_settings(planted)) {
        let explored = explore(&setting).unwrap_or_else(|broken| panic!("{broken}"));
        let Explored { states: count, ends } = explored;
        println!("{:62} {count:9} states, {ends:6} of them final", setting.name);
        states += count;
    }
    states
}

#[test]
fn a_deadlock_is_found() {
    // With fewer push slots than gradients in a step, admitted pushes occupy them all.
    let setting = settings(PlantedBugs::default())[0];
    let setting = ModelSetting { rule: StepRule { push_slots: 1, ..setting.rule }, ..setting };
    let broken = explore(&setting).unwrap_err();
    assert!(broken.contains("nothing is due"), "{broken}");
}

#[test]
fn no_state_violates_an_invariant_or_deadlocks() {
    let states = suite(PlantedBugs::default());
    println!("{{\"test\":\"exhaustive\",\"states\":{states},\"broken\":0}}");
}
