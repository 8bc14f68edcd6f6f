//! Gradients in rooms that shards lend: a room that the session has done with is written at once, as a
//! caller may begin with the next gradients there.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::SharedPushBuffer;

use crate::params::Memory;
use crate::parts::Scattered;
use crate::push_buffers::{PushBufferId, Run};
use crate::runtime::{PushBuffers, map_push_buffer};
use crate::sharding_plan::ShardingPlan;

/// What lies in a room that nobody sends from: no gradient of any test.
const JUNK: u8 = 0x6d;

/// The trays that shards have lent, and what is written there.
#[derive(Debug)]
pub(super) struct BufferSlots {
    plan: Arc<ShardingPlan>,
    runs: Arc<[Run]>,
    push_buffers: PushBuffers,
    /// What pushes were written to.
    pool: Vec<Memory>,
    /// What each link was lent, for the planted bug.
    shared: BTreeMap<usize, (SharedPushBuffer, File)>,
}

impl BufferSlots {
    pub(super) fn new(plan: Arc<ShardingPlan>) -> BufferSlots {
        let runs = plan.runs(|_| true).into();
        BufferSlots {
            plan,
            runs,
            push_buffers: PushBuffers::default(),
            pool: Vec::new(),
            shared: BTreeMap::new(),
        }
    }

    /// The shard of a link has lent a tray.
    ///
    /// # Panics
    /// If it cannot be mapped.
    pub(super) fn add(
        &mut self,
        (link, shard, id): (usize, ShardId, PushBufferId),
        shared: SharedPushBuffer,
        descriptors: Vec<OwnedFd>,
    ) {
        let file = descriptors.first().and_then(|file| file.try_clone().ok());
        let push_buffer =
            map_push_buffer(&shared, descriptors).expect("shared memory can be mapped");
        self.push_buffers.add(link, shard, id, push_buffer);
        let file = File::from(file.expect("a push buffer has a descriptor"));
        self.shared.insert(link, (shared, file));
    }

    /// The connection of a link is gone, and what it was lent.
    pub(super) fn remove(&mut self, link: usize) {
        self.push_buffers.remove(link);
        self.shared.remove(&link);
    }

    /// Writes gradients, of which `bytes` has all variables, where shards read them; nothing if none has
    /// lent a room.
    pub(super) fn write(&mut self, variables: &[VariableId], bytes: &[u8]) -> Option<Scattered> {
        let free = self.pool.iter().position(Memory::is_free);
        let memory = free.map(|free| self.pool.swap_remove(free));
        let mut memory = memory.unwrap_or_else(|| Memory::new(&self.plan, self.runs.clone()));
        let (buffer, push_buffers) = (memory.buffer_mut(), &self.push_buffers);
        buffer.renew(|push_buffer| push_buffers.has(push_buffer), |shard| push_buffers.take(shard));
        if buffer.push_slots() == 0 {
            return None;
        }
        for &id in variables {
            let range = self.plan.range(id);
            buffer.slice_mut(range.clone()).copy_from_slice(&bytes[range]);
        }
        let scatter = Arc::new(self.plan.scatter(variables.iter().copied()));
        let factors = BTreeMap::new();
        let buffer = memory.buffer.clone();
        self.pool.push(memory);
        Some(Scattered { scatter, buffer, factors })
    }

    /// Writes over everything that nobody sends from any more.
    pub(super) fn scribble(&mut self) {
        for memory in self.pool.iter_mut().filter(|memory| memory.is_free()) {
            for id in 0..self.plan.catalogue().variables().len() as u32 {
                memory.buffer_mut().slice_mut(self.plan.range(VariableId(id))).fill(JUNK);
            }
        }
    }

    /// Writes over a room that is being pushed, as a caller would who thinks that it is free.
    pub(super) fn spoil(&self, link: usize, push_slot: u32) {
        let Some((shared, file)) = self.shared.get(&link) else { return };
        let place = shared.push_slots.items().iter().position(|&number| number == push_slot);
        if let Some(place) = place {
            let (stride, start) = (shared.stride, shared.first + place as u64 * shared.stride);
            let junk = vec![JUNK; stride as usize];
            file.write_all_at(&junk, start).expect("it is shared to be written");
        }
    }
}
