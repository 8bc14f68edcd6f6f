//! Does long work in slices: applies pushes and computes initial values.

use std::time::Instant;

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::{RestoreEpoch, TokenId};
use pushpull_common::protocol::message::{Operation, PushAnswer};
use pushpull_common::protocol::{Envelope, Outcome, Refusal};
use pushpull_optim::optimizer::{ApplyAt, VariableRules};
use pushpull_store::change::{Change, Stalled};
use pushpull_store::store::{ChangeInput, Store};
use pushpull_store::testing::planted::Bug;

use super::grad_norm::NormJob;
use super::intake::whole_push::overflow_refusal;
use super::peers::client_registry::ClientPresence;
use super::rows::RowChange;
use super::scan::{NonFiniteScan, ScanJob, ScanningInput};
use super::shard_files::record::RESTORED_LIMIT;
use super::staleness::StalenessAdjustment;
use super::step_work::StepJob;
use super::two_pass::TwoPass;
use super::variables::Variables;
use super::{Shard, VariablesState};
use crate::aggregate::step_coordinator::PerPush;
use crate::client_key::ClientKey;
use crate::config::NonFinite;
use crate::inbox::{Extents, PushArrival, PushValues};

/// The bytes of values that one slice of work changes. Large enough that slicing costs nothing;
/// small enough that a concurrent small request waits about 100 us.
pub(super) const SLICE_BYTES: u64 = 1 << 20;

/// The least cost of a partition in the budget of a slice, in bytes.
const PARTITION_COST: u64 = 1 << 10;

/// A piece of long work. The front job of a shard is the one under way.
#[derive(Debug)]
pub(super) enum ShardJob {
    /// Applies a push that is whole in the inbox.
    Push(PushJob),
    /// Applies a synchronous step.
    Step(StepJob),
    /// Scans the ranges that a push has in a push buffer, before anything of it counts.
    Scan(ScanJob),
    /// Computes the squared norm of a gradient that waits for its step.
    Norm(NormJob),
    /// Computes the initial values.
    Initialize(InitializeJob),
}

