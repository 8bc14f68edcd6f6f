//! The trays that shards have lent to a session: callers write gradients there by themselves.

use std::sync::Arc;

use pushpull_common::ids::ShardId;

use super::per_link::PerLink;
use super::shared_memory::MappedPushBuffer;
use crate::push_buffers::{GradientSlot, PushBufferId};

/// Trays, for as long as the connections last over which they were lent. The session's thread adds and
/// removes them, callers take rooms.
#[derive(Debug, Default)]
pub(crate) struct PushBuffers(PerLink<LinkBuffer>);

#[derive(Debug)]
struct LinkBuffer {
    id: PushBufferId,
    push_buffer: Arc<MappedPushBuffer>,
}

impl PushBuffers {
    /// The shard of a link has lent a tray.
    pub(crate) fn add(
        &self,
        link: usize,
        shard: ShardId,
        id: PushBufferId,
        push_buffer: MappedPushBuffer,
    ) {
        self.0.add(link, shard, LinkBuffer { id, push_buffer: Arc::new(push_buffer) });
    }

    /// The connection of a link is gone, and the tray with it: whoever still has a room of it may write
    /// there, and nobody takes one any more.
    pub(crate) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Whether a tray is lent.
    pub(crate) fn has(&self, push_buffer: PushBufferId) -> bool {
        self.0.any(|shared| shared.id == push_buffer)
    }

    /// A room of a shard's tray that nobody has.
    pub(crate) fn take(&self, shard: ShardId) -> Option<GradientSlot> {
        let shared = self.0.of(shard)?;
        let (memory, number) = shared.push_buffer.take()?;
        Some(GradientSlot { shard, push_buffer: shared.id, number, memory: Box::new(memory) })
    }
}
