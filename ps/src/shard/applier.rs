//! The updates of a shard and its other long work: jobs that are due or under way, done in slices.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Refusal;
use pushpull_store::change::Stalled;
use pushpull_store::store::Store;

use super::grad_norm::NormJob;
use super::initialization::InitializeJob;
use super::intake::Intake;
use super::output::{ShardOutput, ShardOutputs};
use super::push_job::{PushJob, StreamingApply};
use super::rows::RowWork;
use super::scan::ScanJob;
use super::step_job::StepJob;
use super::steps::Steps;
use super::update::Scratch;
use super::{Detail, Shard};
use crate::aggregate::current_step::PerPush;
use crate::error::StorageError;
use crate::event::Event;
use crate::metrics::Counters;

/// The bytes of values that one slice of work changes. Large enough that slicing costs nothing;
/// small enough that a concurrent small request waits about 100 us.
pub(super) const SLICE_BYTES: u64 = 1 << 20;

/// The interval of attempts to grow. A shard is not notified when space becomes free.
const RETRY: Duration = Duration::from_secs(1);

/// The updates of a shard.
#[derive(Debug)]
pub(super) struct Applier {
    pub(super) id: ShardId,
    pub(super) counters: Arc<Counters>,
    pub(super) jobs: VecDeque<ShardJob>,
    /// The push that is applied as its parts arrive, into shadow blocks.
    pub(super) streaming: Option<StreamingApply>,
    /// The rows that the current push or step changes.
    pub(super) rows: RowWork,
    pub(super) scratch: Scratch,
    /// The memory that the shard waits for, if it cannot grow.
    pub(super) growth: Option<AwaitedGrowth>,
}

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

#[cfg(any(test, fuzzing, feature = "simulation"))]
impl ShardJob {
    /// Returns the push slot of a [`ShardJob::Push`].
    pub(super) fn push_slot(&self) -> Option<u32> {
        match self {
            ShardJob::Push(job) => Some(job.push_slot),
            _ => None,
        }
    }

    /// Returns whether the job has begun to change values.
    pub(super) fn has_begun(&self) -> bool {
        match self {
            ShardJob::Push(job) => job.has_begun(),
            ShardJob::Step(job) => job.has_begun(),
            // A scan and a norm change nothing.
            ShardJob::Scan(_) | ShardJob::Norm(_) => false,
            ShardJob::Initialize(job) => job.has_begun(),
        }
    }
}

/// A failed growth: a push that needs more memory waits, and its clients learn why.
///
/// The push is not refused. Other shards may have applied their share of it, so a refusal here
/// would leave a gradient that counts on some shards only. The push is complete in the inbox. It is
/// applied once there is space, without a restart, or by the next process that opens the state.
#[derive(Debug)]
pub(super) struct AwaitedGrowth {
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
    pub(super) fn new(id: ShardId, counters: Arc<Counters>) -> Applier {
        Applier {
            id,
            counters,
            jobs: VecDeque::new(),
            streaming: None,
            rows: RowWork::default(),
            scratch: Scratch::default(),
            growth: None,
        }
    }

    /// Returns whether the initial values are being computed.
    pub(super) fn is_initializing(&self) -> bool {
        self.jobs.iter().any(|job| matches!(job, ShardJob::Initialize(_)))
    }