#[derive(Debug)]
pub(super) struct PushJob {
    push_slot: u32,
    begun: bool,
    /// The staleness adjustment, computed when the job begins.
    adjustment: StalenessAdjustment,
    two_pass: TwoPass,
    /// The dense ranges that it covers, computed when the job begins.
    dense: Extents,
    /// The index of the current dense extent, and the byte of the layout up to which it is applied.
    extent: usize,
    done_to: u64,
    /// Whether a [`ScanJob`] has scanned its ranges in a push buffer. Otherwise they are scanned as
    /// they are applied; parts that were sent were scanned on arrival.
    scanned: bool,
    /// Why the push is refused, if it is.
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

impl InitializeJob {
    /// Computes a slice of the initial values; returns whether they are complete.
    fn slice(&mut self, variables: &mut Variables) -> bool {
        let VariablesState::Declared(store) = &mut variables.state else {
            return true;
        };
        self.begun = true;
        let mut budget = SLICE_BYTES;
        while budget > 0 {
            let Some(partition) = store.layout().partitions().get(self.partition) else {
                return true;
            };
            let (elements, size) = (&partition.elements, partition.dtype.size() as u64);
            // A partition has a cost even if it needs no work.
            let mut spent = PARTITION_COST;
            if variables.assigned.contains(&partition.id)
                || self.done >= elements.end - elements.start
            {
                (self.partition, self.done) = (self.partition + 1, 0);
            } else {
                let done = store.initialize(self.partition, self.done);
                spent = spent.max(done.saturating_sub(self.done) * size);
                self.done = done;
            }
            budget = budget.saturating_sub(spent);
        }
        false
    }
}

impl ShardJob {
    /// Creates the job that applies the push in this slot.
    pub(super) fn push(push_slot: u32, scanned: bool) -> ShardJob {
        ShardJob::Push(PushJob {
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

    pub(super) fn initialize(connection: u64, request: Envelope, epoch: RestoreEpoch) -> ShardJob {
        let (begun, partition, done) = (false, 0, 0);
        ShardJob::Initialize(InitializeJob { connection, request, epoch, begun, partition, done })
    }

    /// Creates the job that computes the squared norm of the gradient in this slot. `order` is its
    /// number among the pushes that arrived whole.
    pub(super) fn norm(push_slot: u32, order: u64) -> ShardJob {
        ShardJob::Norm(NormJob::new(push_slot, order))
    }

    /// Creates the job that applies a step: the pushes in these slots, in this order, each times
    /// its factor.
    pub(super) fn step(push_slots: PerPush<u32>, factors: PerPush<f64>) -> ShardJob {
        ShardJob::Step(StepJob::new(push_slots, factors))
    }

    /// Returns the push slot of a [`ShardJob::Push`].
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn push_slot(&self) -> Option<u32> {
        match self {
            ShardJob::Push(job) => Some(job.push_slot),
            _ => None,
        }
    }

    /// Returns whether the job has begun to change values.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn has_begun(&self) -> bool {
        match self {
            ShardJob::Push(job) => job.begun,
            ShardJob::Step(job) => job.has_begun(),
            // A scan and a norm change nothing.
            ShardJob::Scan(_) | ShardJob::Norm(_) => false,
            ShardJob::Initialize(job) => job.begun,
        }
    }
}

/// The outcome of a slice of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// No job is queued.
    Idle,
    /// A job is queued.
    More,
    /// A job waits until a pull has been sent: all free blocks are pinned.
    Blocked,
    /// A job waits until an image is on the disk.
    Flushing,
    /// A job waits until the arena can grow: see [`Shard::growth_failed`].
    Growing,
}

impl Shard {
    /// Does a slice of the front job.
    pub(crate) fn work(&mut self, now: Instant) -> Work {
        self.persist_late();
        if self.applier.awaits_growth(now) {
            return Work::Growing;
        }
        let Some(mut job) = self.applier.jobs.pop_front() else {
            return Work::Idle;
        };
        let unbegun = match &job {
            ShardJob::Push(push) => Some(push.push_slot).filter(|_| !push.begun),
            ShardJob::Scan(scan) => scan.unbegun(),
            _ => None,
        };
        if unbegun.is_some_and(|push_slot| self.drop_if_too_old(now, push_slot)) {
            return self.job_done(now);
        }
        let result = match &mut job {
            ShardJob::Push(push) => self.work_on_push(push),
            ShardJob::Step(step) => self.work_on_step(step),
            ShardJob::Scan(scan) => Ok(scan.slice(&self.intake, &self.variables)),
            ShardJob::Norm(norm) => {
                Ok(norm.slice(&self.intake, &self.variables, &mut self.applier.shared_tile))
            }
            ShardJob::Initialize(initialize) => Ok(initialize.slice(&mut self.variables)),
        };
        match result {
            Err(Stalled::Growth(error)) => {
                self.applier.jobs.push_front(job);
                return self.applier.growth_failed(&mut self.out, now, &error);
            }
            Err(Stalled::NoFreeBlock) => {
                self.applier.jobs.push_front(job);
                if self.waits_for_image() {
                    // Blocks become free when the image is on the disk; no reader is at fault.
                    return Work::Flushing;
                }
                // Training has priority over a checkpoint that pins more than the pin budget.
                self.checkpoints.release_checkpoint_pins();
                return Work::Blocked;
            }
            Ok(false) => {
                self.applier.jobs.push_front(job);
                self.applier.growth_succeeded(&mut self.out, now);
            }
            Ok(true) => {
                self.applier.growth_succeeded(&mut self.out, now);
                match job {
                    ShardJob::Push(PushJob { push_slot, refusal: Some(refusal), .. }) => {
                        let Shard { peers, intake, steps, out, .. } = self;
                        intake.refuse_whole(peers, steps, out, push_slot, refusal);
                    }
                    ShardJob::Push(push) => self.push_applied(now, push),
                    ShardJob::Step(step) => {
                        self.applier.rows.clear();
                        self.step_applied(now, &step.push_slots);
                    }
                    ShardJob::Scan(scan) => {
                        if self.scan_done(now, scan) {
                            // A small push is applied in the slice in which it arrives.
                            return self.work(now);
                        }
                    }
                    ShardJob::Norm(norm) => self.norm_done(&norm),
                    ShardJob::Initialize(job) => {
                        self.initialized(job.connection, job.request, job.epoch)
                    }
                }
                return self.job_done(now);
            }
        }
        Work::More
    }

