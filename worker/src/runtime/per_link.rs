//! What shards have lent over their links, for as long as those last: the session's thread adds and
//! removes, callers use it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::ids::ShardId;

/// Something of each link whose shard has lent it.
#[derive(Debug)]
pub(super) struct PerLink<T> {
    all: Mutex<Vec<LinkEntry<T>>>,
    /// A child of this process has what is lent mapped, too, where only one of them may write.
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
    /// The shard of a link has lent something, in place of what it had lent over that before.
    pub(super) fn add(&self, link: usize, shard: ShardId, shared: T) {
        let mut all = self.all();
        all.retain(|other| other.link != link);
        all.push(LinkEntry { link, shard, shared: Arc::new(shared) });
    }

    /// The connection of a link is gone, and with it what was lent. Whoever uses it goes on to the end.
    pub(super) fn remove(&self, link: usize) {
        self.all().retain(|other| other.link != link);
    }

    /// What a shard has lent; nothing in a child of the process that it was lent to.
    pub(super) fn of(&self, shard: ShardId) -> Option<Arc<T>> {
        self.find(|other| (other.shard == shard).then(|| other.shared.clone()))
    }

    /// Whether something is lent of which this is true.
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
        // Each change is one call: the list is whole whatever a panic elsewhere interrupted.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_is_found_until_its_link_is_gone_or_lends_anew() {
        let (links, shard) = (PerLink::default(), |task| ShardId { task, shard: 0 });
        links.add(0, shard(7), "first");
        links.add(1, shard(8), "second");
        let kept = links.of(shard(7)).unwrap();
        assert_eq!((*kept, links.of(shard(9)).is_none()), ("first", true));
        links.add(0, shard(7), "third");
        assert_eq!(*links.of(shard(7)).unwrap(), "third");
        assert!(links.any(|shared| *shared == "second") && !links.any(|shared| *shared == "first"));
        links.remove(0);
        assert!(links.of(shard(7)).is_none() && links.of(shard(8)).is_some());
        assert_eq!(*kept, "first", "who uses it has it still");
        let links = PerLink { process: links.process + 1, ..links };
        assert!(links.of(shard(8)).is_none() && !links.any(|_| true), "not in another process");
    }
}
