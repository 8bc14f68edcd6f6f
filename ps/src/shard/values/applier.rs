//! [`Applier`]: the updates of a shard and its other long work, as jobs that are due or under way,
//! done in slices.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_store::change::{NoFreeBlock, Stalled};
use pushpull_store::commit::Journal;

use super::grad_norm::NormJob;
use super::initialization::InitializeJob;
use super::push_job::{ArrivedPart, PushJob, StreamingApply};
use super::scan::ScanJob;
use super::step_job::StepJob;
use super::update::{UpdateMemory, UpdateProgress};
use super::variables::Variables;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::current_step::PerPush;
use crate::aggregate::step_follower::StepFollower;
use crate::error::StorageError;
use crate::event::Event;
use crate::inbox::Inbox;
use crate::metrics::Counters;
use crate::shard::output::{ShardOutput, ShardOutputs};

/// The interval of attempts to grow. A shard is not notified when space becomes free.
const RETRY: Duration = Duration::from_secs(1);

/// The updates of a shard.
#[derive(Debug)]
pub(in crate::shard) struct Applier {
    id: ShardId,
    counters: Arc<Counters>,
    pub(in crate::shard) jobs: VecDeque<ShardJob>,
    /// The push that is applied as its parts arrive, into shadow blocks.
    pub(in crate::shard) streaming: Option<StreamingApply>,
    memory: UpdateMemory,
    /// The memory that the shard waits for, if it cannot grow.
    growth: Option<AwaitedGrowth>,
}

/// A piece of long work. The front job of a shard is the one under way.
#[derive(Debug)]
pub(in crate::shard) enum ShardJob {
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

impl ShardJob {
    /// Returns the slot of the push of a job that has not begun and that may have to be dropped
    /// instead.
    pub(in crate::shard) fn unbegun(&self) -> Option<u32> {
        match self {
            ShardJob::Push(push) => Some(push.push_slot).filter(|_| !push.has_begun()),
            ShardJob::Scan(scan) => scan.unbegun(),
            _ => None,
        }
    }

    /// Returns whether the job has begun to change values.
    pub(in crate::shard) fn has_begun(&self) -> bool {
        match self {
            ShardJob::Push(job) => job.has_begun(),
            ShardJob::Step(job) => job.has_begun(),
            // A scan and a norm change nothing.
            ShardJob::Scan(_) | ShardJob::Norm(_) => false,
            ShardJob::Initialize(job) => job.has_begun(),
        }
    }
}

#[cfg(any(test, fuzzing, feature = "simulation"))]
impl ShardJob {
    /// Returns the push slot of a [`ShardJob::Push`].
    pub(in crate::shard) fn push_slot(&self) -> Option<u32> {
        match self {
            ShardJob::Push(job) => Some(job.push_slot),
            _ => None,
        }
    }
}

/// A failed growth: a push that needs more memory waits, and its clients learn why.
///
/// The push is not refused. Other shards may have applied their share of it, so a refusal here
/// would leave a gradient that counts on some shards only. The push is complete in the inbox. It is
/// applied once there is space, without a restart, or by the next process that opens the state.
#[derive(Debug)]
pub(in crate::shard) struct AwaitedGrowth {
    since: Instant,
    tried: Instant,
    cause: String,
}

/// The outcome of a slice of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkOutcome {
    /// No job is queued.
    Idle,
    /// A job is queued.
    More,
    /// A job waits until a pull has been sent: all free blocks are pinned.
    Blocked,
    /// A job waits until an image is on the disk.
    Flushing,
    /// A job waits until the arena can grow: see [`Applier::growth_failed`].
    Growing,
}

impl Applier {
    pub(in crate::shard) fn new(id: ShardId, counters: Arc<Counters>) -> Applier {
        Applier {
            id,
            counters,
            jobs: VecDeque::new(),
            streaming: None,
            memory: UpdateMemory::default(),
            growth: None,
        }
    }

    /// Returns whether the initial values are being computed.
    pub(in crate::shard) fn is_initializing(&self) -> bool {
        self.jobs.iter().any(|job| matches!(job, ShardJob::Initialize(_)))
    }

    /// Returns whether an update has begun to change values, and is not complete.
    pub(in crate::shard) fn is_updating(&self) -> bool {
        self.streaming.is_some() || self.jobs.front().is_some_and(ShardJob::has_begun)
    }