    /// Commits the changes of a job, before its outputs are sent.
    fn job_done(&mut self, now: Instant) -> Work {
        self.follow_up(now);
        if self.applier.jobs.is_empty() { Work::Idle } else { Work::More }
    }

    /// Applies a slice of a push; returns whether the job is done.
    fn work_on_push(&mut self, job: &mut PushJob) -> Result<bool, Stalled> {
        if !job.begun {
            // The push was applied as it arrived, and nothing was committed since, so the job is
            // done.
            if let Some(streaming_apply) = self
                .applier
                .streaming
                .take()
                .filter(|streaming_apply| streaming_apply.push_slot == job.push_slot)
            {
                (job.begun, job.adjustment) = (true, streaming_apply.adjustment);
                return Ok(true);
            }
            job.adjustment = self.adjustment_of(job.push_slot);
        }
        let Some(inbox) = &self.intake.inbox else {
            return Ok(true);
        };
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) =
            &mut self.variables.state
        else {
            return Ok(true);
        };
        let (Some(push), Some(source)) =
            (inbox.arrival(job.push_slot), inbox.source(job.push_slot))
        else {
            return Ok(true);
        };
        let scan = NonFiniteScan { policy: self.config.non_finite, counters: &self.counters };
        let (push_slots, rules) = ([job.push_slot], &self.variables.rules);
        let known = self.steps.owner.as_ref().map(|owner| owner.step().0);
        if !job.begun {
            job.begun = true;
            job.dense.unite(&[push.extents.ranges()], store.layout());
            self.applier.rows.find((inbox, &push_slots), store, push.operation, rules);
            job.two_pass = TwoPass::new(store.layout(), rules, push.operation);
            // A shard that is not the step owner takes the client's step, up to a limit.
            let step = known.unwrap_or(push.step.0.min(RESTORED_LIMIT));
            let at = (step, self.variables.version + 1);
            let (journal, operation) = (&mut self.files.journal, push.operation);
            let begun = self.applier.rows.begin(store, journal, job.dense.ranges(), at, operation);
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
                match job.two_pass.end_pass() {
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
                // The end of an extent may be padding, or a partition without elements.
                let Some(fused_range) =
                    self.variables.fused_ranges.within(job.done_to..extent.end).next()
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
                    let (range, dtype, tile) =
                        (range.clone(), fused_range.dtype, &mut self.applier.tile);
                    // The client may change the values between two passes. Both passes scan if
                    // non-finite values are refused; only the pass that changes values counts them.
                    let scans = scan.policy == NonFinite::Reject || job.two_pass.changes_values();
                    let scan = Some(scan).filter(|_| scans && !job.scanned);
                    let apply = |store: &mut Store, range, input: ChangeInput<'_>| {
                        job.two_pass.apply(store, how, &partition, range, input)
                    };
                    let mut scanning = None;
                    let input = match values {
                        PushValues::Own(bytes) => bytes.into(),
                        PushValues::Shared(shared) => {
                            let input = ScanningInput::new(shared, range.start, dtype, scan);
                            ChangeInput::Source(scanning.insert(input))
                        }
                    };
                    adjustment.each(store, dtype, range, input, tile, apply)?;
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
                // Rounded to words, so that the next slice ends between two elements of any type.
                let spent = (range.end - range.start).next_multiple_of(8).max(8);
                budget = budget.saturating_sub(spent);
                job.done_to = range.end;
            }
            job.extent += 1;
        }
        let (operation, reduction) = (push.operation, self.config.sparse_reduction);
        let change = RowChange { rules, operation, at, reduction, factors: &[] };
        let done = self.applier.rows.slice(
            store,
            inbox,
            &push_slots,
            change,
            &mut budget,
            &mut self.applier.tile,
        )?;
        if let Some(overflow) = store.overflow().filter(|_| refuses)
            && store.abandon_change()
        {
            job.refusal = Some(overflow_refusal(overflow));
            self.counters.overflows_refused.add(1);
            return Ok(true);
        }
        Ok(done)
    }

