//! Extents: the ranges of a push that have been received.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use smallvec::SmallVec;

/// The ranges that have been received, merged.
///
/// Invariants: ascending, not empty, not adjacent. Each starts at a partition or at a partition's
/// row index, so there are at most twice as many as partitions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents(SmallVec<[Range<u64>; FEW]>);

/// The number of ranges that need no heap. Most pushes have fewer.
const FEW: usize = 4;

/// A part at a wrong position: where it had to start, or the limit that it exceeds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MisplacedPart {
    pub(crate) limit: u64,
}

impl Extents {
    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Returns how many bytes of a range are covered.
    pub(crate) fn bytes_within(&self, range: Range<u64>) -> u64 {
        let first = self.0.partition_point(|extent| extent.end <= range.start);
        let touching = self.0[first..].iter().take_while(|extent| extent.start < range.end);
        touching.map(|e| e.end.min(range.end).saturating_sub(e.start.max(range.start))).sum()
    }

    /// Replaces the extents by the union of these pushes, without sparse partitions. The pushes
    /// cover partitions whole.
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

    /// Checks whether a part may come next. It must continue an extent or start a partition,
    /// overlap nothing, and end within the push.
    pub(crate) fn check(
        &self,
        part: &Range<u64>,
        layout: &ShardLayout,
    ) -> Result<(), MisplacedPart> {
        let limit = layout.push_bytes();
        if part.end > limit || !part.end.is_multiple_of(8) || part.is_empty() {
            return Err(MisplacedPart { limit });
        }
        let next = self.0.partition_point(|range| range.end < part.start);
        let continues = self.0.get(next).is_some_and(|range| range.end == part.start);
        let starts = layout.starts_at(part.start) || layout.index_starts_at(part.start);
        if !continues && !starts {
            return Err(MisplacedPart { limit: self.0.get(next).map_or(0, |range| range.end) });
        }
        match self.0.get(next + usize::from(continues)) {
            Some(later) if later.start < part.end => Err(MisplacedPart { limit: later.start }),
            _ => Ok(()),
        }
    }

    /// Adds a part that [`Extents::check`] has accepted.
    pub(crate) fn add(&mut self, part: Range<u64>) {
        let next = self.0.partition_point(|range| range.end < part.start);
        match self.0.get_mut(next) {
            Some(range) if range.end == part.start => range.end = part.end,
            _ => self.0.insert(next, part.clone()),
        }
        // The part may have closed the gap before the next extent.
        let at = self.0.partition_point(|range| range.end < part.end);
        if self.0.get(at + 1).is_some_and(|later| later.start == part.end) {
            self.0[at].end = self.0.remove(at + 1).end;
        }
    }
}
