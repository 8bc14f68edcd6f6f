//! The updates of a shard: pushes, steps and initial values that are due or under way.

use std::collections::VecDeque;
use std::sync::Arc;

use pushpull_common::ids::ShardId;

use super::grad_norm::NormJob;
use super::growth::AwaitedGrowth;
use super::intake::Intake;
use super::push_job::StreamingApply;
use super::rows::RowWork;
use super::scan::ScanJob;
use super::step_job::StepJob;
use super::steps::Steps;
use super::update::Scratch;
use super::work::ShardJob;
use crate::aggregate::step_coordinator::PerPush;
use crate::metrics::Counters;

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
}
