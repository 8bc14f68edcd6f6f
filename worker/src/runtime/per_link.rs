//! A map from links to the memory that their shards share. The session adds and removes entries;
//! callers use them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::ids::ShardId;

/// At most one shared value per link, for as long as the connection lasts.
#[derive(Debug)]
pub(super) struct PerLink<T> {
    all: Mutex<Vec<LinkEntry<T>>>,
    /// The owning process. A forked child inherits the mappings but must not use them: only one
    /// process may write.
    process: u32,
}

#[derive(Debug)]
struct LinkEntry<T> {
    link: usize,
    shard: ShardId,
    shared: Arc<T>,
}

impl<T> Default for PerLink<T> {
    fn default() -> PerLink<T> {
        PerLink { all: Mutex::default(), process: std::process::id() }
    }
}

impl<T> PerLink<T> {
    /// Adds the value that the shard of a link shares. Replaces an earlier one of the same link.
    pub(super) fn add(&self, link: usize, shard: ShardId, shared: T) {
        let mut all = self.all();
        all.retain(|other| other.link != link);
        all.push(LinkEntry { link, shard, shared: Arc::new(shared) });
    }

    /// Removes the value of a link whose connection has ended. A caller that holds it may finish.
    pub(super) fn remove(&self, link: usize) {
        self.all().retain(|other| other.link != link);
    }

    /// Returns the value that a shard shares; `None` in a forked child.
    pub(super) fn of(&self, shard: ShardId) -> Option<Arc<T>> {
        self.find(|other| (other.shard == shard).then(|| other.shared.clone()))
    }

    /// Returns whether a shared value satisfies the predicate; `false` in a forked child.
    pub(super) fn any(&self, is_it: impl Fn(&T) -> bool) -> bool {
        self.find(|other| is_it(&other.shared).then_some(())).is_some()
    }

    fn find<R>(&self, of: impl Fn(&LinkEntry<T>) -> Option<R>) -> Option<R> {
        if std::process::id() != self.process {
            return None;
        }
        self.all().iter().find_map(of)
    }

    fn all(&self) -> MutexGuard<'_, Vec<LinkEntry<T>>> {
        // Each change is one call, so a panic elsewhere leaves the list valid.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_value_is_found_until_it_is_removed_or_replaced() {
        let (links, shard) = (PerLink::default(), |task| ShardId { task, shard: 0 });
        links.add(0, shard(7), "first");
        links.add(1, shard(8), "second");
        let held = links.of(shard(7)).unwrap();
        assert_eq!((*held, links.of(shard(9)).is_none()), ("first", true));
        links.add(0, shard(7), "third");
        assert_eq!(*links.of(shard(7)).unwrap(), "third");
        assert!(links.any(|shared| *shared == "second") && !links.any(|shared| *shared == "first"));
        links.remove(0);
        assert!(links.of(shard(7)).is_none() && links.of(shard(8)).is_some());
        assert_eq!(*held, "first", "a holder keeps its value");
        let links = PerLink { process: links.process + 1, ..links };
        assert!(
            links.of(shard(8)).is_none() && !links.any(|_| true),
            "a forked child finds no value"
        );
    }
}
