//! Reads shared values in small steps, between which everything else may happen.
//!
//! The runtime (`runtime/mapped_memory`) does the same in one go. Both use the same reader, the
//! same copy plan and the same consistency check.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::protocol::message::SharedValues;
use pushpull_common::shared_values::{PinError, SharedValuesReader, ValueCounts};

use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::{CopyPlan, MappedShard, PullConsistency, PullVerdict};
use crate::runtime::{MappedFile, map};
use crate::session::{OpId, ReadPoint};

/// How often a pull tries again while a commit is in progress.
const TRIES: usize = 4;

/// The shared values of a shard, and how to read them.
#[derive(Debug)]
struct StepwiseReader {
    mapped_shard: MappedShard,
    reader: SharedValuesReader<MappedFile>,
    copy_plan: CopyPlan,
}

/// The readers of all shards that have shared their values, by link.
#[derive(Debug, Default)]
pub(super) struct StepwiseReaders(BTreeMap<usize, Rc<RefCell<StepwiseReader>>>);

impl StepwiseReaders {
    /// Adds the values that the shard of a link has shared.
    ///
    /// # Panics
    /// If they cannot be mapped.
    pub(super) fn add(
        &mut self,
        plan: &Arc<ShardingPlan>,
        link: usize,
        mapped_shard: MappedShard,
        shared: &SharedValues,
        descriptors: Vec<OwnedFd>,
    ) {
        let reader = map(shared, descriptors).expect("shared memory can be mapped");
        if let Some(copy_plan) = CopyPlan::new(plan, mapped_shard.shard, reader.geometry()) {
            let stepwise_reader = StepwiseReader { mapped_shard, reader, copy_plan };
            self.0.insert(link, Rc::new(RefCell::new(stepwise_reader)));
        }
    }

    /// Removes the reader of a lost link. A pull in progress may finish with it.
    pub(super) fn remove(&mut self, link: usize) {
        self.0.remove(&link);
    }

    fn of(&self, shard: ShardId) -> Option<&Rc<RefCell<StepwiseReader>>> {
        self.0.values().find(|stepwise_reader| stepwise_reader.borrow().mapped_shard.shard == shard)
    }

    /// Returns whether all these shards have shared their values.
    pub(super) fn has_all(&self, shards: &[ShardId]) -> bool {
        shards.iter().all(|&shard| self.of(shard).is_some())
    }
}

/// A pull from shared memory, in progress.
#[derive(Debug)]
pub(super) struct MappedPull {
    pub(super) op: OpId,
    pub(super) token: Option<GlobalStep>,
    pub(super) deadline: Instant,
    consistency: PullConsistency,
    buffer: AlignedBuffer,
    read: ReadPoint,
    /// The index of the next shard in the plan.
    next: usize,
    tries: usize,
    pinned: Option<PinnedShard>,
}

/// The blocks of the shard that is being read.
#[derive(Debug)]
struct PinnedShard {
    stepwise_reader: Rc<RefCell<StepwiseReader>>,
    counts: ValueCounts,
    blocks: Vec<u32>,
    copied: usize,
}

/// The result of one step.
#[derive(Debug)]
pub(super) enum ReadProgress {
    /// The pull is not done.
    More,
    /// The values, and the point at which they were read.
    Pulled(AlignedBuffer, ReadPoint),
    /// The token's step has passed.
    Stale,
    /// Shared memory cannot serve this pull: send requests instead.
    SendRequests,
}

impl MappedPull {
    pub(super) fn new(
        plan: &ShardingPlan,
        op: OpId,
        token: Option<GlobalStep>,
        deadline: Instant,
    ) -> MappedPull {
        MappedPull {
            op,
            token,
            deadline,
            consistency: PullConsistency::new(token),
            buffer: AlignedBuffer::of_bytes(plan.bytes()),
            read: ReadPoint::default(),
            next: 0,
            tries: 0,
            pinned: None,
        }
    }

    /// Cancels the pull.
    pub(super) fn give_up(self) {
        if let Some(PinnedShard { stepwise_reader, .. }) = self.pinned {
            stepwise_reader.borrow_mut().reader.give_up();
        }
    }

    /// Takes one small step.
    pub(super) fn step(&mut self, plan: &ShardingPlan, readers: &StepwiseReaders) -> ReadProgress {
        match self.pinned.take() {
            Some(pinned) => self.copy(pinned),
            None => self.pin(plan, readers),
        }
    }

    fn pin(&mut self, plan: &ShardingPlan, readers: &StepwiseReaders) -> ReadProgress {
        let Some(&shard) = plan.shards().get(self.next) else {
            let Some(step) = self.consistency.step() else { return ReadProgress::SendRequests };
            self.read.step = step;
            let buffer = std::mem::replace(&mut self.buffer, AlignedBuffer::of_bytes(0));
            return ReadProgress::Pulled(buffer, std::mem::take(&mut self.read));
        };
        let Some(stepwise_reader) = readers.of(shard).cloned() else {
            return ReadProgress::SendRequests;
        };
        let mut blocks = Vec::new();
        let StepwiseReader { mapped_shard, reader, copy_plan } = &mut *stepwise_reader.borrow_mut();
        let counts = match reader.pin(copy_plan.logical_blocks(), &mut blocks) {
            Ok(counts) => counts,
            Err(PinError::Changing) if self.tries < TRIES => {
                self.tries += 1;
                return ReadProgress::More;
            }
            Err(_) => return ReadProgress::SendRequests,
        };
        let verdict = self.consistency.judge(mapped_shard, &counts);
        if verdict != PullVerdict::Take {
            reader.give_up();
            return if verdict == PullVerdict::Stale {
                ReadProgress::Stale
            } else {
                ReadProgress::SendRequests
            };
        }
        self.pinned = Some(PinnedShard {
            stepwise_reader: stepwise_reader.clone(),
            counts,
            blocks,
            copied: 0,
        });
        ReadProgress::More
    }

    fn copy(&mut self, mut pinned: PinnedShard) -> ReadProgress {
        let stepwise_reader = pinned.stepwise_reader.clone();
        let StepwiseReader { mapped_shard, reader, copy_plan } = &mut *stepwise_reader.borrow_mut();
        if let Some(copy) = copy_plan.copies().get(pinned.copied) {
            let start = reader.geometry().start(pinned.blocks[copy.logical]) as usize;
            let to = &mut self.buffer.bytes_mut()[copy.to..copy.to + copy.bytes];
            reader.values().copy(start + copy.from, to);
            pinned.copied += 1;
            self.pinned = Some(pinned);
            return ReadProgress::More;
        }
        if reader.unpin(copy_plan.bytes()).is_err() {
            return ReadProgress::SendRequests;
        }
        self.read.gradients.lower(mapped_shard.shard, pinned.counts.gradients);
        self.next += 1;
        self.tries = 0;
        ReadProgress::More
    }
}
