//! The passes of a collective operation: what a rank sends to its successor and receives from its
//! predecessor in each.

use std::ops::Range;

use crate::planted::{PlantedRingBugs, RingBug};

/// The bytes of a tensor, cut into one chunk for each rank. The lengths differ by at most one
/// element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunks {
    elements: usize,
    width: usize,
    ranks: usize,
}

impl Chunks {
    /// Cuts a tensor of this many elements of `width` bytes. `ranks` is at least 1.
    pub(crate) fn new(elements: usize, width: usize, ranks: u32) -> Chunks {
        Chunks { elements, width, ranks: ranks.max(1) as usize }
    }

    /// Returns the elements of a chunk.
    pub(crate) fn elements(&self, chunk: u32) -> Range<usize> {
        let share = self.elements / self.ranks;
        let longer = self.elements % self.ranks;
        let begin = |chunk: usize| chunk * share + chunk.min(longer);
        begin(chunk as usize)..begin(chunk as usize + 1)
    }

    /// Returns the bytes of a chunk.
    pub(crate) fn bytes(&self, chunk: u32) -> Range<usize> {
        let Range { start, end } = self.elements(chunk);
        start * self.width..end * self.width
    }
}

/// The handling of received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// They are combined with the rank's own bytes. The last rank of a chunk also finishes it.
    Fold {
        /// Whether no other rank folds the chunk after this one.
        is_last: bool,
    },
    /// They replace the rank's own bytes.
    Store,
}

/// The passes of one operation on one rank.
///
/// - **All-reduce.** Chunk `c` begins at rank `c` and is folded in rank order around the ring, so
///   the predecessor of rank `c` finishes it. Then it goes around once more. 2(n-1) passes.
/// - **Reduce-scatter.** Block `b` begins at rank `b + 1`, so that rank `b` finishes it. n-1
///   passes.
/// - **Gather.** The block of each rank goes around. n-1 passes.
/// - **Broadcast.** Everything goes from the root to its predecessor. n-1 passes.
///
/// What a rank sends in a pass is what it has received in the pass before, so it sends each part as
/// soon as that is folded or stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    kind: ScheduleKind,
    rank: u32,
    ranks: u32,
    chunks: Chunks,
    planted: PlantedRingBugs,
}

/// The kind of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScheduleKind {
    /// Every rank has the result.
    AllReduce,
    /// Each rank has its block of the result.
    ReduceScatter,
    /// Every rank has the blocks of all.
    Gather,
    /// Every rank has the bytes of the root.
    Broadcast {
        /// The rank whose bytes are sent.
        root: u32,
    },
}

impl Schedule {
    /// Creates the schedule of a rank below `ranks`, for a tensor in these chunks.
    pub(crate) fn new(kind: ScheduleKind, rank: u32, ranks: u32, chunks: Chunks) -> Schedule {
        Schedule { kind, rank, ranks, chunks, planted: PlantedRingBugs::default() }
    }

    /// Plants a bug.
    #[cfg(test)]
    pub(crate) fn with_planted(self, planted: PlantedRingBugs) -> Schedule {
        Schedule { planted, ..self }
    }

    /// Returns the number of passes.
    pub(crate) fn passes(&self) -> u32 {
        let around = self.ranks.saturating_sub(1);
        match self.kind {
            ScheduleKind::AllReduce => 2 * around,
            _ => around,
        }
    }

    /// Returns the bytes that an all-reduce begins with on the rank: no rank before has added to them.
    pub(crate) fn begins(&self) -> Range<usize> {
        self.chunk_behind(0)
    }

    /// Returns the bytes that the rank sends in a pass.
    pub(crate) fn sends(&self, pass: u32) -> Range<usize> {
        match self.kind {
            ScheduleKind::AllReduce | ScheduleKind::Gather => self.chunk_behind(pass),
            ScheduleKind::ReduceScatter => self.chunk_behind(pass + 1),
            ScheduleKind::Broadcast { root } if self.distance(root) == pass => self.whole(),
            ScheduleKind::Broadcast { .. } => 0..0,
        }
    }

    /// Returns the bytes that the rank receives in a pass, and their handling.
    pub(crate) fn receives(&self, pass: u32) -> (Range<usize>, Arrival) {
        let around = self.ranks.saturating_sub(1);
        let fold = Arrival::Fold { is_last: pass + 1 == around };
        match self.kind {
            ScheduleKind::AllReduce if pass < around => (self.chunk_behind(pass + 1), fold),
            ScheduleKind::AllReduce if self.planted.has(RingBug::ChunkOffByOne) => {
                (self.chunk_behind(pass + 2), Arrival::Store)
            }
            ScheduleKind::AllReduce | ScheduleKind::Gather => {
                (self.chunk_behind(pass + 1), Arrival::Store)
            }
            ScheduleKind::ReduceScatter => (self.chunk_behind(pass + 2), fold),
            ScheduleKind::Broadcast { root } if self.distance(root) == pass + 1 => {
                (self.whole(), Arrival::Store)
            }
            ScheduleKind::Broadcast { .. } => (0..0, Arrival::Store),
        }
    }

    /// Returns the chunk whose number is this far below the rank.
    fn chunk_behind(&self, steps: u32) -> Range<usize> {
        let ranks = self.ranks.max(1);
        self.chunks.bytes((self.rank + ranks - steps % ranks) % ranks)
    }

    /// Returns the number of passes from a root to this rank.
    fn distance(&self, root: u32) -> u32 {
        (self.rank + self.ranks - root) % self.ranks.max(1)
    }

    fn whole(&self) -> Range<usize> {
        0..self.chunks.elements * self.chunks.width
    }
}

#[cfg(test)]
mod tests;
