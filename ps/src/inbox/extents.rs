//! Which ranges of a push have been received.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use smallvec::SmallVec;

/// Ranges that have been received, merged.
///
/// Invariants: rising, not empty, not touching. Each starts where a partition starts, or the index of
/// its rows, so there are never more of them than twice the partitions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents(SmallVec<[Range<u64>; FEW]>);

/// Most pushes are of one stretch, or few: those take no memory of their own.
const FEW: usize = 4;

/// Why a part is out of place: where it had to start, or the end it ran over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Misplaced {
    pub(crate) limit: u64,
}

impl Extents {
    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// How many bytes of a range they cover.
    pub(crate) fn bytes_within(&self, range: Range<u64>) -> u64 {
        let first = self.0.partition_point(|extent| extent.end <= range.start);
        let touching = self.0[first..].iter().take_while(|extent| extent.start < range.end);
        touching.map(|e| e.end.min(range.end).saturating_sub(e.start.max(range.start))).sum()
    }

    /// Becomes what some of these pushes cover of what is not sparse, partition by partition: each covers
    /// partitions whole.
    pub(crate) fn unite(&mut self, pushes: &[&[Range<u64>]], layout: &ShardLayout) {
        self.0.clear();
        if let ([push], 0) = (pushes, layout.sparse().len()) {
            return self.0.extend(push.iter().cloned());
        }
        for partition in layout.partitions().iter().filter(|partition| !partition.is_sparse()) {
            let covers = |ranges: &&[Range<u64>]| {
                let next = ranges.partition_point(|range| range.end <= partition.offset);
                ranges.get(next).is_some_and(|range| range.contains(&partition.offset))
            };
            if partition.end() > partition.offset && pushes.iter().any(covers) {
                self.add(partition.offset..partition.end());
            }
        }
    }

    /// Whether a part may come next: it goes on where another has ended or starts a partition,
    /// overlaps nothing, and ends within what can be pushed.
    pub(crate) fn check(&self, part: &Range<u64>, layout: &ShardLayout) -> Result<(), Misplaced> {
        let limit = layout.push_bytes();
        if part.end > limit || !part.end.is_multiple_of(8) || part.is_empty() {
            return Err(Misplaced { limit });
        }
        let next = self.0.partition_point(|range| range.end < part.start);
        let goes_on = self.0.get(next).is_some_and(|range| range.end == part.start);
        let starts = layout.starts_at(part.start) || layout.index_starts_at(part.start);
        if !goes_on && !starts {
            return Err(Misplaced { limit: self.0.get(next).map_or(0, |range| range.end) });
        }
        match self.0.get(next + usize::from(goes_on)) {
            Some(later) if later.start < part.end => Err(Misplaced { limit: later.start }),
            _ => Ok(()),
        }
    }

    /// Adds a part that `check` has allowed.
    pub(crate) fn add(&mut self, part: Range<u64>) {
        let next = self.0.partition_point(|range| range.end < part.start);
        match self.0.get_mut(next) {
            Some(range) if range.end == part.start => range.end = part.end,
            _ => self.0.insert(next, part.clone()),
        }
        // The part may have closed the gap to the range behind it.
        let at = self.0.partition_point(|range| range.end < part.end);
        if self.0.get(at + 1).is_some_and(|later| later.start == part.end) {
            self.0[at].end = self.0.remove(at + 1).end;
        }
    }
}
