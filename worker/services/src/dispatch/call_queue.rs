//! [`CallQueue`]: calls that wait for a worker, in the order of their numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::io::ResourceId;

/// The calls that wait for a worker, in the order of their numbers.
///
/// The queue groups calls by the resources that they need. So the search for a worker's next call
/// does not pass the calls that need other resources.
#[derive(Debug, Default)]
pub(super) struct CallQueue {
    by_resources: BTreeMap<Vec<ResourceId>, BTreeSet<u64>>,
}

impl CallQueue {
    pub(super) fn insert(&mut self, number: u64, resources: &[ResourceId]) {
        match self.by_resources.get_mut(resources) {
            Some(calls) => _ = calls.insert(number),
            None => _ = self.by_resources.insert(resources.to_vec(), BTreeSet::from([number])),
        }
    }

    /// Removes the first call up to `last` whose resources satisfy a predicate.
    pub(super) fn take(&mut self, last: u64, has: impl Fn(&[ResourceId]) -> bool) -> Option<u64> {
        let groups = self.by_resources.iter().filter(|(resources, _)| has(resources));
        let firsts = groups.filter_map(|(resources, calls)| Some((*calls.first()?, resources)));
        let (number, resources) = firsts.filter(|&(number, _)| number <= last).min()?;
        let resources = resources.clone();
        let calls = self.by_resources.get_mut(&resources)?;
        calls.remove(&number);
        if calls.is_empty() {
            self.by_resources.remove(&resources);
        }
        Some(number)
    }

    /// Removes the calls that need an unavailable resource, and returns each with that resource.
    pub(super) fn take_unrunnable(
        &mut self,
        lacks: impl Fn(&[ResourceId]) -> Option<ResourceId>,
    ) -> Vec<(u64, ResourceId)> {
        let mut taken = Vec::new();
        self.by_resources.retain(|resources, calls| match lacks(resources) {
            None => true,
            Some(resource) => {
                taken.extend(calls.iter().map(|&number| (number, resource)));
                false
            }
        });
        taken
    }

    pub(super) fn clear(&mut self) {
        self.by_resources.clear();
    }

    #[cfg(test)]
    pub(super) fn contains(&self, number: u64) -> bool {
        self.by_resources.values().any(|calls| calls.contains(&number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_call_that_a_worker_may_run_is_taken() {
        let mut queue = CallQueue::default();
        let [table, reader] = [ResourceId(0), ResourceId(1)];
        queue.insert(5, &[]);
        queue.insert(3, &[table]);
        queue.insert(4, &[table, reader]);
        queue.insert(2, &[reader]);
        let lacks_reader = |resources: &[ResourceId]| !resources.contains(&reader);
        assert_eq!(queue.take(2, lacks_reader), None, "the window ends before it");
        assert_eq!(queue.take(9, lacks_reader), Some(3));
        assert_eq!(queue.take(9, lacks_reader), Some(5));
        assert_eq!(queue.take(9, lacks_reader), None);
        assert_eq!([queue.take(9, |_| true), queue.take(9, |_| true)], [Some(2), Some(4)]);
        assert_eq!(queue.take(9, |_| true), None);
    }

    #[test]
    fn the_calls_that_lack_a_resource_are_taken_with_it() {
        let mut queue = CallQueue::default();
        let [table, reader] = [ResourceId(0), ResourceId(1)];
        queue.insert(5, &[]);
        queue.insert(3, &[table]);
        queue.insert(4, &[table, reader]);
        let lacks = |needed: &[ResourceId]| needed.contains(&reader).then_some(reader);
        assert_eq!(queue.take_unrunnable(lacks), [(4, reader)]);
        assert_eq!([queue.take(9, |_| true), queue.take(9, |_| true)], [Some(3), Some(5)]);
    }
}