    /// Returns whether [`Shard::work`] has a job to do.
    pub(in crate::shard) fn has_work(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Queues the update by a push that is whole in the inbox.
    pub(in crate::shard) fn begin_push(&mut self, push_slot: u32) {
        self.jobs.push_back(ShardJob::Push(PushJob::new(push_slot, false)));
    }

    /// Queues the update by a push that has just been scanned: next, so that pushes are applied in
    /// the order in which they arrived.
    pub(in crate::shard) fn begin_scanned_push(&mut self, push_slot: u32) {
        self.jobs.push_front(ShardJob::Push(PushJob::new(push_slot, true)));
    }

    /// Queues the updates by pushes that an earlier process has received. They were sent, and
    /// scanned on arrival: push buffers end with their process.
    pub(in crate::shard) fn begin_recovered(&mut self, push_slots: Vec<u32>) {
        let jobs = push_slots.into_iter().map(|push_slot| PushJob::new(push_slot, true));
        self.jobs.extend(jobs.map(ShardJob::Push));
    }

    /// Queues the computation of the initial values, for a chief's request.
    pub(in crate::shard) fn begin_initialization(
        &mut self,
        connection: u64,
        request: Envelope,
        epoch: RestoreEpoch,
    ) {
        let job = InitializeJob::new(connection, request, epoch);
        self.jobs.push_back(ShardJob::Initialize(job));
    }

    /// Queues the computation of a complete gradient's squared norm.
    pub(in crate::shard) fn begin_norm(&mut self, inbox: &Inbox, push_slot: u32) {
        let order = inbox.arrival(push_slot).map(|push| push.order);
        self.jobs.extend(order.map(|order| ShardJob::Norm(NormJob::new(push_slot, order))));
    }

    /// Queues the scan of a push that has arrived whole.
    pub(in crate::shard) fn begin_scan(&mut self, inbox: &mut Inbox, push_slot: u32) {
        let Some(order) = inbox.arrival(push_slot).map(|push| push.order) else { return };
        inbox.set_scanning(push_slot, order, true);
        self.jobs.push_back(ShardJob::Scan(ScanJob::new(push_slot, order)));
    }

    /// Queues the update of the committed step.
    pub(in crate::shard) fn begin_step(&mut self, inbox: &Inbox, follower: &StepFollower) {
        let under_way = self.jobs.iter().any(|job| matches!(job, ShardJob::Step(_)));
        if let Some(tokens) = follower.tokens_to_apply().filter(|_| !under_way) {
            let push_slots: PerPush<u32> =
                tokens.iter().filter_map(|&token| inbox.whole_push_slot_of(token)).collect();
            // All admitted pushes are complete here. A step without one of them would be a
            // different step.
            if push_slots.len() == tokens.len() {
                let factors = follower.factors().collect();
                let job = StepJob::new(push_slots, factors, follower.step());
                self.jobs.push_back(ShardJob::Step(job));
            }
        }
    }

    /// Drops all jobs, because the shard trains no more or another restore epoch begins.
    pub(in crate::shard) fn drop_jobs(&mut self) {
        self.jobs.clear();
        self.streaming = None;
    }

    /// Does a slice of a job. Returns whether the job is done. `made_step` returns the step at which
    /// a push is applied that names another.
    pub(in crate::shard) fn slice(
        &mut self,
        job: &mut ShardJob,
        inbox: Option<&Inbox>,
        variables: &mut Variables,
        tokens: Option<&AsynchronousTokens>,
        made_step: impl Fn(&Variables, GlobalStep) -> GlobalStep,
        journal: &mut Journal,
    ) -> Result<bool, Stalled> {
        if let ShardJob::Initialize(initialize) = job {
            return Ok(initialize.slice(variables));
        }
        if let ShardJob::Push(push) = job
            && !push.has_begun()
            && let Some(streaming) = self.streaming.take_if(|it| it.push_slot == push.push_slot)
        {
            push.was_applied(streaming);
            return Ok(true);
        }
        let Some(inbox) = inbox else { return Ok(true) };
        match job {
            ShardJob::Push(push) => {
                self.streaming = None;
                push.slice(&mut self.memory, inbox, variables, tokens, made_step, journal)
            }
            ShardJob::Step(step) => step.slice(&mut self.memory, inbox, variables, journal),
            ShardJob::Scan(scan) => Ok(scan.slice(inbox, variables)),
            ShardJob::Norm(norm) => {
                Ok(norm.slice(inbox, variables, &mut self.memory.scratch.shared_tile))
            }
            ShardJob::Initialize(initialize) => Ok(initialize.slice(variables)),
        }
    }

    /// Ends the update under way.
    pub(in crate::shard) fn end_update(&mut self) {
        self.memory.rows.clear();
    }

    /// Applies a part of a push on arrival, while it is in cache. Returns whether it was applied.
    ///
    /// If the part cannot be applied now, the inbox still has it, and the push is applied from
    /// there once it is whole.
    ///
    /// # Errors
    /// If the scan or the overflow check refuses the push.
    pub(in crate::shard) fn apply_on_arrival(
        &mut self,
        inbox: &Inbox,
        variables: &mut Variables,
        tokens: Option<&AsynchronousTokens>,
        part: ArrivedPart<'_>,
    ) -> Result<bool, Refusal> {
        let ArrivedPart { push_slot, range, may_begin } = part;
        if !variables.is_ready() {
            return Ok(false);
        }
        let is_current = |streaming: &StreamingApply| streaming.push_slot == push_slot;
        if variables.defers(range) {
            // The row ids, or the sums of a two-pass rule, are known only once the push is whole.
            if self.streaming.as_ref().is_some_and(is_current) {
                self.abandon_streaming(variables);
            }
            return Ok(false);
        }
        if may_begin && self.streaming.is_none() && self.jobs.is_empty() {
            self.streaming = Some(StreamingApply::begin(push_slot, inbox, variables, tokens));
        }
        let Some(streaming) = self.streaming.as_mut().filter(|streaming| is_current(streaming))
        else {
            return Ok(false);
        };
        match streaming.apply(inbox, variables, &mut self.memory.scratch, range) {
            None | Some(Ok(UpdateProgress::Unfinished)) => Ok(false),
            Some(Ok(UpdateProgress::Done)) => Ok(true),
            Some(Ok(UpdateProgress::Refused(refusal))) => {
                self.abandon_streaming(variables);
                Err(refusal)
            }
            Some(Err(NoFreeBlock)) => {
                self.abandon_streaming(variables);
                Ok(false)
            }
        }
    }

    fn abandon_streaming(&mut self, variables: &mut Variables) {
        self.streaming = None;
        variables.discard_change();
    }

    /// Discards the change of a push that was dropped before it was whole.
    pub(in crate::shard) fn drop_stale_streaming(
        &mut self,
        inbox: Option<&Inbox>,
        variables: &mut Variables,
    ) {
        let Some(StreamingApply { push_slot, .. }) = self.streaming else { return };
        if inbox.is_none_or(|inbox| inbox.arrival(push_slot).is_none()) {
            self.abandon_streaming(variables);
        }
    }

    /// Returns whether work has waited for memory.
    pub(in crate::shard) fn awaits_memory(&self) -> bool {
        self.growth.is_some()
    }

    /// Returns whether the current work waits for memory, and the next attempt is not due.
    pub(in crate::shard) fn awaits_growth(&self, now: Instant) -> bool {
        let growth = self.growth.as_ref().filter(|_| self.has_work());
        growth.is_some_and(|growth| now.saturating_duration_since(growth.tried) < RETRY)
    }

    /// The current work needs memory that cannot be reserved. It is repeated later.
    pub(in crate::shard) fn growth_failed(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        error: &StorageError,
    ) -> WorkOutcome {
        self.counters.growths_failed.add(1);
        self.counters.shards_waiting_to_grow.set(1);
        let cause = Chain(error).to_string();
        let reported = self.growth.as_ref().is_some_and(|growth| growth.cause == cause);
        if !reported {
            let event = Event::GrowthFailed { shard: self.id, cause: cause.clone() };
            out.push(ShardOutput::Event(event));
        }
        let since = self.growth.as_ref().map_or(now, |growth| growth.since);
        self.growth = Some(AwaitedGrowth { since, tried: now, cause });
        WorkOutcome::Growing
    }

    /// Work has continued, so any awaited memory is there.
    pub(in crate::shard) fn growth_succeeded(&mut self, out: &mut ShardOutputs, now: Instant) {
        let Some(growth) = self.growth.take() else { return };
        self.counters.shards_waiting_to_grow.set(0);
        let waited = now.saturating_duration_since(growth.since);
        out.push(ShardOutput::Event(Event::GrowthResumed { shard: self.id, waited }));
    }

    /// Forgets the awaited memory if no work is left.
    pub(in crate::shard) fn forget_growth(&mut self, out: &mut ShardOutputs, now: Instant) {
        if !self.has_work() {
            self.growth_succeeded(out, now);
        }
    }

    /// Returns the refusal of heartbeats while the shard waits for memory, which tells waiting
    /// clients the reason.
    pub(in crate::shard) fn growth_refusal(&self) -> Option<Refusal> {
        let growth = self.growth.as_ref()?;
        Some(Refusal::Storage { detail: Detail::clipped(&*growth.cause) })
    }

    /// Adds to the text of a wait that the shard cannot grow, if so.
    pub(in crate::shard) fn with_growth(&self, awaited: String) -> String {
        match &self.growth {
            None => awaited,
            Some(growth) => format!("{awaited}; {} cannot grow: {}", self.id, growth.cause),
        }
    }
}
