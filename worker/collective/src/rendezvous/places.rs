//! [`Places`]: the stable indices of members, reserved while a member is away.

use std::collections::{BTreeMap, BTreeSet};

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::limits::RING_SIZE_MAX;

/// The index of every id that was in a ring and has not left.
///
/// Invariants: no two ids have one index, and every index is below [`RING_SIZE_MAX`]. So there are
/// at most as many places.
#[derive(Debug, Default)]
pub(super) struct Places {
    by_id: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    index: u32,
    /// The process that had the place last.
    incarnation: Incarnation,
}

/// The claim of a member to an index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    /// The stable id of the member.
    pub(super) id: &'a str,
    /// The index that the launcher has given to the member.
    pub(super) index: Option<u32>,
}

impl Places {
    /// Returns the index that a member has without an assignment: that of the launcher, or the one
    /// that it had before.
    pub(super) fn own(&self, claim: Claim<'_>) -> Option<u32> {
        claim.index.or_else(|| self.by_id.get(claim.id).map(|place| place.index))
    }

    /// Returns the process that had the place of an id last.
    pub(super) fn incarnation(&self, id: &str) -> Option<Incarnation> {
        self.by_id.get(id).map(|place| place.incarnation)
    }

    /// Returns the index of each claim. Members without one get the lowest that is free, and if
    /// none is, the lowest of a member that is away.
    ///
    /// The own indices of the claims must differ.
    pub(super) fn assign(&self, claims: &[Claim<'_>]) -> Vec<u32> {
        let own: Vec<Option<u32>> = claims.iter().map(|&claim| self.own(claim)).collect();
        let mut taken: BTreeSet<u32> = own.iter().copied().flatten().collect();
        let reserved: BTreeSet<u32> = self.by_id.values().map(|place| place.index).collect();
        let all = 0..RING_SIZE_MAX as u32;
        let mut free = all.clone().filter(|index| !reserved.contains(index)).chain(all);
        let mut next = || {
            let index = free.find(|index| taken.insert(*index));
            // There are no more claims than indices.
            index.unwrap_or_default()
        };
        own.into_iter().map(|index| index.unwrap_or_else(&mut next)).collect()
    }

    /// Gives an index to an id, and takes it from the id that had it.
    pub(super) fn settle(&mut self, id: &str, index: u32, incarnation: Incarnation) {
        self.release_index(index);
        self.by_id.insert(id.to_owned(), Place { index, incarnation });
    }

    /// Frees the index of an id.
    pub(super) fn release(&mut self, id: &str) {
        self.by_id.remove(id);
    }

    /// Frees an index.
    pub(super) fn release_index(&mut self, index: u32) {
        self.by_id.retain(|_, place| place.index != index);
    }

    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn check_invariants(&self) {
        let indices: BTreeSet<u32> = self.by_id.values().map(|place| place.index).collect();
        assert_eq!(indices.len(), self.by_id.len(), "two ids have one index");
        assert!(indices.iter().all(|&index| (index as usize) < RING_SIZE_MAX), "{indices:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(id: &str, index: Option<u32>) -> Claim<'_> {
        Claim { id, index }
    }

    #[test]
    fn members_without_an_index_get_the_lowest_free_one() {
        let mut places = Places::default();
        places.settle("away", 1, Incarnation(1));
        places.settle("back", 4, Incarnation(1));
        let claims = [claim("a", None), claim("b", Some(0)), claim("back", None), claim("c", None)];
        assert_eq!(places.assign(&claims), [2, 0, 4, 3]);
        places.release("away");
        assert_eq!(places.assign(&claims), [1, 0, 4, 2]);
        // The index of a launcher replaces the reserved one.
        assert_eq!(places.own(claim("back", Some(9))), Some(9));
        places.settle("other", 4, Incarnation(2));
        assert_eq!(places.own(claim("back", None)), None);
        places.check_invariants();
    }

    #[test]
    fn a_full_roster_gives_away_the_indices_of_members_that_are_away() {
        let mut places = Places::default();
        let names: Vec<String> = (0..RING_SIZE_MAX).map(|at| format!("m{at}")).collect();
        for (at, name) in names.iter().enumerate() {
            places.settle(name, at as u32, Incarnation(1));
        }
        let mut claims: Vec<Claim<'_>> = names.iter().map(|name| claim(name, None)).collect();
        claims[7].id = "new";
        let indices = places.assign(&claims);
        assert_eq!(indices, (0..RING_SIZE_MAX as u32).collect::<Vec<u32>>());
        places.settle("new", 7, Incarnation(2));
        places.check_invariants();
        assert_eq!(places.own(claim("m7", None)), None);
    }
}
