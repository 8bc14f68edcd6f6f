//! Values in memory that shards lend, read a little at a time: between any two steps everything else may
//! happen.
//!
//! What a caller does in one go (`runtime/mapped_shards`) is done here in steps, by the same reader, by the same
//! route and by the same judgement.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::protocol::message::SharedValues;
use pushpull_common::shared_values::{Counts, NotNow, Reader};

use crate::params::Buffer;
use crate::runtime::{Mapped, map};
use crate::session::{OpId, Read};
use crate::sharding_plan::ShardingPlan;
use crate::shared::{Agreement, MappedShard, Route, Verdict};

/// How often a change that is being made is waited for.
const TRIES: usize = 4;

/// A shard that has lent its values.
#[derive(Debug)]
struct MappedReads {
    mapped_shard: MappedShard,
    reader: Reader<Mapped>,
    route: Route,
}

/// The shards that have, by the links over which they did.
#[derive(Debug, Default)]
pub(super) struct MappedShards(BTreeMap<usize, Rc<RefCell<MappedReads>>>);

impl MappedShards {
    /// The shard of a link has lent its values.
    ///
    /// # Panics
    /// If they cannot be mapped.
    pub(super) fn add(
        &mut self,
        plan: &Arc<ShardingPlan>,
        link: usize,
        mapped_shard: MappedShard,
        (shared, descriptors): (&SharedValues, Vec<OwnedFd>),
    ) {
        let reader = map(shared, descriptors).expect("shared memory can be mapped");
        if let Some(route) = Route::new(plan, mapped_shard.shard, reader.geometry()) {
            let mapped_reads = MappedReads { mapped_shard, reader, route };
            self.0.insert(link, Rc::new(RefCell::new(mapped_reads)));
        }
    }

    /// The connection of a link is gone. Whoever is reading reads on.
    pub(super) fn remove(&mut self, link: usize) {
        self.0.remove(&link);
    }

    fn of(&self, shard: ShardId) -> Option<&Rc<RefCell<MappedReads>>> {
        self.0.values().find(|mapped_reads| mapped_reads.borrow().mapped_shard.shard == shard)
    }

    /// Whether all of these have lent their values.
    pub(super) fn share(&self, shards: &[ShardId]) -> bool {
        shards.iter().all(|&shard| self.of(shard).is_some())
    }
}

/// A pull that asks nobody, as far as it is.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) op: OpId,
    pub(super) token: Option<GlobalStep>,
    pub(super) deadline: Instant,
    agreement: Agreement,
    buffer: Buffer,
    read: Read,
    /// The shard that is read next, among those of the plan.
    next: usize,
    tries: usize,
    pinned: Option<Pinned>,
}

/// What is read now.
#[derive(Debug)]
struct Pinned {
    mapped_reads: Rc<RefCell<MappedReads>>,
    counts: Counts,
    blocks: Vec<u32>,
    copied: usize,
}

/// What came of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// There is more to do.
    More,
    /// The buffer holds values of these.
    Pulled(Buffer, Read),
    /// The token's step has passed.
    Stale,
    /// The values have to be asked for.
    Ask,
}

impl Reading {
    pub(super) fn new(
        plan: &ShardingPlan,
        op: OpId,
        token: Option<GlobalStep>,
        deadline: Instant,
    ) -> Reading {
        Reading {
            op,
            token,
            deadline,
            agreement: Agreement::new(token),
            buffer: Buffer::new(plan),
            read: Read::default(),
            next: 0,
            tries: 0,
            pinned: None,
        }
    }

    /// Nobody waits for it any longer.
    pub(super) fn give_up(self) {
        if let Some(Pinned { mapped_reads, .. }) = self.pinned {
            mapped_reads.borrow_mut().reader.give_up();
        }
    }

    /// Does a little more.
    pub(super) fn step(&mut self, plan: &ShardingPlan, mapped_shards: &MappedShards) -> Step {
        match self.pinned.take() {
            Some(pinned) => self.copy(pinned),
            None => self.pin(plan, mapped_shards),
        }
    }

    fn pin(&mut self, plan: &ShardingPlan, mapped_shards: &MappedShards) -> Step {
        let Some(&shard) = plan.shards().get(self.next) else {
            let Some(step) = self.agreement.step() else { return Step::Ask };
            self.read.step = step;
            let buffer = std::mem::replace(&mut self.buffer, Buffer::of_bytes(0));
            return Step::Pulled(buffer, std::mem::take(&mut self.read));
        };
        let Some(mapped_reads) = mapped_shards.of(shard).cloned() else { return Step::Ask };
        let mut blocks = Vec::new();
        let MappedReads { mapped_shard, reader, route } = &mut *mapped_reads.borrow_mut();
        let counts = match reader.pin(route.logical_blocks(), &mut blocks) {
            Ok(counts) => counts,
            Err(NotNow::Changing) if self.tries < TRIES => {
                self.tries += 1;
                return Step::More;
            }
            Err(_) => return Step::Ask,
        };
        let verdict = self.agreement.judge(mapped_shard, &counts);
        if verdict != Verdict::Take {
            reader.give_up();
            return if verdict == Verdict::Stale { Step::Stale } else { Step::Ask };
        }
        self.pinned =
            Some(Pinned { mapped_reads: mapped_reads.clone(), counts, blocks, copied: 0 });
        Step::More
    }

    fn copy(&mut self, mut pinned: Pinned) -> Step {
        let mapped_reads = pinned.mapped_reads.clone();
        let MappedReads { mapped_shard, reader, route } = &mut *mapped_reads.borrow_mut();
        if let Some(copy) = route.copies().get(pinned.copied) {
            let start = reader.geometry().start(pinned.blocks[copy.logical]) as usize;
            let to = &mut self.buffer.bytes_mut()[copy.to..copy.to + copy.bytes];
            reader.values().copy(start + copy.from, to);
            pinned.copied += 1;
            self.pinned = Some(pinned);
            return Step::More;
        }
        if reader.unpin(route.bytes()).is_err() {
            return Step::Ask;
        }
        self.read.gradients.lower(mapped_shard.shard, pinned.counts.gradients);
        (self.next, self.tries) = (self.next + 1, 0);
        Step::More
    }
}
