//! The trays that shards have lent to a session: callers write gradients there by themselves.

use std::sync::Arc;

use pushpull_common::ids::ShardId;

use super::links::OfLinks;
use super::shared_memory::MappedTray;
use crate::trays::{BufferSlot, TrayId};

/// Trays, for as long as the connections last over which they were lent. The session's thread adds and
/// removes them, callers take rooms.
#[derive(Debug, Default)]
pub(crate) struct Trays(OfLinks<Lent>);

#[derive(Debug)]
struct Lent {
    id: TrayId,
    tray: Arc<MappedTray>,
}

impl Trays {
    /// The shard of a link has lent a tray.
    pub(crate) fn add(&self, link: usize, shard: ShardId, id: TrayId, tray: MappedTray) {
        self.0.add(link, shard, Lent { id, tray: Arc::new(tray) });
    }

    /// The connection of a link is gone, and the tray with it: whoever still has a room of it may write
    /// there, and nobody takes one any more.
    pub(crate) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Whether a tray is lent.
    pub(crate) fn has(&self, tray: TrayId) -> bool {
        self.0.any(|lent| lent.id == tray)
    }

    /// A room of a shard's tray that nobody has.
    pub(crate) fn take(&self, shard: ShardId) -> Option<BufferSlot> {
        let lent = self.0.of(shard)?;
        let (memory, number) = lent.tray.take()?;
        Some(BufferSlot { shard, tray: lent.id, number, memory: Box::new(memory) })
    }
}
