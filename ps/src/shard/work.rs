//! Long work in slices: applying pushes and computing initial values.

use std::time::Instant;

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::{RestoreEpoch, TokenId};
use pushpull_common::protocol::message::{Operation, PushAnswer};
use pushpull_common::protocol::{Envelope, Outcome, Refusal};

use super::checks::overflow_refusal;
use super::client_registry::{ClientKey, ClientPresence};
use super::grad_norm::NormJob;
use super::record::RESTORED_LIMIT;
use super::rows::RowChange;
use super::scan::{NonFiniteScan, ScanJob, ScanningInput};
use super::staleness::StalenessAdjustment;
use super::step_work::StepJob;
use super::two_pass::TwoPass;
use super::{Shard, VariablesState};
use crate::aggregate::step_coordinator::PerPush;
use crate::config::NonFinite;
use crate::inbox::{Extents, PushArrival, PushValues};
use crate::optimizer::{ApplyAt, VariableRules};
use crate::planted::Bug;
use crate::store::{Change, ChangeInput, Stalled, Store};

/// The bytes of values that one slice of work changes: long enough that the slicing costs
/// nothing, short enough that a small request beside it waits about 100 us.
pub(super) const SLICE_BYTES: u64 = 1 << 20;

/// What a partition counts for among them at least.
const SMALLEST_BYTES: u64 = 1 << 10;

/// A piece of long work. The front job of a shard is the one under way.
#[derive(Debug)]
pub(super) enum Job {
    /// Applies a push that lies whole in the inbox.
    Push(PushJob),
    /// Applies a synchronous step.
    Step(StepJob),
    /// Scans the ranges that a push has in a push buffer, before anything of it counts.
    Scan(ScanJob),
    /// Adds up the squares of a gradient that waits for its step.
    Norm(NormJob),
    /// Computes the initial values.
    Initialize(InitializeJob),
}

#[derive(Debug)]
pub(super) struct PushJob {
    push_slot: u32,
    begun: bool,
    /// Since it has begun.
    adjustment: StalenessAdjustment,
    two_pass: TwoPass,
    /// What it covers of what is not sparse, since it has begun.
    dense: Extents,
    /// The extent of it under way, and how far it is applied, in bytes of the shard's variables.
    extent: usize,
    done_to: u64,
    /// Whether a [`ScanJob`] has scanned its ranges in a push buffer. Otherwise they are scanned as they are
    /// applied; parts that were sent were scanned on arrival.
    scanned: bool,
    /// Why it is not applied, if it is not.
    refusal: Option<Refusal>,
}

#[derive(Debug)]
pub(super) struct InitializeJob {
    connection: u64,
    request: Envelope,
    epoch: RestoreEpoch,
    #[cfg_attr(
        not(any(test, fuzzing, feature = "simulation")),
        allow(dead_code, reason = "for the invariants")
    )]
    begun: bool,
    partition: usize,
    done: u64,
}

impl Job {
    /// Applies the push in this slot.
    pub(super) fn push(push_slot: u32, scanned: bool) -> Job {
        Job::Push(PushJob {
            push_slot,
            begun: false,
            adjustment: StalenessAdjustment::default(),
            two_pass: TwoPass::default(),
            dense: Extents::default(),
            extent: 0,
            done_to: 0,
            scanned,
            refusal: None,
        })
    }

    pub(super) fn initialize(connection: u64, request: Envelope, epoch: RestoreEpoch) -> Job {
        let (begun, partition, done) = (false, 0, 0);
        Job::Initialize(InitializeJob { connection, request, epoch, begun, partition, done })
    }

    /// Of the gradient in this room, which came whole as this one of all.
    pub(super) fn measure(push_slot: u32, order: u64) -> Job {
        Job::Norm(NormJob::new(push_slot, order))
    }

    /// The step that is made of the pushes in these rooms, in this order, each times its factor.
    pub(super) fn step(push_slots: PerPush<u32>, factors: PerPush<f64>) -> Job {
        Job::Step(StepJob::new(push_slots, factors))
    }

    /// The room of the push that it applies by itself.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn push_slot(&self) -> Option<u32> {
        match self {
            Job::Push(job) => Some(job.push_slot),
            _ => None,
        }
    }

    /// Whether it is under way.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn has_begun(&self) -> bool {
        match self {
            Job::Push(job) => job.begun,
            Job::Step(job) => job.has_begun(),
            // These change nothing.
            Job::Scan(_) | Job::Norm(_) => false,
            Job::Initialize(job) => job.begun,
        }
    }
}

