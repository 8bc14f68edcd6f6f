//! The trays that shards have lent to a session: callers write gradients there by themselves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::ids::ShardId;

use super::shared_memory::MappedTray;
use crate::trays::{Room, TrayId};

/// Trays, for as long as the connections last over which they were lent. The session's thread adds and
/// removes them, callers take rooms.
#[derive(Debug)]
pub(crate) struct Trays {
    /// By link.
    all: Mutex<Vec<(usize, Lent)>>,
    /// A child of this process has its rooms, where only one of them may write: it has gradients of its own.
    process: u32,
}

#[derive(Debug)]
struct Lent {
    shard: ShardId,
    id: TrayId,
    tray: Arc<MappedTray>,
}

impl Default for Trays {
    fn default() -> Trays {
        Trays { all: Mutex::default(), process: std::process::id() }
    }
}

impl Trays {
    /// The shard of a link has lent a tray.
    pub(super) fn add(&self, link: usize, shard: ShardId, id: TrayId, tray: MappedTray) {
        let mut all = self.all();
        all.retain(|(other, _)| *other != link);
        all.push((link, Lent { shard, id, tray: Arc::new(tray) }));
    }

    /// The connection of a link is gone, and the tray with it: whoever still has a room of it may write
    /// there, and nobody takes one any more.
    pub(super) fn remove(&self, link: usize) {
        self.all().retain(|(other, _)| *other != link);
    }

    /// Whether a tray is lent.
    pub(crate) fn has(&self, tray: TrayId) -> bool {
        std::process::id() == self.process && self.all().iter().any(|(_, lent)| lent.id == tray)
    }

    /// A room of a shard's tray that nobody has.
    pub(crate) fn take(&self, shard: ShardId) -> Option<Room> {
        if std::process::id() != self.process {
            return None;
        }
        let all = self.all();
        let Lent { id, tray, .. } = &all.iter().find(|(_, lent)| lent.shard == shard)?.1;
        let (memory, number) = tray.take()?;
        Some(Room { shard, tray: *id, number, memory: Box::new(memory) })
    }

    fn all(&self) -> MutexGuard<'_, Vec<(usize, Lent)>> {
        // Each change is one call: the list is whole whatever a panic elsewhere interrupted.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
