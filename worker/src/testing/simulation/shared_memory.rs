//! The memory that shards share with a session, for the simulator.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{SharedPushBuffer, SharedValues};

use super::push_buffers::SimulatedPushBuffers;
use super::stepwise_reader::StepwiseReaders;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::MappedShard;

/// The values and push buffers that the shards of all links share, and the descriptors that come
/// with them.
///
/// Invariant: the memory of a link is removed when the link is lost.
#[derive(Debug)]
pub(super) struct SimulatedSharedMemory {
    plan: Arc<ShardingPlan>,
    /// Descriptors received over each link and not used yet, in the order of the answers they
    /// belong to.
    descriptors: BTreeMap<usize, VecDeque<Vec<OwnedFd>>>,
    pub(super) readers: StepwiseReaders,
    pub(super) push_buffers: SimulatedPushBuffers,
    /// Planted bug: push slots are overwritten while they are being pushed.
    pub(super) overwrites_push_slots: bool,
    /// How many frames have referenced gradients in push buffers.
    pub(super) push_frames: u64,
}

impl SimulatedSharedMemory {
    pub(super) fn new(plan: Arc<ShardingPlan>) -> SimulatedSharedMemory {
        SimulatedSharedMemory {
            push_buffers: SimulatedPushBuffers::new(plan.clone()),
            plan,
            descriptors: BTreeMap::new(),
            readers: StepwiseReaders::default(),
            overwrites_push_slots: false,
            push_frames: 0,
        }
    }

    /// Keeps descriptors until the answer that they belong to.
    pub(super) fn receive(&mut self, link: usize, descriptors: Vec<OwnedFd>) {
        self.descriptors.entry(link).or_default().push_back(descriptors);
    }

    fn take_descriptors(&mut self, link: usize) -> Vec<OwnedFd> {
        let descriptors = self.descriptors.get_mut(&link).and_then(VecDeque::pop_front);
        descriptors.expect("descriptors come with shared memory")
    }

    /// Adds the values that the shard of a link has shared.
    pub(super) fn add_values(
        &mut self,
        link: usize,
        mapped_shard: MappedShard,
        shared: &SharedValues,
    ) {
        let descriptors = self.take_descriptors(link);
        self.readers.add(&self.plan, link, mapped_shard, shared, descriptors);
    }

    /// Adds the push buffer that the shard of a link has shared.
    pub(super) fn add_push_buffer(
        &mut self,
        link: usize,
        shard: ShardId,
        push_buffer: PushBufferId,
        shared: SharedPushBuffer,
    ) {
        let descriptors = self.take_descriptors(link);
        self.push_buffers.add(link, shard, push_buffer, shared, descriptors);
    }

    /// Notes a message that is sent.
    pub(super) fn sent(&mut self, link: usize, message: &Message) {
        let Message::PushShared(shared) = message else { return };
        self.push_frames += 1;
        if self.overwrites_push_slots {
            self.push_buffers.overwrite(link, shared.push_slot);
        }
    }

    /// Drops the descriptors of an earlier connection.
    pub(super) fn connected(&mut self, link: usize) {
        self.descriptors.remove(&link);
    }

    /// Removes the memory of a lost link.
    pub(super) fn lost(&mut self, link: usize) {
        self.readers.remove(link);
        self.push_buffers.remove(link);
    }
}