/// What a slice of work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// There is nothing to do.
    Idle,
    /// There is more to do.
    More,
    /// There is more to do once a pull has been sent: all spare memory is pinned.
    Blocked,
    /// There is more to do once an image is on the disk.
    Flushing,
    /// There is more to do once memory that must be made can be had: see [`Shard::growth_failed`].
    Growing,
}

impl Shard {
    /// Whether [`Shard::work`] has something to do.
    pub(crate) fn has_work(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Does a slice of the work that is due.
    pub(crate) fn work(&mut self, now: Instant) -> Work {
        self.persist_late();
        if self.awaits_growth(now) {
            return Work::Growing;
        }
        let Some(mut job) = self.jobs.pop_front() else {
            return Work::Idle;
        };
        let unbegun = match &job {
            Job::Push(push) => Some(push.push_slot).filter(|_| !push.begun),
            Job::Scan(scan) => scan.unbegun(),
            _ => None,
        };
        if unbegun.is_some_and(|push_slot| self.drop_if_too_old(now, push_slot)) {
            return self.job_done();
        }
        let result = match &mut job {
            Job::Push(push) => self.work_on_push(push),
            Job::Step(step) => self.work_on_step(step),
            Job::Scan(scan) => Ok(self.work_on_scan(scan)),
            Job::Norm(measure) => Ok(self.work_on_norm(measure)),
            Job::Initialize(initialize) => Ok(self.work_on_initialize(initialize)),
        };
        match result {
            Err(Stalled::Growth(error)) => {
                self.jobs.push_front(job);
                return self.growth_failed(now, &error);
            }
            Err(Stalled::NoFreeBlock) => {
                self.jobs.push_front(job);
                if self.waits_for_image() {
                    // Blocks are free again when it is on the disk; nobody is to blame.
                    return Work::Flushing;
                }
                // Training goes before a checkpoint that pins more than the budget for pins.
                self.release_checkpoint_pins();
                return Work::Blocked;
            }
            Ok(false) => {
                self.jobs.push_front(job);
                self.growth_succeeded(now);
            }
            Ok(true) => {
                self.growth_succeeded(now);
                match job {
                    Job::Push(PushJob { push_slot, refusal: Some(refusal), .. }) => {
                        self.refuse_whole(now, push_slot, refusal);
                    }
                    Job::Push(push) => self.push_applied(now, push),
                    Job::Step(step) => {
                        self.rows.clear();
                        self.step_applied(now, &step.push_slots);
                    }
                    Job::Scan(scan) => {
                        if self.scan_done(now, scan) {
                            // A small push is applied in the slice in which it arrives.
                            return self.work(now);
                        }
                    }
                    Job::Norm(measure) => self.norm_done(now, &measure),
                    Job::Initialize(job) => {
                        self.initialized(job.connection, job.request, job.epoch)
                    }
                }
                return self.job_done();
            }
        }
        Work::More
    }

    /// Commits what a job has changed, before what it caused is put out.
    fn job_done(&mut self) -> Work {
        self.send_parked_values();
        self.report_members();
        self.persist_in_time();
        #[cfg(any(test, fuzzing))]
        self.check_invariants();
        if self.jobs.is_empty() { Work::Idle } else { Work::More }
    }

    /// A slice of an update; whether it is done.
    fn work_on_push(&mut self, job: &mut PushJob) -> Result<bool, Stalled> {
        if !job.begun {
            // Applied as it came, and nothing was committed since: there is nothing left to do.
            if let Some(streaming_apply) = self
                .streaming_apply
                .take()
                .filter(|streaming_apply| streaming_apply.push_slot == job.push_slot)
            {
                (job.begun, job.adjustment) = (true, streaming_apply.adjustment);
                return Ok(true);
            }
            job.adjustment = self.adjustment_of(job.push_slot);
        }
        let Some(inbox) = &self.inbox else {
            return Ok(true);
        };
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = &mut self.variables
        else {
            return Ok(true);
        };
        let (Some(push), Some(source)) =
            (inbox.arrival(job.push_slot), inbox.source(job.push_slot))
        else {
            return Ok(true);
        };
        let scan = NonFiniteScan { policy: self.config.non_finite, counters: &self.counters };
        let (push_slots, rules) = ([job.push_slot], &self.rules);
        let known = self.owner.as_ref().map(|owner| owner.step().0);
        if !job.begun {
            job.begun = true;
            job.dense.unite(&[push.extents.ranges()], store.layout());
            self.rows.find((inbox, &push_slots), store, push.operation, rules);
            job.two_pass = TwoPass::new(store.layout(), rules, push.operation);
            // Who does not count the steps believes what a client says, within reason.
            let step = known.unwrap_or(push.step.0.min(RESTORED_LIMIT));
            let at = (step, self.version + 1);
            let (journal, operation) = (&mut self.journal, push.operation);
            let begun = self.rows.begin(store, journal, job.dense.ranges(), at, operation);
            if let Err(blocked) = begun {
                store.discard();
                job.begun = false;
                return Err(blocked);
            }
        }
        let refuses = self.config.refuses_overflows();
        let (adjustment, at) = (&job.adjustment, job.adjustment.at);
        let how = (rules, push.operation, at);
        let mut budget = budget_of(store);
        loop {
            let Some(extent) = job.dense.ranges().get(job.extent) else {
                match job.two_pass.next() {
                    true => (job.extent, job.done_to) = (0, 0),
                    false => break,
                }
                continue;
            };
            job.done_to = job.done_to.max(extent.start);
            while job.done_to < extent.end {
                if budget == 0 {
                    return Ok(false);
                }
                // Behind the last value of a group lies padding, or a partition without elements.
                let Some(fused_range) = self.fused_ranges.within(job.done_to..extent.end).next()
                else {
                    job.done_to = extent.end;
                    continue;
                };
                let partition = fused_range.partition(store.layout()).clone();
                if job.two_pass.skips(rules, &partition) {
                    job.done_to = fused_range.range.end;
                    continue;
                }
                let start = job.done_to.max(fused_range.range.start);
                let end = fused_range.range.end.min(extent.end).min(start.saturating_add(budget));
                let mut range = start..end;
                if let Some((values, end)) = source.values(range.clone()) {
                    range.end = end;
                    let (range, dtype, tile) = (range.clone(), fused_range.dtype, &mut self.tile);
                    // The client may change the values between two passes: each pass refuses them, and one
                    // counts them.
                    let scans = scan.policy == NonFinite::Reject || job.two_pass.changes();
                    let scan = Some(scan).filter(|_| scans && !job.scanned);
                    let take = |store: &mut Store, range, input: ChangeInput<'_>| {
                        job.two_pass.take(store, how, &partition, range, input)
                    };
                    let mut scanning = None;
                    let input = match values {
                        PushValues::Own(bytes) => bytes.into(),
                        PushValues::Shared(shared) => {
                            let input = ScanningInput::new(shared, range.start, dtype, scan);
                            ChangeInput::Source(scanning.insert(input))
                        }
                    };
                    adjustment.each(store, dtype, range, input, tile, take)?;
                    if let Some(found) = scanning.and_then(|scanning| scanning.found()) {
                        job.refusal = Some(found.refusal(store.layout()));
                        store.discard();
                        return Ok(true);
                    }
                    if let Some(overflow) = store.overflow().filter(|_| refuses)
                        && store.abandon_change()
                    {
                        job.refusal = Some(overflow_refusal(overflow));
                        self.counters.overflows_refused.add(1);
                        return Ok(true);
                    }
                }
                // In whole words, so that the next slice ends between two elements of any type.
                let spent = (range.end - range.start).next_multiple_of(8).max(8);
                budget = budget.saturating_sub(spent);
                job.done_to = range.end;
            }
            job.extent += 1;
        }
        let (operation, reduction) = (push.operation, self.config.sparse_reduction);
        let change = RowChange { rules, operation, at, reduction, factors: &[] };
        let done =
            self.rows.slice(store, inbox, &push_slots, change, &mut budget, &mut self.tile)?;
        if let Some(overflow) = store.overflow().filter(|_| refuses)
            && store.abandon_change()
        {
            job.refusal = Some(overflow_refusal(overflow));
            self.counters.overflows_refused.add(1);
            return Ok(true);
        }
        Ok(done)
    }

