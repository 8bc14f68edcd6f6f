//! The applier: the one loop that changes values, one slice at a time.

use crate::config::PsConfig;
use crate::metrics::Counters;
use pushpull_common::ids::ShardId;
use std::collections::VecDeque;
use std::sync::Arc;

use super::growth::AwaitedGrowth;
use super::rows::RowWork;
use super::streaming_apply::StreamingApply;
use super::work::ShardJob;

/// The updates of a shard: those that are due, and the one under way.
#[derive(Debug)]
pub(super) struct Applier {
    pub(super) id: ShardId,
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    pub(super) jobs: VecDeque<ShardJob>,
    /// The push that is applied as its parts arrive, into shadow blocks.
    pub(super) streaming: Option<StreamingApply>,
    /// The rows that the current push or step changes.
    pub(super) rows: RowWork,
    /// Scratch memory for elements that are computed from a gradient.
    pub(super) tile: Vec<u64>,
    /// Scratch memory for elements copied from a push buffer.
    pub(super) shared_tile: Vec<u64>,
    /// The memory that the shard waits for, if it cannot grow.
    pub(super) growth: Option<AwaitedGrowth>,
}

impl Applier {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>, counters: Arc<Counters>) -> Applier {
        Applier {
            id,
            config,
            counters,
            jobs: VecDeque::new(),
            streaming: None,
            rows: RowWork::default(),
            tile: Vec::new(),
            shared_tile: Vec::new(),
            growth: None,
        }
    }

    /// Returns whether the initial values are being computed.
    pub(super) fn is_initializing(&self) -> bool {
        self.jobs.iter().any(|job| matches!(job, ShardJob::Initialize(_)))
    }

    /// Returns whether [`Shard::work`] has a job to do.
    pub(crate) fn has_work(&self) -> bool {
        !self.jobs.is_empty()
    }
}