    /// Returns whether [`Shard::work`] has a job to do.
    pub(super) fn has_work(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Queues the computation of a complete gradient's squared norm.
    pub(super) fn begin_norm(&mut self, intake: &Intake, push_slot: u32) {
        let push = intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let order = push.map(|push| push.order);
        self.jobs.extend(order.map(|order| ShardJob::Norm(NormJob::new(push_slot, order))));
    }

    /// Queues the scan of a push that has arrived whole.
    pub(super) fn begin_scan(&mut self, intake: &mut Intake, push_slot: u32) {
        let Some(inbox) = &mut intake.inbox else { return };
        let Some(order) = inbox.arrival(push_slot).map(|push| push.order) else { return };
        inbox.set_scanning(push_slot, order, true);
        self.jobs.push_back(ShardJob::Scan(ScanJob::new(push_slot, order)));
    }

    /// Queues the update of the committed step.
    pub(super) fn begin_step(&mut self, intake: &Intake, steps: &Steps) {
        let (Some(follower), Some(inbox)) = (&steps.follower, &intake.inbox) else {
            return;
        };
        let under_way = self.jobs.iter().any(|job| matches!(job, ShardJob::Step(_)));
        if let Some(tokens) = follower.tokens_to_apply().filter(|_| !under_way) {
            let push_slots: PerPush<u32> =
                tokens.iter().filter_map(|&token| inbox.whole_push_slot_of(token)).collect();
            // All admitted pushes are complete here. A step without one of them would be a
            // different step.
            if push_slots.len() == tokens.len() {
                self.jobs.push_back(ShardJob::Step(StepJob::new(
                    push_slots,
                    follower.factors().collect(),
                )));
            }
        }
    }

    /// Returns whether the current work waits for memory, and the next attempt is not due.
    pub(super) fn awaits_growth(&self, now: Instant) -> bool {
        let growth = self.growth.as_ref().filter(|_| self.has_work());
        growth.is_some_and(|growth| now.saturating_duration_since(growth.tried) < RETRY)
    }

    /// The current work needs memory that cannot be reserved. It is repeated later.
    pub(super) fn growth_failed(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        error: &StorageError,
    ) -> WorkOutcome {
        self.counters.growths_failed.add(1);
        self.counters.shards_waiting_to_grow.set(1);
        let cause = error.to_string();
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
    pub(super) fn growth_succeeded(&mut self, out: &mut ShardOutputs, now: Instant) {
        let Some(growth) = self.growth.take() else { return };
        self.counters.shards_waiting_to_grow.set(0);
        let waited = now.saturating_duration_since(growth.since);
        out.push(ShardOutput::Event(Event::GrowthResumed { shard: self.id, waited }));
    }

    /// Forgets the awaited memory if no work is left.
    pub(super) fn forget_growth(&mut self, out: &mut ShardOutputs, now: Instant) {
        if !self.has_work() {
            self.growth_succeeded(out, now);
        }
    }

    /// Returns the refusal of heartbeats while the shard waits for memory, which tells waiting
    /// clients the reason.
    pub(super) fn growth_refusal(&self) -> Option<Refusal> {
        let growth = self.growth.as_ref()?;
        Some(Refusal::Storage { detail: Detail::clipped(&*growth.cause) })
    }

    /// Adds to the text of a wait that the shard cannot grow, if so.
    pub(super) fn with_growth(&self, awaited: String) -> String {
        match &self.growth {
            None => awaited,
            Some(growth) => format!("{awaited}; {} cannot grow: {}", self.id, growth.cause),
        }
    }
}

impl Shard {
    /// Does a slice of the front job.
    pub(crate) fn work(&mut self, now: Instant) -> WorkOutcome {
        self.persist_late();
        if self.applier.awaits_growth(now) {
            return WorkOutcome::Growing;
        }
        let Some(mut job) = self.applier.jobs.pop_front() else {
            return WorkOutcome::Idle;
        };
        let unbegun = match &job {
            ShardJob::Push(push) => Some(push.push_slot).filter(|_| !push.has_begun()),
            ShardJob::Scan(scan) => scan.unbegun(),
            _ => None,
        };
        // A repeated gradient is never too old: its call has counted.
        let drops = |push_slot| {
            self.drop_if_repeated(now, push_slot) || self.drop_if_too_old(now, push_slot)
        };
        if unbegun.is_some_and(drops) {
            return self.job_done(now);
        }
        let Shard { applier, intake, variables, steps, pulls, files, .. } = self;
        let journal = &mut files.journal;
        let result = match &mut job {
            ShardJob::Push(push) => push.slice(applier, intake, variables, steps, pulls, journal),
            ShardJob::Step(step) => step.slice(applier, intake, variables, steps, journal),
            ShardJob::Scan(scan) => Ok(scan.slice(intake, variables)),
            ShardJob::Norm(norm) => {
                Ok(norm.slice(intake, variables, &mut applier.scratch.shared_tile))
            }
            ShardJob::Initialize(initialize) => Ok(initialize.slice(variables)),
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
                    return WorkOutcome::Flushing;
                }
                // Training has priority over a checkpoint that pins more than the pin budget.
                self.checkpoints.release_checkpoint_pins();
                return WorkOutcome::Blocked;
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
        WorkOutcome::More
    }

    /// Commits the changes of a job, before its outputs are sent.
    fn job_done(&mut self, now: Instant) -> WorkOutcome {
        self.follow_up(now);
        if self.applier.jobs.is_empty() { WorkOutcome::Idle } else { WorkOutcome::More }
    }
}

/// Returns the budget of a slice of the current change, in bytes. A change in place is not sliced.
pub(super) fn budget_of(store: &Store) -> u64 {
    if store.is_in_place() { u64::MAX } else { SLICE_BYTES }
}