    fn work_on_initialize(&mut self, job: &mut InitializeJob) -> bool {
        let VariablesState::Declared(store) = &mut self.variables else {
            return true;
        };
        job.begun = true;
        let mut budget = SLICE_BYTES;
        while budget > 0 {
            let Some(partition) = store.layout().partitions().get(job.partition) else {
                return true;
            };
            let (elements, size) = (&partition.elements, partition.dtype.size() as u64);
            // A partition costs something even where there is nothing to be done.
            let mut spent = SMALLEST_BYTES;
            if self.assigned.contains(&partition.id) || job.done >= elements.end - elements.start {
                (job.partition, job.done) = (job.partition + 1, 0);
            } else {
                let done = store.initialize(job.partition, job.done);
                spent = spent.max(done.saturating_sub(job.done) * size);
                job.done = done;
            }
            budget = budget.saturating_sub(spent);
        }
        false
    }

    /// An update is done: settles it, frees its room, and answers.
    fn push_applied(&mut self, now: Instant, job: PushJob) {
        let Some(inbox) = &mut self.inbox else { return };
        let Some((client, push)) = inbox.take(job.push_slot) else {
            return;
        };
        self.count_overflow();
        if !self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.publish();
        }
        self.version += 1;
        let gradient = push.operation == Operation::Gradient {};
        let mut staleness = 0;
        if gradient {
            self.gradients += 1;
            self.counters.gradients_applied.add(1);
            self.count_staleness(&job.adjustment);
            if let Some(owner) = &mut self.owner {
                staleness = owner.spend(push.token, push.step);
                debug_assert_eq!(job.adjustment.staleness, Some(staleness), "it was known before");
                self.counters.global_step.set(owner.step().0);
            }
        } else {
            self.counters.assigns_applied.add(1);
            if let VariablesState::Declared(store) = &self.variables {
                for extent in push.extents.ranges() {
                    let stored = store.layout().within(extent.clone()).filter(|p| !p.is_table());
                    self.assigned.extend(stored.map(|partition| partition.id));
                }
            }
        }
        let outcome = Outcome::Applied { version: self.version, step: self.step(), staleness };
        self.give_parked_push_slots(now);
        self.rows.clear();
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        if gradient {
            self.grant_parked_tokens(now);
        }
        if self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.persist();
            self.publish();
        }
    }

    /// Puts the changed blocks into the transaction that this push is committed by.
    pub(super) fn publish(&mut self) {
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &mut self.variables
        {
            store.publish(&mut self.journal);
        }
        self.count_tables();
    }

    /// Settles a push in its client's window, and only then acknowledges it.
    pub(super) fn settle_and_answer(
        &mut self,
        now: Instant,
        client: ClientKey,
        push: &PushArrival,
        outcome: Outcome,
    ) {
        let entry = self.registry.client_mut(client);
        // Whoever counts the steps knows its tokens.
        let spends = push.operation == (Operation::Gradient {}) && self.owner.is_none();
        let token = if spends { push.token } else { TokenId(0) };
        entry.window.settle_under(token, push.sequence, outcome);
        let (Some(connection), Some(whole)) = (entry.connection, push.whole) else {
            return;
        };
        if whole.connection != connection {
            // It was asked for over a connection that is gone; whoever asks again is answered.
            return;
        }
        let present = entry.presence == ClientPresence::Present;
        let (next, ended) = match whole.next && present {
            true => self.next_token(now, client),
            false => (None, None),
        };
        let push_slot = if present { self.free_push_slot(now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next, ended, push_slot };
        let (request, sequence) = (whole.request, push.sequence);
        let request = Envelope { request, sequence, ..Envelope::default() };
        self.answer(connection, request, answer.into());
    }
}

/// What a slice of the change that has begun may come to: a change in place is made in one go.
pub(super) fn budget_of(store: &Store) -> u64 {
    if store.is_in_place() { u64::MAX } else { SLICE_BYTES }
}

/// What a push does to a partition.
pub(super) fn change_of<'a>(
    rules: &'a VariableRules,
    operation: Operation,
    at: ApplyAt,
    partition: &Partition,
) -> Change<'a> {
    let (variable, dtype) = (partition.variable, partition.dtype);
    match operation {
        Operation::Gradient {} => {
            let at = at.at_rate(at.rate * rules.rate(variable));
            Change::Gradient { optimizer: rules.optimizer(variable), at, dtype }
        }
        Operation::AssignAdd {} => Change::Add { dtype },
        Operation::Assign {} => Change::Assign,
    }
}