    /// Settles a push that has been applied, frees its slot, and answers.
    fn push_applied(&mut self, now: Instant, job: PushJob) {
        let Some(inbox) = &mut self.intake.inbox else { return };
        let Some((client, push)) = inbox.take(job.push_slot) else {
            return;
        };
        self.variables.count_overflow();
        if !self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.variables.publish(&mut self.files);
        }
        self.variables.version += 1;
        let gradient = push.operation == Operation::Gradient {};
        let mut staleness = 0;
        if gradient {
            self.variables.gradients += 1;
            self.counters.gradients_applied.add(1);
            debug_assert_eq!(
                job.adjustment.at.count, self.variables.gradients,
                "no gradient was applied in between"
            );
            job.adjustment.count(&self.counters);
            if let Some(owner) = &mut self.steps.owner {
                staleness = owner.spend(push.token, push.step);
                debug_assert_eq!(
                    job.adjustment.staleness,
                    Some(staleness),
                    "the staleness has changed since the push began"
                );
                self.counters.global_step.set(owner.step().0);
                self.stamp_answers();
            }
        } else {
            self.counters.assigns_applied.add(1);
            if let VariablesState::Declared(store) = &self.variables.state {
                for extent in push.extents.ranges() {
                    let stored = store.layout().within(extent.clone()).filter(|p| !p.is_table());
                    self.variables.assigned.extend(stored.map(|partition| partition.id));
                }
            }
        }
        let outcome = Outcome::Applied {
            version: self.variables.version,
            step: self.steps.step(),
            staleness,
        };
        self.applier.rows.clear();
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        if self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.persist();
            self.variables.publish(&mut self.files);
        }
    }

    /// Settles a push in its client's window, and only then acknowledges it.
    pub(super) fn settle_and_answer(
        &mut self,
        now: Instant,
        client: ClientKey,
        push: &PushArrival,
        outcome: Outcome,
    ) {
        let entry = self.peers.registry.client_mut(client);
        // The step owner tracks its tokens itself.
        let spends = push.operation == (Operation::Gradient {}) && self.steps.owner.is_none();
        let token = if spends { push.token } else { TokenId(0) };
        entry.window.settle_under(token, push.sequence, outcome);
        let (Some(connection), Some(whole)) = (entry.connection, push.whole) else {
            return;
        };
        if whole.connection != connection {
            // The request came over a connection that has ended. A repeated request is answered.
            return;
        }
        let present = entry.presence == ClientPresence::Present;
        let (next, ended) = match whole.next && present {
            true => self.steps.next_token(&self.peers, now, client),
            false => (None, None),
        };
        let push_slot =
            if present { self.intake.free_push_slot(&self.peers, now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next, ended, push_slot };
        let (request, sequence) = (whole.request, push.sequence);
        let request = Envelope { request, sequence, ..Envelope::default() };
        self.out.answer(connection, request, answer.into());
    }
}

/// Returns the budget of a slice of the current change, in bytes. A change in place is not sliced.
pub(super) fn budget_of(store: &Store) -> u64 {
    if store.is_in_place() { u64::MAX } else { SLICE_BYTES }
}

/// Returns the change that a push makes to a partition.
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
