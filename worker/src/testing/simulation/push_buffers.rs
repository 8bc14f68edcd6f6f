//! Push buffers for the simulator. A slot that the session no longer uses is overwritten at once,
//! as a caller may do with its next gradients.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::SharedPushBuffer;

use crate::gradients::gradient_buffer::{BufferRun, PushBufferId};
use crate::gradients::params::GradientMemory;
use crate::gradients::scatter::Scatter;
use crate::gradients::scatter::ScatteredGradients;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::runtime::{PushBuffers, map_push_buffer};

/// The content of slots that are not being pushed: no gradient of any test.
const JUNK: u8 = 0x6d;

/// The mapped push buffers of all links, and the gradients written there.
#[derive(Debug)]
pub(super) struct SimulatedPushBuffers {
    plan: Arc<ShardingPlan>,
    runs: Arc<[BufferRun]>,
    push_buffers: PushBuffers,
    /// The memory of earlier pushes.
    pool: Vec<GradientMemory>,
    /// The memory that each link has shared, for the planted bug.
    shared: BTreeMap<usize, (SharedPushBuffer, File)>,
}

impl SimulatedPushBuffers {
    pub(super) fn new(plan: Arc<ShardingPlan>) -> SimulatedPushBuffers {
        let runs = plan.runs(|_| true).into();
        SimulatedPushBuffers {
            plan,
            runs,
            push_buffers: PushBuffers::default(),
            pool: Vec::new(),
            shared: BTreeMap::new(),
        }
    }

    /// Adds the push buffer that the shard of a link has shared.
    ///
    /// # Panics
    /// If it cannot be mapped.
    pub(super) fn add(
        &mut self,
        link: usize,
        shard: ShardId,
        id: PushBufferId,
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

    /// Removes the push buffer of a lost link.
    pub(super) fn remove(&mut self, link: usize) {
        self.push_buffers.remove(link);
        self.shared.remove(&link);
    }

    /// Writes gradients into push slots. `bytes` covers all variables. `None` if no shard has
    /// shared a free slot.
    pub(super) fn write(
        &mut self,
        variables: &[VariableId],
        bytes: &[u8],
    ) -> Option<ScatteredGradients> {
        let free = self.pool.iter().position(GradientMemory::is_free);
        let memory = free.map(|free| self.pool.swap_remove(free));
        let mut memory =
            memory.unwrap_or_else(|| GradientMemory::new(&self.plan, self.runs.clone()));
        let buffer = memory.buffer_mut();
        let push_buffers = &self.push_buffers;
        buffer.renew(|push_buffer| push_buffers.has(push_buffer), |shard| push_buffers.take(shard));
        if buffer.slot_count() == 0 {
            return None;
        }
        for &id in variables {
            let range = self.plan.range(id);
            buffer.slice_mut(range.clone()).copy_from_slice(&bytes[range]);
        }
        let scatter = Arc::new(Scatter::new(&self.plan, variables.iter().copied()));
        let factors = BTreeMap::new();
        let buffer = memory.buffer.clone();
        self.pool.push(memory);
        Some(ScatteredGradients { scatter, buffer, factors })
    }

    /// Overwrites all memory that is not being pushed.
    pub(super) fn overwrite_free_memory(&mut self) {
        for memory in self.pool.iter_mut().filter(|memory| memory.is_free()) {
            for id in 0..self.plan.catalogue().variables().len() as u32 {
                memory.buffer_mut().slice_mut(self.plan.range(VariableId(id))).fill(JUNK);
            }
        }
    }

    /// Overwrites a slot that is being pushed, like a caller that mistakes it for free.
    pub(super) fn overwrite(&self, link: usize, push_slot: u32) {
        let Some((shared, file)) = self.shared.get(&link) else { return };
        let place = shared.push_slots.items().iter().position(|&number| number == push_slot);
        if let Some(place) = place {
            let (stride, start) = (shared.stride, shared.first + place as u64 * shared.stride);
            let junk = vec![JUNK; stride as usize];
            file.write_all_at(&junk, start).expect("the shared memory is writable");
        }
    }
}
