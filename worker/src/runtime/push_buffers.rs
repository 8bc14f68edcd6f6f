//! The mapped push buffers of a session: callers write gradients there in place.

use std::sync::Arc;

use pushpull_common::ids::ShardId;

use super::per_link::PerLink;
use super::shared_memory::MappedPushBuffer;
use crate::gradients::gradient_buffer::{GradientSlot, PushBufferId};

/// The push buffers that shards share, each for as long as its connection lasts. The session adds
/// and removes them; callers take buffer slots.
#[derive(Debug, Default)]
pub(crate) struct PushBuffers(PerLink<LinkBuffer>);

#[derive(Debug)]
struct LinkBuffer {
    id: PushBufferId,
    push_buffer: Arc<MappedPushBuffer>,
}

impl PushBuffers {
    /// Adds the push buffer that the shard of a link shares.
    pub(crate) fn add(
        &self,
        link: usize,
        shard: ShardId,
        id: PushBufferId,
        push_buffer: MappedPushBuffer,
    ) {
        self.0.add(link, shard, LinkBuffer { id, push_buffer: Arc::new(push_buffer) });
    }

    /// Removes the push buffer of a link whose connection has ended. A caller that holds a buffer
    /// slot may still write to it; no more slots are taken.
    pub(crate) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Returns whether this push buffer is still shared.
    pub(crate) fn has(&self, push_buffer: PushBufferId) -> bool {
        self.0.any(|shared| shared.id == push_buffer)
    }

    /// Takes a free buffer slot of a shard's push buffer.
    pub(crate) fn take(&self, shard: ShardId) -> Option<GradientSlot> {
        let shared = self.0.of(shard)?;
        let (memory, number) = shared.push_buffer.take()?;
        Some(GradientSlot { shard, push_buffer: shared.id, number, memory: Box::new(memory) })
    }
}
